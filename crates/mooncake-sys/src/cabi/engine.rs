//! `transfer_engine_c.h`. No released library exports it on x86-64; it comes from a source build.

use std::{
    collections::{HashMap, VecDeque},
    ffi::{c_char, c_int, c_void},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use transport_core::{Error, ErrorKind, Result, SessionName};

use super::{Handle, LibraryOptions, c_text, closed, info, open, table};
use crate::{
    EngineApi, EngineCode, EngineSetup, ProviderInfo, ReadFailure, ReadPiece, Running, Submission,
    TransferState,
};

const WHAT: &str = "Mooncake transfer engine library";
const START: &str = "start transfer engine";
const OPCODE_READ: c_int = 0;
const INVALID_BATCH: u64 = u64::MAX;
/// Requests in one batch; the engine fixes the size when the batch is made.
const MAX_BATCH: usize = 4096;
/// How long the other pieces of a failed read are waited for.
const DRAIN: Duration = Duration::from_millis(500);
const CLOSE_PATIENCE: Duration = Duration::from_secs(40);

type Engine = *mut c_void;

#[repr(C)]
pub(super) struct RawRequest {
    opcode: c_int,
    source: *mut c_void,
    target_id: i32,
    target_offset: u64,
    length: u64,
}

#[repr(C)]
pub(super) struct RawStatus {
    status: c_int,
    transferred_bytes: u64,
}

#[repr(C)]
pub(super) struct RawBuffer {
    address: *mut c_void,
    length: usize,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<RawRequest>() == 40);
    assert!(offset_of!(RawRequest, source) == 8);
    assert!(offset_of!(RawRequest, target_id) == 16);
    assert!(offset_of!(RawRequest, target_offset) == 24);
    assert!(offset_of!(RawRequest, length) == 32);
    assert!(size_of::<RawStatus>() == 16);
    assert!(offset_of!(RawStatus, transferred_bytes) == 8);
    assert!(size_of::<RawBuffer>() == 16);
    assert!(offset_of!(RawBuffer, length) == 8);
};

table! {
    /// Functions of `transfer_engine_c.h`.
    EngineTable is "Mooncake transfer engine library";
    needed {
        create = "createTransferEngine": fn(*const c_char, *const c_char, *const c_char, u64, c_int) -> Engine;
        destroy = "destroyTransferEngine": fn(Engine);
        install = "installTransport": fn(Engine, *const c_char, *mut *mut c_void) -> *mut c_void;
        local_address = "getLocalIpAndPort": fn(Engine, *mut c_char, usize) -> c_int;
        open_segment = "openSegment": fn(Engine, *const c_char) -> i32;
        register = "registerLocalMemoryBatch": fn(Engine, *mut RawBuffer, usize, *const c_char) -> c_int;
        unregister = "unregisterLocalMemoryBatch": fn(Engine, *mut *mut c_void, usize) -> c_int;
        allocate_batch = "allocateBatchID": fn(Engine, usize) -> u64;
        submit = "submitTransfer": fn(Engine, u64, *mut RawRequest, usize) -> c_int;
        status = "getTransferStatus": fn(Engine, u64, usize, *mut RawStatus) -> c_int;
        free_batch = "freeBatchID": fn(Engine, u64) -> c_int;
    }
    optional {
        discover_topology = "discoverTopology": fn(Engine) -> c_int;
        open_segment_anew = "openSegmentNoCache": fn(Engine, *const c_char) -> i32;
    }
}

/// An open library with the interface of `transfer_engine_c.h`.
#[derive(Clone, Debug)]
pub struct EngineLibrary {
    table: EngineTable,
    info: ProviderInfo,
}

impl EngineLibrary {
    /// Name of the file, as upstream's shared build calls it.
    pub const FILE_NAME: &'static str = "libtransfer_engine.so";
    /// Variable that names the file.
    pub const VARIABLE: &'static str = "MOONCAKE_TE_LIBRARY";

    /// Finds the library, opens it and resolves its functions.
    pub fn load(options: &LibraryOptions) -> Result<Self> {
        let opened = open(options, Self::VARIABLE, Self::FILE_NAME, WHAT)?;
        let table = EngineTable::resolve(&opened)?;
        let info = info(&opened, table.create as *mut ());
        tracing::info!(provider = %info, "loaded Mooncake's transfer engine");
        Ok(Self { table, info })
    }

    /// Which file was opened.
    pub fn info(&self) -> &ProviderInfo {
        &self.info
    }

    /// Starts an engine with exactly one transport, the one that was asked for.
    pub fn start(&self, setup: &EngineSetup) -> Result<CEngine> {
        let metadata = c_text(START, "metadata address", &setup.metadata)?;
        let host = c_text(START, "local host", &setup.local_host)?;
        let protocol = c_text(START, "protocol", &setup.protocol)?;
        // SAFETY: NUL-terminated texts, which the library copies. 0 turns discovery off, so that
        // nothing but the transport below is installed.
        let raw =
            unsafe { (self.table.create)(metadata.as_ptr(), host.as_ptr(), host.as_ptr(), 0, 0) };
        if raw.is_null() {
            return Err(Error::new(ErrorKind::Unexpected, START, "the library gave no engine")
                .with("local_host", &setup.local_host)
                .with("metadata", &setup.metadata));
        }
        let engine = CEngine {
            table: self.table,
            info: self.info.clone(),
            handle: Arc::new(RwLock::new(Some(Handle(raw)))),
            segments: Mutex::new(HashMap::new()),
        };
        if let Some(discover) = self.table.discover_topology {
            // SAFETY: a live handle.
            let answer = unsafe { discover(raw) };
            EngineCode::check_return(answer).map_err(|c| c.error(START))?;
        }
        // SAFETY: a live handle and a text; null arguments are what upstream's own callers pass.
        let transport =
            unsafe { (self.table.install)(raw, protocol.as_ptr(), std::ptr::null_mut()) };
        if transport.is_null() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                START,
                "the library cannot install this transport here",
            )
            .with("protocol", &setup.protocol)
            .with("provider", &self.info));
        }
        Ok(engine)
    }
}

/// A transfer engine of a C library.
#[derive(Debug)]
pub struct CEngine {
    table: EngineTable,
    info: ProviderInfo,
    handle: Arc<RwLock<Option<Handle>>>, // calls read, close writes
    segments: Mutex<HashMap<SessionName, i32>>, // opened peers
}

struct Live<'a>(RwLockReadGuard<'a, Option<Handle>>);

impl Live<'_> {
    fn raw(&self) -> Engine {
        self.0.expect("checked when it was made").0
    }
}

impl CEngine {
    fn live(&self, operation: &'static str) -> Result<Live<'_>> {
        let guard = self.handle.read();
        if guard.is_none() {
            return Err(closed(operation));
        }
        Ok(Live(guard))
    }

    fn segment(&self, live: &Live<'_>, peer: &SessionName) -> Result<i32> {
        if let Some(&id) = self.segments.lock().get(peer) {
            return Ok(id);
        }
        let name = c_text("read", "session name", &peer.to_string())?;
        let open = self.table.open_segment_anew.unwrap_or(self.table.open_segment);
        // SAFETY: a live handle and a NUL-terminated text.
        let id = unsafe { open(live.raw(), name.as_ptr()) };
        if id < 0 {
            return Err(EngineCode::Return(id).error("read").with("peer", peer));
        }
        self.segments.lock().insert(peer.clone(), id);
        Ok(id)
    }

    fn left(&self, batches: Vec<Batch>) -> Left {
        Left { table: self.table, handle: Arc::downgrade(&self.handle), batches }
    }

    /// Hands requests over as one batch.
    fn submit(&self, live: &Live<'_>, requests: &mut [RawRequest]) -> Result<Batch, ReadFailure> {
        // SAFETY: a live handle.
        let id = unsafe { (self.table.allocate_batch)(live.raw(), requests.len()) };
        if id == INVALID_BATCH || id == 0 {
            let error = Error::new(ErrorKind::CapacityExceeded, "read", "no batch to be had");
            return Err(error.into());
        }
        let batch = Batch { id, open: (0..requests.len()).collect() };
        // SAFETY: a live handle, a batch of this engine with room for as many requests; the caller
        // of `read` vouches for the destinations.
        let answer = unsafe {
            (self.table.submit)(live.raw(), batch.id, requests.as_mut_ptr(), requests.len())
        };
        match EngineCode::check_status(answer) {
            Ok(()) => Ok(batch),
            Err(code) => {
                // The engine frees a batch only if nothing of it runs, which is the proof of that.
                let mut failure = ReadFailure::from(code.error("read"));
                // SAFETY: a live handle and a batch that is not freed.
                let answer = unsafe { (self.table.free_batch)(live.raw(), batch.id) };
                if EngineCode::check_status(answer).is_err() {
                    failure.running = Some(Box::new(self.left(vec![batch])));
                }
                Err(failure)
            }
        }
    }
}

/// A submitted batch, which may be freed when none of its tasks is open.
#[derive(Debug)]
struct Batch {
    id: u64,
    open: Vec<usize>, // tasks that have not ended, as far as is known
}

impl Batch {
    /// Looks at the open tasks once; the first that failed, and why.
    fn look(&mut self, table: &EngineTable, live: &Live<'_>) -> Option<(usize, Error)> {
        let mut failed = None;
        self.open.retain(|&task| {
            let mut status = RawStatus { status: -1, transferred_bytes: 0 };
            // SAFETY: a live handle, a batch that is not freed, and a place for the answer.
            let answer = unsafe { (table.status)(live.raw(), self.id, task, &mut status) };
            if let Err(code) = EngineCode::check_status(answer) {
                failed.get_or_insert((task, code.error("read")));
                return true; // nothing is known about it
            }
            let state = TransferState::from_raw(status.status);
            match state.outcome("read") {
                None => true,
                Some(Ok(())) => false,
                Some(Err(error)) => {
                    let error = error.with("bytes", status.transferred_bytes);
                    failed.get_or_insert((task, error));
                    matches!(state, TransferState::Timeout | TransferState::Unknown(_))
                }
            }
        });
        failed
    }

    fn free(self, table: &EngineTable, live: &Live<'_>) {
        debug_assert!(self.open.is_empty(), "its tasks point into it");
        // SAFETY: a live handle and a batch whose tasks have all ended.
        let answer = unsafe { (table.free_batch)(live.raw(), self.id) };
        if let Err(code) = EngineCode::check_status(answer) {
            tracing::warn!(code = code.number(), name = code.name(), "a batch stays behind");
        }
    }
}

/// Batches that nobody waits for.
#[derive(Debug)]
struct Left {
    table: EngineTable,
    handle: Weak<RwLock<Option<Handle>>>,
    batches: Vec<Batch>,
}

impl Running for Left {
    fn is_over(&mut self) -> bool {
        let Some(handle) = self.handle.upgrade() else { return true };
        let Some(guard) = handle.try_read() else { return false };
        if guard.is_none() {
            return true; // a closed engine has no transfers
        }
        let live = Live(guard);
        for mut batch in std::mem::take(&mut self.batches) {
            batch.look(&self.table, &live);
            if batch.open.is_empty() {
                batch.free(&self.table, &live);
            } else {
                self.batches.push(batch);
            }
        }
        self.batches.is_empty()
    }
}

impl EngineApi for CEngine {
    fn provider(&self) -> &ProviderInfo {
        &self.info
    }

    fn session(&self) -> Result<SessionName> {
        let live = self.live("get session name")?;
        let mut buffer = [0u8; 512];
        // SAFETY: a live handle; the library writes at most `len` bytes and ends them with NUL.
        let answer = unsafe {
            (self.table.local_address)(live.raw(), buffer.as_mut_ptr().cast(), buffer.len())
        };
        EngineCode::check_return(answer).map_err(|c| c.error("get session name"))?;
        let end = buffer.iter().position(|&b| b == 0).unwrap_or(buffer.len());
        String::from_utf8_lossy(&buffer[..end]).parse()
    }

    unsafe fn register(&self, ranges: &[(*mut u8, usize)]) -> Result<()> {
        let live = self.live("register memory")?;
        if ranges.iter().any(|&(start, len)| start.is_null() || len == 0) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "register memory",
                "a range without bytes cannot be registered",
            ));
        }
        let mut raw: Vec<_> = ranges
            .iter()
            .map(|&(start, length)| RawBuffer { address: start.cast(), length })
            .collect();
        // SAFETY: a live handle, an array of ranges that the caller keeps allocated, and a text.
        let answer = unsafe {
            (self.table.register)(live.raw(), raw.as_mut_ptr(), raw.len(), c"*".as_ptr())
        };
        EngineCode::check_return(answer).map_err(|c| c.error("register memory"))
    }

    unsafe fn unregister(&self, starts: &[*mut u8]) -> Result<()> {
        let live = self.live("unregister memory")?;
        let mut raw: Vec<_> = starts.iter().map(|s| s.cast::<c_void>()).collect();
        // SAFETY: a live handle and an array of addresses, which the library looks up.
        let answer = unsafe { (self.table.unregister)(live.raw(), raw.as_mut_ptr(), raw.len()) };
        EngineCode::check_return(answer).map_err(|c| c.error("unregister memory"))
    }

    unsafe fn read(
        &self,
        peer: &SessionName,
        pieces: &[ReadPiece],
        submission: Submission,
        timeout: Duration,
    ) -> Result<(), ReadFailure> {
        let live = self.live("read")?;
        let deadline = Instant::now() + timeout;
        let target_id = self.segment(&live, peer)?;
        let mut requests: Vec<_> = pieces
            .iter()
            .map(|piece| RawRequest {
                opcode: OPCODE_READ,
                source: piece.local.cast(),
                target_id,
                target_offset: piece.remote.0,
                length: piece.len as u64,
            })
            .collect();
        let (size, ahead) = match submission {
            Submission::Batch => (MAX_BATCH, 1),
            Submission::Single { ahead } => (1, ahead.max(1)),
        };
        let mut parts = requests.chunks_mut(size).enumerate();
        let mut flying: VecDeque<(usize, Batch)> = VecDeque::new(); // with its first piece
        let mut failure: Option<ReadFailure> = None;
        let mut since = Instant::now(); // when something last happened
        loop {
            while failure.is_none() && flying.len() < ahead {
                let Some((at, part)) = parts.next() else { break };
                match self.submit(&live, part) {
                    Ok(batch) => flying.push_back((at * size, batch)),
                    Err(refused) => {
                        let piece = (size == 1).then_some(at);
                        failure = Some(ReadFailure { piece, ..refused });
                    }
                }
                since = Instant::now();
            }
            let Some((first, batch)) = flying.front_mut() else { break };
            if let Some((task, error)) = batch.look(&self.table, &live)
                && failure.is_none()
            {
                failure = Some(ReadFailure { piece: Some(*first + task), ..error.into() });
            }
            if batch.open.is_empty() {
                let (_, batch) = flying.pop_front().expect("looked at above");
                batch.free(&self.table, &live);
                since = Instant::now();
                continue;
            }
            // Of what has failed already, the rest is waited for only shortly.
            let late = Instant::now() >= deadline;
            if late || (failure.is_some() && since.elapsed() > DRAIN) {
                break;
            }
            // Polling is what completes some transports, so it stays tight at first.
            if since.elapsed() < Duration::from_micros(200) {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        if failure.is_none() && flying.is_empty() {
            return Ok(());
        }
        self.segments.lock().remove(peer); // the peer may be another process by now
        let mut failure = failure.unwrap_or_else(|| {
            let piece = flying.front().map(|(first, batch)| first + batch.open[0]);
            let error = Error::new(ErrorKind::Timeout, "read", "the transfer still runs");
            ReadFailure { piece, ..error.into() }
        });
        failure.error = failure.error.with("peer", peer);
        if !flying.is_empty() {
            let batches = flying.into_iter().map(|(_, batch)| batch).collect();
            let left = self.left(batches);
            failure.running = match failure.running.take() {
                None => Some(Box::new(left)),
                Some(refused) => Some(Box::new((refused, left))),
            };
        }
        Err(failure)
    }

    fn close(&self) -> Result<()> {
        let Some(mut handle) = self.handle.try_write_for(CLOSE_PATIENCE) else {
            return Err(Error::new(ErrorKind::Busy, "stop transfer engine", "a call still runs"));
        };
        if let Some(handle) = handle.take() {
            // SAFETY: the write lock proves that no call runs, and the handle is gone after this.
            unsafe { (self.table.destroy)(handle.0) }
        }
        Ok(())
    }
}

impl Drop for CEngine {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "leaving a transfer engine behind");
        }
    }
}
