//! Tensors exported by DLPack, as Python and what it brings take them over.
//!
//! The library is the example `dlpack_export`, which is built here: cargo builds no examples for
//! tests that are chosen by target.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use transport_core::Dtype;

/// Built here, or named where there is no cargo: on a machine with a device.
fn library() -> PathBuf {
    if let Some(library) = std::env::var_os("FEATURESTORE_DLPACK_LIBRARY") {
        return library.into();
    }
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).expect("target/PROFILE/deps/test");
    let build = ["build", "--quiet", "--package", "transport-core", "--example", "dlpack_export"];
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(build).arg("--target-dir").arg(target).current_dir(env!("CARGO_MANIFEST_DIR"));
    assert!(cargo.status().unwrap().success(), "{cargo:?}");
    target.join("debug/examples/libdlpack_export.so")
}

/// Runs a script behind what both have in common; it must print `ok`.
fn python(script: &str) -> String {
    let names = Dtype::ALL.map(|dtype| format!("{:?}", dtype.name())).join(", ");
    let script = format!("library, names = {:?}, [{names}]\n{COMMON}{script}", library());
    let Output { status, stdout, stderr } =
        Command::new("python3").args(["-c", &script]).output().expect("python3 is installed");
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    assert!(status.success(), "{stdout}\n{}", String::from_utf8_lossy(&stderr));
    assert!(stdout.ends_with("ok\n"), "{stdout}");
    stdout
}

const COMMON: &str = r#"
import ctypes, gc
rust = ctypes.CDLL(library)
rust.export_tensor.restype = ctypes.c_void_p
rust.export_tensor.argtypes = [ctypes.c_uint32, ctypes.c_int32, ctypes.c_bool]
rust.live_regions.restype = ctypes.c_int64
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
NEW, OLD = b"dltensor_versioned", b"dltensor"

class Exported:
    "What an extension module gives to from_dlpack."
    def __init__(self, dtype, writable=False, versioned=True):
        self.dtype, self.writable, self.versioned = names.index(dtype), writable, versioned
        self.seen = None
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.seen = max_version
        minor = max_version[1] if self.versioned and max_version and max_version[0] >= 1 else -1
        at = rust.export_tensor(self.dtype, minor, self.writable)
        if at is None:
            raise BufferError("refused")
        return capsule(at, NEW if minor >= 0 else OLD, None)
    def __dlpack_device__(self):
        return (1, 0)
"#;

#[test]
#[ignore = "needs python3; cargo xtask test runs it where python3 is installed"]
fn plain_python_finds_every_field_in_its_place() {
    python(
        r#"
class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]
class Old(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]
class New(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64),
        ("tensor", Tensor)]
codes = {"float32": (2, 32), "float64": (2, 64), "float16": (2, 16), "bfloat16": (4, 16),
    "int64": (0, 64), "int32": (0, 32), "int16": (0, 16), "int8": (0, 8), "uint8": (1, 8),
    "bool": (6, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64),
    "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8), "complex64": (5, 64), "complex128": (5, 128)}
assert set(codes) == set(names)
for i, name in enumerate(names):
    for minor, form in [(1, New), (0, New), (-1, Old)]:
        for writable in [False, True]:
            at = rust.export_tensor(i, minor, writable)
            if name.startswith("float8") and minor < 1:
                assert at is None
                continue
            head = form.from_address(at)
            t = head.tensor
            assert (t.code, t.bits) == codes[name] and t.lanes == 1, name
            assert (t.kind, t.id, t.ndim, t.byte_offset) == (1, 0, 2, 0)
            assert t.shape[:2] == [2, 3] and t.strides[:2] == [3, 1]
            size = 6 * t.bits // 8
            assert ctypes.string_at(t.data, size) == bytes(range(1, size + 1))
            if form is New:
                assert (head.major, head.minor, head.flags) == (1, minor, 0 if writable else 1)
            assert rust.live_regions() == 1
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(head.deleter)(at)
            assert rust.live_regions() == 0
print("ok")
"#,
    );
}

#[test]
#[ignore = "needs numpy; cargo xtask test runs it where python3 has numpy"]
fn numpy_takes_tensors_over_and_gives_them_back() {
    let said = python(
        r#"
import numpy
known = [name for name in names if not name.startswith(("bfloat16", "float8"))]
for name in known:
    for versioned in [True, False]:
        for writable in [False, True]:
            given = Exported(name, writable, versioned)
            a = numpy.from_dlpack(given)
            assert (a.dtype.name, a.shape, a.strides) == (name, (2, 3), (3 * a.itemsize, a.itemsize))
            assert a.tobytes() == bytes(range(1, a.nbytes + 1)), name
            newest = given.seen is not None and given.seen[0] >= 1 and versioned
            assert a.flags.writeable == (writable and newest), "what is only to be read stays so"
            if a.flags.writeable:
                a[0, 0] = 0
            part = a[1:, :]
            del a
            gc.collect()
            assert rust.live_regions() == 1, "a view keeps it"
            assert part.tobytes()[-1] == 6 * part.itemsize
            del part
            gc.collect()
            assert rust.live_regions() == 0, "given back with the last view"
for name in ["bfloat16", "float8_e5m2"]:
    try:
        numpy.from_dlpack(Exported(name))
        raise SystemExit("numpy has no such type")
    except (BufferError, RuntimeError, TypeError):
        pass
gc.collect()
print("numpy", numpy.__version__, "newest version asked for:", given.seen)
try:
    import torch
except ImportError:
    print("no torch here")
else:
    for name in ["float32", "bfloat16", "int64", "bool", "uint8", "complex64"]:
        t = torch.from_dlpack(Exported(name, True))
        assert (str(t.dtype), tuple(t.shape)) == ("torch." + name, (2, 3))
        if name not in ("bool", "complex64"):
            assert bytes(t.view(torch.uint8).flatten().tolist()) == bytes(range(1, t.nbytes + 1))
        kept = t[1]
        del t
        gc.collect()
        del kept
        gc.collect()
    print("torch", torch.__version__)
print("ok")
"#,
    );
    println!("{said}");
}
