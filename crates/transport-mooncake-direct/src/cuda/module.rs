//! Device code that this crate carries, loaded on a device.

use capture_arena::cuda::{Device, DeviceAttribute, During, FunctionId, ModuleId};
use transport_core::{Error, ErrorKind, Result};

/// Oldest CUDA version whose driver reads the code.
const MIN_CUDA: (u32, u32) = (12, 3);

/// Loaded code; unloaded when dropped. Launches keep it until they are done.
#[derive(Debug)]
pub(super) struct Module {
    device: Device,
    id: ModuleId,
    operation: &'static str,
}

impl Module {
    /// Loads PTX ended by a zero byte, or a binary, which takes the driver some milliseconds.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the driver is older than CUDA 12.3.
    pub(super) fn load(device: &Device, code: &[u8], operation: &'static str) -> Result<Self> {
        let found = device.api().driver().version;
        if found < MIN_CUDA {
            return Err(Error::new(ErrorKind::Unsupported, operation, "the driver is too old")
                .with("expected", format_args!("CUDA {}.{}", MIN_CUDA.0, MIN_CUDA.1))
                .with("found", format_args!("CUDA {}.{}", found.0, found.1))
                .remedy("install a newer driver"));
        }
        let _bound = device.bind()?;
        let id = device.api().module_load(code).during(operation)?;
        Ok(Self { device: device.clone(), id, operation })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// A kernel by its name.
    pub(super) fn function(&self, name: &str) -> Result<FunctionId> {
        let _bound = self.device.bind()?;
        // SAFETY: the module is loaded for as long as this lives.
        unsafe { self.device.api().module_function(self.id, name) }.during(self.operation)
    }

    /// What the driver says about the device; no less than zero.
    pub(super) fn attribute(&self, attribute: DeviceAttribute) -> Result<u32> {
        let asked = self.device.api().device_attribute(self.device.ordinal(), attribute);
        Ok(u32::try_from(asked.during(self.operation)?).unwrap_or(0))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: loaded by `load`; every launch keeps this alive until it is done.
            let _ = unsafe { self.device.api().module_unload(self.id) };
        }
    }
}
