use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use super::*;

fn id(i: u64) -> SampleId {
    SampleId::new(format!("run:e0:task-{i:07}")).unwrap()
}

fn ids(range: std::ops::Range<u64>) -> Vec<SampleId> {
    range.map(id).collect()
}

fn batch(range: std::ops::Range<u64>) -> Vec<(SampleId, Vec<u8>)> {
    range.map(|i| (id(i), format!("record {i}").into_bytes())).collect()
}

fn open(path: &Path) -> Ledger {
    Ledger::open(path, "run", LedgerOptions::default()).unwrap()
}

#[test]
fn a_restart_finds_in_flight_and_unfreed_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let mut ledger = open(&path);
    assert!(ledger.is_empty());
    assert_eq!(ledger.commit(&batch(0..10)).unwrap(), [Standing::New; 10]);
    assert_eq!(ledger.commit(&batch(9..11)).unwrap(), [Standing::InFlight, Standing::New]);
    let done = ledger.acknowledge(1, &ids(0..4)).unwrap();
    assert_eq!((done.new, done.repeated), (4, 0));
    ledger.freed(&ids(0..2));
    drop(ledger); // the note is lost, as in a crash

    let mut ledger = open(&path);
    assert_eq!(ledger.marker(), Some(1));
    assert_eq!(ledger.unfreed().unwrap().len(), 4);
    let flying = ledger.in_flight().unwrap();
    assert_eq!(flying.len(), 7);
    assert_eq!(flying[0], (id(4), b"record 4".to_vec()));
    ledger.freed(&ids(0..4));
    ledger.flush().unwrap();
    drop(ledger);
    let mut ledger = open(&path);
    assert!(ledger.unfreed().unwrap().is_empty());
    assert_eq!(ledger.commit(&batch(3..5)).unwrap(), [Standing::Acknowledged, Standing::InFlight]);
    assert_eq!(ledger.lost(&ids(0..6)).unwrap(), 2, "only what is in flight can be lost");
    assert_eq!(ledger.commit(&batch(5..6)).unwrap(), [Standing::New]);
}

#[test]
fn steps_are_in_order_and_duplicates_are_settled_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut ledger = open(&folder.path().join("l"));
    ledger.commit(&batch(0..10)).unwrap();
    ledger.acknowledge(5, &ids(0..2)).unwrap();
    let again = ledger.acknowledge(5, &ids(0..2)).unwrap();
    assert_eq!((again.new, again.repeated), (0, 2), "a lost answer");
    assert_eq!(ledger.acknowledge(5, &ids(2..3)).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(ledger.acknowledge(4, &[]).unwrap_err().kind(), ErrorKind::Stale);
    let error = ledger.acknowledge(6, &[id(3), id(77)]).unwrap_err();
    assert_eq!(error.context("sample_id"), Some(id(77).as_str()), "{error}");
    assert!(!ledger.acknowledged().contains(id(3).as_str()), "all or nothing");
    let twice = ledger.acknowledge(6, &[id(3), id(3), id(0)]).unwrap();
    assert_eq!((twice.new, twice.repeated), (1, 2));
    ledger.freed(&[id(0), id(3)]);
    ledger.flush().unwrap();
    let gone = ledger.acknowledge(6, &[id(3), id(0)]).unwrap();
    assert_eq!((gone.new, gone.repeated), (0, 2), "what is free again is known by its history");
}

#[test]
fn one_owner_one_run_and_no_foreign_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l");
    let first = open(&path);
    let error = Ledger::open(&path, "run", LedgerOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    drop(first);
    let error = Ledger::open(&path, "other", LedgerOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    let junk = folder.path().join("junk");
    std::fs::write(&junk, vec![7; 8192]).unwrap();
    let error = Ledger::open(&junk, "run", LedgerOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let nowhere = folder.path().join("no/such/folder");
    let error = Ledger::open(&nowhere, "run", LedgerOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

#[test]
fn a_full_disk_records_nothing_and_the_same_call_works_once_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l");
    let options = LedgerOptions { max_bytes: Some(96 << 10), ..LedgerOptions::default() };
    let mut ledger = Ledger::open(&path, "run", options).unwrap();
    let mut taken = 0;
    let error = loop {
        match ledger.commit(&batch(taken..taken + 100)) {
            Ok(_) => taken += 100,
            Err(error) => break error,
        }
        assert!(taken < 100_000, "the bound is kept");
    };
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{error}");
    assert!(error.to_string().contains("make room"), "{error}");
    assert_eq!(ledger.in_flight().unwrap().len() as u64, taken);
    drop(ledger);
    let mut ledger = open(&path);
    assert_eq!(ledger.in_flight().unwrap().len() as u64, taken);
    ledger.commit(&batch(taken..taken + 100)).unwrap();
    ledger.acknowledge(1, &ids(0..taken + 100)).unwrap();
}

#[test]
fn a_crash_before_and_inside_the_commit_records_nothing_and_after_it_everything() {
    for (point, durable) in
        [(Point::BeforeCommit, false), (Point::InsideCommit, false), (Point::AfterCommit, true)]
    {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l");
        open(&path).commit(&batch(0..4)).unwrap();
        let observer = Observer::new(move |at| assert!(at != point, "crash"));
        let options = LedgerOptions { observer, ..LedgerOptions::default() };
        let mut ledger = Ledger::open(&path, "run", options).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| ledger.acknowledge(1, &ids(0..4)))).is_err());
        drop(ledger);
        let ledger = open(&path);
        assert_eq!(ledger.marker().is_some(), durable, "{point:?}");
        assert_eq!(ledger.unfreed().unwrap().len(), if durable { 4 } else { 0 });
        assert_eq!(ledger.in_flight().unwrap().len(), if durable { 0 } else { 4 });
    }
}

#[test]
fn a_clock_that_jumps_changes_nothing() {
    fn before_time_began() -> SystemTime {
        SystemTime::UNIX_EPOCH - Duration::from_secs(1 << 40)
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l");
    let mut ledger = open(&path);
    ledger.commit(&batch(0..4)).unwrap();
    ledger.acknowledge(1, &ids(0..1)).unwrap();
    drop(ledger);
    let options = LedgerOptions { clock: before_time_began, ..LedgerOptions::default() };
    let mut ledger = Ledger::open(&path, "run", options).unwrap();
    ledger.acknowledge(2, &ids(1..2)).unwrap();
    drop(ledger);
    let mut ledger = open(&path);
    assert_eq!(ledger.marker(), Some(2));
    ledger.acknowledge(3, &ids(2..3)).unwrap();
}

#[test]
fn old_steps_are_folded_and_nothing_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l");
    let mut ledger = open(&path);
    ledger.connection.pragma_update(None, "synchronous", "OFF").unwrap(); // speed; not under test
    let steps = STEPS_KEPT as u64 + 10;
    let odd = SampleId::new("deadbeef").unwrap();
    ledger.commit(&[(odd.clone(), Vec::new())]).unwrap();
    ledger.commit(&batch(0..steps)).unwrap();
    for step in 0..steps {
        let mut step_ids = vec![id(step)];
        step_ids.extend((step == 7).then(|| odd.clone()));
        ledger.acknowledge(step, &step_ids).unwrap();
    }
    let before = ledger.acknowledged().clone();
    drop(ledger);
    drop(open(&path)); // folds
    let ledger = open(&path);
    let kept: i64 =
        ledger.connection.query_row("SELECT count(*) FROM step", [], |r| r.get(0)).unwrap();
    assert_eq!(kept, 1);
    assert_eq!(*ledger.acknowledged(), before);
    assert_eq!(ledger.marker(), Some(steps - 1));
    assert!(ledger.acknowledged().contains("deadbeef"));
}

/// The cost of a step stays the same however long the run is; the bound is loose because others
/// use the machine too, and `benches` prints exact figures.
#[test]
fn a_long_history_does_not_slow_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut ledger = open(&folder.path().join("l"));
    ledger.connection.pragma_update(None, "synchronous", "OFF").unwrap(); // without its fsync
    let mut step = 0;
    let mut run = |ledger: &mut Ledger, steps: u64| {
        let mut times = Vec::new();
        for _ in 0..steps {
            let range = step * 128..(step + 1) * 128;
            ledger.commit(&batch(range.clone())).unwrap();
            let ids = ids(range);
            let start = Instant::now();
            ledger.acknowledge(step + 1, &ids).unwrap();
            ledger.freed(&ids);
            times.push(start.elapsed());
            step += 1;
        }
        times.sort_unstable();
        times[times.len() / 2]
    };
    let young = run(&mut ledger, 100);
    run(&mut ledger, 1500);
    let old = run(&mut ledger, 100);
    assert!(old < young * 3 + Duration::from_millis(1), "{young:?} became {old:?}");
    assert!(ledger.acknowledged().pieces() < 16, "{}", ledger.acknowledged().pieces());
}
