//! `mooncake.store`.

use std::{sync::Arc, time::Duration};

use parking_lot::{RwLock, RwLockReadGuard};
use transport_core::{Error, ErrorKind, RemoteAddr, Result};

use super::{
    Interpreter, WheelOptions,
    object::{Argument as A, Gil, Object, Parked},
};
use crate::{
    GetItem, KeyResults, ProviderInfo, PutItem, Replica, ReplicaPolicy, StoreApi,
    StoreCapabilities, StoreCode, StoreSetup,
    store::{probe_master, setup_failed},
};

const CLOSE_PATIENCE: Duration = Duration::from_secs(40);
/// Payload from which a call waits in Mooncake for much longer than it works.
const LONG_WAIT: u64 = 4 << 20;

/// A store client of the wheel.
#[derive(Debug)]
pub struct WheelStore {
    interpreter: Interpreter,
    info: ProviderInfo,
    client: RwLock<Option<Parked>>, // calls read, close writes
}

/// Items whose addresses may go to the interpreter's thread.
struct Addresses<'a, T>(&'a [T]);

// SAFETY: the addresses are passed on as numbers; the caller of the unsafe method vouches for the
// memory, for as long as the call runs, on whatever thread that is.
unsafe impl<T> Send for Addresses<'_, T> {}

impl<'a, T> Addresses<'a, T> {
    fn items(self) -> &'a [T] {
        self.0
    }
}

impl WheelStore {
    /// Starts the interpreter if need be, and joins a cluster.
    pub fn connect(options: &WheelOptions, setup: &StoreSetup) -> Result<Self> {
        setup.check()?;
        probe_master(setup)?;
        let interpreter = Interpreter::start(options)?;
        let (client, info) = interpreter.run(|gil| {
            let module = gil.import(c"mooncake.store")?;
            let class = module.attribute(c"MooncakeDistributedStore")?;
            let has = |name| class.attribute(name).is_ok();
            // Sessions take the wire even into this process's own segment, where a plain write is a
            // copy within the process, three times as fast.
            let sessions = [
                c"batch_put_session_start",
                c"batch_put_from_multi_buffer_ranges",
                c"batch_put_session_end",
                c"batch_put_session_revoke",
            ];
            let capabilities = StoreCapabilities::default()
                .object_memory(setup.segment_bytes > 0)
                .batch_remove(has(c"batch_remove"))
                .put_new(setup.segment_bytes == 0 && sessions.into_iter().all(has));
            let file = native_file(gil, &module)?;
            let info = interpreter.wheel().info(&file).store(capabilities);
            let client = class.call([])?;
            let mut answer = set_up(&client, setup)?;
            if answer.to_text()? == "None" {
                answer = gil.number(0)?; // older bindings raise instead of answering
            }
            StoreCode::check(answer.as_number()?)
                .map_err(|code| setup_failed(code, setup, &info))?;
            Ok((client.park(), info))
        })?;
        tracing::info!(provider = %info, "joined Mooncake Store");
        Ok(Self { interpreter, info, client: RwLock::new(Some(client)) })
    }

    /// Runs a call on the client, in an interpreter thread.
    fn call<T: Send>(
        &self,
        operation: &'static str,
        call: impl FnOnce(Gil<'_>, &Object<'_>) -> Result<T> + Send,
    ) -> Result<T> {
        self.call_moving(0, operation, call)
    }

    /// Runs a call that moves so many bytes.
    fn call_moving<T: Send>(
        &self,
        bytes: u64,
        operation: &'static str,
        call: impl FnOnce(Gil<'_>, &Object<'_>) -> Result<T> + Send,
    ) -> Result<T> {
        let client: RwLockReadGuard<'_, Option<Parked>> = self.client.read();
        let Some(parked) = &*client else {
            return Err(Error::new(ErrorKind::Closed, operation, "the store client was closed"));
        };
        let job = |gil: Gil<'_>| call(gil, &Object::of(parked, gil));
        let result = match bytes >= LONG_WAIT {
            true => self.interpreter.run_waiting(job),
            false => self.interpreter.run(job),
        };
        result.map_err(|e| e.with("call", operation))
    }
}

/// Calls `setup` with positional arguments, which every version takes in this order.
fn set_up<'g>(client: &Object<'g>, setup: &StoreSetup) -> Result<Object<'g>> {
    let common = [
        A::Text(&setup.local_host),
        A::Text(&setup.metadata),
        A::Number(setup.segment_bytes),
        A::Number(setup.buffer_bytes),
        A::Text(&setup.protocol),
        A::Text(&setup.devices),
        A::Text(&setup.master),
    ];
    match &setup.tenant {
        None => client.method(c"setup", common),
        Some(_) => Err(Error::new(
            ErrorKind::Unsupported,
            "set up Mooncake Store",
            "tenants are not served through the wheel",
        )),
    }
}

/// File of the native module behind `mooncake.store`.
fn native_file(gil: Gil<'_>, module: &Object<'_>) -> Result<String> {
    if let Ok(native) = gil.import(c"mooncake._store") {
        return native.attribute(c"__file__")?.as_text(); // from 0.3.14 on
    }
    module.attribute(c"__file__")?.as_text()
}

/// An object's replicas in memory. `last` is the segment seen last, which the next is mostly in.
fn replicas_of(replicas: &Object<'_>, last: &mut Arc<str>) -> Result<Vec<Replica>> {
    let mut found = Vec::new();
    for replica in replicas.items()? {
        if replica.method(c"is_memory_replica", [])?.as_number()? == 0 {
            continue;
        }
        let memory = replica.method(c"get_memory_descriptor", [])?;
        let buffer = memory.attribute(c"buffer_descriptor")?;
        let segment = buffer.attribute(c"transport_endpoint")?.as_text()?;
        if **last != *segment {
            *last = segment.into();
        }
        let number = |name| -> Result<u64> { Ok(buffer.attribute(name)?.as_number()? as u64) };
        found.push(Replica {
            segment: last.clone(),
            address: RemoteAddr(number(c"buffer_address")?),
            len: number(c"size")?,
        });
    }
    Ok(found)
}

fn replicate_config(gil: Gil<'_>, policy: ReplicaPolicy) -> Result<Object<'_>> {
    let config = gil.import(c"mooncake.store")?.method(c"ReplicateConfig", [])?;
    config.set(c"replica_num", &gil.number(policy.replicas.max(1) as u64)?)?;
    config.set(c"with_hard_pin", &gil.flag(policy.hard_pin)?)?;
    Ok(config)
}

/// Writes and completes the objects whose sessions are open, and leaves nothing of those that fail.
fn fill_sessions(
    gil: Gil<'_>,
    client: &Object<'_>,
    items: &[PutItem<'_>],
    open: &[usize],
    results: &mut [Result<(), StoreCode>],
) -> Result<()> {
    let keys = |which: &[usize]| gil.texts(&mut which.iter().map(|&i| items[i].key));
    let take_back = |which: &[usize]| {
        // As far as possible: what is not complete the master gives up after a while by itself.
        if let Ok(keys) = keys(which) {
            drop(client.method(c"batch_put_session_revoke", [A::Object(keys.share())]));
            drop(client.method(c"batch_remove", [A::Object(keys), A::Flag(true)]));
        }
    };
    if open.is_empty() {
        return Ok(());
    }
    let written = keys(open).and_then(|keys| {
        let arguments = [
            A::Object(keys),
            A::Singles(&mut open.iter().map(|&i| items[i].start as u64)),
            A::Singles(&mut open.iter().map(|&i| items[i].len as u64)),
            A::Singles(&mut open.iter().map(|_| 0)), // offsets in the objects
        ];
        let written = client.method(c"batch_put_from_multi_buffer_ranges", arguments)?;
        checked(written.as_numbers()?, open.len(), "put")
    });
    let written = written.inspect_err(|_| take_back(open))?;
    let mut whole = Vec::with_capacity(open.len());
    let mut failed = Vec::new();
    for (&i, answer) in open.iter().zip(written) {
        match StoreCode::count(answer) {
            Ok(bytes) if bytes == items[i].len as u64 => whole.push(i),
            other => {
                results[i] = Err(other.err().unwrap_or(StoreCode::TRANSFER_FAIL));
                failed.push(i);
            }
        }
    }
    if !whole.is_empty() {
        let ended = keys(&whole).and_then(|keys| {
            let ended = client.method(c"batch_put_session_end", [A::Object(keys)])?;
            checked(ended.as_numbers()?, whole.len(), "put")
        });
        let ended = ended.inspect_err(|_| take_back(open))?;
        for (i, answer) in whole.into_iter().zip(ended) {
            results[i] = StoreCode::check(answer);
            if results[i].is_err() {
                failed.push(i);
            }
        }
    }
    if !failed.is_empty() {
        take_back(&failed);
    }
    Ok(())
}

fn checked(answers: Vec<i64>, expected: usize, operation: &'static str) -> Result<Vec<i64>> {
    if answers.len() == expected {
        return Ok(answers);
    }
    Err(Error::new(ErrorKind::Protocol, operation, "not one answer for each key")
        .with("expected", expected)
        .with("found", answers.len()))
}

impl StoreApi for WheelStore {
    fn provider(&self) -> &ProviderInfo {
        &self.info
    }

    fn hostname(&self) -> Result<String> {
        self.call("get host name", |_, client| client.method(c"get_hostname", [])?.as_text())
    }

    fn health(&self) -> Result<()> {
        let answer = self.call("check Mooncake Store", |_, client| {
            client.method(c"health_check", [])?.as_number()
        })?;
        crate::store::check_health(answer)
    }

    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<()> {
        let address = start as u64;
        let answer = self.call("register memory", move |_, client| {
            let arguments = [A::Number(address), A::Number(len as u64)];
            client.method(c"register_buffer", arguments)?.as_number()
        })?;
        StoreCode::check(answer).map_err(|c| c.error("register memory").with("bytes", len))
    }

    unsafe fn unregister(&self, start: *mut u8) -> Result<()> {
        let address = start as u64;
        let answer = self.call("unregister memory", move |_, client| {
            client.method(c"unregister_buffer", [A::Number(address)])?.as_number()
        })?;
        StoreCode::check(answer).map_err(|c| c.error("unregister memory"))
    }

    unsafe fn put(&self, items: &[PutItem<'_>], policy: ReplicaPolicy) -> Result<KeyResults<()>> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let bytes = items.iter().map(|item| item.len as u64).sum();
        let items = Addresses(items);
        self.call_moving(bytes, "put", move |gil, client| {
            let items = items.items();
            let config = replicate_config(gil, policy)?;
            let arguments = [
                A::Texts(&mut items.iter().map(|i| i.key)),
                A::Numbers(&mut items.iter().map(|i| i.start as u64)),
                A::Numbers(&mut items.iter().map(|i| i.len as u64)),
                A::Object(config),
            ];
            let answers = client.method(c"batch_put_from", arguments)?.as_numbers()?;
            let answers = checked(answers, items.len(), "put")?;
            Ok(answers.into_iter().map(StoreCode::check).collect())
        })
    }

    unsafe fn put_new(
        &self,
        items: &[PutItem<'_>],
        policy: ReplicaPolicy,
    ) -> Result<KeyResults<()>> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        if !self.info.store.put_new {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "put",
                "this client has no put sessions",
            )
            .remedy("install a newer wheel, and add no object memory in this process"));
        }
        let bytes = items.iter().map(|item| item.len as u64).sum();
        let items = Addresses(items);
        self.call_moving(bytes, "put", move |gil, client| {
            let items = items.items();
            let config = replicate_config(gil, policy)?;
            let arguments = [
                A::Texts(&mut items.iter().map(|i| i.key)),
                A::Numbers(&mut items.iter().map(|i| i.len as u64)),
                A::Object(config),
            ];
            let started = client.method(c"batch_put_session_start", arguments)?.as_numbers()?;
            let started = checked(started, items.len(), "put")?;
            let mut results: Vec<_> = started.into_iter().map(StoreCode::check).collect();
            let open: Vec<usize> = (0..items.len()).filter(|&i| results[i].is_ok()).collect();
            fill_sessions(gil, client, items, &open, &mut results)?;
            Ok(results)
        })
    }

    unsafe fn get(&self, items: &[GetItem<'_>]) -> Result<KeyResults<u64>> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let bytes = items.iter().map(|item| item.len as u64).sum();
        let items = Addresses(items);
        self.call_moving(bytes, "get", move |_, client| {
            let items = items.items();
            let arguments = [
                A::Texts(&mut items.iter().map(|i| i.key)),
                A::Numbers(&mut items.iter().map(|i| i.start as u64)),
                A::Numbers(&mut items.iter().map(|i| i.len as u64)),
            ];
            let answers = client.method(c"batch_get_into", arguments)?.as_numbers()?;
            let answers = checked(answers, items.len(), "get")?;
            Ok(answers.into_iter().map(StoreCode::count).collect())
        })
    }

    fn exists(&self, keys: &[&str]) -> Result<KeyResults<bool>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        self.call("look up", |_, client| {
            let arguments = [A::Texts(&mut keys.iter().copied())];
            let answers = client.method(c"batch_is_exist", arguments)?.as_numbers()?;
            let answers = checked(answers, keys.len(), "look up")?;
            Ok(answers.into_iter().map(|a| StoreCode::count(a).map(|n| n != 0)).collect())
        })
    }

    fn size(&self, key: &str) -> Result<Result<u64, StoreCode>> {
        self.call("get size", |_, client| {
            Ok(StoreCode::count(client.method(c"get_size", [A::Text(key)])?.as_number()?))
        })
    }

    fn locate(&self, keys: &[&str]) -> Result<Option<Vec<Vec<Replica>>>> {
        if keys.is_empty() {
            return Ok(Some(Vec::new()));
        }
        self.call("locate", |_, client| {
            let mut last = Arc::from("");
            if let Ok(lookup) = client.attribute(c"batch_get_replica_desc") {
                let found = lookup.call([A::Texts(&mut keys.iter().copied())])?;
                let of = |key: &&str| match found.entry(key)? {
                    Some(replicas) => replicas_of(&replicas, &mut last),
                    None => Ok(Vec::new()),
                };
                return keys.iter().map(of).collect::<Result<_>>().map(Some);
            }
            let Ok(lookup) = client.attribute(c"get_replica_desc") else { return Ok(None) };
            let of = |key: &&str| replicas_of(&lookup.call([A::Text(key)])?, &mut last);
            keys.iter().map(of).collect::<Result<_>>().map(Some)
        })
    }

    fn remove(&self, keys: &[&str], force: bool) -> Result<KeyResults<()>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let batch = self.info.store.batch_remove;
        self.call("remove", |_, client| {
            if batch {
                let arguments = [A::Texts(&mut keys.iter().copied()), A::Flag(force)];
                let answers = client.method(c"batch_remove", arguments)?.as_numbers()?;
                let answers = checked(answers, keys.len(), "remove")?;
                return Ok(answers.into_iter().map(StoreCode::check).collect());
            }
            keys.iter()
                .map(|key| {
                    let answer = client.method(c"remove", [A::Text(key), A::Flag(force)])?;
                    Ok(StoreCode::check(answer.as_number()?))
                })
                .collect()
        })
    }

    fn close(&self) -> Result<()> {
        let Some(mut client) = self.client.try_write_for(CLOSE_PATIENCE) else {
            return Err(Error::new(ErrorKind::Busy, "close Mooncake Store", "a call still runs"));
        };
        let Some(parked) = client.take() else { return Ok(()) };
        self.interpreter.run(|gil| {
            let client = Object::take_up(parked, gil);
            client.method(c"close", [])?;
            Ok(())
        })
    }
}

impl Drop for WheelStore {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "leaving a store client behind");
        }
    }
}
