//! What the tests against real Mooncake share: where it is, and that it stays on loopback.
#![allow(dead_code, unreachable_pub)] // shared by several test binaries

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use mooncake_sys::master::{ManagedMaster, MasterOptions};

/// Has Mooncake name loopback to its peers and use tcp, which it reads when it is loaded. Its ports
/// are open on every address all the same: no setting of 0.3.13 changes that.
extern "C" fn loopback_only() {
    for (name, value) in [("MC_TCP_BIND_ADDRESS", "127.0.0.1"), ("MC_FORCE_TCP", "1")] {
        // SAFETY: runs before `main`, when this thread is the only one.
        unsafe { std::env::set_var(name, value) }
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOOPBACK_ONLY: extern "C" fn() = loopback_only;

/// The virtual environment with Mooncake's wheel.
///
/// # Panics
/// If there is none: tests that need one are ignored unless asked for, and never pass without.
pub fn environment() -> PathBuf {
    let named = std::env::var_os("FEATURESTORE_MOONCAKE_VENV").map(PathBuf::from);
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/mooncake-venv");
    let path = named.unwrap_or(made);
    assert!(
        path.join("bin/mooncake_master").exists(),
        "no Mooncake at {}: run `cargo xtask mooncake-venv` or set FEATURESTORE_MOONCAKE_VENV",
        path.display()
    );
    path
}

/// A master for one test.
pub fn master() -> ManagedMaster {
    ManagedMaster::start(&MasterOptions::of_environment(&environment())).unwrap()
}

/// Compiles C to a shared library. Every machine that links Rust has a C compiler.
pub fn compile(dir: &Path, name: &str, source: &str) -> PathBuf {
    let (code, library) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&code, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"])
        .arg(format!("-Wl,-soname,{name}"))
        .arg("-o")
        .args([&library, &code])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

/// A driver without devices: what a CUDA build of Mooncake needs to load on a machine without one.
pub fn stub_cuda(dir: &Path) -> PathBuf {
    let names = "cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute \
                 cuDeviceGetPCIBusId cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain \
                 cuGetErrorName cuGetErrorString cuInit cuMemAddressFree cuMemAddressReserve \
                 cuMemCreate cuMemExportToShareableHandle cuMemGetAddressRange_v2 \
                 cuMemGetAllocationGranularity cuMemGetHandleForAddressRange \
                 cuMemImportFromShareableHandle cuMemMap cuMemRelease \
                 cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap cuPointerGetAttribute \
                 cuPointerSetAttribute";
    let no_device = |name| format!("int {name}(void) {{ return 100; }}\n");
    let source: String = names.split_whitespace().map(no_device).collect();
    compile(dir, "libcuda.so.1", &source)
}
