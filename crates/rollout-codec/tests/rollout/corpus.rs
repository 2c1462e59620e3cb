//! The committed fuzz corpus runs as ordinary tests.

use std::{fs, path::PathBuf};

use rollout_codec::fuzzing::TARGETS;

fn folder(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

#[test]
fn every_file_of_the_corpus_is_read_or_refused() {
    for (name, target) in TARGETS {
        let mut files: Vec<_> =
            fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= 5, "{name} has {} files", files.len());
        for file in files {
            let bytes = fs::read(&file).unwrap();
            target(&bytes);
            // Cut short and flipped, besides.
            for cut in (0..bytes.len()).step_by(1 + bytes.len() / 64) {
                target(&bytes[..cut]);
                let mut flipped = bytes.clone();
                flipped[cut] ^= 1 << (cut % 8);
                target(&flipped);
            }
        }
    }
}
