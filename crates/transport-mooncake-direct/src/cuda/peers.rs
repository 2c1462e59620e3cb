//! Memory of peers that this process has open: each block once.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::cuda::Device;
use control_proto::mooncake::handshake::SegmentDescriptor;
use parking_lot::{Mutex, RwLock};
use transport_core::{Epoch, Error, ErrorKind, RemoteAddr, Result, SessionName};

use crate::{
    device::{OpenedBlock, open_block},
    net::timed_out,
    tcp::fetch_metadata,
};

/// Blocks of all peers, by session and life.
#[derive(Debug, Default)]
pub(super) struct Peers {
    known: RwLock<HashMap<Place, Arc<Peer>>>,
    own: SegmentDescriptor,
}

/// A life of a peer; peers of other software do not tell theirs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) session: SessionName,
    pub(super) epoch: Option<Epoch>,
}

/// What one life of a peer has told, and what of it is open.
#[derive(Debug)]
pub(super) struct Peer {
    session: SessionName,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    told: SegmentDescriptor,
    asked: Instant,
    blocks: Vec<Arc<OpenedBlock>>,
}

/// What is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) peers: u64,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
}

impl Peers {
    /// The peer, asked for its memory if it is not known or, where it tells no life, was asked
    /// longer ago than `trust`. Older lives at the same session are closed.
    pub(super) fn get(
        &self,
        session: &SessionName,
        epoch: Option<Epoch>,
        trust: Duration,
        deadline: Instant,
    ) -> Result<Arc<Peer>> {
        let place = Place { session: session.clone(), epoch };
        let known = self.known.read().get(&place).cloned();
        if let Some(peer) = &known
            && (epoch.is_some() || peer.state.lock().asked.elapsed() < trust)
        {
            return Ok(peer.clone());
        }
        let asked = Instant::now();
        let told = self.ask(session, epoch, deadline).inspect_err(|error| {
            // Nothing of what does not answer any more is kept open.
            if matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::Stale) {
                self.known.write().remove(&place);
            }
        })?;
        if let Some(peer) = known {
            peer.renew(told, asked);
            return Ok(peer);
        }
        let mut known = self.known.write();
        known.retain(|other, _| {
            other.session != *session || other.epoch == epoch || epoch.is_none()
        });
        let peer = known.entry(place).or_insert_with(|| {
            let state = State { told, asked, blocks: Vec::new() };
            Arc::new(Peer { session: session.clone(), state: Mutex::new(state) })
        });
        Ok(peer.clone())
    }

    fn ask(
        &self,
        session: &SessionName,
        epoch: Option<Epoch>,
        deadline: Instant,
    ) -> Result<SegmentDescriptor> {
        let told = fetch_metadata(session, &self.own, deadline)?;
        match (epoch, told.featurestore_epoch) {
            (Some(expected), Some(found)) if expected != found => {
                Err(Error::new(ErrorKind::Stale, "read", "another life of the peer answers")
                    .with("peer", session)
                    .with("expected", expected)
                    .with("found", found)
                    .remedy("its memory is gone: capture the sample again"))
            }
            _ => Ok(told),
        }
    }

    /// Whether that life is known.
    pub(super) fn knows(&self, session: &SessionName, epoch: Option<Epoch>) -> bool {
        self.known.read().contains_key(&Place { session: session.clone(), epoch })
    }

    /// Closes what `keep` does not want; reads that run keep theirs until they end.
    pub(super) fn retain(&self, mut keep: impl FnMut(&Place) -> bool) {
        self.known.write().retain(|place, _| keep(place));
    }

    pub(super) fn open(&self) -> Open {
        let known = self.known.read();
        let mut open = Open { peers: known.len() as u64, ..Open::default() };
        for peer in known.values() {
            let state = peer.state.lock();
            open.blocks += state.blocks.len() as u64;
            open.bytes += state.blocks.iter().map(|block| block.memory().len()).sum::<u64>();
        }
        open
    }
}

impl Peer {
    /// The block that all of the range lies in; opened if it is not.
    pub(super) fn block(
        &self,
        device: &Device,
        address: RemoteAddr,
        len: u64,
        deadline: Instant,
    ) -> Result<Arc<OpenedBlock>> {
        let named = |e: Error| e.with("peer", &self.session);
        let mut state = self.state.lock();
        let known = state.blocks.iter().find(|block| holds(block, address));
        let block = match known {
            Some(block) => block.clone(),
            None => {
                if Instant::now() >= deadline {
                    return Err(named(timed_out("open device memory of peer")));
                }
                // Under the lock, so that no block is opened twice.
                let block = Arc::new(open_block(device, &state.told, address, deadline)?);
                state.blocks.push(block.clone());
                block
            }
        };
        drop(state);
        block.locate(address, len).map_err(named)?;
        Ok(block)
    }

    /// Closes the blocks that the peer does not describe as it did before: they were freed, and
    /// whatever is at their addresses now is something else.
    fn renew(&self, told: SegmentDescriptor, asked: Instant) {
        let mut state = self.state.lock();
        let same = told.protocol == state.told.protocol;
        let old = std::mem::replace(&mut state.told, told);
        state.asked = asked;
        let State { told, blocks, .. } = &mut *state;
        blocks.retain(|block| {
            let buffer = old.buffers.iter().find(|b| b.addr == block.base().0);
            same && buffer.is_some_and(|buffer| told.buffers.contains(buffer))
        });
    }
}

/// Whether an address of the peer lies in the block.
fn holds(block: &OpenedBlock, address: RemoteAddr) -> bool {
    address.0.checked_sub(block.base().0).is_some_and(|offset| offset < block.bytes())
}
