//! Rows and fields of a rollout, as frameworks take them over by DLPack.
//!
//! The library is the example `dlpack_rollout`, which is built here: cargo builds no examples for
//! tests that are chosen by target.

use std::{path::PathBuf, process::Command};

fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).expect("target/PROFILE/deps/test");
    let build = ["build", "--quiet", "--package", "rollout-codec", "--example", "dlpack_rollout"];
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(build).arg("--target-dir").arg(target).current_dir(env!("CARGO_MANIFEST_DIR"));
    assert!(cargo.status().unwrap().success(), "{cargo:?}");
    target.join("debug/examples/libdlpack_rollout.so")
}

/// Runs a script behind what both have in common; it must print `ok`.
fn python(script: &str) {
    let script = format!("library = {:?}\n{COMMON}{script}\nprint('ok')", library());
    let output =
        Command::new("python3").args(["-c", &script]).output().expect("python3 is installed");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.ends_with("ok\n"), "{stdout}");
    println!("{stdout}");
}

const COMMON: &str = r#"
import ctypes, gc
rust = ctypes.CDLL(library)
rust.export.restype = ctypes.c_void_p
rust.export.argtypes = [ctypes.c_uint32, ctypes.c_int64, ctypes.c_int32]
rust.is_kept.restype = ctypes.c_bool
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
FIELD, VALUES, OFFSETS = -1, -2, -3
names = ["tokens", "experts", "sums", "rewards"]

class Given:
    "What an extension module gives to from_dlpack."
    def __init__(self, field, row):
        self.field, self.row = names.index(field), row
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        minor = max_version[1] if max_version and max_version[0] >= 1 else -1
        at = rust.export(self.field, self.row, minor)
        if at is None:
            raise BufferError("refused")
        return capsule(at, b"dltensor_versioned" if minor >= 0 else b"dltensor", None)
    def __dlpack_device__(self):
        return (1, 0)

def is_refused(take):
    try:
        take()
    except (BufferError, RuntimeError, TypeError):
        return True
    return False

rust.begin_view()
assert rust.is_kept()
"#;

#[test]
#[ignore = "needs python3; cargo xtask test runs it where python3 is installed"]
fn plain_python_sees_read_only_rows() {
    python(
        r#"
class Head(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]
def take(field, row):
    at = rust.export(names.index(field), row, 1)
    return at, Head.from_address(at)
def end(at, head):
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(head.deleter)(at)
wanted = [("tokens", 2, (0, 64), [2], bytes(range(8, 24))), ("experts", 1, (4, 16), [1, 3, 2], bytes(range(12))),
    ("tokens", 0, (0, 64), [0], b""), ("sums", FIELD, (2, 32), [5], None), ("rewards", FIELD, (2, 32), [5], None),
    ("experts", VALUES, (4, 16), [6, 3, 2], bytes(range(72))), ("tokens", OFFSETS, (0, 64), [6], None)]
for field, row, kind, shape, content in wanted:
    at, head = take(field, row)
    assert head.flags == 1, "only to be read"
    assert (head.code, head.bits) == kind and head.shape[:head.ndim] == shape, field
    if content is not None:
        assert ctypes.string_at(head.data, len(content)) == content
    end(at, head)
for field, row in [("tokens", 4), ("tokens", 5), ("tokens", FIELD), ("sums", 0), ("rewards", VALUES)]:
    assert rust.export(names.index(field), row, 1) is None, (field, row)
(one, first), (two, second) = take("tokens", 3), take("tokens", 2)
rust.end_view()
assert rust.is_kept(), "rows outlive their view"
end(one, first)
assert rust.is_kept()
assert ctypes.string_at(second.data, 1) == b"\x08"
end(two, second)
assert not rust.is_kept(), "given back with the last row"
"#,
    );
}

#[test]
#[ignore = "needs numpy; cargo xtask test runs it where python3 has numpy"]
fn frameworks_take_rows_over_and_give_them_back() {
    python(
        r#"
import numpy
def take(field, row):
    return numpy.from_dlpack(Given(field, row))
tokens = [take("tokens", i) for i in range(4)]
assert [len(row) for row in tokens] == [0, 1, 2, 3] and tokens[1].dtype == numpy.int64
assert b"".join(row.tobytes() for row in tokens) == bytes(range(48))
assert not tokens[2].flags.writeable and not take("sums", FIELD).flags.writeable
assert take("sums", FIELD).tolist() == [0, 1, 2, 3, 4] == take("rewards", FIELD).tolist()
values, offsets = take("tokens", VALUES), take("tokens", OFFSETS)
assert offsets.tolist() == [0, 0, 1, 3, 6, 6]
assert numpy.array_equal(values[1:3], tokens[2])
for field, row in [("tokens", 4), ("tokens", 5), ("tokens", FIELD), ("sums", VALUES)]:
    assert is_refused(lambda: take(field, row)), (field, row)
print("numpy", numpy.__version__)
kept = [values[4:]]
try:
    import torch
except ImportError:
    print("no torch here")
else:
    rows = [torch.from_dlpack(Given("experts", i)) for i in range(4)]
    assert [tuple(row.shape) for row in rows] == [(i, 3, 2) for i in range(4)]
    assert rows[1].dtype == torch.bfloat16
    joined = torch.from_dlpack(Given("experts", VALUES))
    assert torch.equal(joined[1:3].view(torch.int16), rows[2].view(torch.int16))
    jagged = torch.nested.nested_tensor_from_jagged(
        torch.from_dlpack(Given("tokens", VALUES)), torch.from_dlpack(Given("tokens", OFFSETS)))
    assert [row.tolist() for row in jagged.unbind()][:4] == [row.tolist() for row in tokens]
    kept.append(rows[3][1])
    del rows, joined, jagged
    print("torch", torch.__version__)
rust.end_view()
del tokens, values, offsets
gc.collect()
while kept:
    assert rust.is_kept(), "a view of a row keeps the rollout"
    kept.pop()
    gc.collect()
assert not rust.is_kept(), "given back with the last view"
"#,
    );
}
