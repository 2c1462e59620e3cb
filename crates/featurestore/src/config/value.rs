//! How single values are written, and what is said about mistakes in them.

use std::time::Duration;

use transport_core::{ByteSize, Error, ErrorKind, Result};

pub(super) fn fold(text: &str) -> String {
    text.trim().to_ascii_lowercase().replace('-', "_")
}

/// What may have been meant by a name that is not known.
pub(crate) fn suggestion<'a>(found: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let list = known.clone().collect::<Vec<_>>().join(", ");
    match nearest(found, known) {
        Some(nearest) => format!("did you mean {nearest}? known: {list}"),
        None => format!("known: {list}"),
    }
}

/// The known name that `found` is a misspelling of, if it looks like one.
pub(super) fn nearest<'a>(found: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |name: &&str| strsim::levenshtein(found, name);
    known.min_by_key(distance).filter(|name| distance(name) <= 3)
}

pub(super) fn bad(why: &'static str, found: &str) -> Error {
    Error::new(ErrorKind::ConfigInvalid, "configure", why).with("found", format_args!("{found:?}"))
}

pub(super) fn boolean(text: &str) -> Result<bool> {
    match fold(text).as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(bad("neither true nor false", text)),
    }
}

/// The number of a GPU in this process.
pub(super) fn device(text: &str) -> Result<u32> {
    const MOST: u32 = 1024;
    let number = text.trim().parse().ok().filter(|number| *number < MOST);
    number.ok_or_else(|| {
        bad("not the number of a GPU", text).remedy("write 0 for the first one, and so on")
    })
}

pub(super) fn nonzero_size(text: &str) -> Result<ByteSize> {
    let size: ByteSize = text.parse()?;
    if size.get() == 0 { Err(bad("the size is zero", text)) } else { Ok(size) }
}

/// Longest duration that a setting may name.
const MAX_DURATION: Duration = Duration::from_secs(24 * 3600);

/// A duration: a whole number and `ms`, `s` or `m`; at least 1 ms, at most a day.
pub fn duration(text: &str) -> Result<Duration> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let millis = match unit.trim_start() {
        "ms" => Some(1),
        "s" => Some(1_000),
        "m" => Some(60_000),
        _ => None,
    };
    let number: Option<u64> = number.parse().ok();
    number
        .zip(millis)
        .and_then(|(number, millis)| number.checked_mul(millis))
        .map(Duration::from_millis)
        .filter(|d| !d.is_zero() && *d <= MAX_DURATION)
        .ok_or_else(|| bad("not a duration", text).remedy("write 500ms, 30s or 5m; at most a day"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_bounded() {
        assert_eq!(duration("500ms").unwrap(), Duration::from_millis(500));
        for text in ["0s", "-1s", "1", "1h", "99999999999999999999s", "25000m", "1.5s", ""] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
