//! Failures of the CUDA driver, each with the name of its code.

use std::{borrow::Cow, fmt};

use transport_core::{Error, ErrorKind, Result};

/// Result of one call of the driver.
pub type CudaResult<T> = std::result::Result<T, CudaError>;

/// What a call of the driver returned other than success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The call, such as `cuMemCreate`.
    pub call: &'static str,
    /// The driver's number; see the constants of this type.
    pub code: u32,
    /// The driver's name for it, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: Cow<'static, str>,
}

/// Codes that this crate knows by name, also where no driver is asked.
const NAMES: &[(u32, &str)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE"),
    (2, "CUDA_ERROR_OUT_OF_MEMORY"),
    (3, "CUDA_ERROR_NOT_INITIALIZED"),
    (4, "CUDA_ERROR_DEINITIALIZED"),
    (34, "CUDA_ERROR_STUB_LIBRARY"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (100, "CUDA_ERROR_NO_DEVICE"),
    (101, "CUDA_ERROR_INVALID_DEVICE"),
    (200, "CUDA_ERROR_INVALID_IMAGE"),
    (201, "CUDA_ERROR_INVALID_CONTEXT"),
    (205, "CUDA_ERROR_MAP_FAILED"),
    (208, "CUDA_ERROR_ALREADY_MAPPED"),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    (218, "CUDA_ERROR_INVALID_PTX"),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (304, "CUDA_ERROR_OPERATING_SYSTEM"),
    (400, "CUDA_ERROR_INVALID_HANDLE"),
    (401, "CUDA_ERROR_ILLEGAL_STATE"),
    (500, "CUDA_ERROR_NOT_FOUND"),
    (600, "CUDA_ERROR_NOT_READY"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (800, "CUDA_ERROR_NOT_PERMITTED"),
    (801, "CUDA_ERROR_NOT_SUPPORTED"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (999, "CUDA_ERROR_UNKNOWN"),
];

impl CudaError {
    /// An argument is out of range.
    pub const INVALID_VALUE: u32 = 1;
    /// The device has too little memory left.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// There is no device.
    pub const NO_DEVICE: u32 = 100;
    /// No device has this ordinal.
    pub const INVALID_DEVICE: u32 = 101;
    /// No context is current, or the wrong one.
    pub const INVALID_CONTEXT: u32 = 201;
    /// Memory could not be mapped; also: the process that exported an IPC handle is gone.
    pub const MAP_FAILED: u32 = 205;
    /// The handle is none, or belongs to another device.
    pub const INVALID_HANDLE: u32 = 400;
    /// A name or symbol does not exist.
    pub const NOT_FOUND: u32 = 500;
    /// Work that was asked about is still running.
    pub const NOT_READY: u32 = 600;
    /// The device accessed memory that is not mapped for it. The context is lost.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// The operation is not allowed on this machine.
    pub const NOT_PERMITTED: u32 = 800;
    /// The operation does not exist on this machine, or the driver is too old to have the call.
    pub const NOT_SUPPORTED: u32 = 801;

    /// The failure of `call` with `code`.
    pub fn new(call: &'static str, code: u32) -> Self {
        let name = match NAMES.iter().find(|(known, _)| *known == code) {
            Some((_, name)) => Cow::Borrowed(*name),
            None => Cow::Owned(format!("CUDA_ERROR_{code}")),
        };
        Self { call, code, name }
    }

    /// Whether the device had too little memory. Never a reason to try another kind of memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == Self::OUT_OF_MEMORY
    }

    /// Whether this machine cannot, or may not, do it: the one reason to try another kind of memory.
    pub fn is_refusal(&self) -> bool {
        matches!(self.code, Self::NOT_PERMITTED | Self::NOT_SUPPORTED)
    }

    /// The same failure as an error of `operation`.
    pub fn during(self, operation: &'static str) -> Error {
        let kind = match self.code {
            Self::OUT_OF_MEMORY => ErrorKind::CapacityExceeded,
            Self::NOT_SUPPORTED | Self::NO_DEVICE => ErrorKind::Unsupported,
            Self::NOT_PERMITTED => ErrorKind::PermissionDenied,
            Self::INVALID_VALUE | Self::INVALID_HANDLE | Self::INVALID_DEVICE => {
                ErrorKind::InvalidInput
            }
            Self::NOT_READY => ErrorKind::Busy,
            _ => ErrorKind::Unexpected,
        };
        let message = format!("{} returned {} ({})", self.call, self.name, self.code);
        Error::new(kind, operation, message).source(self)
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.name, self.code)
    }
}

impl std::error::Error for CudaError {}

/// Says what was going on when a call of the driver failed.
pub trait During<T> {
    /// Turns a failure into an error of `operation`.
    fn during(self, operation: &'static str) -> Result<T>;
}

impl<T> During<T> for CudaResult<T> {
    fn during(self, operation: &'static str) -> Result<T> {
        self.map_err(|error| error.during(operation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_names_its_call_and_code() {
        let error = CudaError::new("cuMemCreate", 800);
        assert!(error.is_refusal() && !error.is_out_of_memory());
        assert_eq!(error.to_string(), "cuMemCreate: CUDA_ERROR_NOT_PERMITTED (800)");
        let error = error.during("create arena");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("cuMemCreate returned CUDA_ERROR_NOT_PERMITTED (800)"));
        assert_eq!(CudaError::new("cuInit", 77).name, "CUDA_ERROR_77");
        assert!(CudaError::new("cuMemAlloc", 2).is_out_of_memory());
    }
}
