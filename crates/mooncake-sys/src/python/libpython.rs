//! The part of Python's stable interface that is used.

use std::ffi::{c_char, c_int, c_long, c_longlong, c_ulonglong, c_void};

use crate::loading::table;

/// A Python object, owned by the interpreter.
#[repr(C)]
pub(super) struct PyObject {
    _opaque: [u8; 0],
}

pub(super) type Ref = *mut PyObject;

#[cfg(target_os = "linux")]
pub(super) type WideChar = i32; // wchar_t

table! {
    /// Functions of `libpython` (stable interface, Python 3.10 and later).
    PythonTable is "libpython";
    needed {
        is_initialized = "Py_IsInitialized": fn() -> c_int;
        initialize = "Py_InitializeEx": fn(c_int);
        version = "Py_GetVersion": fn() -> *const c_char;
        decode_locale = "Py_DecodeLocale": fn(*const c_char, *mut usize) -> *mut WideChar;
        save_thread = "PyEval_SaveThread": fn() -> *mut c_void;
        restore_thread = "PyEval_RestoreThread": fn(*mut c_void);
        ensure = "PyGILState_Ensure": fn() -> c_int;
        inc_ref = "Py_IncRef": fn(Ref);
        dec_ref = "Py_DecRef": fn(Ref);
        import = "PyImport_ImportModule": fn(*const c_char) -> Ref;
        get_attribute = "PyObject_GetAttrString": fn(Ref, *const c_char) -> Ref;
        set_attribute = "PyObject_SetAttrString": fn(Ref, *const c_char, Ref) -> c_int;
        call = "PyObject_CallObject": fn(Ref, Ref) -> Ref;
        to_text = "PyObject_Str": fn(Ref) -> Ref;
        tuple_new = "PyTuple_New": fn(isize) -> Ref;
        tuple_set = "PyTuple_SetItem": fn(Ref, isize, Ref) -> c_int;
        list_new = "PyList_New": fn(isize) -> Ref;
        list_set = "PyList_SetItem": fn(Ref, isize, Ref) -> c_int;
        list_get = "PyList_GetItem": fn(Ref, isize) -> Ref;
        list_len = "PyList_Size": fn(Ref) -> isize;
        list_append = "PyList_Append": fn(Ref, Ref) -> c_int;
        dict_get = "PyDict_GetItemWithError": fn(Ref, Ref) -> Ref;
        text_new = "PyUnicode_FromStringAndSize": fn(*const c_char, isize) -> Ref;
        text_get = "PyUnicode_AsUTF8AndSize": fn(Ref, *mut isize) -> *const c_char;
        unsigned_new = "PyLong_FromUnsignedLongLong": fn(c_ulonglong) -> Ref;
        signed_get = "PyLong_AsLongLong": fn(Ref) -> c_longlong;
        bool_new = "PyBool_FromLong": fn(c_long) -> Ref;
        error_occurred = "PyErr_Occurred": fn() -> Ref;
        error_fetch = "PyErr_Fetch": fn(*mut Ref, *mut Ref, *mut Ref);
        error_normalize = "PyErr_NormalizeException": fn(*mut Ref, *mut Ref, *mut Ref);
        error_clear = "PyErr_Clear": fn();
        contains = "PySequence_Contains": fn(Ref, Ref) -> c_int;
    }
    optional {
        set_program_name = "Py_SetProgramName": fn(*const WideChar);
    }
}
