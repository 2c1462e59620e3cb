//! Newtypes for identities, lives and places, so that none is mistaken for another.

use std::{fmt, str::FromStr, sync::Arc};

use crate::{Error, ErrorKind, Result};

/// Longest object key accepted, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;

fn check_text(what: &'static str, text: &str, slash_allowed: bool) -> Result<()> {
    let problem = if text.is_empty() {
        "is empty"
    } else if text.len() > MAX_KEY_BYTES {
        "is longer than 1024 bytes"
    } else if text.chars().any(char::is_control) {
        "holds a control character"
    } else if !slash_allowed && text.contains('/') {
        "holds a '/'"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidInput, "parse name", format!("the {what} {problem}"))
        .with("found", format_args!("{:?}", text.chars().take(80).collect::<String>())))
}

macro_rules! text_newtype {
    ($(#[$doc:meta])* $name:ident, $what:literal, slash: $slash:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Takes the text, or says why it cannot be one.
            pub fn new(text: impl AsRef<str>) -> Result<Self> {
                check_text($what, text.as_ref(), $slash)?;
                Ok(Self(text.as_ref().into()))
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                Self::new(text)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

text_newtype!(
    /// The store, or training run, that samples belong to. Holds no `/`.
    StoreId,
    "store id",
    slash: false
);
text_newtype!(
    /// One captured sample, such as `run0:task-1`. May hold `/` and `:`.
    SampleId,
    "sample id",
    slash: true
);
text_newtype!(
    /// A tensor's name inside its sample, such as `hidden_states`. Holds no `/`.
    FeatureName,
    "feature name",
    slash: false
);
text_newtype!(
    /// A process that holds samples: a trainer rank, for as long as it lives. Holds no `/`.
    ClientId,
    "client id",
    slash: false
);

impl ClientId {
    /// A fresh identity: 32 random hexadecimal digits.
    pub fn random() -> Self {
        let mut bytes = [0u8; 16];
        getrandom::fill(&mut bytes).expect("the operating system provides random bytes");
        Self(bytes.iter().map(|b| format!("{b:02x}")).collect::<String>().into())
    }
}

macro_rules! number_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_newtype!(
    /// Attempt number of a sample as its producer counts it. Server captures always use 1, so this
    /// alone does not tell two lives of a key apart: see [`Sequence`].
    Generation
);
number_newtype!(
    /// One life of a publishing process: random, never 0, at most 2^53 so that every JSON reader
    /// keeps it exact.
    Epoch
);
number_newtype!(
    /// One life of one object within an [`Epoch`]: 1, 2, 3, … in the order of publication.
    Sequence
);
number_newtype!(
    /// Byte of a shared arena's file that a consumer keeps locked for as long as it maps the arena:
    /// random, never 0, at most 2^53. The kernel ends the lock together with the mapping, so the
    /// publisher can tell a consumer that is only slow from one that can see nothing any more.
    MapMark
);
number_newtype!(
    /// An address in the publisher's address space. Never dereferenced here.
    RemoteAddr
);
number_newtype!(
    /// A distance in bytes from the start of an arena. Not an address.
    ArenaOffset
);

impl Epoch {
    /// A fresh random epoch.
    pub fn random() -> Self {
        Self(random_number())
    }
}

impl MapMark {
    /// Largest mark.
    pub const MAX: Self = Self(1 << 53);

    /// A fresh random mark.
    pub fn random() -> Self {
        Self(random_number())
    }
}

/// From 1 to 2^53.
fn random_number() -> u64 {
    let mut bytes = [0u8; 8];
    getrandom::fill(&mut bytes).expect("the operating system provides random bytes");
    (u64::from_le_bytes(bytes) >> 11).max(1)
}

impl RemoteAddr {
    /// The address `bytes` further on, unless that overflows.
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

/// Identity of one sample: store, sample and generation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleKey {
    /// Store or run.
    pub store_id: StoreId,
    /// Sample within the store.
    pub sample_id: SampleId,
    /// The producer's attempt number.
    pub generation: Generation,
}

impl SampleKey {
    /// Puts an identity together; all parts are already valid.
    pub fn new(store_id: StoreId, sample_id: SampleId, generation: Generation) -> Self {
        Self { store_id, sample_id, generation }
    }

    /// Key of one tensor of the sample.
    pub fn object(&self, name: &FeatureName) -> ObjectKey {
        let mut key = String::with_capacity(128); // enough for most
        self.push_prefix(&mut key);
        key.push_str(name.as_str());
        ObjectKey(key.into())
    }

    /// Appends what the keys of all its tensors begin with: all but their names.
    pub fn push_prefix(&self, out: &mut String) {
        // Piece by piece: a step's frees write thousands of keys.
        out.push_str(self.store_id.as_str());
        out.push('/');
        out.push_str(self.sample_id.as_str());
        out.push_str("/g");
        // Writing to a string cannot fail.
        let _ = fmt::Write::write_fmt(out, format_args!("{}/", self.generation.0));
    }
}

impl fmt::Display for SampleKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/g{}", self.store_id, self.sample_id, self.generation)
    }
}

/// Key of one stored tensor: `{store_id}/{sample_id}/g{gen}/{name}`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey(Arc<str>);

impl ObjectKey {
    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text, shared.
    pub fn shared(&self) -> Arc<str> {
        self.0.clone()
    }

    /// Store id, sample id, generation and feature name.
    pub fn parts(&self) -> (&str, &str, Generation, &str) {
        split_key(&self.0).expect("checked when the key was made")
    }
}

fn split_key(text: &str) -> Option<(&str, &str, Generation, &str)> {
    let (rest, name) = text.rsplit_once('/')?;
    let (rest, generation) = rest.rsplit_once("/g")?;
    let (store, sample) = rest.split_once('/')?;
    let canonical = generation == "0" || !generation.starts_with('0');
    if !canonical || !generation.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let generation = Generation(generation.parse().ok()?);
    (!store.is_empty() && !sample.is_empty() && !name.is_empty())
        .then_some((store, sample, generation, name))
}

impl FromStr for ObjectKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        check_text("object key", text, true)?;
        if split_key(text).is_none() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "parse object key",
                "not of the form store_id/sample_id/gN/name",
            )
            .with("found", format_args!("{text:?}")));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl std::borrow::Borrow<str> for ObjectKey {
    fn borrow(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_keys_keep_slashes_and_colons_of_the_sample() {
        let sample = SampleKey::new(
            StoreId::new("run0").unwrap(),
            SampleId::new("run0:task/7").unwrap(),
            Generation(1),
        );
        let key = sample.object(&FeatureName::new("input_ids").unwrap());
        assert_eq!(key.as_str(), "run0/run0:task/7/g1/input_ids");
        assert_eq!(key.parts(), ("run0", "run0:task/7", Generation(1), "input_ids"));
        assert_eq!(key.as_str().parse::<ObjectKey>().unwrap(), key);
        let mut prefix = "#".to_owned();
        sample.push_prefix(&mut prefix);
        assert_eq!(
            (prefix, sample.to_string()),
            (format!("#{sample}/"), "run0/run0:task/7/g1".into())
        );
    }

    #[test]
    fn bad_names_say_what_is_wrong() {
        for (text, part) in [("", "empty"), ("a\nb", "control"), ("a/b", "'/'")] {
            let error = StoreId::new(text).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        for bad in ["a/b/c", "a/b/g/x", "a/b/g01/x", "a/b/g-1/x", "/b/g1/x", "a/b/g1/", "a//g1/x"] {
            assert!(bad.parse::<ObjectKey>().is_err(), "{bad}");
        }
        assert!("x".repeat(1025).parse::<ObjectKey>().is_err());
    }

    #[test]
    fn epochs_are_exact_in_json_and_differ() {
        let (a, b) = (Epoch::random(), Epoch::random());
        assert!(a.0 > 0 && a.0 <= 1 << 53);
        assert_ne!(a, b);
        assert_ne!(ClientId::random(), ClientId::random());
    }
}
