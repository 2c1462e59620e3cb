use std::collections::HashMap;

use control_proto::sample_ref::SampleRef;
use indexmap::IndexMap;
use transport_core::{
    Descriptor, Dtype, FeatureDescriptor, FeatureName, Generation, Location, SampleId, SampleKey,
    StoreId, TensorMeta,
};

use super::{writer::Lines, *};

pub(crate) fn sample_ref(id: &str) -> SampleRef {
    let key =
        SampleKey::new(StoreId::new("run").unwrap(), SampleId::new(id).unwrap(), Generation(1));
    let meta = TensorMeta::new(Dtype::Int64, [1, 3]).unwrap();
    let name = FeatureName::new("input_ids").unwrap();
    let features = IndexMap::from([(name, FeatureDescriptor::new(meta, None, None))]);
    let descriptor = Descriptor::new(key, features, None, Location::Store).unwrap();
    SampleRef::new(&descriptor, "run", None, "dspark").unwrap()
}

fn refs(names: &[&str]) -> Vec<SampleRef> {
    names.iter().map(|name| sample_ref(name)).collect()
}

fn ids(polled: &Polled) -> Vec<&str> {
    polled.refs.iter().map(|r| r.sample_id.as_str()).collect()
}

/// Writes at most `room` more bytes, then fails; or fails to sync.
#[derive(Debug)]
struct Failing {
    file: fs::File,
    room: usize,
    sync: bool,
}

impl Lines for Failing {
    fn append(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let part = bytes.len().min(self.room);
        if part == 0 {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.room -= part;
        self.file.append(&bytes[..part])
    }
    fn sync(&mut self) -> std::io::Result<()> {
        if self.sync { Ok(()) } else { Err(std::io::Error::other("fsync failed")) }
    }
    fn cut(&mut self, length: u64) -> std::io::Result<()> {
        self.file.cut(length)
    }
}

fn failing(folder: &Path, room: usize, sync: bool) -> Box<dyn Lines> {
    let file = fs::OpenOptions::new().append(true).open(folder.join("refs.jsonl")).unwrap();
    Box::new(Failing { file, room, sync })
}

#[test]
fn d14_a_partial_trailing_line_is_not_parsed_and_a_restart_cuts_it_off() {
    let folder = tempfile::tempdir().unwrap();
    let mut reader = RefReader::open(folder.path()).unwrap();
    assert!(reader.poll(10).unwrap().refs.is_empty(), "nothing there yet");
    let mut writer = RefWriter::open(folder.path()).unwrap();
    writer.publish(&refs(&["a", "b"])).unwrap();
    let path = folder.path().join("refs.jsonl");
    let mut line = Vec::new();
    sample_ref("c").write(&mut line);
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(&line[..line.len() / 2]).unwrap();
    assert_eq!(ids(&reader.poll(10).unwrap()), ["a", "b"]);
    assert!(reader.poll(10).unwrap().refs.is_empty());
    drop(writer);
    let mut writer = RefWriter::open(folder.path()).unwrap();
    assert_eq!(writer.published(), 2);
    writer.publish(&refs(&["c"])).unwrap();
    assert_eq!(ids(&reader.poll(10).unwrap()), ["c"]);
}

#[test]
fn d14_a_partial_write_publishes_the_complete_prefix_only() {
    let folder = tempfile::tempdir().unwrap();
    let writer = RefWriter::open(folder.path()).unwrap();
    let mut line = Vec::new();
    sample_ref("a").write(&mut line);
    let mut writer = writer.with_lines(failing(folder.path(), line.len() + 10, true));
    let error = writer.publish(&refs(&["a", "b", "c"])).unwrap_err();
    assert_eq!(error.published, 1);
    assert!(error.to_string().contains("after 1/3 durable refs"), "{error}");
    assert_eq!(error.error.kind(), ErrorKind::CapacityExceeded);
    let mut writer = writer.with_lines(failing(folder.path(), 1 << 20, true));
    writer.publish(&refs(&["d"])).unwrap();
    let mut reader = RefReader::open(folder.path()).unwrap();
    assert_eq!(ids(&reader.poll(10).unwrap()), ["a", "d"], "half of b is gone");
}

#[test]
fn d14_lines_stay_published_when_fsync_fails() {
    let folder = tempfile::tempdir().unwrap();
    let writer = RefWriter::open(folder.path()).unwrap();
    let mut writer = writer.with_lines(failing(folder.path(), 1 << 20, false));
    let error = writer.publish(&refs(&["a"])).unwrap_err();
    assert_eq!(error.published, 1);
    let mut reader = RefReader::open(folder.path()).unwrap();
    assert_eq!(ids(&reader.poll(10).unwrap()), ["a"]);
}

#[test]
fn d14_the_quantum_is_claimed_once_and_does_not_change_on_resume() {
    let folder = tempfile::tempdir().unwrap();
    let reader = RefReader::open(folder.path()).unwrap();
    reader.claim_quantum(16, false).unwrap();
    let writer = RefWriter::open(folder.path()).unwrap();
    assert_eq!(writer.quantum().unwrap(), Some(16));
    let error = reader.claim_quantum(16, false).unwrap_err();
    assert!(error.to_string().contains("fresh reference channel"), "{error}");
    reader.claim_quantum(16, true).unwrap();
    let error = reader.claim_quantum(8, true).unwrap_err();
    assert!(error.to_string().contains("changed across resume"), "{error}");
}

#[test]
fn d14_failure_wins_over_closed_and_closing_drains_everything() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = RefWriter::open(folder.path()).unwrap();
    writer.publish(&refs(&["a", "b", "c"])).unwrap();
    let mut reader = RefReader::open(folder.path()).unwrap();
    writer.close().unwrap();
    let polled = reader.poll(2).unwrap();
    assert_eq!((ids(&polled), polled.ended), (vec!["a", "b"], false));
    let polled = reader.poll(2).unwrap();
    assert_eq!((ids(&polled), polled.ended), (vec!["c"], true));
    assert_eq!(RefWriter::open(folder.path()).unwrap_err().kind(), ErrorKind::Closed);
    reader.files.replace("failed", "boom").unwrap();
    assert!(reader.poll(1).unwrap_err().to_string().contains("boom"));
}

#[test]
fn one_producer_at_a_time_and_both_ends_see_how_the_other_does() {
    let folder = tempfile::tempdir().unwrap();
    let writer = RefWriter::open(folder.path()).unwrap();
    assert_eq!(RefWriter::open(folder.path()).unwrap_err().kind(), ErrorKind::Busy);
    let mut reader = RefReader::open(folder.path()).unwrap();
    reader.settle(3).unwrap();
    reader.settle(2).unwrap();
    assert_eq!((reader.settled(), writer.settled().unwrap()), (3, 3));
    assert!(!writer.consumers_done().unwrap());
    reader.done().unwrap();
    assert!(writer.consumers_done().unwrap());
    reader.fail("out of memory").unwrap();
    assert!(writer.consumers_done().unwrap_err().to_string().contains("out of memory"));
}

#[test]
fn lost_samples_are_wanted_again_exactly_as_often_as_they_were_lost() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = RefWriter::open(folder.path()).unwrap();
    let reader = RefReader::open(folder.path()).unwrap();
    let a = SampleId::new("a").unwrap();
    assert!(writer.wants(&a, &HashMap::new()));
    writer.publish(&refs(&["a"])).unwrap();
    assert!(!writer.wants(&a, &writer.lost().unwrap()));
    reader.lost([&a]).unwrap();
    assert!(writer.wants(&a, &writer.lost().unwrap()));
    writer.publish(&refs(&["a"])).unwrap();
    drop(writer);
    let writer = RefWriter::open(folder.path()).unwrap();
    assert!(!writer.wants(&a, &writer.lost().unwrap()), "also after a restart");
}

/// Upstream counts over HTTP what is consumed; here it is a small file, replaced as a whole.
#[test]
fn d19_settling_is_absolute_whoever_repeats_it_and_looking_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = RefWriter::open(folder.path()).unwrap();
    writer.publish(&refs(&["a", "b", "c"])).unwrap();
    let mut reader = RefReader::open(folder.path()).unwrap();
    assert!(reader.poll(0).unwrap().refs.is_empty(), "a look at the state");
    assert_eq!(ids(&reader.poll(2).unwrap()), ["a", "b"]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut retrying = RefReader::open(folder.path()).unwrap();
                (0..20).for_each(|_| retrying.settle(2).unwrap());
            });
        }
        for _ in 0..100 {
            assert!(matches!(writer.settled(), Ok(0 | 2)), "never half a number");
        }
    });
    reader.settle(2).unwrap();
    reader.settle(1).unwrap();
    assert_eq!((reader.settled(), writer.settled().unwrap()), (2, 2), "it never goes back");
    assert_eq!(ids(&reader.poll(9).unwrap()), ["c"], "and nothing was lost on the way");
}

/// A path that is mistyped must not become a channel that no peer looks into.
#[test]
fn one_folder_is_made_and_no_path_to_it() {
    let parent = tempfile::tempdir().unwrap();
    let deep = parent.path().join("mistyped/channel");
    for error in [RefReader::open(&deep).unwrap_err(), RefWriter::open(&deep).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.context("folder").is_some_and(|it| it.ends_with("mistyped/channel")));
        assert!(error.to_string().contains("correct the path"), "{error}");
    }
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "nothing is left behind");
    let channel = parent.path().join("channel");
    for _ in 0..2 {
        RefReader::open(&channel).unwrap();
    }
    std::os::unix::fs::symlink(&channel, parent.path().join("link")).unwrap();
    RefReader::open(&parent.path().join("link")).unwrap();
    std::fs::write(parent.path().join("file"), "").unwrap();
    assert!(RefReader::open(&parent.path().join("file")).is_err());
}
