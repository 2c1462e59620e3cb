//! Objects that Mooncake's own Python code wrote are read value for value, kind for kind.

mod golden;

use golden::{Golden, SAMPLES};
use rollout_codec::{
    json::{self, Style},
    mooncake::{Reader, Reference},
    notation::{self, Layout},
};

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
