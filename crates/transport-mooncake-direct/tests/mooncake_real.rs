//! The mooncake engine with Mooncake's wheel: protocol tcp, as there is no other hardware to rely on.
#![cfg(feature = "mooncake-python")]

mod mooncake;
mod support;

use std::{
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use capture_arena::{Arena, ArenaConfig, Backing, RegionPool};
use mooncake::{Peer, Wheel, wheel};
use mooncake_sys::{
    EngineApi, EngineSetup, ProviderInfo, ReadFailure, ReadPiece, Submission,
    python::{WheelEngine, WheelOptions},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use support::*;
use transport_core::{
    Destination, ErrorKind, FetchOptions, FetchRequest, RegionMut, RemoteAddr, Result, SessionName,
    Transport,
    conformance::{Harness, Hook, Outcome, Pair, Setup, cases},
};
use transport_mooncake_direct::{
    CaptureSink, DirectTransport, Engine, MooncakeEngine, MooncakeOptions, Protocol, ReadOp,
    ReadOptions, SinkConfig,
};

fn engine_with(options: MooncakeOptions) -> Result<MooncakeEngine> {
    let wheel = WheelOptions::at(wheel::environment()).threads(2);
    MooncakeEngine::of_wheel(&wheel, "127.0.0.1", options)
}

fn engine() -> MooncakeEngine {
    engine_with(MooncakeOptions::new(Protocol::Tcp)).unwrap()
}

fn trainer(engine: MooncakeEngine) -> DirectTransport {
    let pool = RegionPool::new(Backing::heap(64 * MIB).unwrap()).unwrap();
    DirectTransport::builder()
        .engine(Engine::Mooncake)
        .mooncake(engine)
        .pool(pool)
        .lease(Duration::from_secs(10))
        .build()
        .unwrap()
}

fn within(seconds: u64) -> ReadOptions {
    ReadOptions::default().deadline(Instant::now() + Duration::from_secs(seconds))
}

fn op(address: u64, len: u64) -> ReadOp {
    ReadOp::new(RemoteAddr(address), RegionMut::zeroed(len as usize).unwrap())
}

fn compare(ops: Vec<ReadOp>, salt: u8) {
    for mut op in ops {
        let bytes = op.dst.as_mut_bytes().unwrap();
        let wrong = bytes.iter().enumerate().find(|&(at, &found)| found != byte(salt, at));
        assert!(wrong.is_none(), "{wrong:?} of {:#x}", op.address.0);
    }
}

/// An engine that outlives the transports that use it: stopping one takes Mooncake a second.
#[derive(Debug)]
struct Kept(WheelEngine);

impl EngineApi for Kept {
    fn provider(&self) -> &ProviderInfo {
        self.0.provider()
    }

    fn session(&self) -> Result<SessionName> {
        self.0.session()
    }

    unsafe fn register(&self, ranges: &[(*mut u8, usize)]) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.register(ranges) }
    }

    unsafe fn unregister(&self, starts: &[*mut u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.unregister(starts) }
    }

    unsafe fn read(
        &self,
        peer: &SessionName,
        pieces: &[ReadPiece],
        submission: Submission,
        timeout: Duration,
    ) -> Result<(), ReadFailure> {
        // SAFETY: as above.
        unsafe { self.0.read(peer, pieces, submission, timeout) }
    }

    /// Does not: what is left of reads stays in quarantine.
    fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Real(Arc<dyn EngineApi>);

impl Real {
    fn consumer(&self, setup: &Setup) -> Result<Arc<dyn Transport>> {
        let pool = RegionPool::new(Backing::heap(setup.arena_bytes)?)?;
        let builder = DirectTransport::builder()
            .engine(Engine::Mooncake)
            .mooncake(MooncakeEngine::new(self.0.clone(), MooncakeOptions::new(Protocol::Tcp))?)
            .pool(pool)
            .transfer_delay(setup.transfer_delay)
            .lease(Duration::from_secs(10));
        Ok(Arc::new(builder.build()?))
    }
}

#[async_trait]
impl Harness for Real {
    fn name(&self) -> String {
        "mooncake engine, protocol tcp".into()
    }

    fn offers(&self, hook: Hook) -> bool {
        matches!(hook, Hook::TransferDelay | Hook::SecondConsumer)
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let arena = Arena::start(Backing::shared(setup.arena_bytes)?, ArenaConfig::default())?;
        let sink = CaptureSink::start(arena, SinkConfig::default())?;
        let publisher: Arc<dyn Transport> =
            Arc::new(DirectTransport::builder().sink(sink).build()?);
        let mut pair = Pair::new(publisher, self.consumer(setup)?);
        if setup.second_consumer {
            pair = pair.second_consumer(self.consumer(setup)?);
        }
        Ok(pair)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn the_conformance_suite_holds() {
    let setup = EngineSetup::new("127.0.0.1", "tcp");
    let wheel = WheelOptions::at(wheel::environment()).threads(2);
    let harness = Real(Arc::new(Kept(WheelEngine::start(&wheel, &setup).unwrap())));
    let (mut passed, mut not_applicable) = (0, Vec::new());
    for case in cases() {
        match case.run(&harness).await {
            Outcome::Passed => passed += 1,
            Outcome::NotApplicable(_) => not_applicable.push(case.name),
            Outcome::Failed(why) => panic!("{}: {why}", case.name),
        }
    }
    assert_eq!(
        not_applicable,
        [
            "views_show_the_bytes",
            "views_are_unmoved_by_other_samples",
            "a_release_waits_for_views",
            "a_view_outlives_its_consumer",
            "views_of_the_replaced_life_stay",
            "a_killed_publisher_is_an_error_in_time",
            "an_older_publisher_is_read",
        ]
    );
    assert!(passed >= 25, "{passed}");
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn mooncake_and_featurestore_processes_are_read_and_the_pool_is_registered_once() {
    let engine = engine();
    assert_eq!(engine.session().host(), "127.0.0.1");
    let mut peer = Peer::start(Wheel::Pinned);
    let name: SessionName = peer.session().parse().unwrap();
    let at = peer.register(4 * MIB, 3);
    // Destinations of one's own are registered for as long as they live.
    let ops = engine.read(&name, vec![op(at, 4 * MIB), op(at, 8), op(at, 0)], &within(20)).unwrap();
    compare(ops, 3);
    assert_eq!(engine.stats().registrations, 2);
    let error = engine.read(&name, vec![op(at, 8), op(at, 4 * MIB + 1)], &within(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error}");
    assert_eq!(error.context("operation"), Some("1"));

    let trainer = trainer(engine.clone());
    assert!(
        trainer.info().engine.contains("protocol tcp of Mooncake 0.3.13"),
        "{:?}",
        trainer.info()
    );
    let warm = engine.stats().registrations;
    let sink = sink(32 * MIB);
    for i in 0..20 {
        let sample = publish(&sink, &format!("s{i}"), i, &[1000, 100_000, 0, MIB]);
        fetch_and_check(&trainer, &sample, i).unwrap();
        trainer.release_blocking(vec![sample.into()]).unwrap();
    }
    assert_eq!(engine.stats().registrations, warm, "none on the hot path");
    assert_eq!(sink.health_blocking().unwrap().resident_samples, 0);
    assert_eq!(trainer.health_blocking().unwrap().quarantined_bytes, 0);
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_refused_piece_is_named_and_nothing_stays_in_quarantine() {
    let mut batches = MooncakeOptions::new(Protocol::Tcp);
    batches.submission = Submission::Batch;
    let (single, batch) = (engine(), engine_with(batches).unwrap());
    let mut peer = Peer::start(Wheel::Pinned);
    let name: SessionName = peer.session().parse().unwrap();
    let (stays, goes) = (peer.register(MIB, 3), peer.register(MIB, 4));
    for engine in [&single, &batch] {
        let ops = (0..64).map(|_| op(stays, 1000)).chain([op(goes, 1000)]).collect();
        engine.read(&name, ops, &within(20)).unwrap();
    }
    assert_eq!(peer.ask(json!({"do": "unregister", "address": goes})), json!({"code": 0}));
    for (engine, quarantined) in [(&single, 0), (&batch, 3000)] {
        let ops = vec![op(stays, 1000), op(goes, 1000), op(stays, 1000)];
        let error = engine.read(&name, ops, &within(20)).unwrap_err();
        // The peer says by now that it has less; Mooncake says nothing.
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
        assert_eq!(engine.stats().quarantined_bytes, quarantined);
        compare(engine.read(&name, vec![op(stays, MIB)], &within(20)).unwrap(), 3);
    }
    batch.close().unwrap();
    assert_eq!(batch.stats().quarantined_bytes, 0, "a closed engine writes nothing");
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_hung_peer_costs_its_deadline_and_its_memory_comes_back() {
    let trainer_engine = engine();
    let pool = RegionPool::new(Backing::heap(64 * MIB).unwrap()).unwrap();
    trainer_engine.register_pool(&pool).unwrap();
    let (mut hung, mut well) = (Peer::start(Wheel::Pinned), Peer::start(Wheel::Pinned));
    let names: [SessionName; 2] =
        [hung.session().parse().unwrap(), well.session().parse().unwrap()];
    let (at, other) = (hung.register(32 * MIB, 3), well.register(MIB, 4));
    let take =
        |address, len: u64| ReadOp::new(RemoteAddr(address), pool.take(len as usize).unwrap());
    trainer_engine.read(&names[0], vec![take(at, 1000)], &within(20)).unwrap();
    let pid = Pid::from_raw(hung.pid() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let started = Instant::now();
    let ops = (0..4).map(|i| take(at + i * MIB, MIB)).collect();
    let error = trainer_engine.read(&names[0], ops, &within(1)).unwrap_err();
    let took = started.elapsed();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(3), "{took:?}");
    assert_eq!(trainer_engine.stats().quarantined_bytes, 4 * MIB);
    assert_eq!(pool.stats().live_regions, 4, "out of use");
    // Others are read meanwhile.
    for _ in 0..3 {
        let ops = trainer_engine.read(&names[1], vec![take(other, MIB)], &within(20)).unwrap();
        compare(ops, 4);
    }
    kill_process(pid, Signal::CONT).unwrap();
    eventually("the transfers are over", || trainer_engine.stats().quarantined_bytes == 0);
    assert_eq!(pool.stats().live_regions, 0);
    compare(trainer_engine.read(&names[0], vec![take(at, 32 * MIB)], &within(20)).unwrap(), 3);
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_publisher_that_restarts_is_read_again() {
    let trainer = trainer(engine());
    let mut config = SinkConfig::default();
    let mut sink = sink(MIB);
    let ports = [sink.session().port(), data_port(sink.session()).port(), sink.control().port()];
    config.data_bind.set_port(ports[0]);
    config.transfer_bind = Some(([127, 0, 0, 1], ports[1]).into());
    config.control_bind.set_port(ports[2]);
    let mut old = publish(&sink, "same", 1, &[1000, 64]);
    fetch_and_check(&trainer, &old, 1).unwrap();
    for life in 2..4 {
        sink.close_blocking();
        drop(sink);
        sink = CaptureSink::start(arena(u64::from(life) * MIB), config.clone()).unwrap();
        let new = publish(&sink, "same", life, &[1000, 64]);
        assert!(fetch_and_check(&trainer, &old, life - 1).is_err());
        fetch_and_check(&trainer, &new, life).unwrap();
        old = new;
    }
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn two_engines_of_one_process_do_not_disturb_each_other() {
    let (first, second) = (trainer(engine()), trainer(engine()));
    let sink = sink(32 * MIB);
    let sample = publish(&sink, "s", 3, &[MIB, 1000]);
    std::thread::scope(|scope| {
        for trainer in [&first, &second] {
            let sample = sample.clone();
            scope.spawn(move || {
                for _ in 0..20 {
                    fetch_and_check(trainer, &sample, 3).unwrap();
                }
            });
        }
    });
    drop(first);
    fetch_and_check(&second, &sample, 3).unwrap();
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_protocol_that_is_not_run_is_refused_before_the_first_byte() {
    let fails = |protocol| engine_with(MooncakeOptions::new(protocol)).unwrap_err();
    // There is no card here, so Mooncake takes tcp in silence.
    let error = fails(Protocol::Rdma);
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(error.context("found"), Some("\"tcp\""), "{error}");
    for protocol in [Protocol::Nvlink, Protocol::NvlinkIntra] {
        assert_eq!(fails(protocol).kind(), ErrorKind::Unsupported);
    }
    let engine = engine();
    let peer = Peer::start(Wheel::Pinned);
    let name: SessionName = peer.session().parse().unwrap();
    assert!(engine.read(&name, vec![op(1, 1)], &within(5)).is_err());
    assert_eq!(engine.stats().peers, 1, "it runs tcp");
}

/// Run by the test below in processes of their own; by itself it shows what is so anyway.
#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn the_environment_does_not_decide() {
    let names = ["MC_FORCE_TCP", "MC_FORCE_MNNVL", "MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK"];
    let before = names.map(std::env::var_os);
    let rdma = engine_with(MooncakeOptions::new(Protocol::Rdma)).unwrap_err();
    assert_eq!(rdma.kind(), ErrorKind::Unsupported, "{rdma}");
    let trainer = trainer(engine());
    assert_eq!(names.map(std::env::var_os), before, "put back");
    let sink = sink(MIB);
    let sample = publish(&sink, "s", 3, &[10_000]);
    fetch_and_check(&trainer, &sample, 3).unwrap();
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn no_variable_changes_what_is_thought_of_an_engine() {
    for (name, value) in [
        ("MC_FORCE_MNNVL", "0"),
        ("MC_FORCE_MNNVL", "1"),
        ("MC_INTRANODE_NVLINK", "0"),
        ("MC_INTRA_NVLINK", "yes"),
        ("MC_FORCE_TCP", ""),
    ] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "the_environment_does_not_decide"])
            .env(name, value)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{name}={value}: {said}");
    }
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn fetches_that_time_out_leave_the_transport_usable() {
    let trainer = trainer(engine());
    let sink = sink(MIB);
    let sample = publish(&sink, "s", 3, &[10_000]);
    let request = || vec![FetchRequest::new(sample.clone(), Destination::Pool)];
    let none = FetchOptions::default().deadline(Duration::ZERO);
    assert!(trainer.fetch_blocking(request(), &none).is_err());
    fetch_and_check(&trainer, &sample, 3).unwrap();
    trainer.close_blocking();
    let closed = trainer.fetch_blocking(request(), &FetchOptions::default()).unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
}
