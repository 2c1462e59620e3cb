//! Shared secrets that are compared and sent, never shown.

use std::fmt;

use transport_core::{Error, ErrorKind, Result};

/// A token that proves the right to free; neither `Debug` nor any error shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<str>);

impl Secret {
    /// Longest secret accepted, in bytes.
    pub const MAX_BYTES: usize = 1024;

    /// Takes a secret of 1 to [`Self::MAX_BYTES`] bytes without control characters.
    pub fn new(text: impl Into<Box<str>>) -> Result<Self> {
        let text = text.into();
        let problem = if text.is_empty() {
            "the token is empty"
        } else if text.len() > Self::MAX_BYTES {
            "the token is longer than 1024 bytes"
        } else if text.chars().any(char::is_control) {
            "the token holds a control character"
        } else {
            return Ok(Self(text));
        };
        Err(Error::new(ErrorKind::InvalidInput, "read token", problem))
    }

    /// The secret itself, to be sent or kept.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether `other` is the same secret; takes the same time wherever the two differ.
    pub fn matches(&self, other: &Self) -> bool {
        let (a, b) = (self.0.as_bytes(), other.0.as_bytes());
        let differing =
            a.iter().zip(b).fold(0u8, |acc, (x, y)| std::hint::black_box(acc | (x ^ y)));
        a.len() == b.len() && differing == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_match_and_stay_hidden() {
        let secret = Secret::new("hush").unwrap();
        assert!(secret.matches(&Secret::new("hush").unwrap()));
        assert!(!secret.matches(&Secret::new("husk").unwrap()));
        assert!(!secret.matches(&Secret::new("hus").unwrap()));
        assert!(!format!("{secret:?}").contains("hush"));
        let error = Secret::new("hu\nsh").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("sh\n"), "{error}");
        assert!(Secret::new("").is_err());
        assert!(Secret::new("x".repeat(1025)).is_err());
    }
}
