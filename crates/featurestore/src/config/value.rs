//! How single values are written, and what is said about mistakes in them.

use std::{net::SocketAddr, time::Duration};

use transport_core::{ByteSize, Error, ErrorKind, Result, check_host};
use transport_mooncake_direct::Cidr;

pub(super) fn fold(text: &str) -> String {
    text.trim().to_ascii_lowercase().replace('-', "_")
}

pub(super) fn suggestion(found: &str, known: impl Iterator<Item = &'static str> + Clone) -> String {
    nearest(found, &known.collect::<Vec<_>>())
}

/// What may have been meant by a name that is not known.
pub(crate) fn nearest(found: &str, known: &[&str]) -> String {
    let list = known.join(", ");
    match known.iter().min_by_key(|k| distance(found, k)).filter(|k| distance(found, k) <= 3) {
        Some(nearest) => format!("did you mean {nearest}? known: {list}"),
        None => format!("known: {list}"),
    }
}

/// Edits between two short names.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
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

pub(super) fn nonzero_size(text: &str) -> Result<ByteSize> {
    let size: ByteSize = text.parse()?;
    if size.get() == 0 { Err(bad("the size is zero", text)) } else { Ok(size) }
}

pub(super) fn bounded(text: &str, most: usize) -> Result<usize> {
    text.trim()
        .parse()
        .ok()
        .filter(|n| (1..=most).contains(n))
        .ok_or_else(|| bad("not a number within its bounds", text).with("max", most))
}

/// Samples a second: more than zero, and something that a clock can pace.
pub(super) fn rate(text: &str) -> Result<f64> {
    text.trim()
        .parse()
        .ok()
        .filter(|rate: &f64| rate.is_finite() && (0.001..=1e6).contains(rate))
        .ok_or_else(|| bad("not a number of samples a second", text).remedy("write such as 67.3"))
}

pub(super) fn host(text: &str) -> Result<String> {
    check_host(text).map_err(|why| bad(why, text)).map(|()| text.to_owned())
}

pub(super) fn networks(text: &str) -> Result<Vec<Cidr>> {
    text.split(',').map(str::trim).filter(|n| !n.is_empty()).map(str::parse).collect()
}

pub(super) fn address(text: &str) -> Result<SocketAddr> {
    text.trim().parse().map_err(|_| {
        bad("not an address and port", text)
            .remedy("write 127.0.0.1:9000 or [::1]:9000; port 0 picks a free one")
    })
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
