//! Python objects in Rust's hands, all behind the interpreter's lock.

use std::{
    ffi::CStr,
    marker::PhantomData,
    ptr::{self, NonNull},
};

use transport_core::{Error, ErrorKind, Result};

use super::libpython::{PyObject, PythonTable, Ref};

/// Proof that this thread holds the interpreter's lock. Never leaves the thread.
#[derive(Clone, Copy)]
pub(super) struct Gil<'g> {
    table: &'g PythonTable,
    _this_thread: PhantomData<*mut ()>,
}

/// An owned reference to an object.
pub(super) struct Object<'g> {
    raw: NonNull<PyObject>,
    gil: Gil<'g>,
}

/// An owned reference that may leave the lock. Only [`Object`] can use it or let go of it; dropping
/// it instead leaks the object, which is safe.
#[derive(Debug)]
pub(super) struct Parked(NonNull<PyObject>);

// SAFETY: a parked reference is only a number until a thread with the lock takes it up.
unsafe impl Send for Parked {}
// SAFETY: as above.
unsafe impl Sync for Parked {}

/// An argument of a call.
pub(super) enum Argument<'a, 'g> {
    Text(&'a str),
    Number(u64),
    Flag(bool),
    Texts(&'a mut dyn ExactSizeIterator<Item = &'a str>),
    Numbers(&'a mut dyn ExactSizeIterator<Item = u64>),
    /// Lists of one number each.
    Singles(&'a mut dyn ExactSizeIterator<Item = u64>),
    Object(Object<'g>),
}

impl<'g> Gil<'g> {
    /// # Safety
    /// This thread holds the lock of the interpreter behind `table` for `'g`.
    pub(super) unsafe fn assume(table: &'g PythonTable) -> Self {
        Self { table, _this_thread: PhantomData }
    }

    pub(super) fn import(self, module: &CStr) -> Result<Object<'g>> {
        // SAFETY: the lock is held, and the name ends with NUL.
        let raw = unsafe { (self.table.import)(module.as_ptr()) };
        self.own(raw)
    }

    fn own(self, raw: Ref) -> Result<Object<'g>> {
        match NonNull::new(raw) {
            Some(raw) => Ok(Object { raw, gil: self }),
            None => Err(self.exception()),
        }
    }

    pub(super) fn text(self, text: &str) -> Result<Object<'g>> {
        // SAFETY: the lock is held; the bytes are UTF-8 of this length.
        let raw = unsafe { (self.table.text_new)(text.as_ptr().cast(), text.len() as isize) };
        self.own(raw)
    }

    pub(super) fn number(self, number: u64) -> Result<Object<'g>> {
        // SAFETY: the lock is held.
        let raw = unsafe { (self.table.unsigned_new)(number) };
        self.own(raw)
    }

    pub(super) fn texts<'t>(
        self,
        texts: &mut dyn ExactSizeIterator<Item = &'t str>,
    ) -> Result<Object<'g>> {
        self.list(&mut texts.map(|text| self.text(text)))
    }

    pub(super) fn flag(self, flag: bool) -> Result<Object<'g>> {
        // SAFETY: the lock is held.
        let raw = unsafe { (self.table.bool_new)(flag.into()) };
        self.own(raw)
    }

    fn list(
        self,
        items: &mut dyn ExactSizeIterator<Item = Result<Object<'g>>>,
    ) -> Result<Object<'g>> {
        // SAFETY: the lock is held.
        let raw = unsafe { (self.table.list_new)(items.len() as isize) };
        let list = self.own(raw)?;
        for (i, item) in items.enumerate() {
            let item = item?.into_raw();
            // SAFETY: the lock is held; `i` lies within the new list, which takes the reference.
            let code = unsafe { (self.table.list_set)(list.raw.as_ptr(), i as isize, item) };
            self.done(code)?;
        }
        Ok(list)
    }

    fn done(self, code: i32) -> Result<()> {
        if code < 0 { Err(self.exception()) } else { Ok(()) }
    }

    /// Takes the pending exception as an error.
    fn exception(self) -> Error {
        let (mut kind, mut value, mut trace) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: the lock is held; three places for references, each owned or null afterwards.
        unsafe { (self.table.error_fetch)(&mut kind, &mut value, &mut trace) }
        // SAFETY: as above.
        unsafe { (self.table.error_normalize)(&mut kind, &mut value, &mut trace) }
        let own = |raw| NonNull::new(raw).map(|raw| Object { raw, gil: self });
        let (kind, value, _trace) = (own(kind), own(value), own(trace));
        let name = kind.and_then(|k| k.attribute(c"__name__").ok()?.as_text().ok());
        let message = value.and_then(|v| v.to_text().ok());
        // SAFETY: the lock is held; drops what describing the exception may have raised.
        unsafe { (self.table.error_clear)() }
        let name = name.unwrap_or_else(|| "an unnamed exception".into());
        let kind = match name.as_str() {
            "ModuleNotFoundError" | "ImportError" => ErrorKind::NotFound,
            "TypeError" | "ValueError" | "AttributeError" => ErrorKind::Unsupported,
            "MemoryError" => ErrorKind::CapacityExceeded,
            _ => ErrorKind::Unexpected,
        };
        Error::new(kind, "call Python", format!("{name}: {}", message.unwrap_or_default()))
    }
}

impl<'g> Object<'g> {
    pub(super) fn attribute(&self, name: &CStr) -> Result<Self> {
        // SAFETY: the lock is held, the object lives, and the name ends with NUL.
        let raw = unsafe { (self.gil.table.get_attribute)(self.raw.as_ptr(), name.as_ptr()) };
        self.gil.own(raw)
    }

    pub(super) fn set(&self, name: &CStr, value: &Self) -> Result<()> {
        let (object, value) = (self.raw.as_ptr(), value.raw.as_ptr());
        // SAFETY: the lock is held, both objects live, and the name ends with NUL.
        let code = unsafe { (self.gil.table.set_attribute)(object, name.as_ptr(), value) };
        self.gil.done(code)
    }

    /// Calls the object itself.
    pub(super) fn call<const N: usize>(&self, arguments: [Argument<'_, 'g>; N]) -> Result<Self> {
        let gil = self.gil;
        // SAFETY: the lock is held.
        let raw = unsafe { (gil.table.tuple_new)(N as isize) };
        let tuple = gil.own(raw)?;
        for (i, argument) in arguments.into_iter().enumerate() {
            let item = match argument {
                Argument::Text(text) => gil.text(text)?,
                Argument::Number(number) => gil.number(number)?,
                Argument::Flag(flag) => gil.flag(flag)?,
                Argument::Texts(texts) => gil.texts(texts)?,
                Argument::Numbers(numbers) => gil.list(&mut numbers.map(|n| gil.number(n)))?,
                Argument::Singles(numbers) => gil.list(
                    &mut numbers.map(|n| gil.list(&mut std::iter::once(n).map(|n| gil.number(n)))),
                )?,
                Argument::Object(object) => object,
            };
            let item = item.into_raw();
            // SAFETY: the lock is held; `i` lies within the new tuple, which takes the reference.
            let code = unsafe { (gil.table.tuple_set)(tuple.raw.as_ptr(), i as isize, item) };
            gil.done(code)?;
        }
        // SAFETY: the lock is held, and both objects live.
        let raw = unsafe { (gil.table.call)(self.raw.as_ptr(), tuple.raw.as_ptr()) };
        gil.own(raw)
    }

    /// Calls a method.
    pub(super) fn method<const N: usize>(
        &self,
        name: &CStr,
        arguments: [Argument<'_, 'g>; N],
    ) -> Result<Self> {
        self.attribute(name)?.call(arguments)
    }

    pub(super) fn as_number(&self) -> Result<i64> {
        // SAFETY: the lock is held, and the object lives.
        let number = unsafe { (self.gil.table.signed_get)(self.raw.as_ptr()) };
        if number == -1 {
            // SAFETY: the lock is held; the reference is borrowed and only compared.
            let pending = unsafe { (self.gil.table.error_occurred)() };
            if !pending.is_null() {
                return Err(self.gil.exception());
            }
        }
        Ok(number)
    }

    pub(super) fn as_text(&self) -> Result<String> {
        let mut len = 0;
        // SAFETY: the lock is held, the object lives, and there is a place for the length.
        let start = unsafe { (self.gil.table.text_get)(self.raw.as_ptr(), &mut len) };
        let Some(start) = NonNull::new(start.cast_mut()) else {
            return Err(self.gil.exception());
        };
        // SAFETY: the text object keeps that many bytes, and it lives until after the copy.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), len as usize) };
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    pub(super) fn to_text(&self) -> Result<String> {
        // SAFETY: the lock is held, and the object lives.
        let raw = unsafe { (self.gil.table.to_text)(self.raw.as_ptr()) };
        self.gil.own(raw)?.as_text()
    }

    /// The numbers of a list.
    pub(super) fn as_numbers(&self) -> Result<Vec<i64>> {
        self.items()?.iter().map(Object::as_number).collect()
    }

    /// The items of a list.
    pub(super) fn items(&self) -> Result<Vec<Self>> {
        // SAFETY: the lock is held, and the object lives.
        let len = unsafe { (self.gil.table.list_len)(self.raw.as_ptr()) };
        if len < 0 {
            return Err(self.gil.exception());
        }
        (0..len)
            .map(|i| {
                // SAFETY: the lock is held, the object is a list, and `i` lies within it.
                let raw = unsafe { (self.gil.table.list_get)(self.raw.as_ptr(), i) };
                let Some(raw) = NonNull::new(raw) else { return Err(self.gil.exception()) };
                // SAFETY: the lock is held; makes the borrowed reference an owned one.
                unsafe { (self.gil.table.inc_ref)(raw.as_ptr()) }
                Ok(Object { raw, gil: self.gil })
            })
            .collect()
    }

    /// The value of this dict under a text; `None` if there is none.
    pub(super) fn entry(&self, key: &str) -> Result<Option<Self>> {
        let key = self.gil.text(key)?;
        // SAFETY: the lock is held, and both objects live.
        let raw = unsafe { (self.gil.table.dict_get)(self.raw.as_ptr(), key.raw.as_ptr()) };
        let Some(raw) = NonNull::new(raw) else {
            // SAFETY: the lock is held; the reference is borrowed and only compared.
            let pending = unsafe { (self.gil.table.error_occurred)() };
            return if pending.is_null() { Ok(None) } else { Err(self.gil.exception()) };
        };
        // SAFETY: the lock is held; makes the borrowed reference an owned one.
        unsafe { (self.gil.table.inc_ref)(raw.as_ptr()) }
        Ok(Some(Object { raw, gil: self.gil }))
    }

    /// Adds an object to this list, unless an equal one is in it.
    pub(super) fn append_new(&self, item: &Self) -> Result<()> {
        let (list, item) = (self.raw.as_ptr(), item.raw.as_ptr());
        // SAFETY: the lock is held, and both objects live.
        let found = unsafe { (self.gil.table.contains)(list, item) };
        self.gil.done(found)?;
        if found == 0 {
            // SAFETY: as above.
            let code = unsafe { (self.gil.table.list_append)(list, item) };
            self.gil.done(code)?;
        }
        Ok(())
    }

    /// Another reference to the same object.
    pub(super) fn share(&self) -> Self {
        // SAFETY: the lock is held, and the object lives.
        unsafe { (self.gil.table.inc_ref)(self.raw.as_ptr()) }
        Object { raw: self.raw, gil: self.gil }
    }

    /// Makes the reference fit to leave the lock.
    pub(super) fn park(self) -> Parked {
        let raw = self.raw;
        std::mem::forget(self);
        Parked(raw)
    }

    /// Another reference to a parked object.
    pub(super) fn of(parked: &Parked, gil: Gil<'g>) -> Self {
        // SAFETY: the lock is held, and the parked reference keeps the object alive.
        unsafe { (gil.table.inc_ref)(parked.0.as_ptr()) }
        Object { raw: parked.0, gil }
    }

    /// The parked reference itself.
    pub(super) fn take_up(parked: Parked, gil: Gil<'g>) -> Self {
        Object { raw: parked.0, gil }
    }

    fn into_raw(self) -> Ref {
        let raw = self.raw.as_ptr();
        std::mem::forget(self);
        raw
    }
}

impl Drop for Object<'_> {
    fn drop(&mut self) {
        // SAFETY: the lock is held, and this reference is owned and let go of once.
        unsafe { (self.gil.table.dec_ref)(self.raw.as_ptr()) }
    }
}
