//! The mooncake engine over an engine of the tests' own: what has to be so whoever does the reading.

mod support;

use std::{
    io::{Read, Write},
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use capture_arena::{Backing, RegionPool};
use mooncake_sys::{
    EngineApi, EngineSupport, ProviderInfo, ProviderKind, ReadFailure, ReadPiece, Running,
    Submission,
};
use parking_lot::Mutex;
use support::*;
use transport_core::{Error, ErrorKind, RegionMut, RemoteAddr, Result, SessionName, Transport};
use transport_mooncake_direct::{
    DirectTransport, Engine, MooncakeEngine, MooncakeOptions, Protocol, ReadOp, ReadOptions,
};

/// Answers handshakes with a protocol, and owns the whole address space as far as it says.
fn peer(protocol: &'static str) -> SessionName {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let session: SessionName = listener.local_addr().unwrap().to_string().parse().unwrap();
    let name = session.to_string();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut length = [0; 8];
            stream.read_exact(&mut length).unwrap();
            let mut body = vec![0; u64::from_le_bytes(length) as usize];
            stream.read_exact(&mut body).unwrap();
            let json = format!(
                r#"{{"name":"{name}","protocol":"{protocol}",
                    "buffers":[{{"addr":0,"length":{},"name":"*"}}]}}"#,
                u64::MAX
            );
            stream.write_all(&frame(Some(body[0]), &json)).unwrap();
        }
    });
    session
}

/// Copies within the process, or hangs when told to.
#[derive(Debug)]
struct Fake {
    info: ProviderInfo,
    session: SessionName,
    support: EngineSupport,
    hangs: AtomicBool,
    over: Arc<AtomicBool>,
    closed: Arc<AtomicBool>,
    inside: AtomicUsize,
    most_inside: AtomicUsize,
    registrations: AtomicUsize,
    /// Registrations that succeed before one is refused; all of them if negative.
    registers: AtomicIsize,
    submissions: Mutex<Vec<(Submission, usize)>>,
}

#[derive(Debug)]
struct Rest(Arc<AtomicBool>, Arc<AtomicBool>);

impl Running for Rest {
    fn is_over(&mut self) -> bool {
        self.0.load(Ordering::SeqCst) || self.1.load(Ordering::SeqCst)
    }
}

impl Fake {
    fn telling(protocol: &'static str) -> Self {
        Self {
            info: ProviderInfo::new(ProviderKind::Other, "fake"),
            session: peer(protocol),
            support: EngineSupport::default(),
            hangs: AtomicBool::new(false),
            over: Arc::default(),
            closed: Arc::default(),
            inside: AtomicUsize::new(0),
            most_inside: AtomicUsize::new(0),
            registrations: AtomicUsize::new(0),
            registers: AtomicIsize::new(-1),
            submissions: Mutex::default(),
        }
    }
}

impl EngineApi for Fake {
    fn provider(&self) -> &ProviderInfo {
        &self.info
    }

    fn support(&self) -> EngineSupport {
        self.support
    }

    fn session(&self) -> Result<SessionName> {
        Ok(self.session.clone())
    }

    unsafe fn register(&self, ranges: &[(*mut u8, usize)]) -> Result<()> {
        if self.registers.load(Ordering::SeqCst) >= 0
            && self.registers.fetch_sub(ranges.len() as isize, Ordering::SeqCst)
                < ranges.len() as isize
        {
            self.registers.store(0, Ordering::SeqCst);
            return Err(Error::new(ErrorKind::InvalidInput, "register memory", "Mooncake said -1"));
        }
        self.registrations.fetch_add(ranges.len(), Ordering::SeqCst);
        Ok(())
    }

    unsafe fn unregister(&self, starts: &[*mut u8]) -> Result<()> {
        self.registrations.fetch_sub(starts.len(), Ordering::SeqCst);
        Ok(())
    }

    unsafe fn read(
        &self,
        _: &SessionName,
        pieces: &[ReadPiece],
        submission: Submission,
        timeout: Duration,
    ) -> Result<(), ReadFailure> {
        self.submissions.lock().push((submission, pieces.len()));
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_inside.fetch_max(inside, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(5));
        let hangs = self.hangs.load(Ordering::SeqCst);
        if hangs {
            std::thread::sleep(timeout);
        } else {
            for piece in pieces {
                let from = std::ptr::with_exposed_provenance::<u8>(piece.remote.0 as usize);
                // SAFETY: the tests ask for ranges of their own memory, of this process, that
                // nothing writes meanwhile; the caller vouches for the destination.
                unsafe { std::ptr::copy_nonoverlapping(from, piece.local, piece.len) }
            }
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
        if !hangs {
            return Ok(());
        }
        let error = Error::new(ErrorKind::Timeout, "read", "the transfer still runs");
        let rest = Rest(self.over.clone(), self.closed.clone());
        Err(ReadFailure { error, piece: Some(0), running: Some(Box::new(rest)) })
    }

    fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::SeqCst);
        Ok(())
    }
}

fn start(fake: &Arc<Fake>, protocol: Protocol) -> Result<MooncakeEngine> {
    MooncakeEngine::new(fake.clone(), MooncakeOptions::new(protocol))
}

fn within(time: Duration) -> ReadOptions {
    ReadOptions::default().deadline(Instant::now() + time)
}

const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(20);

#[test]
fn what_is_told_has_to_be_what_is_asked_for() {
    for told in ["tcp", "TCP", " Tcp "] {
        start(&Arc::new(Fake::telling(told)), Protocol::Tcp).unwrap();
    }
    for (told, asked) in [
        ("tcp", Protocol::Rdma),
        ("nvlink_intra", Protocol::Nvlink),
        ("rdma", Protocol::Tcp),
        ("", Protocol::Tcp),
        ("efa", Protocol::Rdma),
    ] {
        let error = start(&Arc::new(Fake::telling(told)), asked).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context("found"), Some(format!("{told:?}").as_str()), "{error}");
        assert_eq!(error.context("expected"), Some(asked.name()));
    }
    // The build's own word comes first.
    let mut fake = Fake::telling("nvlink");
    fake.support.mnnvl = Some(false);
    let error = start(&Arc::new(fake), Protocol::Nvlink).unwrap_err();
    assert!(error.to_string().contains("does not know the protocol"), "{error}");
    let mut fake = Fake::telling("nvlink");
    fake.support.mnnvl = Some(true);
    start(&Arc::new(fake), Protocol::Nvlink).unwrap();
}

#[test]
fn a_peer_with_another_protocol_is_refused_before_the_first_byte() {
    let fake = Arc::new(Fake::telling("tcp"));
    let engine = start(&fake, Protocol::Tcp).unwrap();
    for told in ["rdma", "nvlink_intra", ""] {
        let op = ReadOp::new(RemoteAddr(1), RegionMut::zeroed(1).unwrap());
        let error = engine.read(&peer(told), vec![op], &within(LONG)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context("found"), Some(format!("{told:?}").as_str()));
    }
    assert!(fake.submissions.lock().is_empty());
    assert_eq!(engine.stats().registrations, 0);
}

#[test]
fn each_protocol_is_handed_ranges_as_it_bears_them() {
    for (protocol, expected) in [
        (Protocol::Tcp, Submission::Single { ahead: 64 }),
        (Protocol::Rdma, Submission::Batch),
        (Protocol::NvlinkIntra, Submission::Batch),
        (Protocol::Nvlink, Submission::Single { ahead: 1 }),
    ] {
        assert_eq!(MooncakeOptions::new(protocol).submission, expected);
    }
    let fake = Arc::new(Fake::telling("rdma"));
    let engine = start(&fake, Protocol::Rdma).unwrap();
    let source: Vec<u8> = (0..200).collect();
    let at = RemoteAddr(source.as_ptr() as u64);
    let ops = [100, 0, 50].map(|len| ReadOp::new(at, RegionMut::zeroed(len).unwrap()));
    let ops = engine.read(&peer("rdma"), ops.into(), &within(LONG)).unwrap();
    assert_eq!(*fake.submissions.lock(), [(Submission::Batch, 2)], "nothing is asked for nothing");
    for mut op in ops {
        let bytes = op.dst.as_mut_bytes().unwrap();
        assert_eq!(bytes, &source[..bytes.len()]);
    }
    assert_eq!(fake.registrations.load(Ordering::SeqCst), 0, "the regions are gone");
}

#[test]
fn nvlink_takes_no_host_memory() {
    let engine = start(&Arc::new(Fake::telling("nvlink_intra")), Protocol::NvlinkIntra).unwrap();
    let op = ReadOp::new(RemoteAddr(1), RegionMut::zeroed(1).unwrap());
    let error = engine.read(&peer("nvlink_intra"), vec![op], &within(LONG)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let pool = RegionPool::new(Backing::heap(MIB).unwrap()).unwrap();
    assert_eq!(engine.register_pool(&pool).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn what_hangs_is_out_of_use_until_it_is_over() {
    let fake = Arc::new(Fake::telling("tcp"));
    let engine = start(&fake, Protocol::Tcp).unwrap();
    let pool = RegionPool::new(Backing::heap(MIB).unwrap()).unwrap();
    engine.register_pool(&pool).unwrap();
    let source = vec![5u8; 1000];
    let peer = peer("tcp");
    let read = |time| {
        let region = pool.take(1000).unwrap();
        let op = ReadOp::new(RemoteAddr(source.as_ptr() as u64), region);
        engine.read(&peer, vec![op], &within(time))
    };
    fake.hangs.store(true, Ordering::SeqCst);
    for reads in 1..3 {
        assert_eq!(read(SHORT).unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(engine.stats().quarantined_bytes, 1000 * reads);
        assert_eq!(pool.stats().live_regions, reads);
    }
    fake.hangs.store(false, Ordering::SeqCst);
    let ops = read(LONG).unwrap();
    assert_eq!(pool.stats().live_regions, 3, "none of the quarantined is handed out");
    drop(ops);
    fake.over.store(true, Ordering::SeqCst);
    drop(read(LONG).unwrap());
    assert_eq!((engine.stats().quarantined_bytes, pool.stats().live_regions), (0, 0));
    assert_eq!(engine.stats().registrations, 1, "the pool's, whatever was read");
    // What never ends by itself ends with the engine.
    fake.over.store(false, Ordering::SeqCst);
    fake.hangs.store(true, Ordering::SeqCst);
    read(SHORT).unwrap_err();
    engine.close().unwrap();
    assert_eq!((engine.stats().quarantined_bytes, pool.stats().live_regions), (0, 0));
    assert_eq!(read(LONG).unwrap_err().kind(), ErrorKind::Closed);
}

/// A code that is passed over here shows up later, and elsewhere.
#[test]
fn f21_memory_that_was_not_registered_is_never_read_into() {
    let fake = Arc::new(Fake::telling("tcp"));
    let engine = start(&fake, Protocol::Tcp).unwrap();
    let source = vec![5u8; 1000];
    let peer = peer("tcp");
    let read = |count: usize| {
        let op = |_| {
            let dst = RegionMut::zeroed(1000).unwrap();
            ReadOp::new(RemoteAddr(source.as_ptr() as u64), dst)
        };
        engine.read(&peer, (0..count).map(op).collect(), &within(LONG))
    };
    // The first, or the second of two.
    for (good, reads) in [(0, 1), (1, 2)] {
        fake.registers.store(good, Ordering::SeqCst);
        let error = read(reads).unwrap_err();
        assert!(error.to_string().contains("Mooncake said -1"), "{error}");
        assert!(fake.submissions.lock().is_empty(), "nothing is asked for");
    }
    let pool = RegionPool::new(Backing::heap(MIB).unwrap()).unwrap();
    fake.registers.store(0, Ordering::SeqCst);
    assert!(engine.register_pool(&pool).is_err());
    fake.registers.store(-1, Ordering::SeqCst);
    engine.register_pool(&pool).unwrap();
    read(2).unwrap();
    assert_eq!(fake.submissions.lock().len(), 1);
}

#[test]
fn no_more_calls_are_inside_than_allowed_and_waiting_ends_in_time() {
    let fake = Arc::new(Fake::telling("tcp"));
    let mut options = MooncakeOptions::new(Protocol::Tcp);
    options.calls = 2;
    let engine = MooncakeEngine::new(fake.clone(), options).unwrap();
    let source = [5u8; 100];
    let (peer, at) = (peer("tcp"), RemoteAddr(source.as_ptr() as u64));
    let read = |time| {
        let op = ReadOp::new(at, RegionMut::zeroed(100).unwrap());
        engine.read(&peer, vec![op], &within(time))
    };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..5).for_each(|_| drop(read(LONG).unwrap())));
        }
    });
    assert_eq!(fake.most_inside.load(Ordering::SeqCst), 2);
    fake.hangs.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let hung = [0; 2].map(|_| scope.spawn(|| read(Duration::from_secs(1)).unwrap_err()));
        eventually("both hang", || fake.inside.load(Ordering::SeqCst) == 2);
        let error = read(SHORT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert_eq!(error.context("calls"), Some("2"), "{error}");
        for thread in hung {
            assert_eq!(thread.join().unwrap().kind(), ErrorKind::Timeout);
        }
    });
}

#[test]
fn a_transport_needs_a_started_engine_and_says_what_it_runs() {
    let error = DirectTransport::builder().engine(Engine::Mooncake).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    let engine = start(&Arc::new(Fake::telling("tcp")), Protocol::Tcp).unwrap();
    let transport =
        DirectTransport::builder().engine(Engine::Mooncake).mooncake(engine).build().unwrap();
    assert_eq!(transport.info().scheme, "mooncake");
    assert!(transport.info().engine.contains("protocol tcp of Mooncake"), "{:?}", transport.info());
}
