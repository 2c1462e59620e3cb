//! Publishing: all or nothing. Where the provider tells new objects from old ones, writing is all;
//! elsewhere look, write, and look again.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use mooncake_sys::{ReplicaPolicy, StoreCode};
use parking_lot::Mutex;
use transport_core::{
    Descriptor, Error, ErrorKind, FeatureDescriptor, Location, Publication, PublishOptions, Ready,
    RegionKind, RegionMut, RegionSlice, Result, SampleKey, Sequence,
};

use crate::{
    io::{self, Source},
    layout::Plan,
    ledger::{Claim, Resident},
    release::remove_all,
    transport::Shared,
    workers::Flight,
};

/// Fewest keys of a call that is one of several.
const LEAST_KEYS: usize = 128;

/// What another call may take where calls are short.
const LEAST_CALL: Duration = Duration::from_millis(20);

/// Lives of objects in this process, over all transports, so that no two are alike.
static NEXT_SEQUENCE: AtomicU64 = AtomicU64::new(1);

/// A batch that is written. Unless it is taken over, it is removed again: its caller went away.
pub(crate) struct Placed {
    shared: Arc<Shared>,
    samples: Vec<(Descriptor, Resident)>,
    claim: Option<Claim>,
}

impl Placed {
    /// Hands the batch over to the caller.
    pub(crate) fn take_over(mut self) -> Vec<Descriptor> {
        let ledger = &self.shared.ledger;
        let samples = std::mem::take(&mut self.samples);
        let descriptors = samples.into_iter().map(|(descriptor, resident)| {
            ledger.add(descriptor.sample.clone(), resident);
            descriptor
        });
        descriptors.collect()
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if self.samples.is_empty() {
            return;
        }
        for (descriptor, resident) in self.samples.drain(..) {
            self.shared.ledger.defer(descriptor.sample, resident.keys, false);
        }
        drop(self.claim.take());
        self.shared.drain_soon();
    }
}

/// One object to write.
struct Write {
    key: Arc<str>,
    slices: Vec<RegionSlice>,
    in_place: Option<Source>, // the slices, if they are registered memory in one piece
    bytes: u64,
}

/// Refuses what can never be published, before any byte moves.
pub(crate) fn check(batch: &[Publication], device: Option<RegionKind>) -> Result<()> {
    let mut seen = HashSet::new();
    for publication in batch {
        if !seen.insert(&publication.sample) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "publish",
                "two samples of the batch have the same key",
            )
            .with("key", &publication.sample));
        }
        if let Some(name) = publication.unreachable_beside(device) {
            return Err(beyond_reach("publish", device)
                .with("key", publication.sample.object(name))
                .with("found", format_args!("{:?}", publication.tensors[name].data.kind())));
        }
        for (name, tensor) in &publication.tensors {
            let (expected, found) = (tensor.meta.nbytes(), tensor.data.len() as u64);
            if expected != found {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "publish",
                    "the bytes do not fit element type and shape",
                )
                .with("key", publication.sample.object(name))
                .with("expected", expected)
                .with("found", found));
            }
        }
    }
    Ok(())
}

/// Refuses memory that neither the store nor the transport's device, if it has one, reaches.
pub(crate) fn beyond_reach(operation: &'static str, device: Option<RegionKind>) -> Error {
    let refuse = |why| Error::new(ErrorKind::Unsupported, operation, why);
    match device {
        None => refuse("the store transport takes host memory only").remedy(
            "copy to host memory, start the transport on the device (start_on_device), or use a \
             transport for device memory",
        ),
        Some(device) => {
            refuse("the store transport takes memory of the host and of one device only")
                .with("expected", format_args!("{device:?}"))
                .remedy("start a transport on the device that the memory lies on")
        }
    }
}

/// Writes a batch. Blocks.
pub(crate) fn run(
    shared: &Arc<Shared>,
    flight: &Flight,
    batch: Vec<Publication>,
    options: &PublishOptions,
    claim: Claim,
) -> Result<Placed> {
    for publication in &batch {
        if let Ready::After(event) = &publication.ready {
            event.wait(flight.remaining())?;
            flight.pause(Duration::ZERO)?;
        }
    }
    let mut samples = Vec::with_capacity(batch.len());
    let mut writes = Vec::new();
    for publication in batch {
        let publication = write_in_place(shared, flight, publication)?;
        samples.push(describe(shared, publication, &mut writes)?);
    }
    make_way(shared, flight, &samples, options.replace)?;
    let touched = Mutex::default();
    let result =
        write_all(shared, flight, &writes, &touched).and_then(|()| look_again(shared, &writes));
    let touched = touched.into_inner();
    if let Err(error) = result {
        for (descriptor, resident) in samples {
            let ours = resident.keys.into_iter().filter(|key| touched.contains(key));
            let ours: Vec<_> = ours.collect();
            let left = remove_all(shared, flight, &ours, Duration::ZERO).left;
            shared.ledger.defer(descriptor.sample, left, false);
        }
        return Err(error);
    }
    let bytes = writes.iter().map(|w| w.bytes).sum();
    shared.ledger.host_bytes.fetch_add(bytes, Ordering::Relaxed);
    Ok(Placed { shared: shared.clone(), samples, claim: Some(claim) })
}

/// Lets the writer of a sample write it into registered memory, from where it is sent.
fn write_in_place(
    shared: &Shared,
    flight: &Flight,
    mut publication: Publication,
) -> Result<Publication> {
    if publication.writer.is_none() {
        return Ok(publication);
    }
    let plan = Plan::of_tensors(shared.config.layout, &publication.sample, &publication.tensors)?;
    let lengths: Vec<_> = publication.tensors.values().map(|t| t.meta.nbytes()).collect();
    let mut regions = plan.regions(&lengths, |len| shared.memory.take(len, flight))?;
    let bytes = |region| RegionMut::as_mut_bytes(region).expect("the pool is host memory");
    let mut destinations: Vec<_> = regions.iter_mut().map(bytes).collect();
    publication.write_into(&mut destinations).map_err(|e| e.with("sample", &publication.sample))?;
    flight.check()?;
    for (tensor, region) in publication.tensors.values_mut().zip(regions) {
        tensor.data = region.freeze();
    }
    publication.writer = None;
    Ok(publication)
}

fn describe(
    shared: &Shared,
    publication: Publication,
    writes: &mut Vec<Write>,
) -> Result<(Descriptor, Resident)> {
    let Publication { sample, tensors, aux_layer_ids, .. } = publication;
    let plan = Plan::of_tensors(shared.config.layout, &sample, &tensors)?;
    let seq = Sequence(NEXT_SEQUENCE.fetch_add(1, Ordering::Relaxed));
    let features: IndexMap<_, _> = tensors
        .iter()
        .map(|(name, t)| (name.clone(), FeatureDescriptor::new(t.meta.clone(), None, Some(seq))))
        .collect();
    let mut keys = Vec::with_capacity(plan.objects.len());
    for object in plan.objects {
        let slices: Vec<_> = object.tensors.iter().map(|&i| tensors[i].data.clone()).collect();
        let in_place = in_place(shared, &slices);
        keys.push(object.key.clone());
        writes.push(Write { key: object.key, slices, in_place, bytes: object.bytes });
    }
    let descriptor = Descriptor::new(sample, features, aux_layer_ids, Location::Store)?;
    let resident = Resident { bytes: descriptor.nbytes(), keys, seq: Some(seq) };
    Ok((descriptor, resident))
}

fn exists(key: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::AlreadyExists, "publish", "the key exists")
        .with("key", key)
        .remedy("publish under another generation, or ask to replace")
}

/// Why a key is taken that the write found so: by an object, or by a writer that has not finished.
fn taken(shared: &Shared, key: &str) -> Error {
    match shared.api.exists(&[key]).as_deref() {
        Ok([Ok(false)]) => unreadable(key),
        _ => exists(&key),
    }
}

fn unreadable(key: &str) -> Error {
    Error::new(ErrorKind::Unexpected, "publish", "the key is taken, and its object cannot be read")
        .with("key", key)
        .remedy(
            "a writer that died may hold the key: publish under another generation, or wait until \
             the master gives it up",
        )
}

/// Refuses keys that exist, or removes them if they are to be replaced: at once and before the new
/// ones are written, because the store has no other way. A publish that fails after that leaves
/// neither.
///
/// Mooncake would answer the write of an existing key with success and keep the old value.
fn make_way(
    shared: &Arc<Shared>,
    flight: &Flight,
    samples: &[(Descriptor, Resident)],
    replace: bool,
) -> Result<()> {
    let ledger = &shared.ledger;
    // What an earlier call could not remove must be gone first, or its removal, repeated later,
    // would take the new objects.
    for (descriptor, _) in samples {
        let Some(pending) = ledger.take_pending(&descriptor.sample) else { continue };
        let removal = remove_all(shared, flight, &pending.keys, flight.remaining());
        if !removal.left.is_empty() {
            ledger.defer(descriptor.sample.clone(), removal.left, pending.is_release);
            return Err(Error::new(
                ErrorKind::Busy,
                "publish",
                "objects of an earlier life of the sample cannot be removed yet",
            )
            .with("sample", &descriptor.sample));
        }
        if pending.is_release {
            ledger.released.fetch_add(1, Ordering::SeqCst);
        }
    }
    if !replace {
        // A sample without objects exists only in the ledger.
        let empty = samples.iter().find(|(_, resident)| resident.keys.is_empty());
        if let Some((descriptor, _)) = empty
            && ledger.is_resident(&descriptor.sample)
        {
            return Err(exists(&descriptor.sample));
        }
        if shared.api.provider().store.put_new {
            return Ok(()); // the write says so
        }
        let keys: Vec<&str> =
            samples.iter().flat_map(|(_, r)| &r.keys).map(AsRef::as_ref).collect();
        for part in keys.chunks(shared.config.part_keys) {
            for (key, found) in part.iter().zip(shared.api.exists(part)?) {
                match found {
                    Ok(false) => {}
                    Ok(true) => return Err(exists(key)),
                    Err(code) => return Err(code.error("publish").with("key", key)),
                }
            }
        }
        return Ok(());
    }
    let mut keys: Vec<Arc<str>> = Vec::new();
    for (descriptor, resident) in samples {
        let old = ledger.resident(&descriptor.sample).map(|r| r.keys).unwrap_or_default();
        let gone = old.into_iter().filter(|key| !resident.keys.contains(key));
        keys.extend(resident.keys.iter().cloned().chain(gone));
    }
    let removal = remove_all(shared, flight, &keys, flight.remaining());
    match removal.left.first() {
        None => {
            for (descriptor, _) in samples {
                let was_resident = ledger.forget(&descriptor.sample);
                ledger.released.fetch_add(was_resident.into(), Ordering::SeqCst);
            }
            Ok(())
        }
        Some(key) => Err(removal
            .error
            .unwrap_or_else(|| Error::new(ErrorKind::Busy, "publish", "the old object stays"))
            .with("key", key)),
    }
}

/// Writes every object, in calls of bounded size; waits for room until the deadline.
///
/// Keys that may hold bytes of ours afterwards, also after an error, go to `touched`: these and no
/// others may be removed again.
fn write_all(
    shared: &Arc<Shared>,
    flight: &Flight,
    writes: &[Write],
    touched: &Mutex<HashSet<Arc<str>>>,
) -> Result<()> {
    let config = &shared.config;
    let half = shared.memory.half();
    // Two calls for each that the store gets otherwise: a call for many small objects waits for the
    // master, which works on it while the payload of others moves.
    let lanes = 2 * config.threads;
    let keys = writes.len().div_ceil(2 * lanes).max(LEAST_KEYS).min(config.part_keys);
    let mut parts = Vec::new();
    let mut rest = writes;
    while !rest.is_empty() {
        let (mut bytes, mut copied) = (0u64, 0u64);
        let fits = |w: &&Write| {
            bytes = bytes.saturating_add(w.bytes);
            if w.in_place.is_none() {
                copied = copied.saturating_add(w.bytes.next_multiple_of(capture_arena::UNIT));
            }
            bytes <= config.part_bytes.get() && copied <= half
        };
        let (part, later) = rest.split_at(rest.iter().take(keys).take_while(fits).count().max(1));
        parts.push(part);
        rest = later;
    }
    let more = lanes.min(parts.len()).saturating_sub(1);
    let (parts, failure) = (Mutex::new(parts.into_iter()), Mutex::new(None));
    let lane = || {
        while failure.lock().is_none() {
            let Some(part) = parts.lock().next() else { return };
            if let Err(error) = write_part(shared, flight, part, touched) {
                failure.lock().get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        (0..more).for_each(|_| drop(scope.spawn(lane)));
        lane();
    });
    failure.into_inner().map_or(Ok(()), Err)
}

fn write_part(
    shared: &Arc<Shared>,
    flight: &Flight,
    part: &[Write],
    touched: &Mutex<HashSet<Arc<str>>>,
) -> Result<()> {
    let sources = registered(shared, flight, part)?;
    let only_new = shared.api.provider().store.put_new;
    let mut open: Vec<usize> = (0..part.len()).collect();
    let mut pause = shared.config.backoff;
    loop {
        flight.check()?;
        let objects: Vec<_> = open.iter().map(|&i| (&*part[i].key, &sources[i])).collect();
        if !only_new {
            // Even if the call fails: nobody can tell what it has written.
            touched.lock().extend(open.iter().map(|&i| part[i].key.clone()));
        }
        let policy = ReplicaPolicy::default();
        let start = Instant::now();
        let results = shared.ledger.timed(|| io::put(&*shared.api, &objects, policy, only_new))?;
        let another = 2 * start.elapsed().max(LEAST_CALL);
        let mut ours = touched.lock();
        let (mut failed, mut fatal) = (Vec::new(), None);
        for (&i, result) in open.iter().zip(results) {
            let key = &part[i].key;
            let Err(code) = result else {
                ours.insert(key.clone());
                continue;
            };
            if code == StoreCode::OBJECT_ALREADY_EXISTS {
                ours.remove(key); // another process was faster: it is not ours
                fatal.get_or_insert_with(|| taken(shared, key));
                continue;
            }
            let error = code.error("publish").with("key", key);
            if error.is_temporary() {
                failed.push((i, code));
            } else {
                fatal.get_or_insert(error);
            }
        }
        drop(ours);
        if let Some(error) = fatal {
            return Err(error);
        }
        let Some(&(first, code)) = failed.first() else { return Ok(()) };
        open = failed.iter().map(|f| f.0).collect();
        // Without the time for another call the caller would hear of a deadline, and not of the store.
        if flight.remaining() <= pause + another || flight.pause(pause).is_err() {
            return Err(no_room(code, &part[first], &open, part));
        }
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

fn no_room(code: StoreCode, first: &Write, open: &[usize], part: &[Write]) -> Error {
    let bytes: u64 = open.iter().map(|&i| part[i].bytes).sum();
    let error = code
        .error("publish")
        .with("key", &first.key)
        .with("objects", open.len())
        .with("requested_bytes", bytes);
    if code == StoreCode::NO_AVAILABLE_HANDLE {
        return error.remedy(
            "release samples, mount more object memory, or publish less at a time: an object \
             needs one free range of its size in one segment",
        );
    }
    error
}

/// The bytes of objects in registered memory: where they are, if they are in one piece there, else
/// copied.
fn registered(shared: &Shared, flight: &Flight, part: &[Write]) -> Result<Vec<Source>> {
    let others = || part.iter().filter(|write| write.in_place.is_none());
    let slices: Vec<&[RegionSlice]> = others().map(|write| &*write.slices).collect();
    let mut copies = shared.memory.gather(&slices, flight)?.into_iter();
    let copied = others().map(|write| write.bytes).sum();
    shared.ledger.copied_bytes.fetch_add(copied, Ordering::Relaxed);
    let mut copy = || Source::new(vec![copies.next()?]);
    let source = |write: &Write| write.in_place.clone().or_else(&mut copy).expect("copied");
    Ok(part.iter().map(source).collect())
}

/// The bytes of an object where they are, if that is registered memory and they are in one piece.
fn in_place(shared: &Shared, slices: &[RegionSlice]) -> Option<Source> {
    let is_host = slices.iter().all(|slice| slice.kind().is_host());
    let source = Source::new(slices.to_vec()).filter(|_| is_host)?;
    shared.memory.knows(source.address(), source.len()).then_some(source)
}

/// Makes sure that every object can be read: a writer that died half-way leaves its key taken but
/// unreadable, and the write above succeeds all the same.
fn look_again(shared: &Shared, writes: &[Write]) -> Result<()> {
    if shared.api.provider().store.put_new {
        return Ok(()); // the write has said so
    }
    let keys: Vec<&str> = writes.iter().map(|w| &*w.key).collect();
    for part in keys.chunks(shared.config.part_keys) {
        for (key, found) in part.iter().zip(shared.api.exists(part)?) {
            match found {
                Ok(true) => {}
                Ok(false) => return Err(unreadable(key)),
                Err(code) => return Err(code.error("publish").with("key", key)),
            }
        }
    }
    Ok(())
}

/// The samples of a batch.
pub(crate) fn samples(batch: &[Publication]) -> Vec<SampleKey> {
    batch.iter().map(|p| p.sample.clone()).collect()
}
