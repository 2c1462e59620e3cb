//! The functions of `libcuda`, looked up once by name. Nothing here panics on a missing one.
//!
//! The types are those of `cudarc`, and each signature is checked against its bindings when this
//! is compiled. The functions are looked up here, because the loader of those bindings ends the
//! process where a symbol or the library is missing, and because a newer driver returns codes that
//! their enumeration does not have.

use std::{
    borrow::Cow,
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    path::Path,
    ptr::null,
};

use cudarc::driver::sys;
use libloading::Library;

use super::{CudaError, CudaResult};

/// Where the driver's library lies: found by the loader, or where containers put it.
const LIBRARIES: &[&str] = &[
    "libcuda.so.1",
    "libcuda.so",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
];

/// Why there is no table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LoadError {
    /// No library; what the loader said.
    NoLibrary(String),
    /// A library without these functions.
    Missing { library: String, symbols: Vec<&'static str> },
}

macro_rules! symbols {
    (
        required { $( $name:ident ( $($arg:ident: $ty:ty),* ); )* }
        optional { $( $extra:ident ( $($xarg:ident: $xty:ty),* ); )* }
    ) => {
        /// The table. One method a function; see the driver's documentation for what each does.
        #[allow(non_snake_case)]
        pub(super) struct Symbols {
            get_error_name: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint,
            $( $name: unsafe extern "C" fn($($ty),*) -> c_uint, )*
            $( $extra: Option<unsafe extern "C" fn($($xty),*) -> c_uint>, )*
        }

        // The signatures are those of the bindings.
        $( const _: unsafe fn($($ty),*) -> sys::CUresult = sys::$name; )*
        $( const _: unsafe fn($($xty),*) -> sys::CUresult = sys::$extra; )*

        impl Symbols {
            /// Names that no driver may lack.
            #[cfg(test)]
            pub(super) const REQUIRED: &[&str] =
                &["cuGetErrorName", $( stringify!($name), )*];

            /// Looks everything up in a library that is never unloaded.
            fn of(library: &'static Library, path: &str) -> Result<Self, LoadError> {
                let mut missing = Vec::new();
                let get_error_name = find(library, "cuGetErrorName");
                if get_error_name.is_none() {
                    missing.push("cuGetErrorName");
                }
                $(
                    #[allow(non_snake_case)]
                    let $name = find(library, stringify!($name));
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                let table = (|| Some(Self {
                    get_error_name: get_error_name?,
                    $( $name: $name?, )*
                    $( $extra: find(library, stringify!($extra)), )*
                }))();
                table.ok_or(LoadError::Missing { library: path.to_owned(), symbols: missing })
            }

            $(
                #[allow(non_snake_case, clippy::too_many_arguments)]
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> CudaResult<()> {
                    // SAFETY: the function of that name and signature; the caller answers for the
                    // arguments.
                    let code = unsafe { (self.$name)($($arg),*) };
                    self.check(stringify!($name), code)
                }
            )*
            $(
                #[allow(non_snake_case, clippy::too_many_arguments)]
                pub(super) unsafe fn $extra(&self, $($xarg: $xty),*) -> CudaResult<()> {
                    let Some(call) = self.$extra else {
                        return Err(CudaError {
                            call: stringify!($extra),
                            code: CudaError::NOT_SUPPORTED,
                            name: Cow::Borrowed("the driver does not have this call"),
                        });
                    };
                    // SAFETY: as above.
                    let code = unsafe { call($($xarg),*) };
                    self.check(stringify!($extra), code)
                }
            )*

            /// Whether the driver has an optional function.
            pub(super) fn has(&self, name: &str) -> bool {
                $( if name == stringify!($extra) { return self.$extra.is_some(); } )*
                false
            }
        }
    };
}

symbols! {
    required {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
        cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
        cuDeviceGetUuid(uuid: *mut sys::CUuuid, device: sys::CUdevice);
        cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
        cuCtxGetCurrent(context: *mut sys::CUcontext);
        cuCtxPushCurrent_v2(context: sys::CUcontext);
        cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemAlloc_v2(at: *mut sys::CUdeviceptr, len: usize);
        cuMemFree_v2(at: sys::CUdeviceptr);
        cuMemGetAddressRange_v2(base: *mut sys::CUdeviceptr, len: *mut usize, at: sys::CUdeviceptr);
        cuPointerGetAttribute(value: *mut c_void, attribute: sys::CUpointer_attribute, at: sys::CUdeviceptr);
        cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const sys::CUmemAllocationProp, option: sys::CUmemAllocationGranularity_flags);
        cuMemCreate(memory: *mut sys::CUmemGenericAllocationHandle, len: usize, prop: *const sys::CUmemAllocationProp, flags: c_ulonglong);
        cuMemRelease(memory: sys::CUmemGenericAllocationHandle);
        cuMemExportToShareableHandle(handle: *mut c_void, memory: sys::CUmemGenericAllocationHandle, kind: sys::CUmemAllocationHandleType, flags: c_ulonglong);
        cuMemImportFromShareableHandle(memory: *mut sys::CUmemGenericAllocationHandle, handle: *mut c_void, kind: sys::CUmemAllocationHandleType);
        cuMemAddressReserve(at: *mut sys::CUdeviceptr, len: usize, alignment: usize, hint: sys::CUdeviceptr, flags: c_ulonglong);
        cuMemAddressFree(at: sys::CUdeviceptr, len: usize);
        cuMemMap(at: sys::CUdeviceptr, len: usize, offset: usize, memory: sys::CUmemGenericAllocationHandle, flags: c_ulonglong);
        cuMemUnmap(at: sys::CUdeviceptr, len: usize);
        cuMemSetAccess(at: sys::CUdeviceptr, len: usize, descriptions: *const sys::CUmemAccessDesc, count: usize);
        cuIpcGetMemHandle(handle: *mut sys::CUipcMemHandle, at: sys::CUdeviceptr);
        cuIpcOpenMemHandle_v2(at: *mut sys::CUdeviceptr, handle: sys::CUipcMemHandle, flags: c_uint);
        cuIpcCloseMemHandle(at: sys::CUdeviceptr);
        cuMemHostAlloc(at: *mut *mut c_void, len: usize, flags: c_uint);
        cuMemFreeHost(at: *mut c_void);
        cuMemHostRegister_v2(at: *mut c_void, len: usize, flags: c_uint);
        cuMemHostUnregister(at: *mut c_void);
        cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
        cuStreamDestroy_v2(stream: sys::CUstream);
        cuStreamSynchronize(stream: sys::CUstream);
        cuStreamQuery(stream: sys::CUstream);
        cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
        cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
        cuEventDestroy_v2(event: sys::CUevent);
        cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
        cuEventSynchronize(event: sys::CUevent);
        cuEventQuery(event: sys::CUevent);
        cuEventElapsedTime(milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent);
        cuMemcpyAsync(dst: sys::CUdeviceptr, src: sys::CUdeviceptr, len: usize, stream: sys::CUstream);
        cuMemsetD8Async(at: sys::CUdeviceptr, byte: u8, len: usize, stream: sys::CUstream);
        cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
        cuModuleUnload(module: sys::CUmodule);
        cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
        cuLaunchKernel(
            function: sys::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint,
            stream: sys::CUstream, args: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
    optional {
        // Since 11.4; the older name gives a slice of a partitioned device the whole one's identity.
        cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: sys::CUdevice);
        // Since 11.7.
        cuMemGetHandleForAddressRange(handle: *mut c_void, at: sys::CUdeviceptr, len: usize, kind: sys::CUmemRangeHandleType, flags: c_ulonglong);
        // Since 12.8.
        cuMemcpyBatchAsync(
            dsts: *mut sys::CUdeviceptr, srcs: *mut sys::CUdeviceptr, lens: *mut usize, count: usize,
            attributes: *mut sys::CUmemcpyAttributes, attribute_starts: *mut usize,
            attribute_count: usize, failed: *mut usize, stream: sys::CUstream
        );
    }
}

impl Symbols {
    /// Loads the driver's library from where it usually lies.
    pub(super) fn load() -> Result<(Self, String), LoadError> {
        let mut first = None;
        for name in LIBRARIES {
            match Self::load_from(Path::new(name)) {
                Err(LoadError::NoLibrary(why)) => {
                    first.get_or_insert(why);
                }
                found => return found,
            }
        }
        Err(LoadError::NoLibrary(first.unwrap_or_default()))
    }

    /// Loads one library, which stays loaded for good: drivers do not survive being unloaded.
    pub(super) fn load_from(path: &Path) -> Result<(Self, String), LoadError> {
        // SAFETY: running the initialisers of the driver's library is what loading it is for.
        let library = unsafe { Library::new(path) }
            .map_err(|error| LoadError::NoLibrary(error.to_string()))?;
        let library: &'static Library = Box::leak(Box::new(library));
        let name = loaded_path(&path.to_string_lossy());
        Ok((Self::of(library, &name)?, name))
    }

    fn check(&self, call: &'static str, code: c_uint) -> CudaResult<()> {
        if code == 0 {
            return Ok(());
        }
        let mut error = CudaError::new(call, code);
        let mut name = null();
        // SAFETY: the out-pointer is to a live local; any number may be asked about.
        let known = unsafe { (self.get_error_name)(code, &mut name) } == 0 && !name.is_null();
        if known {
            // SAFETY: a constant text of the library, which is never unloaded.
            let name = unsafe { CStr::from_ptr(name) };
            error.name = Cow::Owned(name.to_string_lossy().into_owned());
        }
        Err(error)
    }
}

fn find<F: Copy>(library: &'static Library, name: &str) -> Option<F> {
    // SAFETY: the macro pairs each name with its signature, and checks that against the bindings.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    symbol.ok().map(|symbol| *symbol)
}

/// The file behind a library's name, as the loader found it.
fn loaded_path(name: &str) -> String {
    let file = name.rsplit('/').next().unwrap_or(name);
    let stem = file.split(".so").next().unwrap_or(file);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let is_it = |path: &&str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so"))
    };
    paths.filter(|path| !path.ends_with("(deleted)")).find(is_it).unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_an_error() {
        let missing = Symbols::load_from(Path::new("libno-such-driver.so.1")).err();
        assert!(
            matches!(missing, Some(LoadError::NoLibrary(why)) if why.contains("no-such-driver"))
        );
    }

    #[test]
    fn a_library_without_the_functions_names_each() {
        // Any other library will do.
        let missing = Symbols::load_from(Path::new("libc.so.6")).err();
        let Some(LoadError::Missing { library, symbols }) = missing else { panic!("{missing:?}") };
        assert!(library.ends_with("libc.so.6"), "{library}");
        assert!(symbols.contains(&"cuInit") && symbols.contains(&"cuLaunchKernel"));
        assert!(!symbols.contains(&"cuMemcpyBatchAsync"), "optional");
    }
}
