//! Slots of a receive pool on a device, as torch takes them over by DLPack: without a copy.
//!
//! Needs a CUDA device, and python3 with torch. The library is the example `dlpack_device`, which is
//! built here; `FEATURESTORE_DLPACK_DEVICE_LIBRARY` names it where there is no cargo.

use std::{path::PathBuf, process::Command};

fn library() -> PathBuf {
    if let Some(library) = std::env::var_os("FEATURESTORE_DLPACK_DEVICE_LIBRARY") {
        return library.into();
    }
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).expect("target/PROFILE/deps/test");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "build",
        "--quiet",
        "--package",
        "transport-mooncake-direct",
        "--features",
        "cuda",
    ]);
    cargo.args(["--example", "dlpack_device"]).arg("--target-dir").arg(target);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    assert!(cargo.status().unwrap().success(), "{cargo:?}");
    target.join("debug/examples/libdlpack_device.so")
}

const SCRIPT: &str = r#"
import ctypes, gc, sys
import torch
rust = ctypes.CDLL(sys.argv[1])
rust.export_slot.restype = ctypes.c_void_p
rust.export_slot.argtypes = [ctypes.c_int32, ctypes.c_bool]
rust.last_address.restype = rust.live_regions.restype = ctypes.c_uint64
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

class Exported:
    "What an extension module gives to from_dlpack."
    def __init__(self, writable):
        self.writable = writable
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        minor = max_version[1] if max_version and max_version[0] >= 1 else -1
        at = rust.export_slot(minor, self.writable)
        assert at is not None
        return capsule(at, b"dltensor_versioned" if minor >= 0 else b"dltensor", None)
    def __dlpack_device__(self):
        return (2, 0)

expected = torch.arange(33000, dtype=torch.int32).reshape(1000, 33)
for writable in (False, True):
    t = torch.from_dlpack(Exported(writable))
    assert t.device == torch.device("cuda", 0) and t.dtype == torch.int32, (t.device, t.dtype)
    assert tuple(t.shape) == (1000, 33) and t.data_ptr() == rust.last_address(), "no copy"
    assert rust.live_regions() == 1
    assert torch.equal(t.cpu(), expected)
    part = t[10:12]
    del t
    gc.collect()
    assert rust.live_regions() == 1, "a part keeps the slot"
    assert torch.equal(part.cpu(), expected[10:12])
    if writable:
        part += 1
        assert torch.equal(part.cpu(), expected[10:12] + 1)
    del part
    gc.collect()
    assert rust.live_regions() == 0, "given back to the pool"
print(torch.__version__, "ok")
"#;

#[test]
#[ignore = "needs a CUDA device, and python3 with torch: cargo xtask test --gpu"]
fn torch_takes_slots_over_without_a_copy() {
    let output = Command::new("python3")
        .args(["-c", SCRIPT])
        .arg(library())
        .output()
        .expect("python3 is installed");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.ends_with("ok\n"), "{stdout}");
    println!("{stdout}");
}
