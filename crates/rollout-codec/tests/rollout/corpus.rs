//! The committed fuzz corpus runs as ordinary tests.

use std::{fs, path::PathBuf};

use proptest::{collection::vec, prelude::*, sample::Index};
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A fuzzer's loop: a file of the corpus with a piece of another in it, bytes changed, and an
    /// end cut off. `PROPTEST_CASES` says how often; `cargo xtask soak` does.
    #[test]
    fn mutations_of_the_corpus_never_panic(
        file in any::<Index>(),
        other in any::<Index>(),
        piece in any::<(Index, Index, Index)>(),
        changes in vec((any::<Index>(), any::<u8>()), 0..8),
        cut in any::<Index>(),
    ) {
        for (name, target) in TARGETS {
            let mut files: Vec<_> =
                fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.sort();
            let read = |index: &Index| fs::read(&files[index.index(files.len())]).unwrap();
            let (mut data, other) = (read(&file), read(&other));
            let (at, from) = (piece.0.index(data.len() + 1), piece.1.index(other.len() + 1));
            let to = from + piece.2.index((other.len() - from).min(64) + 1);
            data.splice(at..at, other[from..to].iter().copied());
            for (place, byte) in &changes {
                if !data.is_empty() {
                    let place = place.index(data.len());
                    data[place] = *byte;
                }
            }
            target(&data);
            data.truncate(cut.index(data.len() + 1));
            target(&data);
        }
    }
}
