//! `GET /metrics`: Prometheus text, version 0.0.4.

use std::{fmt::Write, sync::atomic::Ordering};

use super::{Counts, HealthReport};

pub(super) fn render(report: &HealthReport, counts: &Counts) -> String {
    let h = &report.health;
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let gauges = [
        ("arena_bytes", "Size of the arena.", h.arena_bytes),
        ("arena_free_bytes", "Free bytes of the arena.", h.arena_free_bytes),
        ("arena_largest_free_bytes", "Largest free range of the arena.", h.arena_largest_free),
        ("resident_samples", "Published samples that are not yet released.", h.resident_samples),
        ("resident_bytes", "Bytes of resident samples.", h.resident_bytes),
        ("reserved_bytes", "Bytes reserved for samples being filled.", h.reserved_bytes),
        ("quarantined_bytes", "Bytes that a transfer may still write.", h.quarantined_bytes),
        ("stalled_clients", "Silent holders that still map the arena.", h.stalled_clients),
        ("connected_peers", "Open connections of peers.", h.connected_peers),
        ("samples_in_flight", "Samples worked on or waiting.", report.samples_in_flight as u64),
        ("peak_rss_bytes", "Largest resident set so far.", report.peak_rss_bytes),
    ];
    let counters = [
        ("requests", "Capture requests received.", load(&counts.requests)),
        ("captured_samples", "Samples captured.", load(&counts.captured)),
        ("failed_samples", "Samples that were not captured.", load(&counts.failed)),
        (
            "put_off_samples",
            "Samples put off because too many were in flight.",
            load(&counts.put_off),
        ),
        ("published_samples", "Samples ever published.", h.published_samples),
        ("released_samples", "Samples whose memory ever came back.", h.released_samples),
        ("duplicate_frees", "Frees of objects that were gone.", h.duplicate_frees),
        ("stale_frees", "Frees of an older life of an object.", h.stale_frees),
        ("lease_expired_samples", "Samples taken back from dead holders.", h.lease_expired_samples),
        ("host_payload_bytes", "Tensor payload through host memory.", h.host_payload_bytes),
        ("memory_registrations", "Memory registrations with an engine.", h.registrations),
        ("protocol_errors", "Lines, frames and requests refused.", h.protocol_errors),
    ];
    let mut text = String::new();
    for (kind, suffix, list) in [("gauge", "", &gauges[..]), ("counter", "_total", &counters[..])] {
        for (name, help, value) in list {
            let name = format!("featurestore_{name}{suffix}");
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_help_type_and_value() {
        let report = HealthReport {
            health: transport_core::Health::default(),
            epoch: Some(1),
            session: "127.0.0.1:1".into(),
            control: Some("127.0.0.1:2".into()),
            samples_in_flight: 3,
            peak_rss_bytes: 4,
            paced: None,
        };
        let text = render(&report, &Counts::default());
        let (comments, values): (Vec<_>, Vec<_>) =
            text.lines().partition(|line| line.starts_with('#'));
        assert_eq!(comments.len(), 2 * values.len());
        assert!(values.contains(&"featurestore_samples_in_flight 3"));
        assert!(values.iter().all(|line| line.split(' ').count() == 2), "{text}");
    }
}
