//! Removing objects: forced, only what was released, and never forgotten.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use transport_core::{Descriptor, Error, Release, ReleaseReport, Result, SampleKey};

use crate::{
    layout::Plan,
    ledger::{Claim, DrainReport},
    transport::Shared,
    workers::Flight,
};

/// What became of a removal.
#[derive(Debug, Default)]
pub(crate) struct Removal {
    /// This call removed them.
    pub(crate) removed: HashSet<Arc<str>>,
    /// They are still there, or nobody knows.
    pub(crate) left: Vec<Arc<str>>,
    /// Why, for one of them.
    pub(crate) error: Option<Error>,
}

/// Removes objects by force; tries again those that are busy, for `patience`. Blocks.
///
/// Nothing here asks whether a key exists: that would renew the leases that may be in the way.
pub(crate) fn remove_all(
    shared: &Shared,
    flight: &Flight,
    keys: &[Arc<str>],
    patience: Duration,
) -> Removal {
    let deadline = Instant::now().checked_add(patience);
    let mut removal = Removal { left: keys.to_vec(), ..Removal::default() };
    let mut pause = shared.config.backoff;
    loop {
        let open = std::mem::take(&mut removal.left);
        for part in open.chunks(shared.config.part_keys) {
            let names: Vec<&str> = part.iter().map(AsRef::as_ref).collect();
            match shared.ledger.timed(|| shared.api.remove(&names, true)) {
                Ok(results) => {
                    for (i, key) in part.iter().enumerate() {
                        match results.get(i) {
                            Some(Ok(())) => {
                                removal.removed.insert(key.clone());
                            }
                            Some(Err(code)) if code.is_gone() => {}
                            Some(Err(code)) => {
                                removal.error = Some(code.error("release").with("key", key));
                                removal.left.push(key.clone());
                            }
                            None => removal.left.push(key.clone()),
                        }
                    }
                }
                Err(error) => {
                    removal.error = Some(error);
                    removal.left.extend_from_slice(part);
                }
            }
        }
        let time_left =
            deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        if removal.left.is_empty() || time_left < pause || flight.pause(pause).is_err() {
            return removal;
        }
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// The samples that a release is about.
pub(crate) fn samples(releases: &[Release]) -> Vec<SampleKey> {
    releases.iter().map(|r| r.descriptor.sample.clone()).collect()
}

/// Lets go of samples. Blocks.
pub(crate) fn run(
    shared: &Shared,
    flight: &Flight,
    releases: &[Release],
    _claim: Claim,
) -> Result<ReleaseReport> {
    let ledger = &shared.ledger;
    let mut report = ReleaseReport::default();
    let mut seen = HashSet::new();
    let mut samples: Vec<(&Descriptor, Vec<Arc<str>>)> = Vec::with_capacity(releases.len());
    for Release { descriptor } in releases {
        if !seen.insert(&descriptor.sample) {
            report.already_gone += 1;
            continue;
        }
        let resident = ledger.resident(&descriptor.sample);
        let described = descriptor.features.values().find_map(|f| f.seq);
        if let (Some(described), Some(life)) = (described, resident.as_ref().and_then(|r| r.seq))
            && described != life
        {
            report.stale += 1;
            continue;
        }
        let plan = Plan::of_descriptor(shared.config.layout, descriptor)?;
        let mut keys: Vec<_> = plan.objects.into_iter().map(|o| o.key).collect();
        if let Some(pending) = ledger.take_pending(&descriptor.sample) {
            keys.extend(pending.keys.into_iter().filter(|k| !keys.contains(k)).collect::<Vec<_>>());
        }
        samples.push((descriptor, keys));
    }
    let all: Vec<_> = samples.iter().flat_map(|(_, keys)| keys.iter().cloned()).collect();
    let removal = remove_all(shared, flight, &all, shared.config.removal_patience);
    if let Some(error) = removal.error.as_ref().filter(|_| !removal.left.is_empty()) {
        ledger.failed(error);
    }
    let left: HashSet<_> = removal.left.into_iter().collect();
    for (descriptor, keys) in samples {
        let was_resident = ledger.forget(&descriptor.sample);
        let pending: Vec<_> = keys.iter().filter(|k| left.contains(*k)).cloned().collect();
        if !pending.is_empty() {
            report.unconfirmed += 1; // counted as released once they are gone
            ledger.defer(descriptor.sample.clone(), pending, true);
        } else if keys.iter().any(|k| removal.removed.contains(k))
            || (keys.is_empty() && was_resident)
        {
            report.released += 1;
        } else if keys.is_empty() {
            report.unconfirmed += 1; // without objects there is nobody to ask
        } else {
            // Another process released what this one had published: its memory came back as well.
            ledger.released.fetch_add(was_resident.into(), Ordering::SeqCst);
            report.already_gone += 1;
        }
    }
    ledger.released.fetch_add(report.released, Ordering::SeqCst);
    ledger.duplicates.fetch_add(report.already_gone, Ordering::SeqCst);
    ledger.stale.fetch_add(report.stale, Ordering::SeqCst);
    Ok(report)
}

/// Tries again what could not be removed before. Blocks, at most for `patience` and one call more.
pub(crate) fn drain(shared: &Shared, flight: &Flight, patience: Duration) -> DrainReport {
    let ledger = &shared.ledger;
    let deadline = Instant::now().checked_add(patience);
    let mut report = DrainReport::default();
    for sample in ledger.pending_samples() {
        // Somebody at work on the sample deals with what is pending of it.
        let Some(_claim) = ledger.try_claim(std::slice::from_ref(&sample)) else { continue };
        let Some(pending) = ledger.take_pending(&sample) else { continue };
        let time_left =
            deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        let removal = remove_all(shared, flight, &pending.keys, time_left);
        report.removed += (pending.keys.len() - removal.left.len()) as u64;
        if removal.left.is_empty() {
            ledger.released.fetch_add(pending.is_release.into(), Ordering::SeqCst);
        } else {
            ledger.defer(sample, removal.left, pending.is_release);
        }
    }
    (report.remaining, report.remaining_keys) = ledger.pending_keys();
    report
}
