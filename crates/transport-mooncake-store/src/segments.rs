//! Segments whose owners do not answer: reads of what lies there fail at once for a while.
//!
//! Mooncake itself gives each read of a silent owner its full timeout, half a minute, as long as the
//! master lists the segment. Here the first read that fails, or passes its deadline, has the owners
//! of its objects asked for a sign of life; those that give none are left alone.

use std::{
    collections::{BTreeSet, HashMap},
    io::{Read, Write},
    net::{Ipv6Addr, TcpStream, ToSocketAddrs},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use control_proto::mooncake::handshake::{Frame, Kind};
use mooncake_sys::{Replica, StoreApi};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, Result, SessionName};

/// Longest wait for a sign of life.
const PROBE: Duration = Duration::from_secs(1);
/// Owners that are asked at the same time.
const AT_A_TIME: usize = 16;

/// What is known of segments that have failed.
#[derive(Debug)]
pub(crate) struct Segments {
    api: Arc<dyn StoreApi>,
    /// How long a silent one is left alone; `None` switches all of this off.
    silence: Option<Duration>,
    silent: Mutex<HashMap<String, Instant>>, // until when
    asking: AtomicUsize,                     // suspicions that are being looked into
    pub(crate) refused: AtomicU64,
}

impl Segments {
    pub(crate) fn new(api: Arc<dyn StoreApi>, silence: Option<Duration>) -> Self {
        let (silent, asking) = (Mutex::default(), AtomicUsize::new(0));
        Self { api, silence, silent, asking, refused: AtomicU64::new(0) }
    }

    /// Whether nothing is silent, as far as anybody knows. Costs next to nothing.
    pub(crate) fn is_clear(&self) -> bool {
        self.asking.load(Ordering::SeqCst) == 0 && self.silent.lock().is_empty()
    }

    /// Segments that are left alone now.
    pub(crate) fn count(&self) -> u64 {
        self.silent.lock().len() as u64
    }

    /// Announces that [`Self::suspect`] will be called, so that [`Self::is_clear`] waits for it.
    pub(crate) fn suspicion(self: &Arc<Self>) -> Option<Suspicion> {
        self.silence?;
        self.asking.fetch_add(1, Ordering::SeqCst);
        Some(Suspicion(self.clone()))
    }

    /// Asks the owners of these objects for a sign of life. Blocks, for a second each.
    pub(crate) fn suspect(&self, keys: &[&str]) {
        let Some(silence) = self.silence else { return };
        let segments = match self.of(keys) {
            Ok(found) => found.into_iter().flatten().collect::<BTreeSet<_>>(),
            Err(error) => {
                tracing::debug!(%error, "segments of a failed read are not known");
                return;
            }
        };
        self.ask(segments.into_iter().collect(), silence);
    }

    /// Asks owners side by side, and notes who does not answer.
    fn ask(&self, segments: Vec<String>, silence: Duration) {
        for some in segments.chunks(AT_A_TIME) {
            std::thread::scope(|scope| {
                for segment in some {
                    // With a metadata server names are free: nobody can be asked, or blamed.
                    let Some(name) = handshake(segment) else { continue };
                    scope.spawn(move || {
                        let answer = sign_of_life(&name);
                        let mut silent = self.silent.lock();
                        if let Err(error) = answer {
                            tracing::warn!(segment, %error, "the owner of memory does not answer");
                            silent.insert(segment.clone(), Instant::now() + silence);
                        } else {
                            silent.remove(segment);
                        }
                    });
                }
            });
        }
    }

    /// Fails if one of the objects lies only in segments that do not answer. Blocks.
    pub(crate) fn check(&self, keys: &[&str]) -> Result<()> {
        self.ask_again();
        if self.silent.lock().is_empty() {
            return Ok(());
        }
        for (key, segments) in keys.iter().zip(self.of(keys)?) {
            let silent = self.silent.lock();
            if !segments.is_empty() && segments.iter().all(|segment| silent.contains_key(segment)) {
                self.refused.fetch_add(1, Ordering::Relaxed);
                return Err(Error::new(
                    ErrorKind::PeerGone,
                    "fetch",
                    "the owner of the memory that holds the object did not answer a moment ago",
                )
                .with("key", key)
                .with("segment", segments.join(", "))
                .remedy(
                    "capture the sample again; what the owner held is lost if it does not come back",
                ));
            }
        }
        Ok(())
    }

    /// Asks those again that were left alone long enough.
    fn ask_again(&self) {
        let Some(silence) = self.silence else { return };
        let now = Instant::now();
        let due: Vec<String> = {
            let silent = self.silent.lock();
            silent.iter().filter(|(_, until)| **until <= now).map(|(s, _)| s.clone()).collect()
        };
        self.ask(due, silence);
    }

    /// Segments of each object; none where the provider cannot tell.
    fn of(&self, keys: &[&str]) -> Result<Vec<Vec<String>>> {
        let located = self.api.locate(keys)?.unwrap_or_else(|| vec![Vec::new(); keys.len()]);
        let names = |replicas: Vec<Replica>| {
            replicas.into_iter().map(|replica| replica.segment.to_string()).collect()
        };
        Ok(located.into_iter().map(names).collect())
    }
}

/// A suspicion that is yet to be looked into.
#[derive(Debug)]
pub(crate) struct Suspicion(Arc<Segments>);

impl Drop for Suspicion {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The handshake that a segment's name names, if it does. Mooncake writes IPv6 addresses without brackets.
pub(crate) fn handshake(segment: &str) -> Option<SessionName> {
    segment.parse().ok().or_else(|| {
        let (host, port) = segment.rsplit_once(':')?;
        host.parse::<Ipv6Addr>().ok()?;
        SessionName::new(host, port.parse().ok()?).ok()
    })
}

/// Asks the owner of a segment for anything at all, on the port of its peer handshake.
fn sign_of_life(name: &SessionName) -> Result<()> {
    const ASK: &str = "ask segment owner";
    let io = |error| Error::io(ASK, error);
    let address = (name.host(), name.port()).to_socket_addrs().map_err(io)?.next();
    let address = address.ok_or_else(|| Error::new(ErrorKind::NotFound, ASK, "no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, PROBE).map_err(io)?;
    stream.set_read_timeout(Some(PROBE)).map_err(io)?;
    stream.set_write_timeout(Some(PROBE)).map_err(io)?;
    let mut frame = Vec::new();
    Frame::new(Kind::Probe, "{}").encode(&mut frame);
    stream.write_all(&frame).map_err(io)?;
    stream.read_exact(&mut [0]).map_err(io)
}
