use std::{
    net::TcpListener,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use control_proto::sample_ref::SampleRef;
use transport_core::{MemoryTransport, PublishOptions, Transport};

use super::*;
use crate::{
    channel::{RefReader, RefWriter},
    flaky::{Flaky, sample},
    ledger::{Ledger, LedgerOptions},
    lifecycle::Retention,
    ranks::GroupOptions,
};

/// One run: a publisher, a folder with channel and ledger.
struct Run {
    folder: tempfile::TempDir,
    publisher: Arc<MemoryTransport>,
    runtime: tokio::runtime::Runtime,
    writer: RefWriter,
}

impl Run {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let publisher = MemoryTransport::builder().arena_bytes(1 << 20).build().unwrap();
        let writer = RefWriter::open(folder.path()).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        Self { folder, publisher: Arc::new(publisher), runtime, writer }
    }

    fn publish(&mut self, range: std::ops::Range<usize>) -> Vec<SampleRef> {
        let batch = range.map(|i| sample(&format!("run:task-{i}"), 1, &[i as u8; 4]));
        let published = self.publisher.publish(batch.collect(), PublishOptions::default());
        let published = self.runtime.block_on(published).unwrap();
        let refs: Vec<_> =
            published.iter().map(|d| SampleRef::new(d, "run", None, "dspark").unwrap()).collect();
        self.writer.publish(&refs).unwrap();
        refs
    }

    fn ledger(&self) -> Result<Ledger> {
        Ledger::open(&self.folder.path().join("ledger.db"), "run", LedgerOptions::default())
    }

    fn authority(&self, ranks: usize, per_rank: usize, resume: Resume) -> Result<Authority> {
        let reader = RefReader::open(self.folder.path())?;
        Authority::new(reader, self.ledger()?, ranks, per_rank, resume)
    }

    fn samples(&self) -> (Arc<Flaky>, Arc<Samples>) {
        let flaky = Arc::new(Flaky::new(self.publisher.client()));
        (flaky.clone(), Arc::new(Samples::over(flaky, Retention::default())))
    }

    fn resident(&self) -> u64 {
        self.runtime.block_on(self.publisher.health()).unwrap().resident_samples
    }

    /// Reads what a rank was handed.
    fn train(&self, samples: &Samples, refs: &[SampleRef]) -> Vec<Arc<Descriptor>> {
        let train = |sample: &SampleRef| {
            let descriptor = Arc::new(sample.descriptor().unwrap());
            self.runtime.block_on(async {
                samples.adopt(std::slice::from_ref(&descriptor)).await.unwrap();
                let leased = samples.get(&descriptor, Duration::from_secs(5)).await.unwrap();
                samples.release(&leased.token).await;
            });
            descriptor
        };
        refs.iter().map(train).collect()
    }

    fn alone(&self, samples: &Arc<Samples>, authority: Authority) -> Acknowledger {
        let authority = Some(Arc::new(Mutex::new(authority)));
        let handle = self.runtime.handle().clone();
        Acknowledger::new(Group::alone("run"), samples.clone(), authority, handle).unwrap()
    }
}

fn names(refs: &[SampleRef]) -> Vec<String> {
    refs.iter().map(|sample| sample.sample_id.to_string()).collect()
}

#[test]
fn d15_windows_are_whole_and_equal_and_duplicates_go_out_once() {
    let mut run = Run::new();
    let refs = run.publish(0..5);
    let mut authority = run.authority(2, 2, Resume::Fresh).unwrap();
    let window = authority.poll().unwrap().expect("four of five");
    assert_eq!(names(&window[0]), ["run:task-0", "run:task-2"]);
    assert_eq!(names(&window[1]), ["run:task-1", "run:task-3"]);
    assert!(authority.poll().unwrap().is_none(), "a round waits for a full window");
    run.writer.publish(&refs[..3]).unwrap();
    assert!(authority.poll().unwrap().is_none(), "the same again");
    assert_eq!(authority.stats().duplicates, 3);
    assert_eq!(run.writer.settled().unwrap(), 3, "each duplicate is settled at once");
    run.publish(5..8);
    assert_eq!(authority.poll().unwrap().unwrap()[0].len(), 2);
    assert!(!authority.ended());
    run.publish(8..9);
    let Run { writer, .. } = run;
    writer.close().unwrap();
    assert!(authority.poll().unwrap().is_none());
    assert!(authority.ended());
    let tail = authority.take_tail().unwrap();
    assert_eq!((names(&tail), authority.stats().dropped), (vec!["run:task-8".into()], 1));
}

#[test]
fn d15_a_producer_that_is_silent_for_too_long_is_an_error() {
    const MOST: Duration = Duration::from_millis(50);
    let mut run = Run::new();
    let (_, samples) = run.samples();
    let authority = run.authority(1, 2, Resume::Fresh).unwrap().patience(MOST);
    let authority = Arc::new(Mutex::new(authority));
    let handle = run.runtime.handle().clone();
    let mut ack =
        Acknowledger::new(Group::alone("run"), samples.clone(), Some(authority.clone()), handle)
            .unwrap();
    let poll = || authority.lock().poll();
    run.publish(0..3);
    let window = poll().unwrap().unwrap().remove(0);
    for _ in 0..3 {
        assert!(poll().unwrap().is_none(), "it may wait for what is being trained");
        std::thread::sleep(2 * MOST);
    }
    ack.acknowledge(&Step::new(1, run.train(&samples, &window))).unwrap();
    assert!(poll().unwrap().is_none(), "it counts from now on");
    std::thread::sleep(2 * MOST);
    let error = poll().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!((error.context("waiting"), error.context("window")), (Some("1"), Some("2")));
    run.publish(3..4);
    assert_eq!(poll().unwrap().unwrap()[0].len(), 2, "late, and still welcome");
}

#[test]
fn d15_a_resume_skips_the_trained_and_hands_the_rest_to_another_number_of_ranks() {
    let mut run = Run::new();
    run.publish(0..8);
    let (_, samples) = run.samples();
    let mut authority = run.authority(2, 2, Resume::Fresh).unwrap();
    let window = authority.poll().unwrap().unwrap().concat();
    let trained = run.train(&samples, &window);
    let mut acknowledger = run.alone(&samples, authority);
    assert_eq!(acknowledger.acknowledge(&Step::new(1, trained)).unwrap().acknowledged, 4);
    assert_eq!(run.writer.settled().unwrap(), 4);
    drop(acknowledger); // a crash
    let error = run.authority(4, 1, Resume::Fresh).unwrap_err();
    assert!(error.to_string().contains("fresh online attempt cannot reuse"), "{error}");
    let mut authority = run.authority(4, 1, Resume::At(Some(1))).unwrap();
    assert_eq!(authority.stats().requeued, 4);
    let window = authority.poll().unwrap().unwrap();
    assert_eq!(window.len(), 4);
    let names = names(&window.concat());
    assert_eq!(names, ["run:task-4", "run:task-5", "run:task-6", "run:task-7"]);
    assert!(authority.poll().unwrap().is_none());
    assert_eq!(run.writer.settled().unwrap(), 4, "settled once, also after a restart");
}

#[test]
fn d15_the_settled_count_is_repaired_after_a_crash_between_commit_and_settling() {
    let mut run = Run::new();
    run.publish(0..4);
    let (_, samples) = run.samples();
    let mut authority = run.authority(1, 2, Resume::Fresh).unwrap();
    let window = authority.poll().unwrap().unwrap().concat();
    let trained = run.train(&samples, &window);
    let crash = Observer::new(|point| assert!(point != Point::BeforeFree, "crash"));
    let mut acknowledger = run.alone(&samples, authority).observed(crash);
    let step = Step::new(1, trained);
    let crashed = std::panic::AssertUnwindSafe(|| acknowledger.acknowledge(&step));
    assert!(std::panic::catch_unwind(crashed).is_err());
    drop(acknowledger);
    assert_eq!((run.writer.settled().unwrap(), run.resident()), (0, 4));
    let mut authority = run.authority(1, 2, Resume::At(Some(1))).unwrap();
    assert_eq!(run.writer.settled().unwrap(), 2, "repaired");
    // What is trained and not freed is freed now, by whoever resumes.
    let unfreed: Vec<_> =
        authority.unfreed().iter().map(|s| Arc::new(s.descriptor().unwrap())).collect();
    assert_eq!(unfreed.len(), 2);
    assert_eq!(run.runtime.block_on(samples.settle(&unfreed)).pending, 0);
    authority.freed(unfreed.iter().map(|d| &d.sample.sample_id));
    assert_eq!(run.resident(), 2);
    assert_eq!(authority.poll().unwrap().unwrap().concat().len(), 2);
    authority.finish().unwrap();
    drop(authority);
    assert!(run.ledger().unwrap().unfreed().unwrap().is_empty());
}

#[test]
fn d17_what_cannot_be_resumed_is_refused() {
    let mut run = Run::new();
    run.publish(0..2);
    let (flaky, samples) = run.samples();
    let authority = run.authority(1, 1, Resume::Fresh).unwrap();
    let forgetful = Retention { retain: false, ..Retention::default() };
    let unkept = Arc::new(Samples::over(flaky, forgetful));
    let handle = run.runtime.handle().clone();
    let authority = Arc::new(Mutex::new(authority));
    let new = |samples: &Arc<Samples>, authority| {
        Acknowledger::new(Group::alone("run"), samples.clone(), authority, handle.clone())
    };
    let error = new(&unkept, Some(authority.clone())).unwrap_err();
    assert!(error.to_string().contains("retain_on_release=True"), "{error}");
    assert!(new(&samples, None).is_err(), "rank 0 without a ledger");
    let window = authority.lock().poll().unwrap().unwrap().concat();
    let trained = run.train(&samples, &window);
    new(&samples, Some(authority.clone())).unwrap().acknowledge(&Step::new(7, trained)).unwrap();
    drop(authority);
    for (at, why) in
        [(Some(6), "ledger is ahead of the checkpoint"), (Some(8), "checkpoint is ahead")]
    {
        let error = run.authority(1, 1, Resume::At(at)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    run.authority(1, 1, Resume::At(Some(7))).unwrap();
}

/// Two ranks; `break_rank` cannot free. What each rank's boundary came to, and the run.
fn two_ranks(break_rank: Option<usize>, patience: u32) -> (Run, Vec<Result<Boundary>>) {
    let mut run = Run::new();
    run.publish(0..6);
    let mut authority = run.authority(2, 2, Resume::Fresh).unwrap();
    let window = authority.poll().unwrap().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let options = GroupOptions::new("run", 2).deadline(Duration::from_secs(10));
    let mut authority = Some(Arc::new(Mutex::new(authority)));
    let mut ranks = Vec::new();
    for (rank, refs) in window.iter().enumerate() {
        let (flaky, samples) = run.samples();
        let trained = run.train(&samples, refs);
        flaky.broken.store(break_rank == Some(rank), Ordering::Relaxed);
        let authority = if rank == 0 { authority.take() } else { None };
        ranks.push((samples, trained, authority));
    }
    let mut listener = Some(listener);
    let threads: Vec<_> = ranks
        .into_iter()
        .enumerate()
        .map(|(rank, (samples, trained, authority))| {
            let (options, handle) = (options.clone(), run.runtime.handle().clone());
            let listener = if rank == 0 { listener.take() } else { None };
            std::thread::spawn(move || {
                let group = match listener {
                    Some(listener) => Group::lead(listener, options).unwrap(),
                    None => Group::join(address, rank, options).unwrap(),
                };
                let acknowledger = Acknowledger::new(group, samples, authority, handle).unwrap();
                acknowledger.patience(patience).acknowledge(&Step::new(1, trained))
            })
        })
        .collect();
    let outcomes = threads.into_iter().map(|t| t.join().unwrap()).collect();
    (run, outcomes)
}

#[test]
fn d16_the_union_is_recorded_once_and_each_rank_frees_its_own() {
    let (run, outcomes) = two_ranks(None, 0);
    for outcome in outcomes {
        let boundary = outcome.unwrap();
        assert_eq!((boundary.step, boundary.acknowledged), (1, 4));
        assert!(boundary.cleanup_errors.is_empty());
    }
    assert_eq!(run.resident(), 2, "what nobody has trained stays");
    assert_eq!(run.writer.settled().unwrap(), 4);
    let ledger = run.ledger().unwrap();
    assert_eq!((ledger.marker(), ledger.acknowledged().len()), (Some(1), 4));
}

#[test]
fn d16_a_cleanup_failure_on_one_rank_reaches_all_after_the_step_is_durable() {
    let (run, outcomes) = two_ranks(Some(1), 0);
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert_eq!(error.context("rank"), Some("1"), "{error}");
        assert!(error.to_string().contains("durable"), "{error}");
    }
    let ledger = run.ledger().unwrap();
    assert_eq!(ledger.marker(), Some(1));
    assert_eq!(ledger.unfreed().unwrap().len(), 4, "rank 0's two are noted with the next step");
    drop(ledger);
    let (run, outcomes) = two_ranks(Some(1), 3);
    for outcome in outcomes {
        let boundary = outcome.unwrap();
        assert_eq!((boundary.release_pending, boundary.cleanup_errors[0].0), (2, 1));
    }
    assert_eq!(run.resident(), 4);
}

#[test]
fn what_ranks_say_against_each_other_is_recorded_nowhere() {
    let mut run = Run::new();
    run.publish(0..2);
    let mut authority = run.authority(1, 2, Resume::Fresh).unwrap();
    authority.poll().unwrap().unwrap();
    let part = |step: u64, ids: &[&str]| {
        serde_json::to_vec(&Trained { step, trained: ids.to_vec(), lost: Vec::new() }).unwrap()
    };
    for (all, why) in [
        ([part(1, &["run:task-0"]), part(2, &[])], "different steps"),
        ([part(1, &["run:task-0"]), part(1, &["run:task-0"])], "trained twice"),
        ([part(1, &["run:task-0"]), part(1, &["run:task-9"])], "not handed out"),
        ([part(1, &["run:task-0"]), b"junk".to_vec()], "makes no sense"),
    ] {
        let error = record(&mut authority, 1, &all).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(authority.marker(), None);
    }
    let all = [part(1, &["run:task-0"]), part(1, &["run:task-1"])];
    assert_eq!(record(&mut authority, 1, &all).unwrap(), 2);
}

#[test]
fn lost_samples_are_asked_for_again_and_arrive_as_new() {
    let mut run = Run::new();
    let refs = run.publish(0..2);
    let mut authority = run.authority(1, 2, Resume::Fresh).unwrap();
    let window = authority.poll().unwrap().unwrap().concat();
    let (_, samples) = run.samples();
    let trained = run.train(&samples, &window[..1]);
    let lost = vec![window[1].sample_id.clone()];
    let mut acknowledger = run.alone(&samples, authority);
    acknowledger.acknowledge(&Step::new(1, trained).lost(lost.clone())).unwrap();
    assert!(run.writer.wants(&lost[0], &run.writer.lost().unwrap()));
    assert_eq!(run.writer.settled().unwrap(), 2);
    drop(acknowledger);
    // After a restart the lost line is not handed out again; its successor is.
    let mut authority = run.authority(1, 1, Resume::At(Some(1))).unwrap_err();
    assert!(authority.to_string().contains("quantum has changed"), "{authority}");
    let mut resumed = run.authority(1, 2, Resume::At(Some(1))).unwrap();
    assert!(resumed.poll().unwrap().is_none());
    run.writer.publish(&refs[1..]).unwrap();
    run.publish(2..3);
    assert_eq!(names(&resumed.poll().unwrap().unwrap().concat()), ["run:task-1", "run:task-2"]);
    assert_eq!(run.writer.settled().unwrap(), 2);
    authority = resumed.take_tail().unwrap_err();
    assert_eq!(authority.kind(), ErrorKind::InvalidInput);
}

#[test]
fn d26_background_acknowledging_overlaps_lags_one_step_and_flushes() {
    let marker = Arc::new(AtomicU64::new(0));
    let (seen, threads) = (marker.clone(), Arc::new(Mutex::new(Vec::new())));
    let names = threads.clone();
    let mut ack = BackgroundAck::running(move |step| {
        std::thread::sleep(Duration::from_millis(100));
        names.lock().push((step.number, std::thread::current().name().unwrap().to_owned()));
        seen.store(step.number, Ordering::SeqCst);
        Ok(Boundary { step: step.number, ..Boundary::default() })
    })
    .unwrap();
    for step in 1..=4 {
        let start = std::time::Instant::now();
        ack.submit(Step::new(step, Vec::new())).unwrap();
        assert!(step > 1 || start.elapsed() < Duration::from_millis(50), "overlapped");
        assert!(marker.load(Ordering::SeqCst) + 1 >= step, "lags at most one step");
    }
    assert_eq!(ack.flush().unwrap().unwrap().step, 4);
    assert_eq!(
        (marker.load(Ordering::SeqCst), ack.durable()),
        (4, Some(4)),
        "as a checkpoint sees"
    );
    ack.close().unwrap();
    let expected: Vec<_> = (1..=4).map(|step| (step, "fs-durable-ack".to_owned())).collect();
    assert_eq!(*threads.lock(), expected);
}

#[test]
fn d26_a_failure_stops_later_steps_and_checkpoints_and_names_its_step() {
    let mut ack = BackgroundAck::running(|step| match step.number {
        2 => Err(Error::new(ErrorKind::CapacityExceeded, "ledger", "the disk is full")),
        step => Ok(Boundary { step, ..Boundary::default() }),
    })
    .unwrap();
    ack.submit(Step::new(1, Vec::new())).unwrap();
    ack.submit(Step::new(2, Vec::new())).unwrap();
    let error = ack.submit(Step::new(3, Vec::new())).unwrap_err();
    assert_eq!(error.context("of_step"), Some("2"), "{error}");
    assert!(error.to_string().contains("background durable ack"), "{error}");
    assert!(ack.flush().is_err(), "no checkpoint");
    assert_eq!(ack.durable(), Some(1));
}

#[test]
fn a_full_disk_makes_nothing_durable_and_frees_nothing() {
    let mut run = Run::new();
    run.publish(0..600);
    let options = LedgerOptions { max_bytes: Some(1), ..LedgerOptions::default() };
    let path = run.folder.path().join("ledger.db");
    assert!(Ledger::open(&path, "run", options).is_err(), "not even the tables fit");
    let (_, samples) = run.samples();
    let (mut room, mut refused) = (40, None);
    while refused.is_none() {
        room += 1;
        // A little more room each time, until handing out fits and the step does not.
        std::fs::remove_file(&path).ok();
        let options = LedgerOptions { max_bytes: Some(room << 12), ..LedgerOptions::default() };
        let reader = RefReader::open(run.folder.path()).unwrap();
        let Ok(ledger) = Ledger::open(&path, "run", options) else { continue };
        let resume =
            if reader.claim_quantum(600, false).is_ok() { Resume::Fresh } else { Resume::At(None) };
        let Ok(mut authority) = Authority::new(reader, ledger, 1, 600, resume) else { continue };
        let Ok(Some(window)) = authority.poll() else { continue };
        let trained = run.train(&samples, &window.concat());
        let mut acknowledger = run.alone(&samples, authority);
        refused = Some(acknowledger.acknowledge(&Step::new(1, trained)));
    }
    let error = refused.expect("set above").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{error}");
    assert_eq!((error.context("step"), run.resident()), (Some("1"), 600), "nothing is freed");
    assert_eq!(run.writer.settled().unwrap(), 0, "and the producer is told nothing");
    let ledger = run.ledger().unwrap();
    assert_eq!((ledger.marker(), ledger.in_flight().unwrap().len()), (None, 600));
}

#[test]
fn a_last_step_may_be_smaller_than_the_others() {
    let mut run = Run::new();
    run.publish(0..5);
    let (_, samples) = run.samples();
    let mut authority = run.authority(1, 3, Resume::Fresh).unwrap();
    let first = authority.poll().unwrap().unwrap().concat();
    assert!(authority.last_window().is_err(), "more may come");
    run.writer = {
        let (folder, writer) = (tempfile::tempdir().unwrap(), run.writer);
        writer.close().unwrap();
        RefWriter::open(folder.path()).unwrap()
    };
    assert!(authority.poll().unwrap().is_none());
    let last = authority.last_window().unwrap().unwrap().concat();
    assert_eq!((names(&last).len(), authority.last_window().unwrap()), (2, None));
    let steps = [first, last].map(|refs| run.train(&samples, &refs));
    let mut acknowledger = run.alone(&samples, authority).batch(1);
    for (step, trained) in (1..).zip(steps) {
        let boundary = acknowledger.acknowledge(&Step::new(step, trained.clone())).unwrap();
        assert_eq!(boundary.acknowledged, trained.len() as u64);
    }
    assert_eq!(run.resident(), 0);
}
