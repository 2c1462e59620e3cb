//! Frees and holds: what clients may say about published objects.

use std::time::Instant;

use transport_core::{ClientId, Error, ErrorKind, Result, Sequence};

use super::{BatchPlan, CaptureArena, Id, State};

/// Older lives of one key that clients may hold before it gets no new one. A free looks through
/// them; and who holds so many has stopped releasing.
const MAX_OLDER: usize = 64;
/// Entries of an object's holders at which those who have let go are forgotten: they are only
/// kept to tell a repeated free, and every claim looks through them.
const MAX_HOLDERS: usize = 32;
/// Holders named in an error.
const NAMED: usize = 3;

/// Keys, each with the life that is meant if the sender knows it. One allocation for all texts.
#[derive(Clone, Debug, Default)]
pub struct ObjectList {
    text: String,
    entries: Vec<(u32, Option<Sequence>)>, // end of the key in `text`
}

/// What became of a free. Indices into its list; all others were let go by this call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreeOutcome {
    /// Were gone before.
    pub gone: Vec<u32>,
    /// Live on in a newer life, which was left alone.
    pub stale: Vec<u32>,
}

/// What became of a claim. Indices into its list; all others are held now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HoldOutcome {
    /// Were held by the client before.
    pub before: Vec<u32>,
    /// Are gone, or on their way out.
    pub gone: Vec<u32>,
    /// Live on in a newer life, which was left alone.
    pub stale: Vec<u32>,
}

enum Freed {
    Yes,
    Gone,
    Stale,
}

impl CaptureArena {
    /// Ends the client's claims on these objects, and frees what nobody else holds.
    ///
    /// An object that others hold stays published if the client was one of its holders; if it was
    /// not, the object drains: nobody new may claim it, and it goes with the last holder. Of a key
    /// that is still being filled, the free is remembered until it is published.
    pub fn free(&mut self, client: Option<&ClientId>, objects: &ObjectList) -> FreeOutcome {
        let index = client.and_then(|client| self.clients.index(client));
        let mut outcome = FreeOutcome::default();
        for (i, (key, seq)) in objects.iter().enumerate() {
            match self.free_one(client, index, key, seq) {
                Freed::Yes => {}
                Freed::Gone => {
                    self.counts.duplicate_frees += 1;
                    outcome.gone.push(i as u32);
                }
                Freed::Stale => {
                    self.counts.stale_frees += 1;
                    outcome.stale.push(i as u32);
                }
            }
        }
        outcome
    }

    /// Claims published objects for a client, which becomes known if it was not.
    pub fn hold(&mut self, client: &ClientId, objects: &ObjectList, now: Instant) -> HoldOutcome {
        let client = self.clients.known(client, now);
        let mut outcome = HoldOutcome::default();
        for (i, (key, seq)) in objects.iter().enumerate() {
            match self.lives(key).and_then(|lives| lives.current) {
                None => outcome.gone.push(i as u32),
                Some(id) if seq.is_some_and(|s| s != self.object(id).seq) => {
                    outcome.stale.push(i as u32);
                }
                Some(id) if self.add_hold(id.index(), client) => {}
                Some(_) => outcome.before.push(i as u32),
            }
        }
        outcome
    }

    /// Ends the client's claims, but leaves what is published where it is, even if nobody holds it
    /// now. What drains goes with its last holder, as ever.
    pub fn unhold(&mut self, client: &ClientId, objects: &ObjectList) {
        let Some(client) = self.clients.index(client) else { return };
        for (key, seq) in objects.iter() {
            let meant =
                |id: u32, books: &Self| seq.is_none_or(|s| s == books.objects[id as usize].seq);
            let current = self.lives(key).and_then(|lives| lives.current).map(Id::index);
            if let Some(id) = current.filter(|&id| meant(id, self))
                && let Some(place) = self.objects[id as usize].holders.forget(client)
            {
                self.forget_place(client, place);
                continue;
            }
            let draining = self.draining.get(key).and_then(|lives| {
                let held = |id: u32| self.objects[id as usize].holders.is_active(client);
                lives.iter().copied().find(|&id| held(id) && meant(id, self))
            });
            if let Some(id) = draining {
                self.end_hold(id, client);
            }
        }
    }

    /// Refuses keys with too many older lives that are still held.
    pub(super) fn check_older(&self, plan: &BatchPlan) -> Result<()> {
        if self.draining.is_empty() {
            return Ok(());
        }
        let keys = plan.samples.iter().flat_map(|s| &s.objects).map(|o| &o.key);
        for key in keys {
            let Some(lives) = self.draining.get(key).filter(|l| l.len() >= MAX_OLDER) else {
                continue;
            };
            let mut names: Vec<&str> = Vec::with_capacity(NAMED);
            let holders =
                lives.iter().flat_map(|&id| self.objects[id as usize].holders.active_clients());
            for name in holders.filter_map(|c| self.clients.name(c)).map(ClientId::as_str) {
                if names.len() < NAMED && !names.contains(&name) {
                    names.push(name);
                }
            }
            return Err(Error::new(
                ErrorKind::Busy,
                "reserve",
                format!("{} older lives of the key are still held", lives.len()),
            )
            .with("key", key)
            .with("holders", names.join(" and "))
            .remedy("let their holders release them"));
        }
        Ok(())
    }

    /// Records a hold of a known client; false if it has one.
    pub(super) fn add_hold(&mut self, id: u32, client: u32) -> bool {
        let holders = &mut self.objects[id as usize].holders;
        if holders.is_active(client) {
            return false;
        }
        holders.claim(client, self.clients.add(client, id));
        true
    }

    fn object(&self, id: Id) -> &super::Object {
        &self.objects[id.index() as usize]
    }

    /// `client` is the index of `who`, if that is known.
    fn free_one(
        &mut self,
        who: Option<&ClientId>,
        client: Option<u32>,
        key: &str,
        seq: Option<Sequence>,
    ) -> Freed {
        let lives = self.lives(key).copied().unwrap_or_default();
        let current = lives.current.map(Id::index);
        let is_current =
            current.filter(|&id| seq.is_none_or(|s| s == self.objects[id as usize].seq));
        let hold = |id: u32| client.and_then(|c| self.objects[id as usize].holders.get(c));
        if let (Some(id), Some(client)) = (is_current, client) {
            match hold(id) {
                Some(true) => {
                    self.end_hold(id, client);
                    return Freed::Yes;
                }
                // It has let go before, and the object lives on for others only.
                Some(false) if self.objects[id as usize].holders.any_active() => {
                    return Freed::Gone;
                }
                _ => {}
            }
        }
        // A life that was replaced or freed by others, but that this client still holds.
        let older = self.draining.get(key).and_then(|lives| {
            lives.iter().copied().find(|&id| {
                hold(id) == Some(true) && seq.is_none_or(|s| s == self.objects[id as usize].seq)
            })
        });
        if let (Some(id), Some(client)) = (older, client) {
            self.end_hold(id, client);
            return Freed::Yes;
        }
        if let Some(id) = is_current {
            self.retire(id);
            return Freed::Yes;
        }
        match (current, lives.filling) {
            (Some(_), _) => Freed::Stale,
            (None, Some(_)) if seq.is_some() => Freed::Stale,
            (None, Some(filling)) => {
                let frees = self.remembered.entry(filling.index()).or_default();
                if frees.iter().any(|earlier| earlier.as_ref() == who) {
                    return Freed::Gone;
                }
                frees.push(who.cloned());
                Freed::Yes
            }
            (None, None) => Freed::Gone,
        }
    }

    /// Applies the frees that came in while the object was filled.
    pub(super) fn apply_remembered(&mut self, id: u32) {
        for who in self.remembered.remove(&id).unwrap_or_default() {
            let client = who.and_then(|who| self.clients.index(&who));
            let alive = self.objects.get(id as usize).is_some_and(|o| o.state == State::Published);
            if !alive {
                return;
            }
            match client {
                Some(client) if self.objects[id as usize].holders.is_active(client) => {
                    self.end_hold(id, client);
                }
                _ => self.retire(id),
            }
        }
    }
}

impl ObjectList {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key; `seq` names its life, none means the current one.
    pub fn push(&mut self, key: &str, seq: Option<Sequence>) {
        self.text.push_str(key);
        let end = u32::try_from(self.text.len()).expect("a list holds less than 4 GiB of keys");
        self.entries.push((end, seq));
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of memory that its keys and lives take.
    pub(crate) fn bytes(&self) -> usize {
        self.text.len() + self.entries.len() * size_of::<(u32, Option<Sequence>)>()
    }

    /// Keys and lives, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<Sequence>)> {
        let mut start = 0;
        self.entries.iter().map(move |&(end, seq)| {
            let key = &self.text[start..end as usize];
            start = end as usize;
            (key, seq)
        })
    }
}

impl<K: AsRef<str>> FromIterator<(K, Option<Sequence>)> for ObjectList {
    fn from_iter<I: IntoIterator<Item = (K, Option<Sequence>)>>(objects: I) -> Self {
        let objects = objects.into_iter();
        let mut list = Self::new();
        let (count, _) = objects.size_hint();
        list.entries.reserve(count);
        for (key, seq) in objects {
            let key = key.as_ref();
            if list.is_empty() {
                list.text.reserve(key.len().saturating_mul(count)); // most are about as long
            }
            list.push(key, seq);
        }
        list
    }
}

impl<K: AsRef<str>> From<Vec<(K, Option<Sequence>)>> for ObjectList {
    fn from(objects: Vec<(K, Option<Sequence>)>) -> Self {
        objects.into_iter().collect()
    }
}

/// Clients that claim an object, or have claimed it and let go. Mostly none or one.
#[derive(Debug)]
pub(super) enum Holders {
    None,
    One(Holder),
    #[allow(clippy::box_collection)] // keeps every object 16 bytes smaller
    Many(Box<Vec<Holder>>),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Holder {
    client: u32,
    place: u32, // among what the client holds
}

impl Holder {
    /// The place of a hold that has ended.
    const LET_GO: u32 = u32::MAX;

    fn is_active(&self) -> bool {
        self.place != Self::LET_GO
    }
}

impl Holders {
    fn all(&self) -> &[Holder] {
        match self {
            Self::None => &[],
            Self::One(holder) => std::slice::from_ref(holder),
            Self::Many(holders) => holders,
        }
    }

    fn all_mut(&mut self) -> &mut [Holder] {
        match self {
            Self::None => &mut [],
            Self::One(holder) => std::slice::from_mut(holder),
            Self::Many(holders) => holders,
        }
    }

    /// Whether the client holds it; none if it never did.
    fn get(&self, client: u32) -> Option<bool> {
        self.all().iter().find(|h| h.client == client).map(Holder::is_active)
    }

    pub(super) fn is_active(&self, client: u32) -> bool {
        self.get(client) == Some(true)
    }

    /// Clients that hold it.
    pub(super) fn active_clients(&self) -> impl Iterator<Item = u32> + '_ {
        self.all().iter().filter(|h| h.is_active()).map(|h| h.client)
    }

    pub(super) fn active(&self) -> usize {
        self.active_clients().count()
    }

    pub(super) fn any_active(&self) -> bool {
        self.active_clients().next().is_some()
    }

    /// Records a hold, which is at `place` among those of its client.
    fn claim(&mut self, client: u32, place: u32) {
        if let Some(holder) = self.find(client) {
            holder.place = place;
            return;
        }
        let new = Holder { client, place };
        match self {
            Self::None => *self = Self::One(new),
            Self::One(old) => *self = Self::Many(Box::new(vec![*old, new])),
            Self::Many(holders) => {
                if holders.len() >= MAX_HOLDERS {
                    holders.retain(Holder::is_active);
                }
                holders.push(new);
            }
        }
    }

    /// Ends a hold as if it had never been, and returns its place; none if there is none.
    fn forget(&mut self, client: u32) -> Option<u32> {
        let place = self.release(client)?;
        match self {
            Self::Many(holders) => holders.retain(|h| h.client != client),
            _ => *self = Self::None,
        }
        Some(place)
    }

    /// Ends a hold, and returns its place; none if there is none.
    pub(super) fn release(&mut self, client: u32) -> Option<u32> {
        let holder = self.find(client).filter(|h| h.is_active())?;
        Some(std::mem::replace(&mut holder.place, Holder::LET_GO))
    }

    /// The client's hold is at another place now.
    pub(super) fn moved(&mut self, client: u32, place: u32) {
        let holder = self.find(client).filter(|h| h.is_active());
        holder.expect("what a client holds knows it").place = place;
    }

    fn find(&mut self, client: u32) -> Option<&mut Holder> {
        self.all_mut().iter_mut().find(|h| h.client == client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_have_let_go_are_forgotten_when_they_are_many() {
        let mut holders = Holders::None;
        holders.claim(0, 0); // and keeps it
        for client in 1..10_000 {
            holders.claim(client, client);
            assert_eq!(holders.release(client), Some(client));
            assert!(holders.all().len() <= MAX_HOLDERS);
        }
        assert_eq!((holders.active(), holders.get(0)), (1, Some(true)));
        assert_eq!((holders.get(9_999), holders.get(1)), (Some(false), None));
        for client in 10_000..10_100 {
            holders.claim(client, 0); // those who hold it are never forgotten
        }
        assert_eq!(holders.active(), 101);
    }
}
