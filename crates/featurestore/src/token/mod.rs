//! Frees samples of servers that are asked with a token: by sample, each request answered.
//!
//! Samples are grouped by server, and the servers are asked side by side. Each gets batches of at
//! most [`MAX_ITEMS`]; one that knows no batches gets single requests. What fails is tried again
//! on a new connection, within bounds, and reported with its server.

#[cfg(test)]
mod tests;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use control_proto::{
    Secret,
    token::{Health, Item, MAX_ITEMS, MAX_LINE_BYTES, Reply, Request, Verb},
};
use parking_lot::Mutex;
use transport_core::{
    Descriptor, Error, ErrorKind, Location, Result, SampleId, SessionName, TokenLocation,
};

/// How a [`TokenReleaser`] asks.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TokenOptions {
    /// Longest time of one attempt at one request. Default: 30 seconds.
    pub timeout: Duration,
    /// Attempts at one request. Default: 3.
    pub attempts: u32,
    /// Pause before another attempt. Default: 100 ms.
    pub pause: Duration,
    /// Why samples are released, for the server's log.
    pub reason: String,
}

impl Default for TokenOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            attempts: 3,
            pause: Duration::from_millis(100),
            reason: "optimizer-boundary-durable-ack".into(),
        }
    }
}

/// What became of a call, in samples.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct TokenReport {
    /// Confirmed by their servers. A server counts those that were gone before, too.
    pub released: u64,
    /// Bytes that came back.
    pub freed_bytes: u64,
    /// Not confirmed, with the reason of each server.
    pub failed: Vec<(SessionName, Vec<SampleId>, Error)>,
}

/// Releases samples through token-authenticated control endpoints. Blocks; share it freely.
#[derive(Debug, Default)]
pub struct TokenReleaser {
    options: TokenOptions,
    requests: AtomicU64,
    items: AtomicU64,
    fallbacks: AtomicU64,
    singles: Mutex<std::collections::HashSet<SessionName>>, // servers that know no batches
}

impl TokenReleaser {
    /// Asks as `options` say.
    pub fn new(options: TokenOptions) -> Self {
        Self { options, ..Self::default() }
    }

    /// Requests sent, samples named in them, and times that a batch was sent one by one instead.
    pub fn counts(&self) -> (u64, u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (load(&self.requests), load(&self.items), load(&self.fallbacks))
    }

    /// Releases samples that were used, or aborts those that are not wanted.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a sample that is not behind a token; then nothing is sent.
    pub fn release(&self, samples: &[Arc<Descriptor>], verb: Verb) -> Result<TokenReport> {
        let mut groups: Vec<(&TokenLocation, Vec<Item>)> = Vec::new();
        for sample in samples {
            let Location::Token(place) = &sample.location else {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "release",
                    "the sample is not behind a token",
                )
                .with("key", &sample.sample));
            };
            let item = Item {
                sample_id: sample.sample.sample_id.clone(),
                generation: sample.sample.generation,
            };
            let same = |(known, _): &&mut (&TokenLocation, Vec<Item>)| {
                known.control == place.control && known.token == place.token
            };
            match groups.iter_mut().find(same) {
                Some((_, items)) => items.push(item),
                None => groups.push((place, vec![item])),
            }
        }
        let reports: Vec<TokenReport> = std::thread::scope(|scope| {
            let asking: Vec<_> = groups
                .iter()
                .map(|(place, items)| scope.spawn(move || self.ask(place, items, verb)))
                .collect();
            asking.into_iter().map(|t| t.join().expect("asking does not panic")).collect()
        });
        let mut all = TokenReport::default();
        for report in reports {
            all.released += report.released;
            all.freed_bytes += report.freed_bytes;
            all.failed.extend(report.failed);
        }
        Ok(all)
    }

    fn ask(&self, place: &TokenLocation, items: &[Item], verb: Verb) -> TokenReport {
        let mut report = TokenReport::default();
        let mut link = Link::new(&place.control, &self.options);
        let fail = |report: &mut TokenReport, items: &[Item], error: Error| {
            let ids = items.iter().map(|item| item.sample_id.clone()).collect();
            report.failed.push((place.control.clone(), ids, error));
        };
        let token = match Secret::new(&*place.token) {
            Ok(token) => token,
            Err(error) => {
                fail(&mut report, items, error);
                return report;
            }
        };
        let mut rest = items;
        while !rest.is_empty() {
            let known_single = self.singles.lock().contains(&place.control);
            let mut most = if known_single { 1 } else { rest.len().min(MAX_ITEMS) };
            let mut line = Vec::new();
            // Long ids make a line too long before a batch is full.
            while self.request(&rest[..most], verb, &token).write(&mut line).is_err() && most > 1 {
                most = most.div_ceil(2);
            }
            let batch = &rest[..most];
            match self.exchange(&mut link, &line, most as u64) {
                Ok(Reply::Freed { freed_bytes, .. }) => {
                    report.released += most as u64;
                    report.freed_bytes += freed_bytes;
                    rest = &rest[most..];
                }
                Ok(reply) if reply.is_unsupported_operation() && most > 1 => {
                    self.fallbacks.fetch_add(1, Ordering::Relaxed);
                    self.singles.lock().insert(place.control.clone());
                }
                Ok(reply) => {
                    let error = reply.into_result().err().unwrap_or_else(|| {
                        Error::new(ErrorKind::Protocol, "token control", "an unexpected reply")
                    });
                    // One stale sample makes a server refuse the whole batch: find it.
                    if error.kind() == ErrorKind::Stale && most > 1 {
                        self.fallbacks.fetch_add(1, Ordering::Relaxed);
                        for item in batch {
                            let one = self.one(&mut link, item, verb, &token);
                            match one {
                                Ok(bytes) => {
                                    report.released += 1;
                                    report.freed_bytes += bytes;
                                }
                                Err(error) => {
                                    fail(&mut report, std::slice::from_ref(item), error);
                                }
                            }
                        }
                    } else {
                        fail(&mut report, batch, error.with("server", &place.control));
                    }
                    rest = &rest[most..];
                }
                Err(error) => {
                    // The server cannot be reached: the rest would only wait as long again.
                    fail(&mut report, rest, error.with("server", &place.control));
                    break;
                }
            }
        }
        report
    }

    fn one(&self, link: &mut Link<'_>, item: &Item, verb: Verb, token: &Secret) -> Result<u64> {
        let mut line = Vec::new();
        self.request(std::slice::from_ref(item), verb, token).write(&mut line)?;
        match self.exchange(link, &line, 1)?.into_result()? {
            Reply::Freed { freed_bytes, .. } => Ok(freed_bytes),
            _ => Err(Error::new(ErrorKind::Protocol, "token control", "an unexpected reply")),
        }
    }

    fn request(&self, items: &[Item], verb: Verb, token: &Secret) -> Request {
        let (token, reason) = (token.clone(), Some(self.options.reason.clone()));
        match items {
            [item] => Request::One { verb, token, item: item.clone(), reason },
            items => Request::Batch { verb, token, items: items.to_vec(), reason },
        }
    }

    /// What a server measures of itself; needs no token.
    pub fn health(&self, control: &SessionName) -> Result<Health> {
        let mut line = Vec::new();
        Request::Health.write(&mut line)?;
        let mut link = Link::new(control, &self.options);
        match self.exchange(&mut link, &line, 0)?.into_result()? {
            Reply::Health(health) => Ok(*health),
            _ => Err(Error::new(ErrorKind::Protocol, "token control", "an unexpected reply")
                .with("server", control)),
        }
    }

    /// Sends a line and reads its answer. Requests are idempotent, so a lost answer is asked for
    /// again, on a new connection.
    fn exchange(&self, link: &mut Link<'_>, line: &[u8], items: u64) -> Result<Reply> {
        let mut attempt = 1;
        loop {
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.items.fetch_add(items, Ordering::Relaxed);
            let error = match link.exchange(line) {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            };
            link.close();
            if attempt >= self.options.attempts.max(1) || !error.is_temporary() {
                return Err(error.with("attempts", attempt).remedy(
                    "check that the capture server runs; its memory is gone if it does not",
                ));
            }
            attempt += 1;
            std::thread::sleep(self.options.pause);
        }
    }
}

/// One connection to one server, made when it is needed. Servers that close after each answer are
/// met by another one.
struct Link<'a> {
    control: &'a SessionName,
    options: &'a TokenOptions,
    stream: Option<BufReader<TcpStream>>,
}

impl<'a> Link<'a> {
    fn new(control: &'a SessionName, options: &'a TokenOptions) -> Self {
        Self { control, options, stream: None }
    }

    fn close(&mut self) {
        self.stream = None;
    }

    fn exchange(&mut self, line: &[u8]) -> Result<Reply> {
        let deadline = Instant::now() + self.options.timeout;
        let used = self.stream.is_some();
        let outcome = self.attempt(line, deadline);
        match outcome {
            // A connection that was used before may have been closed by the server meanwhile.
            Err(error) if used && error.kind() == ErrorKind::PeerGone => {
                self.close();
                self.attempt(line, deadline)
            }
            outcome => outcome,
        }
    }

    fn attempt(&mut self, line: &[u8], deadline: Instant) -> Result<Reply> {
        let io = |e| Error::io("token control", e);
        if self.stream.is_none() {
            let address = (self.control.host(), self.control.port());
            let mut addresses = address.to_socket_addrs().map_err(io)?;
            let address = addresses.next().ok_or_else(|| {
                Error::new(ErrorKind::NotFound, "token control", "the name has no address")
            })?;
            let stream = TcpStream::connect_timeout(&address, left(deadline)?).map_err(io)?;
            stream.set_nodelay(true).map_err(io)?;
            self.stream = Some(BufReader::new(stream));
        }
        let reader = self.stream.as_mut().expect("made above");
        let stream = reader.get_mut();
        stream.set_write_timeout(Some(left(deadline)?)).map_err(io)?;
        stream.write_all(line).map_err(io)?;
        let mut reply = Vec::new();
        while !reply.ends_with(b"\n") {
            reader.get_ref().set_read_timeout(Some(left(deadline)?)).map_err(io)?;
            let most = (MAX_LINE_BYTES + 1 - reply.len()) as u64;
            let read = reader.by_ref().take(most).read_until(b'\n', &mut reply).map_err(io)?;
            if reply.len() > MAX_LINE_BYTES && !reply.ends_with(b"\n") {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    "token control",
                    "a reply is too long",
                ));
            }
            if read == 0 {
                return Err(Error::new(
                    ErrorKind::PeerGone,
                    "token control",
                    "the server closed without an answer",
                ));
            }
        }
        reply.pop();
        Reply::parse(&reply)
    }
}

fn left(deadline: Instant) -> Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(Error::new(
            ErrorKind::Timeout,
            "token control",
            "the server did not answer in time",
        )),
        left => Ok(left),
    }
}
