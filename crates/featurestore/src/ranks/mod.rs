//! A small collective over tcp: what the ranks of one run tell each other at an optimizer step.
//!
//! Rank 0 leads and listens; the others join. Every rank makes the same calls in the same order,
//! and each call has a number, so that ranks that are out of step notice instead of mixing answers.
//! When a rank is gone or late, the call fails on all of them.

mod frame;
#[cfg(test)]
mod tests;

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use control_proto::Secret;
use transport_core::{Error, ErrorKind, Result};

use frame::{Frame, Hello, read_frame, write_frame};

/// Most ranks of a group.
pub const MAX_RANKS: usize = 4096;

/// How a group comes together and how patient it is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Name of the run; ranks of another run are refused.
    pub run: String,
    /// Ranks of the group.
    pub size: usize,
    /// How long all ranks may take to come together, and each call to complete.
    pub deadline: Duration,
    /// What ranks prove to know; all or none.
    pub token: Option<Secret>,
    /// Longest contribution of one rank to one call, in bytes.
    pub max_bytes: usize,
}

impl GroupOptions {
    /// `size` ranks of `run`: a minute of patience, 16 MiB a call.
    pub fn new(run: impl Into<String>, size: usize) -> Self {
        Self {
            run: run.into(),
            size,
            deadline: Duration::from_secs(60),
            token: None,
            max_bytes: 16 << 20,
        }
    }

    /// Sets how long all ranks may take, to come together and for each call.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    fn check(&self, rank: usize) -> Result<()> {
        if self.size == 0 || self.size > MAX_RANKS || rank >= self.size {
            return Err(Error::new(ErrorKind::ConfigInvalid, "join ranks", "no such rank")
                .with("rank", rank)
                .with("size", self.size)
                .remedy("ranks are counted from 0 and are fewer than the size of the group"));
        }
        Ok(())
    }
}

/// This rank's place in its group. Calls block, so that they may run beside a training loop on a
/// thread of their own.
#[derive(Debug)]
pub struct Group {
    rank: usize,
    options: GroupOptions,
    links: Vec<TcpStream>, // rank 0: those of ranks 1..; others: the one to rank 0
    calls: u64,
    broken: Option<String>,
}

impl Group {
    /// A group of one.
    pub fn alone(run: impl Into<String>) -> Self {
        let options = GroupOptions::new(run, 1);
        Self { rank: 0, options, links: Vec::new(), calls: 0, broken: None }
    }

    /// Rank 0: waits on `listener` until all others have joined.
    ///
    /// Connections that are not ranks of this run are refused and do not hold up the others.
    pub fn lead(listener: TcpListener, options: GroupOptions) -> Result<Self> {
        options.check(0)?;
        let deadline = Instant::now() + options.deadline;
        let mut links: Vec<Option<TcpStream>> = (1..options.size).map(|_| None).collect();
        let io = |e| Error::io("lead ranks", e);
        listener.set_nonblocking(true).map_err(io)?;
        while links.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, peer)) => match admit(stream, &options, deadline) {
                    // A rank that was restarted while the others wait takes its own place again.
                    Ok((rank, stream)) => links[rank - 1] = Some(stream),
                    Err(error) => tracing::warn!(%peer, %error, "not a rank of this run"),
                },
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        let missing = links.iter().enumerate().filter(|(_, link)| link.is_none());
                        let missing: Vec<_> =
                            missing.take(16).map(|(i, _)| (i + 1).to_string()).collect();
                        return Err(Error::new(
                            ErrorKind::Timeout,
                            "lead ranks",
                            "not all ranks have joined",
                        )
                        .with("missing", missing.join(","))
                        .with("size", options.size)
                        .remedy("check that every rank was started with this address"));
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(e) => return Err(io(e)),
            }
        }
        let mut links: Vec<TcpStream> = links.into_iter().flatten().collect();
        // Only now do the others go on: nobody works for a group that never came together.
        for link in &mut links {
            write_frame(link, &Frame::Answer { call: 0, parts: Vec::new() }, deadline)?;
        }
        Ok(Self { rank: 0, options, links, calls: 0, broken: None })
    }

    /// Another rank: joins the group that `leader` leads, which may not listen yet.
    pub fn join(leader: SocketAddr, rank: usize, options: GroupOptions) -> Result<Self> {
        options.check(rank)?;
        if rank == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "join ranks", "rank 0 leads"));
        }
        let deadline = Instant::now() + options.deadline;
        loop {
            let error = match try_join(leader, rank, &options, deadline) {
                Ok(stream) => {
                    let links = vec![stream];
                    return Ok(Self { rank, options, links, calls: 0, broken: None });
                }
                Err(error) => error,
            };
            let later = error.is_temporary() && Instant::now() < deadline;
            if !later {
                return Err(error.with("leader", leader).with("rank", rank));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.options.size
    }

    /// Gives what every rank has contributed, in the order of ranks, to every rank.
    pub fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.call(own, |all| Ok(all.to_vec()))
    }

    /// Lets rank 0 see all contributions and decide; gives its decision to every rank.
    ///
    /// An error of `decide` is an error on every rank.
    pub fn decide(
        &mut self,
        own: &[u8],
        decide: impl FnOnce(&[Vec<u8>]) -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let mut parts = self.call(own, |all| decide(all).map(|decision| vec![decision]))?;
        parts
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::Protocol, "decide", "the leader sent no decision"))
    }

    /// Waits until every rank has come this far.
    pub fn barrier(&mut self) -> Result<()> {
        self.call(&[], |_| Ok(Vec::new())).map(drop)
    }

    fn call(
        &mut self,
        own: &[u8],
        answer: impl FnOnce(&[Vec<u8>]) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Vec<Vec<u8>>> {
        if let Some(why) = &self.broken {
            return Err(Error::new(ErrorKind::Closed, "ranks", "the group is broken")
                .with("because", why)
                .remedy("restart all ranks from the newest checkpoint"));
        }
        if own.len() > self.options.max_bytes {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "ranks",
                "the contribution is too long",
            )
            .with("bytes", own.len())
            .with("max_bytes", self.options.max_bytes));
        }
        self.calls += 1;
        let deadline = Instant::now() + self.options.deadline;
        let outcome = if self.rank == 0 {
            self.lead_call(own, answer, deadline)
        } else {
            self.follow_call(own, deadline)
        };
        let (outcome, fatal) = match outcome {
            Ok(parts) => (Ok(parts), false),
            Err(Failure::Decided(error)) => (Err(error), false),
            Err(Failure::Broken(error)) => (Err(error), true),
        };
        if let (Err(error), true) = (&outcome, fatal) {
            self.broken = Some(error.to_string());
            self.links.clear(); // the others notice at once
        }
        outcome
    }

    fn lead_call(
        &mut self,
        own: &[u8],
        answer: impl FnOnce(&[Vec<u8>]) -> Result<Vec<Vec<u8>>>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        let mut all = Vec::with_capacity(self.options.size);
        all.push(own.to_vec());
        let mut lost = None;
        for (index, link) in self.links.iter_mut().enumerate() {
            match read_frame(link, self.options.max_bytes, deadline) {
                Ok(Frame::Part { call, bytes }) if call == self.calls => all.push(bytes),
                Ok(_) => {
                    let why = "a rank is out of step";
                    let error = Error::new(ErrorKind::Protocol, "ranks", why);
                    lost = Some(error.with("rank", index + 1));
                }
                Err(error) => lost = Some(error.with("rank", index + 1)),
            }
            if lost.is_some() {
                break;
            }
        }
        if let Some(error) = lost {
            let frame = Frame::Failed { call: self.calls, message: error.to_string(), fatal: true };
            for link in &mut self.links {
                let _ = write_frame(link, &frame, deadline); // it may be the one that is gone
            }
            return Err(Failure::Broken(error));
        }
        let outcome = answer(&all);
        let frame = match &outcome {
            Ok(parts) => Frame::Answer { call: self.calls, parts: parts.clone() },
            Err(error) => {
                Frame::Failed { call: self.calls, message: error.to_string(), fatal: false }
            }
        };
        let mut unreached = None;
        for (index, link) in self.links.iter_mut().enumerate() {
            if let Err(error) = write_frame(link, &frame, deadline) {
                unreached.get_or_insert(error.with("rank", index + 1));
            }
        }
        match (outcome, unreached) {
            (_, Some(error)) => Err(Failure::Broken(error)),
            (outcome, None) => outcome.map_err(Failure::Decided),
        }
    }

    fn follow_call(&mut self, own: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, Failure> {
        let (calls, most) = (self.calls, self.options.max_bytes);
        let link = self.links.first_mut().expect("the link to rank 0 is there until it breaks");
        let part = Frame::Part { call: calls, bytes: own.to_vec() };
        write_frame(link, &part, deadline).map_err(Failure::Broken)?;
        let most = most.saturating_mul(self.options.size);
        match read_frame(link, most, deadline).map_err(|e| Failure::Broken(e.with("rank", 0)))? {
            Frame::Answer { call, parts } if call == calls => Ok(parts),
            Frame::Failed { message, fatal, .. } => {
                let error = Error::new(ErrorKind::PeerGone, "ranks", message);
                Err(if fatal { Failure::Broken(error) } else { Failure::Decided(error) })
            }
            _ => Err(Failure::Broken(
                Error::new(ErrorKind::Protocol, "ranks", "the leader is out of step")
                    .with("call", calls),
            )),
        }
    }
}

enum Failure {
    /// Rank 0 decided against it; the group goes on.
    Decided(Error),
    /// The ranks cannot go on together.
    Broken(Error),
}

fn admit(
    mut stream: TcpStream,
    options: &GroupOptions,
    deadline: Instant,
) -> Result<(usize, TcpStream)> {
    /// Longest time that one connection may take to say who it is.
    const GREETING: Duration = Duration::from_secs(2);
    stream.set_nonblocking(false).map_err(|e| Error::io("lead ranks", e))?;
    let _ = stream.set_nodelay(true);
    let end = deadline.min(Instant::now() + GREETING);
    let refuse = |stream: &mut TcpStream, why: &'static str| {
        let frame = Frame::Failed { call: 0, message: why.into(), fatal: true };
        let _ = write_frame(stream, &frame, end);
        Err(Error::new(ErrorKind::PermissionDenied, "lead ranks", why))
    };
    let Frame::Hello(hello) = read_frame(&mut stream, 4096, end)? else {
        return refuse(&mut stream, "the connection did not say who it is");
    };
    let token = options.token.as_ref().map_or("", Secret::expose);
    let given = Secret::new(&*hello.token).ok();
    let known = match &options.token {
        Some(expected) => given.is_some_and(|given| given.matches(expected)),
        None => hello.token.is_empty() && token.is_empty(),
    };
    if !known {
        return refuse(&mut stream, "the rank's token is wrong");
    }
    if hello.run != options.run || hello.size as usize != options.size {
        return refuse(&mut stream, "the rank belongs to another run or a group of another size");
    }
    if !(1..options.size).contains(&(hello.rank as usize)) {
        return refuse(&mut stream, "there is no such rank");
    }
    Ok((hello.rank as usize, stream))
}

fn try_join(
    leader: SocketAddr,
    rank: usize,
    options: &GroupOptions,
    deadline: Instant,
) -> Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(&leader, left.min(Duration::from_secs(3)))
        .map_err(|e| Error::io("join ranks", e))?;
    let _ = stream.set_nodelay(true);
    let hello = Hello {
        run: options.run.clone(),
        rank: rank as u32,
        size: options.size as u32,
        token: options.token.as_ref().map_or_else(String::new, |t| t.expose().to_owned()),
    };
    write_frame(&mut stream, &Frame::Hello(hello), deadline)?;
    match read_frame(&mut stream, 4096, deadline)? {
        Frame::Answer { call: 0, .. } => Ok(stream),
        Frame::Failed { message, .. } => {
            Err(Error::new(ErrorKind::PermissionDenied, "join ranks", message))
        }
        _ => Err(Error::new(ErrorKind::Protocol, "join ranks", "not a leader of ranks")),
    }
}
