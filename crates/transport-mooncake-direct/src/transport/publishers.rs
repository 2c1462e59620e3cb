//! What is known about every publisher: its control connection, its lives, and our claims there.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};
use transport_core::{ClientId, Epoch, Error, ErrorKind, Health, MapMark, Result, SessionName};

use crate::{ControlClient, ControlOptions, Standing, claims::Claims, shm::SharedArena};

/// Lives of one publisher that are remembered: the present one, and older ones until it is known.
const MAX_LIVES: usize = 4;

/// Publishers by their control endpoint.
#[derive(Debug)]
pub(super) struct Publishers {
    options: ControlOptions,
    mark: MapMark,
    names: Arc<Names>,
    known: RwLock<HashMap<SessionName, Arc<Publisher>>>,
}

/// One capture server, whatever process answers there.
#[derive(Debug)]
pub(super) struct Publisher {
    client: ControlClient,
    mark: MapMark,
    names: Arc<Names>,
    lives: Mutex<Vec<Arc<Life>>>, // the newest last
}

/// One life of a publisher. Reads of an older one keep it until they end.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) epoch: Epoch,
    pub(super) claims: Mutex<Claims>,
    shared: Mutex<Option<Arc<SharedArena>>>,
}

/// Under which one name each life was reached.
///
/// Frees and claims of one life keep their order on one connection only, so a server is spoken to
/// under one name: through another, a sample could be freed while it is being claimed.
#[derive(Debug, Default)]
struct Names(Mutex<HashMap<Epoch, SessionName>>);

impl Names {
    fn learn(&self, epoch: Epoch, name: &SessionName) -> Result<()> {
        self.0.lock().entry(epoch).or_insert_with(|| name.clone());
        self.check(epoch, name)
    }

    fn check(&self, epoch: Epoch, name: &SessionName) -> Result<()> {
        match self.0.lock().get(&epoch) {
            Some(known) if known != name => {
                let why = "the server is known under another name";
                Err(Error::new(ErrorKind::InvalidInput, "reach publisher", why)
                    .with("expected", known)
                    .with("found", name)
                    .remedy("use descriptors as the server gave them"))
            }
            _ => Ok(()),
        }
    }
}

impl Publishers {
    /// `mark` is the one under which memory of theirs is mapped.
    pub(super) fn new(options: ControlOptions, mark: MapMark) -> Self {
        Self { options, mark, names: Arc::default(), known: RwLock::default() }
    }

    /// The same publishers, spoken to as somebody who maps nothing and holds nothing: what such a
    /// client frees stays for as long as others hold it.
    pub(super) fn stranger(options: &ControlOptions) -> Self {
        let mut options = options.clone();
        (options.client, options.mapping) = (ClientId::random(), None);
        Self::new(options, MapMark::random())
    }

    pub(super) fn client_id(&self) -> &ClientId {
        &self.options.client
    }

    /// The publisher at `control`; its connection starts with the first use.
    pub(super) fn get(&self, control: &SessionName) -> Result<Arc<Publisher>> {
        if let Some(publisher) = self.known.read().get(control) {
            return Ok(publisher.clone());
        }
        let mut known = self.known.write();
        if let Some(publisher) = known.get(control) {
            return Ok(publisher.clone());
        }
        let client = ControlClient::start(control.clone(), self.options.clone())?;
        let (mark, names) = (self.mark, self.names.clone());
        let publisher = Arc::new(Publisher { client, mark, names, lives: Mutex::default() });
        known.insert(control.clone(), publisher.clone());
        Ok(publisher)
    }

    /// Whether that life of a publisher is connected, as far as is known.
    #[cfg(feature = "cuda")]
    pub(super) fn answers(&self, session: &SessionName, epoch: Epoch) -> bool {
        self.known.read().values().any(|publisher| {
            let standing = publisher.client.standing();
            standing.is_some_and(|s| {
                s.connected && s.hello.epoch == epoch && s.hello.session == *session
            })
        })
    }

    pub(super) fn add_to(&self, health: &mut Health) {
        for publisher in self.known.read().values() {
            let stats = publisher.client.stats();
            health.connected_peers += u64::from(stats.connected);
            health.protocol_errors += stats.protocol_errors;
            health.last_error = health.last_error.take().or(stats.last_error);
        }
    }

    /// Says goodbye to all of them at once, and waits at most `bound`.
    pub(super) fn close(&self, bound: Duration) {
        let known = std::mem::take(&mut *self.known.write());
        std::thread::scope(|scope| {
            for publisher in known.values() {
                // The mappings first: the publisher keeps what is held for as long as one exists.
                publisher.lives.lock().clear();
                scope.spawn(|| publisher.client.close(bound));
            }
        });
    }
}

impl Publisher {
    pub(super) fn client(&self) -> &ControlClient {
        &self.client
    }

    /// The life that is meant, with our standing there; connects if need be.
    pub(super) fn life(&self, epoch: Epoch, deadline: Instant) -> Result<(Arc<Life>, Standing)> {
        let standing = self.client.connect_to(epoch, deadline)?;
        self.names.learn(epoch, self.client.server())?;
        Ok((self.present(&standing), standing))
    }

    /// Refuses a life that is known under another name.
    pub(super) fn check_name(&self, epoch: Epoch) -> Result<()> {
        self.names.check(epoch, self.client.server())
    }

    /// The life that `standing` is about. All others are over: they are forgotten here.
    fn present(&self, standing: &Standing) -> Arc<Life> {
        let life = self.life_called(standing.hello.epoch);
        self.lives.lock().retain(|other| other.epoch == life.epoch);
        life.claims.lock().renew(standing.continuity, standing.known_since);
        life.shared.lock().get_or_insert_with(|| {
            let info = standing.hello.arena.clone();
            Arc::new(SharedArena::new(info, self.client.server().clone(), self.mark))
        });
        life
    }

    /// The record of a life, whether or not it is known to be there.
    pub(super) fn life_called(&self, epoch: Epoch) -> Arc<Life> {
        let mut lives = self.lives.lock();
        if let Some(life) = lives.iter().find(|life| life.epoch == epoch) {
            return life.clone();
        }
        if lives.len() >= MAX_LIVES {
            // Never the present one, which alone has its memory.
            let oldest = lives.iter().position(|life| life.shared.lock().is_none());
            lives.remove(oldest.unwrap_or(0));
        }
        let life = Arc::new(Life { epoch, claims: Mutex::default(), shared: Mutex::new(None) });
        lives.push(life.clone());
        life
    }
}

impl Life {
    /// The publisher's memory as other processes map it.
    pub(super) fn shared(&self) -> Result<Arc<SharedArena>> {
        self.shared.lock().clone().ok_or_else(|| {
            Error::new(ErrorKind::PeerGone, "map arena", "this life of the publisher is over")
        })
    }
}
