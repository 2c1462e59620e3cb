//! Objects that Mooncake's own Python code wrote are read value for value, kind for kind.

use std::num::NonZeroU64;

use indexmap::IndexMap;
use rollout_codec::{
    Column, Schema, Value,
    commands::{EncodeOptions, encode},
    json::{self, Style},
    mooncake::{Dump, MemoryStore, ObjectStore, Place, Reader, Reference, Writer, cleanup, remove},
    notation::{self, Layout},
};

use crate::golden::{Golden, SAMPLES};

#[test]
fn every_sample_is_read_as_python_reads_it() {
    for name in SAMPLES {
        let golden = Golden::load(name);
        let reader = Reader::new(&golden.dump.objects);
        let decoded = match &golden.reference {
            Some(reference) => {
                let reference = Reference::parse(reference.as_bytes()).unwrap();
                let rollout = reader.rollout(&reference).unwrap();
                let layout = if golden.decoded.contains("\"layout\": \"flat\"") {
                    Layout::Flat
                } else {
                    Layout::Envelope
                };
                notation::decoded(&rollout, layout).unwrap()
            }
            None => reader.members(golden.manifest_key()).unwrap().decoded().unwrap(),
        };
        let text = json::write(&decoded, Style::PRETTY).unwrap();
        assert_eq!(text, golden.decoded, "{name}");
    }
}

#[test]
fn references_and_dumps_survive_byte_for_byte() {
    for name in SAMPLES {
        let golden = Golden::load(name);
        assert_eq!(golden.dump.to_text().unwrap(), golden.hex, "{name}");
        if let Some(text) = &golden.reference {
            let reference = Reference::parse(text.as_bytes()).unwrap();
            assert_eq!(&reference.to_json(Style::PRETTY).unwrap(), text, "{name}");
        }
    }
}

/// What the generator of the samples was told: prefix, first id, chunk length and place.
fn options(name: &str, golden: &Golden) -> EncodeOptions {
    let base = 0xa000_0000_0000_0000_0000_0000_0000_0000;
    let (prefix, first, chunk) = match name {
        "sample1" => ("golden1", 1, 64 << 20),
        "sample2" => ("golden2", 3, 40),
        "sample3" => ("golden3", 5, 64 << 20),
        "sample4" => ("golden4", 6, 64 << 20),
        "sample5" => ("golden5", 0x50, 100),
        "sample6" => ("golden6", 0x60, 64 << 20),
        _ => ("slime-rollout", 0x70, 64 << 20),
    };
    let place = |namespace: &str, partition: &str, stage: &str| Place {
        namespace: namespace.into(),
        partition: partition.into(),
        stage: stage.into(),
    };
    EncodeOptions {
        prefix: prefix.into(),
        first_id: Some(base + first),
        chunk_bytes: NonZeroU64::new(chunk).unwrap(),
        place: match name {
            "sample2" => place("ns", "p0", "rollout"),
            "sample7" => place("slime", "dp0", "rollout"),
            _ => Place::default(),
        },
        like: golden.reference.as_ref().map(|text| Reference::parse(text.as_bytes()).unwrap()),
        ..EncodeOptions::default()
    }
}

fn assert_same_objects(name: &str, golden: &Golden, mut dump: Dump, reference: Option<Reference>) {
    dump.note.clone_from(&golden.dump.note);
    let reference = reference.map(|reference| reference.to_json(Style::PRETTY).unwrap());
    assert_eq!(reference, golden.reference, "{name}");
    for key in golden.dump.objects.keys().chain(dump.objects.keys()) {
        let text = |dump: &Dump| {
            let bytes = dump.objects.get(key).unwrap().unwrap_or_else(|| panic!("{name}: {key}"));
            String::from_utf8_lossy(&bytes).into_owned()
        };
        assert_eq!(text(&dump), text(&golden.dump), "{name}: {key}");
    }
    assert_eq!(dump.objects.len(), golden.dump.objects.len());
}

#[test]
fn decoded_samples_are_written_byte_for_byte() {
    for name in SAMPLES {
        let golden = Golden::load(name);
        let decoded = json::parse(golden.decoded.as_bytes()).unwrap();
        let (dump, reference) = encode(&decoded, &options(name, &golden)).unwrap();
        assert_same_objects(name, &golden, dump, reference);
    }
}

#[test]
fn samples_that_python_inferred_are_inferred_the_same() {
    for name in ["sample2", "sample4"] {
        let golden = Golden::load(name);
        let options = options(name, &golden);
        let reference = options.like.clone().unwrap();
        let rollout = Reader::new(&golden.dump.objects).rollout(&reference).unwrap();
        // From values alone: no codec, no element type, no structure is handed over.
        let values = |columns: &IndexMap<String, Column<'_>>| {
            let value = |(name, column): (&String, &Column<'_>)| {
                let value = match column {
                    Column::Dense(dense) => Value::Array(dense.to_array()),
                    column => Value::List(column.to_values().unwrap()),
                };
                (name.clone(), value)
            };
            columns.iter().map(value).collect::<IndexMap<_, _>>()
        };
        let again = Schema::new()
            .rollout_of_sections(
                &values(&rollout.batch),
                &values(&rollout.non_tensor),
                &rollout.meta,
            )
            .unwrap();
        let mut dump = Dump::default();
        let mut next = options.first_id.unwrap();
        let inferred = again.non_tensor.keys().cloned().collect();
        let written = Writer::new(&mut dump.objects, &options.prefix)
            .unwrap()
            .chunk_bytes(options.chunk_bytes)
            .ids(|| {
                next += 1;
                next - 1
            })
            .put(&again, &options.place, &inferred)
            .unwrap();
        assert_same_objects(name, &golden, dump, Some(written));
    }
}

/// Written by the same Python code over a store in memory: what the samples above do not have.
#[test]
fn appended_stages_pictures_and_dicts_are_read_as_python_reads_them() {
    for (name, layout) in [("appended", Layout::Envelope), ("media", Layout::Flat)] {
        let golden = Golden::load(name);
        let reference = Reference::parse(golden.reference.as_ref().unwrap().as_bytes()).unwrap();
        let decoded = rollout_codec::commands::decode(&golden.dump, &reference, layout).unwrap();
        assert_eq!(json::write(&decoded, Style::PRETTY).unwrap(), golden.decoded, "{name}");
        assert_eq!(reference.to_json(Style::PRETTY).unwrap(), golden.reference.unwrap(), "{name}");
        // A merged object also owns the manifests that it replaced.
        let mut store = golden.dump.objects.clone();
        let objects = store.len() as u64;
        assert_eq!(cleanup(&mut store, &reference).unwrap(), objects, "{name}");
        assert!(store.is_empty(), "{name}");
    }
    let golden = Golden::load("media");
    let decoded = json::parse(golden.decoded.as_bytes()).unwrap();
    let like = Reference::parse(golden.reference.as_ref().unwrap().as_bytes()).unwrap();
    let options =
        EncodeOptions { prefix: "media".into(), like: Some(like.clone()), ..Default::default() };
    let (dump, reference) = encode(&decoded, &options).unwrap();
    assert_eq!(reference.unwrap().encoded, like.encoded);
    let payloads = |dump: &Dump| {
        let last = |key: &str| key.rsplit('/').next().unwrap().to_owned();
        let keys = dump.objects.keys().filter(|key| key.contains("/buffer/"));
        keys.map(|key| (last(key), dump.objects.get(key).unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(payloads(&dump), payloads(&golden.dump));
}

#[test]
fn cleanup_leaves_nothing_and_can_be_repeated() {
    for name in SAMPLES {
        let golden = Golden::load(name);
        let mut store = golden.dump.objects.clone();
        let objects = store.len() as u64;
        let clean = |store: &mut MemoryStore| match &golden.reference {
            Some(text) => cleanup(store, &Reference::parse(text.as_bytes()).unwrap()),
            None => remove(store, golden.manifest_key()),
        };
        // Payloads first, the manifest last: a cleanup that stopped halfway can be run again.
        let lost = store.keys().nth(2).unwrap().to_owned();
        store.remove(&lost).unwrap();
        assert_eq!(clean(&mut store).unwrap(), objects - 1, "{name}");
        assert!(store.is_empty(), "{name}");
        assert_eq!(clean(&mut store).unwrap(), 0, "{name}");
    }
}
