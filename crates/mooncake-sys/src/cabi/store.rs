//! `store_c.h`.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    ptr,
    time::Duration,
};

use parking_lot::{RwLock, RwLockReadGuard};
use transport_core::{Error, ErrorKind, Result};

use super::{Handle, LibraryOptions, Opened, c_text, closed, info, open, table};
use crate::{
    GetItem, KeyResults, ProviderInfo, PutItem, ReplicaPolicy, StoreApi, StoreCapabilities,
    StoreCode, StoreSetup,
    store::{SETUP, probe_master, setup_failed},
};

const WHAT: &str = "Mooncake Store library";
/// How long `close` waits for running calls before it gives up; Mooncake's own timeout is 30 s.
const CLOSE_PATIENCE: Duration = Duration::from_secs(40);

type Store = *mut c_void;

#[repr(C)]
pub(super) struct RawReplicaConfig {
    replica_num: usize,
    with_soft_pin: c_int,
    with_hard_pin: c_int,
    preferred_segments: *const *const c_char,
    preferred_segments_count: usize,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<RawReplicaConfig>() == 32);
    assert!(align_of::<RawReplicaConfig>() == 8);
    assert!(std::mem::offset_of!(RawReplicaConfig, with_soft_pin) == 8);
    assert!(std::mem::offset_of!(RawReplicaConfig, with_hard_pin) == 12);
    assert!(std::mem::offset_of!(RawReplicaConfig, preferred_segments) == 16);
    assert!(std::mem::offset_of!(RawReplicaConfig, preferred_segments_count) == 24);
    assert!(size_of::<c_int>() == 4);
};

type SetupFn =
    (*const c_char, *const c_char, u64, u64, *const c_char, *const c_char, *const c_char);
const _: () = assert!(size_of::<SetupFn>() == 56, "every argument of setup is a word");

table! {
    /// Functions of `store_c.h`.
    StoreTable is "Mooncake Store library";
    needed {
        create = "mooncake_store_create": fn() -> Store;
        destroy = "mooncake_store_destroy": fn(Store);
        setup = "mooncake_store_setup": fn(Store, *const c_char, *const c_char, u64, u64, *const c_char, *const c_char, *const c_char) -> c_int;
        health_check = "mooncake_store_health_check": fn(Store) -> c_int;
        batch_put_from = "mooncake_store_batch_put_from": fn(Store, *const *const c_char, *const *mut c_void, *const usize, usize, *const RawReplicaConfig, *mut c_int) -> c_int;
        batch_get_into = "mooncake_store_batch_get_into": fn(Store, *const *const c_char, *const *mut c_void, *const usize, usize, *mut i64) -> c_int;
        batch_is_exist = "mooncake_store_batch_is_exist": fn(Store, *const *const c_char, usize, *mut c_int) -> c_int;
        get_size = "mooncake_store_get_size": fn(Store, *const c_char) -> i64;
        get_hostname = "mooncake_store_get_hostname": fn(Store, *mut c_char, usize) -> c_int;
        remove = "mooncake_store_remove": fn(Store, *const c_char, c_int) -> c_int;
        register_buffer = "mooncake_store_register_buffer": fn(Store, *mut c_void, usize) -> c_int;
        unregister_buffer = "mooncake_store_unregister_buffer": fn(Store, *mut c_void) -> c_int;
    }
    optional {
        setup_with_tenant = "mooncake_store_setup_with_tenant": fn(Store, *const c_char, *const c_char, u64, u64, *const c_char, *const c_char, *const c_char, *const c_char) -> c_int;
    }
}

/// An open library with the interface of `store_c.h`.
#[derive(Clone, Debug)]
pub struct StoreLibrary {
    table: StoreTable,
    info: ProviderInfo,
}

impl StoreLibrary {
    /// Name of the file, as upstream's build calls it.
    pub const FILE_NAME: &'static str = "libmooncake_store.so";
    /// Variable that names the file; upstream's crate reads the same one.
    pub const VARIABLE: &'static str = "MOONCAKE_STORE_LIBRARY";

    /// Finds the library, opens it and resolves its functions.
    pub fn load(options: &LibraryOptions) -> Result<Self> {
        let opened: Opened = open(options, Self::VARIABLE, Self::FILE_NAME, WHAT)?;
        let table = StoreTable::resolve(&opened)?;
        let capabilities = StoreCapabilities::default().tenants(table.setup_with_tenant.is_some());
        let info = info(&opened, table.create as *mut ()).store(capabilities);
        tracing::info!(provider = %info, "loaded Mooncake Store");
        Ok(Self { table, info })
    }

    /// Which file was opened.
    pub fn info(&self) -> &ProviderInfo {
        &self.info
    }

    /// Joins a cluster.
    pub fn connect(&self, setup: &StoreSetup) -> Result<CStore> {
        setup.check()?;
        probe_master(setup)?;
        let text = |what, value: &str| c_text(SETUP, what, value);
        let host = text("local host", &setup.local_host)?;
        let metadata = text("metadata address", &setup.metadata)?;
        let protocol = text("protocol", &setup.protocol)?;
        let devices = text("device list", &setup.devices)?;
        let master = text("master address", &setup.master)?;
        let tenant = setup.tenant.as_deref().map(|t| text("tenant", t)).transpose()?;
        if tenant.is_some() && self.table.setup_with_tenant.is_none() {
            return Err(Error::new(ErrorKind::Unsupported, SETUP, "this library has no tenants")
                .with("file", self.info.file.display()));
        }
        // SAFETY: takes nothing and gives a handle or null.
        let raw = unsafe { (self.table.create)() };
        if raw.is_null() {
            return Err(Error::new(ErrorKind::Unexpected, SETUP, "the library gave no client"));
        }
        let capabilities = self.info.store.object_memory(setup.segment_bytes > 0);
        let store = CStore {
            table: self.table,
            info: self.info.clone().store(capabilities),
            handle: RwLock::new(Some(Handle(raw))), // destroyed on drop, whatever setup says
        };
        let (segment, buffer) = (setup.segment_bytes, setup.buffer_bytes);
        let (host, metadata, master) = (host.as_ptr(), metadata.as_ptr(), master.as_ptr());
        let (protocol, devices) = (protocol.as_ptr(), devices.as_ptr());
        let code = match (self.table.setup_with_tenant, &tenant) {
            (Some(with_tenant), Some(tenant)) => {
                let tenant = tenant.as_ptr();
                // SAFETY: a live handle and NUL-terminated texts, which the library copies.
                unsafe {
                    with_tenant(
                        raw, host, metadata, segment, buffer, protocol, devices, master, tenant,
                    )
                }
            }
            // SAFETY: as above.
            _ => unsafe {
                (self.table.setup)(raw, host, metadata, segment, buffer, protocol, devices, master)
            },
        };
        StoreCode::check(code.into()).map_err(|code| setup_failed(code, setup, &self.info))?;
        Ok(store)
    }
}

/// A store client of a C library.
#[derive(Debug)]
pub struct CStore {
    table: StoreTable,
    info: ProviderInfo,
    handle: RwLock<Option<Handle>>, // calls read, close writes
}

struct Live<'a>(RwLockReadGuard<'a, Option<Handle>>);

impl Live<'_> {
    fn raw(&self) -> Store {
        self.0.expect("checked when it was made").0
    }
}

/// Keys as C wants them: the texts, and the addresses of the texts.
struct Keys {
    _texts: Vec<CString>,
    addresses: Vec<*const c_char>,
}

impl Keys {
    fn new<'a>(operation: &'static str, keys: impl Iterator<Item = &'a str>) -> Result<Self> {
        let texts: Vec<_> = keys.map(|k| c_text(operation, "key", k)).collect::<Result<_>>()?;
        let addresses = texts.iter().map(|t| t.as_ptr()).collect();
        Ok(Self { _texts: texts, addresses })
    }
}

impl CStore {
    fn live(&self, operation: &'static str) -> Result<Live<'_>> {
        let guard = self.handle.read();
        if guard.is_none() {
            return Err(closed(operation));
        }
        Ok(Live(guard))
    }

    fn called(operation: &'static str, code: c_int) -> Result<()> {
        StoreCode::check(code.into()).map_err(|code| code.error(operation))
    }
}

impl StoreApi for CStore {
    fn provider(&self) -> &ProviderInfo {
        &self.info
    }

    fn hostname(&self) -> Result<String> {
        let live = self.live("get host name")?;
        let mut buffer = [0u8; 512];
        // SAFETY: a live handle; the library writes at most `len` bytes and ends them with NUL.
        let code = unsafe {
            (self.table.get_hostname)(live.raw(), buffer.as_mut_ptr().cast(), buffer.len())
        };
        Self::called("get host name", code)?;
        let end = buffer.iter().position(|&b| b == 0).unwrap_or(buffer.len());
        Ok(String::from_utf8_lossy(&buffer[..end]).into_owned())
    }

    fn health(&self) -> Result<()> {
        let live = self.live("check Mooncake Store")?;
        // SAFETY: a live handle.
        let answer = unsafe { (self.table.health_check)(live.raw()) };
        crate::store::check_health(answer.into())
    }

    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<()> {
        let live = self.live("register memory")?;
        // SAFETY: a live handle; the caller keeps the memory allocated.
        let code = unsafe { (self.table.register_buffer)(live.raw(), start.cast(), len) };
        Self::called("register memory", code).map_err(|e| e.with("bytes", len))
    }

    unsafe fn unregister(&self, start: *mut u8) -> Result<()> {
        let live = self.live("unregister memory")?;
        // SAFETY: a live handle; the library looks the address up and knows it or not.
        let code = unsafe { (self.table.unregister_buffer)(live.raw(), start.cast()) };
        Self::called("unregister memory", code)
    }

    unsafe fn put(&self, items: &[PutItem<'_>], policy: ReplicaPolicy) -> Result<KeyResults<()>> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let live = self.live("put")?;
        let keys = Keys::new("put", items.iter().map(|i| i.key))?;
        let starts: Vec<_> = items.iter().map(|i| i.start.cast_mut().cast::<c_void>()).collect();
        let lens: Vec<_> = items.iter().map(|i| i.len).collect();
        let mut codes = vec![StoreCode::INVALID_PARAMS.0; items.len()];
        let config = RawReplicaConfig {
            replica_num: policy.replicas.max(1), // 0 is passed on and means no copy at all
            with_soft_pin: 0,
            with_hard_pin: policy.hard_pin.into(),
            preferred_segments: ptr::null(),
            preferred_segments_count: 0,
        };
        // SAFETY: a live handle; four arrays of `items.len()` entries, which the library only uses
        // during the call; the caller vouches for the memory of the items.
        let code = unsafe {
            (self.table.batch_put_from)(
                live.raw(),
                keys.addresses.as_ptr(),
                starts.as_ptr(),
                lens.as_ptr(),
                items.len(),
                &config,
                codes.as_mut_ptr(),
            )
        };
        Self::called("put", code)?;
        Ok(codes.into_iter().map(|c| StoreCode::check(c.into())).collect())
    }

    unsafe fn get(&self, items: &[GetItem<'_>]) -> Result<KeyResults<u64>> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let live = self.live("get")?;
        let keys = Keys::new("get", items.iter().map(|i| i.key))?;
        let starts: Vec<_> = items.iter().map(|i| i.start.cast::<c_void>()).collect();
        let lens: Vec<_> = items.iter().map(|i| i.len).collect();
        let mut answers = vec![i64::from(StoreCode::TRANSFER_FAIL.0); items.len()];
        // SAFETY: as in `put`.
        let code = unsafe {
            (self.table.batch_get_into)(
                live.raw(),
                keys.addresses.as_ptr(),
                starts.as_ptr(),
                lens.as_ptr(),
                items.len(),
                answers.as_mut_ptr(),
            )
        };
        Self::called("get", code)?;
        Ok(answers.into_iter().map(StoreCode::count).collect())
    }

    fn exists(&self, keys: &[&str]) -> Result<KeyResults<bool>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let live = self.live("look up")?;
        let texts = Keys::new("look up", keys.iter().copied())?;
        let mut answers = vec![StoreCode::INVALID_PARAMS.0; keys.len()];
        // SAFETY: a live handle; two arrays of `keys.len()` entries.
        let code = unsafe {
            (self.table.batch_is_exist)(
                live.raw(),
                texts.addresses.as_ptr(),
                keys.len(),
                answers.as_mut_ptr(),
            )
        };
        Self::called("look up", code)?;
        Ok(answers.into_iter().map(|a| StoreCode::count(a.into()).map(|n| n != 0)).collect())
    }

    fn size(&self, key: &str) -> Result<Result<u64, StoreCode>> {
        let live = self.live("get size")?;
        let key = c_text("get size", "key", key)?;
        // SAFETY: a live handle and a NUL-terminated text.
        Ok(StoreCode::count(unsafe { (self.table.get_size)(live.raw(), key.as_ptr()) }))
    }

    fn remove(&self, keys: &[&str], force: bool) -> Result<KeyResults<()>> {
        let live = self.live("remove")?;
        keys.iter()
            .map(|key| {
                let key = c_text("remove", "key", key)?;
                // SAFETY: a live handle and a NUL-terminated text.
                let code = unsafe { (self.table.remove)(live.raw(), key.as_ptr(), force.into()) };
                Ok(StoreCode::check(code.into()))
            })
            .collect()
    }

    fn close(&self) -> Result<()> {
        let Some(mut handle) = self.handle.try_write_for(CLOSE_PATIENCE) else {
            return Err(Error::new(ErrorKind::Busy, "close Mooncake Store", "a call still runs"));
        };
        if let Some(handle) = handle.take() {
            // SAFETY: the write lock proves that no call runs, and the handle is gone after this.
            unsafe { (self.table.destroy)(handle.0) }
        }
        Ok(())
    }
}

impl Drop for CStore {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "leaving a store client behind"); // unreachable: calls borrow
        }
    }
}
