//! A store in memory that keeps Mooncake's word to the letter, and breaks it on request.
//!
//! It checks what the real one only punishes: payload in unregistered memory is refused with a
//! panic, and after a failed transfer it writes garbage into the destination when the next call
//! comes, as a late peer would.
#![allow(dead_code, unreachable_pub)] // shared by several test binaries

pub mod reader;

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_sys::{
    GetItem, KeyResults, ProviderInfo, ProviderKind, PutItem, Replica, ReplicaPolicy, StoreApi,
    StoreCapabilities, StoreCode,
};
use parking_lot::{Condvar, Mutex};
use transport_core::{Error, ErrorKind, RemoteAddr, Result};

const OK: i32 = 0;

/// What all clients of one store share.
#[derive(Debug, Default)]
pub struct Cluster {
    state: Mutex<State>,
    gate: Condvar,
}

#[derive(Debug)]
struct State {
    objects: HashMap<String, Object>,
    capacity: u64,
    lease: Duration,
    faults: VecDeque<Fault>,
    transfer_delay: Duration,
    delay_of_each: Duration,
    delay_of_puts: Duration,
    calls: Calls,
    late_writes: Vec<(usize, usize)>,
    hung: bool,
    segments: Vec<(&'static str, String)>,
    hung_text: Option<&'static str>,
}

#[derive(Debug)]
struct Object {
    bytes: Vec<u8>,
    complete: bool,
    hard_pinned: bool,
    leased_until: Instant,
}

/// Calls made so far, and keys in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub put: u64,
    pub put_keys: u64,
    pub get: u64,
    pub get_keys: u64,
    pub exists: u64,
    pub remove: u64,
    pub remove_keys: u64,
    pub register: u64,
    pub located: u64,
}

/// Something to go wrong, once for each time it is scripted.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Reads of keys that hold the text answer the code; with the two that leave a transfer
    /// running, garbage arrives later.
    Get(&'static str, i32),
    /// A read that says `len` bytes, whatever was asked for.
    GetLen(&'static str, u64),
    /// Writes of keys that hold the text answer the code; -705 because another process has just
    /// written the object.
    Put(&'static str, i32),
    /// A writer dies half-way: the write answers success, and the object is never complete.
    PutHalf(&'static str),
    /// Removals of keys that hold the text answer the code.
    Remove(&'static str, i32),
    /// The next call of this name fails as a whole.
    Call(&'static str, ErrorKind),
    /// The next read takes this long.
    Slow(Duration),
}

impl Default for State {
    fn default() -> Self {
        Self {
            objects: HashMap::new(),
            capacity: u64::MAX,
            lease: Duration::from_secs(10),
            faults: VecDeque::new(),
            transfer_delay: Duration::ZERO,
            delay_of_each: Duration::ZERO,
            delay_of_puts: Duration::ZERO,
            calls: Calls::default(),
            late_writes: Vec::new(),
            hung: false,
            segments: Vec::new(),
            hung_text: None,
        }
    }
}

impl Cluster {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A new client.
    pub fn client(self: &Arc<Self>) -> Arc<FakeStore> {
        self.client_that(StoreCapabilities::default().batch_remove(true))
    }

    /// A new client of a provider that can tell new objects from old ones.
    pub fn client_with_sessions(self: &Arc<Self>) -> Arc<FakeStore> {
        self.client_that(StoreCapabilities::default().batch_remove(true).put_new(true))
    }

    /// One that adds object memory, too.
    pub fn client_with_memory(self: &Arc<Self>) -> Arc<FakeStore> {
        let can = StoreCapabilities::default().batch_remove(true).put_new(true);
        self.client_that(can.object_memory(true))
    }

    fn client_that(self: &Arc<Self>, can: StoreCapabilities) -> Arc<FakeStore> {
        let info = ProviderInfo::new(ProviderKind::Other, "fake").store(can);
        Arc::new(FakeStore {
            cluster: self.clone(),
            info,
            registered: Mutex::default(),
            closed: AtomicBool::new(false),
            gone: AtomicU64::new(0),
        })
    }

    pub fn set_capacity(&self, bytes: u64) {
        self.state.lock().capacity = bytes;
    }

    pub fn set_transfer_delay(&self, delay: Duration) {
        self.state.lock().transfer_delay = delay;
    }

    /// Each object of a read takes this long.
    pub fn set_delay_of_each(&self, delay: Duration) {
        self.state.lock().delay_of_each = delay;
    }

    /// Each call that writes takes this long.
    pub fn set_delay_of_puts(&self, delay: Duration) {
        self.state.lock().delay_of_puts = delay;
    }

    /// Scripts faults, each for one use.
    pub fn script(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state.lock().faults.extend(faults);
    }

    pub fn faults_left(&self) -> usize {
        self.state.lock().faults.len()
    }

    pub fn calls(&self) -> Calls {
        self.state.lock().calls
    }

    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.state.lock().objects.keys().cloned().collect();
        keys.sort();
        keys
    }

    pub fn value(&self, key: &str) -> Option<Vec<u8>> {
        self.state.lock().objects.get(key).map(|o| o.bytes.clone())
    }

    pub fn all_hard_pinned(&self) -> bool {
        self.state.lock().objects.values().all(|o| o.hard_pinned)
    }

    /// Places an object as another process would.
    pub fn place(&self, key: &str, bytes: &[u8]) {
        let object = Object {
            bytes: bytes.to_vec(),
            complete: true,
            hard_pinned: true,
            leased_until: Instant::now(),
        };
        self.state.lock().objects.insert(key.into(), object);
    }

    /// Every object is lost, as when a segment's owner dies or the master restarts.
    pub fn lose_everything(&self) {
        self.state.lock().objects.clear();
    }

    /// Objects whose key holds `text` lie in `segment`, from now on.
    pub fn set_segment(&self, text: &'static str, segment: String) {
        self.state.lock().segments.push((text, segment));
    }

    /// Reads of keys that hold the text hang until it is `None`.
    pub fn hang_reads_of(&self, text: Option<&'static str>) {
        self.state.lock().hung_text = text;
        self.gate.notify_all();
    }

    /// Reads hang until it is switched off.
    pub fn hang(&self, hung: bool) {
        self.state.lock().hung = hung;
        self.gate.notify_all();
    }
}

impl State {
    /// Takes the first scripted fault that `matches` turns into an answer.
    fn fault<T>(&mut self, matches: impl Fn(&Fault) -> Option<T>) -> Option<T> {
        let at = self.faults.iter().position(|f| matches(f).is_some())?;
        matches(&self.faults.remove(at)?)
    }

    fn call_fault(&mut self, call: &'static str) -> Result<()> {
        let kind = self.fault(|f| match f {
            Fault::Call(name, kind) if *name == call => Some(*kind),
            _ => None,
        });
        kind.map_or(Ok(()), |kind| Err(Error::new(kind, call, "scripted failure")))
    }

    /// Lets late peers write. What they write to must still be allocated: that is the contract.
    fn write_late(&mut self) {
        for (start, len) in self.late_writes.drain(..) {
            // SAFETY: the contract of `get` keeps this memory allocated and unused.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, len) };
            bytes.fill(0xEE);
        }
    }
}

/// One client of a [`Cluster`].
#[derive(Debug)]
pub struct FakeStore {
    cluster: Arc<Cluster>,
    info: ProviderInfo,
    registered: Mutex<Vec<(usize, usize)>>,
    closed: AtomicBool,
    gone: AtomicU64,
}

impl FakeStore {
    fn open(&self, call: &'static str) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, call, "the client was closed"));
        }
        Ok(())
    }

    fn must_be_registered(&self, start: usize, len: usize) {
        let holds = |&(from, size): &(usize, usize)| start >= from && start + len <= from + size;
        assert!(self.registered.lock().iter().any(holds), "payload in unregistered memory");
    }

    /// Writes objects; a key that is taken answers `taken`.
    ///
    /// # Safety
    /// That of [`StoreApi::put`].
    unsafe fn write(
        &self,
        items: &[PutItem<'_>],
        policy: ReplicaPolicy,
        taken: std::result::Result<(), StoreCode>,
    ) -> Result<KeyResults<()>> {
        self.open("put")?;
        let delay = self.cluster.state.lock().delay_of_puts;
        std::thread::sleep(delay);
        let mut state = self.cluster.state.lock();
        state.write_late();
        state.calls.put += 1;
        state.calls.put_keys += items.len() as u64;
        state.call_fault("put")?;
        Ok(items
            .iter()
            .map(|item| {
                if item.len == 0 {
                    return Err(StoreCode::INVALID_PARAMS);
                }
                self.must_be_registered(item.start as usize, item.len);
                let fault = state.fault(|f| match f {
                    Fault::Put(text, code) if item.key.contains(text) => Some(*code),
                    Fault::PutHalf(text) if item.key.contains(text) => Some(OK),
                    _ => None,
                });
                if let Some(code) = fault.filter(|code| *code != OK) {
                    if code == StoreCode::OBJECT_ALREADY_EXISTS.0 {
                        let object = Object {
                            bytes: vec![0xAA; item.len],
                            complete: true,
                            hard_pinned: true,
                            leased_until: Instant::now(),
                        };
                        state.objects.insert(item.key.into(), object); // another's, just now
                    }
                    return Err(StoreCode(code));
                }
                if state.objects.contains_key(item.key) {
                    return taken; // and keeps the old value
                }
                let used: u64 = state.objects.values().map(|o| o.bytes.len() as u64).sum();
                if used + item.len as u64 > state.capacity {
                    return Err(StoreCode::NO_AVAILABLE_HANDLE);
                }
                // SAFETY: the contract of `put` keeps the source allocated and unwritten.
                let bytes = unsafe { std::slice::from_raw_parts(item.start, item.len) };
                let object = Object {
                    bytes: bytes.to_vec(),
                    complete: fault.is_none(),
                    hard_pinned: policy.hard_pin && policy.replicas == 1,
                    leased_until: Instant::now(),
                };
                state.objects.insert(item.key.into(), object);
                Ok(())
            })
            .collect())
    }

    pub fn registered_ranges(&self) -> usize {
        self.registered.lock().len()
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

impl StoreApi for FakeStore {
    fn provider(&self) -> &ProviderInfo {
        &self.info
    }

    fn hostname(&self) -> Result<String> {
        self.open("get host name")?;
        Ok("127.0.0.1:1".into())
    }

    fn health(&self) -> Result<()> {
        self.open("check")
    }

    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<()> {
        self.open("register")?;
        let mut state = self.cluster.state.lock();
        state.calls.register += 1;
        state.call_fault("register")?;
        let mut registered = self.registered.lock();
        let start = start as usize;
        if registered.iter().any(|&(from, size)| start < from + size && from < start + len) {
            return Err(StoreCode::INVALID_PARAMS.error("register")); // as the real one does
        }
        registered.push((start, len));
        Ok(())
    }

    unsafe fn unregister(&self, start: *mut u8) -> Result<()> {
        self.open("unregister")?;
        let mut registered = self.registered.lock();
        let before = registered.len();
        registered.retain(|r| r.0 != start as usize);
        assert_eq!(registered.len() + 1, before, "unregistered once, and only what was registered");
        Ok(())
    }

    unsafe fn put(&self, items: &[PutItem<'_>], policy: ReplicaPolicy) -> Result<KeyResults<()>> {
        // SAFETY: as the caller vouches.
        unsafe { self.write(items, policy, Ok(())) }
    }

    unsafe fn put_new(
        &self,
        items: &[PutItem<'_>],
        policy: ReplicaPolicy,
    ) -> Result<KeyResults<()>> {
        assert!(self.info.store.put_new, "only where the provider says so");
        // SAFETY: as the caller vouches.
        unsafe { self.write(items, policy, Err(StoreCode::OBJECT_ALREADY_EXISTS)) }
    }

    unsafe fn get(&self, items: &[GetItem<'_>]) -> Result<KeyResults<u64>> {
        self.open("get")?;
        let mut state = self.cluster.state.lock();
        state.write_late();
        state.calls.get += 1;
        state.calls.get_keys += items.len() as u64;
        state.call_fault("get")?;
        let slow = state.fault(|f| match f {
            Fault::Slow(time) => Some(*time),
            _ => None,
        });
        let delay = slow.unwrap_or(state.transfer_delay);
        let delay = delay + state.delay_of_each * items.len() as u32;
        if !delay.is_zero() {
            drop(state);
            std::thread::sleep(delay);
            state = self.cluster.state.lock();
        }
        let hangs = |state: &State| {
            let text = state.hung_text;
            state.hung || text.is_some_and(|text| items.iter().any(|i| i.key.contains(text)))
        };
        while hangs(&state) {
            self.cluster.gate.wait(&mut state);
        }
        let lease = state.lease;
        let mut filled = std::collections::HashSet::new();
        Ok(items
            .iter()
            .map(|item| {
                let address = item.start as usize;
                self.must_be_registered(address, item.len);
                let scripted = state.fault(|f| match f {
                    Fault::Get(text, code) if item.key.contains(text) => Some(Err(*code)),
                    Fault::GetLen(text, len) if item.key.contains(text) => Some(Ok(*len)),
                    _ => None,
                });
                match scripted {
                    Some(Err(code)) => {
                        let code = StoreCode(code);
                        if code == StoreCode::TRANSFER_FAIL || code == StoreCode::LEASE_EXPIRED {
                            state.late_writes.push((address, item.len));
                        }
                        return Err(code);
                    }
                    Some(Ok(len)) => return Ok(len),
                    None => {}
                }
                let object = state.objects.get_mut(item.key).ok_or(StoreCode::OBJECT_NOT_FOUND)?;
                if !object.complete {
                    return Err(StoreCode::REPLICA_IS_NOT_READY);
                }
                if object.bytes.len() > item.len {
                    return Err(StoreCode::INVALID_PARAMS);
                }
                object.leased_until = Instant::now() + lease;
                if !filled.insert(item.key) {
                    return Ok(object.bytes.len() as u64); // as the real one does: filled once
                }
                // SAFETY: the contract of `get` gives this memory to this call alone.
                let to = unsafe { std::slice::from_raw_parts_mut(item.start, item.len) };
                to[..object.bytes.len()].copy_from_slice(&object.bytes);
                Ok(object.bytes.len() as u64)
            })
            .collect())
    }

    fn exists(&self, keys: &[&str]) -> Result<KeyResults<bool>> {
        self.open("exists")?;
        let mut state = self.cluster.state.lock();
        state.calls.exists += 1;
        state.call_fault("exists")?;
        let lease = state.lease;
        Ok(keys
            .iter()
            .map(|key| {
                Ok(state.objects.get_mut(*key).is_some_and(|object| {
                    object.leased_until = Instant::now() + lease; // as the real one does
                    object.complete
                }))
            })
            .collect())
    }

    fn size(&self, key: &str) -> Result<Result<u64, StoreCode>> {
        self.open("size")?;
        let state = self.cluster.state.lock();
        let object = state.objects.get(key);
        Ok(object.map(|o| o.bytes.len() as u64).ok_or(StoreCode::OBJECT_NOT_FOUND))
    }

    fn locate(&self, keys: &[&str]) -> Result<Option<Vec<Vec<Replica>>>> {
        self.open("locate")?;
        let mut state = self.cluster.state.lock();
        if state.segments.is_empty() {
            return Ok(None);
        }
        if keys.is_empty() {
            return Ok(Some(Vec::new())); // nobody is asked
        }
        state.calls.located += 1;
        state.call_fault("locate")?;
        let lease = state.lease;
        let mut of = |key: &&str| {
            let State { objects, segments, .. } = &mut *state;
            let Some(object) = objects.get_mut(*key).filter(|o| o.complete) else {
                return Vec::new();
            };
            object.leased_until = Instant::now() + lease; // as the real one does
            let here = segments.iter().filter(|(text, _)| key.contains(text));
            here.map(|(_, segment)| Replica {
                segment: segment.as_str().into(),
                address: RemoteAddr(object.bytes.as_ptr().expose_provenance() as u64),
                len: object.bytes.len() as u64,
            })
            .collect()
        };
        Ok(Some(keys.iter().map(&mut of).collect()))
    }

    fn remove(&self, keys: &[&str], force: bool) -> Result<KeyResults<()>> {
        self.open("remove")?;
        let mut state = self.cluster.state.lock();
        state.calls.remove += 1;
        state.calls.remove_keys += keys.len() as u64;
        state.call_fault("remove")?;
        Ok(keys
            .iter()
            .map(|key| {
                let fault = state.fault(|f| match f {
                    Fault::Remove(text, code) if key.contains(text) => Some(*code),
                    _ => None,
                });
                if let Some(code) = fault {
                    return Err(StoreCode(code));
                }
                let object = state.objects.get(*key).ok_or(StoreCode::OBJECT_NOT_FOUND)?;
                if !force && object.leased_until > Instant::now() {
                    return Err(StoreCode::OBJECT_HAS_LEASE);
                }
                state.objects.remove(*key);
                Ok(())
            })
            .collect())
    }

    fn close(&self) -> Result<()> {
        self.cluster.state.lock().write_late(); // the last moment at which a peer can write
        self.closed.store(true, Ordering::SeqCst);
        Ok(())
    }
}
