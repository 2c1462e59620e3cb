//! A whole training run, any process of which is killed again and again.
//!
//! The kills are drawn from a seed, which is printed: `RANKS_SEED=N` replays it. `RANKS_STEPS` sets
//! how long the run is, for `cargo xtask soak`.

use std::{
    collections::{BTreeMap, HashMap},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use featurestore::ledger::{Ledger, LedgerOptions};
use featurestore_tests::{
    STEP,
    capture::health,
    eventually,
    process::{CaptureServer, Process},
};

const PER_RANK: usize = 2;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Two neighbouring ports of loopback that are free now.
fn two_ports() -> String {
    loop {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        if port < u16::MAX && TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return format!("127.0.0.1:{port}");
        }
    }
}

struct Run<'a> {
    folder: &'a Path,
    ranks: usize,
    steps: usize,
    servers: Vec<CaptureServer>,
    addresses: Vec<[String; 3]>, // http, data, control of each server: the same in every life
    attempt: u32,
}

impl<'a> Run<'a> {
    fn new(folder: &'a Path, ranks: usize, steps: usize) -> Self {
        let mut run =
            Self { folder, ranks, steps, servers: Vec::new(), addresses: Vec::new(), attempt: 0 };
        for _ in 0..2 {
            let server =
                Self::server(&["127.0.0.1:0".into(), "127.0.0.1:0".into(), "127.0.0.1:0".into()]);
            run.addresses
                .push(["http", "session", "control"].map(|name| server.field(name).to_owned()));
            run.servers.push(server);
        }
        run
    }

    fn server([http, data, control]: &[String; 3]) -> CaptureServer {
        let flags =
            ["--hidden", "8", "--taps", "1", "--http", http, "--data", data, "--control", control];
        CaptureServer::start("4MiB", &flags)
    }

    fn restart_server(&mut self, index: usize) {
        self.servers[index].process.kill();
        self.servers[index] = Self::server(&self.addresses[index]);
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_test-run"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        if std::env::var_os("RANKS_LOG").is_none() {
            command.stderr(Stdio::null());
        }
        command
    }

    fn producer(&self) -> Process {
        let quantum = self.ranks * PER_RANK;
        let mut command = self.command();
        command.arg("producer").arg(self.folder);
        command.args([(self.steps * quantum).to_string(), quantum.to_string()]);
        for [http, _, control] in &self.addresses {
            command.arg(format!("{control}=http://{http}"));
        }
        Process::start(&mut command)
    }

    fn group(&mut self, point: &str) -> Vec<Process> {
        let address = two_ports();
        let group = (0..self.ranks).map(|rank| {
            let mut command = self.command();
            command.arg("rank").arg(self.folder);
            let numbers = [rank, self.ranks, PER_RANK, self.attempt as usize];
            command.args(numbers.map(|n| n.to_string()));
            command.args([&*address, if rank == 0 { point } else { "-" }]);
            command.args(self.addresses.iter().map(|[_, _, control]| control));
            Process::start(&mut command)
        });
        let group = group.collect();
        self.attempt += 1;
        group
    }

    /// Nothing trained after it was durable, nothing lost, nothing leaked.
    fn check(&self) {
        let options = LedgerOptions::default();
        let ledger = Ledger::open(&self.folder.join("ledger.db"), "run", options).unwrap();
        let mut durable = HashMap::new();
        for (step, ids) in ledger.steps().unwrap() {
            for id in ids {
                assert!(durable.insert(id.to_string(), step).is_none(), "{id} is durable twice");
            }
        }
        let mut trained: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for rank in 0..self.ranks {
            let path = self.folder.join(format!("trained-{rank}.log"));
            for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
                let mut words = line.split(' ').skip(1);
                let step = words.next().unwrap().parse().unwrap();
                trained.entry(words.next().unwrap().into()).or_default().push(step);
            }
        }
        for (id, steps) in &trained {
            let last = *steps.iter().max().unwrap();
            if let Some(&step) = durable.get(id) {
                assert!(last <= step, "{id} is durable since step {step} and trained in {last}");
            }
        }
        let (samples, quantum) = (self.steps * self.ranks * PER_RANK, self.ranks * PER_RANK);
        let missing: Vec<_> = (0..samples)
            .map(|i| format!("run:task-{i:06}"))
            .filter(|id| !durable.contains_key(id))
            .collect();
        assert!(missing.len() < quantum, "lost: {missing:?}");
        assert!(ledger.in_flight().unwrap().is_empty());
        assert!(ledger.unfreed().unwrap().is_empty());
        for server in &self.servers {
            eventually("everything is free again", STEP, || {
                health(server, "resident_samples") == 0 && health(server, "reserved_bytes") == 0
            });
            assert_eq!(health(server, "arena_largest_free"), health(server, "arena_bytes"));
        }
    }
}

/// Runs to the end, killing what `kill` says, at most every few hundred milliseconds.
fn run_with_kills(ranks: usize, steps: usize, seed: u64, kills: u64) {
    println!("RANKS_SEED={seed}");
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random(seed);
    let mut run = Run::new(folder.path(), ranks, steps);
    let mut producer = Some(run.producer());
    let mut group = run.group("-");
    let end = Instant::now() + Duration::from_secs(60 + 2 * steps as u64);
    let (mut killed, mut next) = (0, Instant::now() + Duration::from_millis(400));
    loop {
        assert!(Instant::now() < end, "seed {seed}: no end after {killed} kills");
        std::thread::sleep(Duration::from_millis(10));
        if let Some(running) = &mut producer {
            match running.ended() {
                None => {}
                Some(status) if status.success() => producer = None,
                Some(_) => producer = Some(run.producer()),
            }
        }
        let statuses: Vec<_> = group.iter_mut().map(Process::ended).collect();
        if statuses.iter().all(|s| s.is_some_and(|s| s.success())) && producer.is_none() {
            break;
        }
        if statuses.iter().any(|s| s.is_some_and(|s| !s.success())) {
            group.clear(); // as a launcher does: all or none
            group = run.group("-");
        }
        if Instant::now() < next || killed == kills {
            continue;
        }
        killed += 1;
        next = Instant::now() + Duration::from_millis(200 + random.below(1000));
        match random.below(10) {
            0..3 => {
                if let Some(running) = &mut producer {
                    running.kill();
                }
            }
            3..8 => group[random.below(ranks as u64) as usize].kill(),
            _ => run.restart_server(random.below(2) as usize),
        }
    }
    drop(group);
    println!("{killed} processes killed in {} attempts", run.attempt);
    assert!(killed * 4 >= kills, "only {killed} of {kills} kills before the end");
    run.check();
}

#[test]
fn a_run_of_two_ranks_without_kills_trains_everything_once() {
    run_with_kills(2, 20, 1, 0);
}

#[test]
fn eight_ranks_survive_kills_of_any_process() {
    let steps = number("RANKS_STEPS", 60) as usize;
    let kills = number("RANKS_KILLS", if steps > 100 { steps as u64 / 10 } else { 8 });
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = number("RANKS_SEED", u64::from(time.subsec_nanos()));
    run_with_kills(8, steps, seed, kills);
}

/// A real kill at each point of the acknowledgement, in the middle of a run.
#[test]
fn a_kill_at_every_point_loses_and_repeats_nothing() {
    for point in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Run::new(folder.path(), 2, 12);
        let mut producer = run.producer();
        let mut group = run.group(&format!("{point}x6"));
        assert!(!group[0].wait(STEP * 2).success(), "point {point}");
        group.clear();
        let mut group = run.group("-");
        for process in &mut group {
            assert!(process.wait(STEP * 2).success(), "point {point}");
        }
        assert!(producer.wait(STEP).success(), "point {point}");
        run.check();
    }
}
