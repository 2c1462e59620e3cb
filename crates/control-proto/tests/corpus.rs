//! Runs every committed input of the fuzz targets through the same entry functions.

use std::{fs, path::PathBuf};

use control_proto::fuzzing::TARGETS;

fn fuzz() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

#[test]
fn every_input_of_every_target_runs() {
    for (name, target) in TARGETS {
        let inputs = fs::read_dir(fuzz().join("corpus").join(name)).unwrap();
        let mut count = 0;
        for input in inputs {
            let path = input.unwrap().path();
            println!("{}", path.display()); // shown when it fails
            target(&fs::read(&path).unwrap());
            count += 1;
        }
        assert!(count >= 5, "{name} has {count} inputs");
    }
}

#[test]
fn every_target_is_built_and_has_a_corpus() {
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let source = fuzz().join(format!("fuzz_targets/{name}.rs"));
        let source = fs::read_to_string(source).unwrap();
        assert!(source.contains(&format!("fuzzing::{name}(data)")), "{name}");
    }
    // Those of other crates are run by these.
    for corpus in fs::read_dir(fuzz().join("corpus")).unwrap() {
        let name = corpus.unwrap().file_name().into_string().unwrap();
        assert!(manifest.contains(&format!("name = \"{name}\"")), "no target for corpus {name}");
    }
}
