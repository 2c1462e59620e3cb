//! The golden samples: objects, reference and decoded values as Mooncake's Python code made them.

use rollout_codec::mooncake::Dump;

pub(crate) const SAMPLES: [&str; 7] =
    ["sample1", "sample2", "sample3", "sample4", "sample5", "sample6", "sample7"];

pub(crate) struct Golden {
    pub(crate) hex: String,
    pub(crate) dump: Dump,
    pub(crate) reference: Option<String>,
    pub(crate) decoded: String,
}

impl Golden {
    pub(crate) fn load(name: &str) -> Self {
        let file = |suffix: &str| {
            let path = format!("{}/tests/golden/{name}{suffix}", env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(path)
        };
        let hex = file(".hex").unwrap();
        Self {
            dump: Dump::parse(&hex).unwrap(),
            hex,
            reference: file("_ref.json").ok(),
            decoded: file("_decoded.json").unwrap(),
        }
    }

    /// The first object is the manifest.
    pub(crate) fn manifest_key(&self) -> &str {
        self.dump.objects.keys().next().unwrap()
    }
}
