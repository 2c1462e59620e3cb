//! What this process looks at without a copy, and the releases that wait for it.
//!
//! Before an object of a mapped arena is read, a use of it is registered; it lasts until the copy
//! is made, or as long as the last view. A release of an object in use, or the end of a hold on it,
//! is kept back until then, so that the publisher holds the bytes still for as long as anybody can
//! see them.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use capture_arena::MappedBacking;
use parking_lot::Mutex;
use transport_core::{Descriptor, Epoch, Error, ErrorKind, Result, Sequence};

use super::publishers::Publisher;

/// Objects in use, of every publisher.
///
/// Known by life and not by name: whatever a caller does to a descriptor, the publisher frees only
/// what is right in both, and that is found here.
#[derive(Debug, Default)]
pub(super) struct Uses {
    objects: Mutex<HashMap<(Epoch, Sequence), Use>>,
    deferred: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Use {
    count: u32,
    waiting: Option<Arc<Deferred>>,
}

/// One fetched sample in use. Keeps its mapping, and with it the publisher from giving this process
/// up.
pub(crate) struct InUse {
    uses: Arc<Uses>,
    epoch: Epoch,
    descriptor: Arc<Descriptor>,
    mapping: MappedBacking,
}

/// What waits; sent when the last object of its sample is out of use.
struct Deferred {
    ending: Ending,
    cancelled: AtomicBool,
    waiting: Arc<AtomicU64>,
    publisher: Weak<Publisher>,
    epoch: Epoch,
    descriptor: Arc<Descriptor>,
}

/// What a client says that is done with a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It is no longer needed by anybody. Counted as long as it waits.
    Release,
    /// This client no longer needs it.
    LetGo,
}

/// What became of an ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deferral {
    /// Nobody uses the sample: the publisher may hear it now.
    NotInUse,
    /// It is kept back, and sent with the end of the last use.
    Kept,
    /// The sample was released before, and that waits already.
    Released,
}

impl Uses {
    /// Registers a use of every object of a sample.
    ///
    /// A hold that was to end with the last view stays then: its new user ends it. Fails with
    /// [`ErrorKind::NotFound`] if the sample was released and only waits for its views.
    pub(super) fn begin(
        self: &Arc<Self>,
        epoch: Epoch,
        descriptor: &Arc<Descriptor>,
        mapping: &MappedBacking,
    ) -> Result<Arc<InUse>> {
        let mut objects = self.objects.lock();
        let released = |seq| objects.get(&(epoch, seq)).is_some_and(Use::is_released);
        if seqs(descriptor).any(released) {
            let why = "the sample was released, and only its views keep it";
            return Err(Error::new(ErrorKind::NotFound, "fetch", why)
                .with("key", descriptor.sample.clone())
                .remedy("keep a view for as long as the sample is needed, or capture it again"));
        }
        for seq in seqs(descriptor) {
            let one = objects.entry((epoch, seq)).or_default();
            one.count += 1;
            one.cancel();
        }
        drop(objects);
        let (uses, descriptor, mapping) = (self.clone(), descriptor.clone(), mapping.clone());
        Ok(Arc::new(InUse { uses, epoch, descriptor, mapping }))
    }

    /// Whether the object is in use.
    pub(super) fn contains(&self, epoch: Epoch, seq: Sequence) -> bool {
        self.objects.lock().contains_key(&(epoch, seq))
    }

    /// Keeps what a client says that is done with a sample back while the sample is in use.
    pub(super) fn defer(
        &self,
        ending: Ending,
        publisher: &Arc<Publisher>,
        epoch: Epoch,
        descriptor: &Arc<Descriptor>,
    ) -> Deferral {
        let mut objects = self.objects.lock();
        if objects.is_empty() {
            return Deferral::NotInUse;
        }
        let used = |seq: &Sequence| objects.contains_key(&(epoch, *seq));
        let in_use: Vec<Sequence> = seqs(descriptor).filter(used).collect();
        if in_use.is_empty() {
            return Deferral::NotInUse;
        }
        if in_use.iter().any(|seq| objects[&(epoch, *seq)].is_released()) {
            return Deferral::Released; // which ends the hold too
        }
        if ending == Ending::Release {
            self.deferred.fetch_add(1, Ordering::Relaxed);
        }
        let deferred = Arc::new(Deferred {
            ending,
            cancelled: AtomicBool::new(false),
            waiting: self.deferred.clone(),
            publisher: Arc::downgrade(publisher),
            epoch,
            descriptor: descriptor.clone(),
        });
        for seq in in_use {
            objects.get_mut(&(epoch, seq)).expect("just looked up").wait(&deferred);
        }
        Deferral::Kept
    }

    /// Releases that wait, in samples.
    pub(super) fn deferred(&self) -> u64 {
        self.deferred.load(Ordering::Relaxed)
    }

    fn end(&self, epoch: Epoch, descriptor: &Descriptor) {
        let mut objects = self.objects.lock();
        for seq in seqs(descriptor) {
            let Some(one) = objects.get_mut(&(epoch, seq)) else { continue };
            one.count -= 1;
            if one.count == 0 {
                // A release that waited is sent here, under the lock: whoever fetches the sample
                // from now on speaks to the publisher after it.
                objects.remove(&(epoch, seq));
            }
        }
    }
}

impl Use {
    fn is_released(&self) -> bool {
        self.waiting.as_ref().is_some_and(|one| one.ending == Ending::Release)
    }

    fn wait(&mut self, deferred: &Arc<Deferred>) {
        self.cancel();
        self.waiting = Some(deferred.clone());
    }

    /// What waits is not to be sent.
    fn cancel(&mut self) {
        if let Some(deferred) = self.waiting.take() {
            deferred.cancelled.store(true, Ordering::Relaxed);
        }
    }
}

impl InUse {
    pub(crate) fn mapping(&self) -> &MappedBacking {
        &self.mapping
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.uses.end(self.epoch, &self.descriptor);
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        if self.ending == Ending::Release {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        if self.cancelled.load(Ordering::Relaxed) {
            return;
        }
        // Once the transport is closed, its publishers look at the mapping, which ends next.
        let Some(publisher) = self.publisher.upgrade() else { return };
        match self.ending {
            Ending::Release => {
                publisher.client().free_deferred(self.descriptor.clone(), self.epoch);
            }
            Ending::LetGo => publisher.client().unhold_sample(self.epoch, &self.descriptor),
        }
    }
}

fn seqs(descriptor: &Descriptor) -> impl Iterator<Item = Sequence> + '_ {
    descriptor.features.values().filter_map(|feature| feature.seq)
}

impl fmt::Debug for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InUse").field("sample", &self.descriptor.sample).finish_non_exhaustive()
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred").field("sample", &self.descriptor.sample).finish_non_exhaustive()
    }
}
