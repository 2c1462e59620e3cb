//! Reading objects into registered memory, tried again where that is safe.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use mooncake_sys::StoreCode;
use transport_core::{Error, ErrorKind, RegionMut, RegionSlice, Result};

use crate::{
    io,
    landing::Landings,
    native::{Found, Wish},
    transport::Shared,
    workers::Flight,
};

/// One object on its way.
pub(crate) struct Read {
    pub(crate) key: Arc<str>,
    pub(crate) len: usize,                      // of the object
    pub(crate) ranges: Option<Vec<Range<u64>>>, // of it that are wanted; all of it if none
    pub(crate) region: Option<RegionMut>,       // being filled; from the pool once it is needed
    pub(crate) is_callers: bool,                // the region must come back as it is
    pub(crate) bytes: Option<RegionSlice>,
}

impl Read {
    /// Bytes that are wanted.
    pub(crate) fn wanted(&self) -> usize {
        let ranges = self.ranges.as_ref();
        ranges.map_or(self.len, |ranges| ranges.iter().map(|r| (r.end - r.start) as usize).sum())
    }
}

/// Reads every object, in calls of bounded size, some of them more than once.
pub(crate) fn read_all(
    shared: &Shared,
    flight: &Flight,
    reads: &mut [Read],
    landings: &mut Landings,
) -> Result<()> {
    let config = &shared.config;
    let mut open: Vec<usize> = (0..reads.len()).collect();
    let mut part_bytes = config.part_bytes.get();
    if landings.is_empty() {
        // All of it stays in the pool until the caller has it: at once, so that no two calls keep what
        // each other waits for.
        take(shared, flight, reads, &open, landings)?;
    } else {
        part_bytes = part_bytes.min(shared.memory.half());
    }
    let mut pause = config.backoff;
    for attempt in 1.. {
        let mut again: Vec<Again> = Vec::new();
        let mut rest = &open[..];
        let (mut largest, mut slowest) = (0, Duration::ZERO);
        while !rest.is_empty() {
            let mut bytes = 0u64;
            let fits = |&&i: &&usize| {
                bytes = bytes.saturating_add(reads[i].wanted() as u64);
                bytes <= part_bytes
            };
            let count = rest.iter().take(config.part_keys).take_while(fits).count().max(1);
            let (part, later) = rest.split_at(count);
            largest = part.iter().map(|&i| reads[i].wanted() as u64).sum::<u64>().max(largest);
            let start = Instant::now();
            read_part(shared, flight, reads, part, landings, &mut again)?;
            slowest = start.elapsed().max(slowest);
            rest = later;
        }
        let failed_keys = again.len();
        let Some(first) = again.first_mut() else { return Ok(()) };
        let (key, code) = (reads[first.index].key.clone(), first.code);
        let failed = |error: Error| {
            let error = error.with("key", key).with("failed_keys", failed_keys);
            let error =
                error.with("attempts", attempt).with("slowest_call_ms", slowest.as_millis());
            match config.read_lease {
                Some(lease) => error.with("read_lease_ms", lease.as_millis()),
                None => error,
            }
        };
        if attempt >= config.read_attempts {
            return Err(failed(first.error.take().unwrap_or_else(|| explain(code))));
        }
        if flight.pause(pause).is_err() {
            let why = "the deadline passed between attempts";
            return Err(failed(Error::new(ErrorKind::Timeout, "fetch", why).with("code", code)));
        }
        pause = (pause * 2).min(Duration::from_secs(1));
        if again.iter().any(|one| one.code == StoreCode::LEASE_EXPIRED) {
            // Each call takes new leases. Half of what was too much, which may be far below the most.
            part_bytes = (part_bytes.min(largest) / 2).max(1);
        }
        shared.ledger.read_retries.fetch_add(again.len() as u64, Ordering::Relaxed);
        open = again.into_iter().map(|one| one.index).collect();
    }
    unreachable!("the loop ends by returning")
}

fn explain(code: StoreCode) -> Error {
    let error = code.error("fetch");
    match code {
        StoreCode::LEASE_EXPIRED => error.remedy(
            "raise the master's default_kv_lease_ttl (and read_lease with it) or read less at a \
             time: the read takes longer than its lease",
        ),
        _ => error,
    }
}

/// An object worth another attempt, and why the last one failed.
struct Again {
    index: usize,
    code: StoreCode,
    error: Option<Error>, // what is known beyond the code
}

/// Reads `some` of the objects through Mooncake's engine, with one call: an answer for each.
fn read_by_mooncake(
    shared: &Shared,
    flight: &Flight,
    keys: &[&str],
    regions: &mut [Option<RegionMut>],
    some: &[usize],
) -> Result<Vec<std::result::Result<u64, StoreCode>>> {
    let mut taken: Vec<_> = some
        .iter()
        .map(|&i| (keys[i], regions[i].take().expect("only taken to be read")))
        .collect();
    let mut objects: Vec<_> = taken.iter_mut().map(|(key, region)| (*key, region)).collect();
    if objects.is_empty() {
        return Ok(Vec::new());
    }
    let bytes = objects.iter().map(|(_, region)| region.len() as u64).sum();
    let answers =
        flight.transfer(bytes, || shared.ledger.timed(|| io::get(&*shared.api, &mut objects)))?;
    // These two are answered before anything is sent.
    if let Err(error) = &answers
        && !matches!(error.kind(), ErrorKind::Closed | ErrorKind::InvalidInput)
    {
        taken.into_iter().for_each(|(_, region)| shared.memory.quarantine(region));
        return answers;
    }
    for (&i, (_, region)) in some.iter().zip(taken) {
        regions[i] = Some(region);
    }
    answers
}

/// Makes one call. Objects worth another attempt go to `again`; any other failure is an error.
fn read_part(
    shared: &Shared,
    flight: &Flight,
    reads: &mut [Read],
    part: &[usize],
    landings: &mut Landings,
    again: &mut Vec<Again>,
) -> Result<()> {
    let bytes = part.iter().map(|&i| reads[i].wanted() as u64).sum();
    take(shared, flight, reads, part, landings)?;
    let mut regions: Vec<_> = part.iter().map(|&i| reads[i].region.take()).collect();
    let start = Instant::now();
    let keys: Vec<Arc<str>> = part.iter().map(|&i| reads[i].key.clone()).collect();
    let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
    let mut found: Vec<Option<Found>> = part.iter().map(|_| None).collect();
    if let Some(native) = &shared.native {
        let wish =
            |&i: &usize| Wish { len: reads[i].len as u64, ranges: reads[i].ranges.as_deref() };
        let wishes: Vec<_> = part.iter().map(wish).collect();
        flight.transfer(bytes, || {
            let read = || native.read(shared, flight, &keys, &wishes, &mut regions, &mut found);
            shared.ledger.timed(read)
        })??;
    }
    // Whole objects: ranges that the reader does not read are refused.
    let left: Vec<usize> = (0..part.len()).filter(|&i| found[i].is_none()).collect();
    let mut answers: Vec<_> = part.iter().map(|_| None).collect();
    let read = read_by_mooncake(shared, flight, &keys, &mut regions, &left)?;
    left.into_iter().zip(read).for_each(|(i, answer)| answers[i] = Some(answer));
    let late = shared.config.read_lease.is_some_and(|lease| start.elapsed() >= lease);
    let regions = regions.into_iter().map(|region| region.expect("given back by whoever read it"));
    let mut fatal = None;
    let mut failed = Vec::new();
    for (((&i, region), found), answer) in part.iter().zip(regions).zip(found).zip(answers) {
        let read = &mut reads[i];
        let result = match found {
            Some(Found::Whole) => Ok(read.len as u64),
            Some(Found::Length(len)) => Ok(len),
            Some(Found::Failed(error)) => {
                failed.push(read.key.clone());
                read.region = Some(region); // nothing writes it any more
                again.push(Again { index: i, code: StoreCode::TRANSFER_FAIL, error });
                continue;
            }
            None => answer.expect("one answer for each that was left"),
        };
        match result {
            Ok(found) if found == read.len as u64 && !late => {
                read.bytes = Some(region.freeze());
            }
            Ok(found) if found == read.len as u64 => {
                read.region = Some(region); // complete, but perhaps another object's
                again.push(Again { index: i, code: StoreCode::LEASE_EXPIRED, error: None });
            }
            Ok(found) => {
                let kind =
                    if found < read.len as u64 { ErrorKind::ShortRead } else { ErrorKind::Corrupt };
                fatal.get_or_insert(wrong_length(kind, read, found));
            }
            Err(code @ (StoreCode::TRANSFER_FAIL | StoreCode::LEASE_EXPIRED)) => {
                if code == StoreCode::TRANSFER_FAIL {
                    failed.push(read.key.clone());
                }
                shared.memory.quarantine(region); // the peer may still write it
                if read.is_callers {
                    let error = explain(code).with("key", &read.key).remedy(
                        "fetch again: memory of the caller is not tried twice, because the failed \
                         transfer may still write it",
                    );
                    fatal.get_or_insert(error);
                } else if shared.memory.quarantined_bytes() > shared.config.max_quarantined.get() {
                    let error = Error::new(
                        ErrorKind::CapacityExceeded,
                        "fetch",
                        "too much memory is in quarantine after failed reads",
                    )
                    .with("key", &read.key)
                    .with("code", code)
                    .with("quarantined_bytes", shared.memory.quarantined_bytes())
                    .remedy("find out why reads fail; closing the transport gives the memory back");
                    fatal.get_or_insert(error);
                } else {
                    again.push(Again { index: i, code, error: None });
                }
            }
            Err(StoreCode::INVALID_PARAMS) => {
                fatal.get_or_insert(too_long(shared, read));
            }
            Err(code) if code.error("fetch").is_temporary() => {
                read.region = Some(region);
                again.push(Again { index: i, code, error: None });
            }
            Err(code) => {
                fatal.get_or_insert(code.error("fetch").with("key", &read.key));
            }
        }
    }
    if !failed.is_empty() {
        // No second wait for an owner that is gone.
        let keys: Vec<&str> = failed.iter().map(AsRef::as_ref).collect();
        shared.segments.suspect(&keys);
        shared.segments.check(&keys)?;
    }
    if let Some(error) = fatal {
        return Err(error);
    }
    match shared.memory.device() {
        Some(device) if !landings.is_empty() => {
            let brought = part.iter().filter_map(|&i| Some((i, reads[i].bytes.take()?)));
            for (i, bytes) in landings.send(device, brought, flight.deadline())? {
                reads[i].bytes = Some(bytes);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Takes memory for the reads that have none: all or none, so that no two calls wait for each other.
fn take(
    shared: &Shared,
    flight: &Flight,
    reads: &mut [Read],
    part: &[usize],
    landings: &mut Landings,
) -> Result<()> {
    let without: Vec<usize> = part.iter().copied().filter(|&i| reads[i].region.is_none()).collect();
    let lens: Vec<usize> = without.iter().map(|&i| reads[i].wanted()).collect();
    let regions = match shared.memory.try_take_all(&lens) {
        Ok(regions) => Ok(regions),
        Err(_) => {
            // What is on its way to the device has its memory on the host until it has arrived.
            landings.settle(flight.deadline())?;
            shared.memory.take_all(&lens, flight)
        }
    };
    let regions = regions.map_err(|(i, error)| no_memory(shared, &reads[without[i]], error))?;
    for (i, region) in without.into_iter().zip(regions) {
        reads[i].region = Some(region);
    }
    Ok(())
}

/// Memory is short: perhaps only because the descriptor asks for more than there is.
fn no_memory(shared: &Shared, read: &Read, error: Error) -> Error {
    match shared.api.size(&read.key) {
        Ok(Ok(found)) if found < read.len as u64 => wrong_length(ErrorKind::ShortRead, read, found),
        _ => error.with("key", &read.key),
    }
}

fn wrong_length(kind: ErrorKind, read: &Read, found: u64) -> Error {
    Error::new(kind, "fetch", "the object has another length than described")
        .with("key", &read.key)
        .with("expected", read.len)
        .with("found", found)
}

/// Finds out why the store refused a read: mostly because the object is longer than described.
fn too_long(shared: &Shared, read: &Read) -> Error {
    match shared.api.size(&read.key) {
        Ok(Ok(found)) if found != read.len as u64 => wrong_length(ErrorKind::Corrupt, read, found),
        _ => StoreCode::INVALID_PARAMS.error("fetch").with("key", &read.key),
    }
}
