//! Reads through the wheel, and what is left of those that fail.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, Result, SessionName};

use super::{
    Interpreter,
    engine::{Client, check},
    object::{Argument as A, Gil, Object, Parked},
    runtime::Answer,
};
use crate::{ReadFailure, ReadPiece, Running};

/// How long the other pieces of a failed read are waited for.
const DRAIN: Duration = Duration::from_millis(500);
/// How long a job looks for the end of a piece before it lets the interpreter's thread go.
const SPIN: Duration = Duration::from_micros(150);
/// Longest time between two looks.
const MAX_PAUSE: Duration = Duration::from_millis(2);
/// How long a look at what is left of a read may take.
const LOOK: Duration = Duration::from_secs(1);

/// Local address, remote address, length.
type Piece = (u64, u64, u64);

/// One call of `read`.
pub(super) struct Read {
    peer: String,
    pieces: Vec<Piece>,
    client: Arc<Client>,
}

/// What a read that failed has left behind.
pub(super) struct Left {
    error: Error,
    piece: Option<usize>,
    rest: Rest,
}

#[derive(Debug)]
enum Rest {
    Nothing,
    /// Requests whose end can be asked for.
    Requests(Vec<u64>),
    /// A job that has not come back, and what it is about.
    Job(Answer<()>, Arc<Mutex<Flight>>),
    /// A batch that has not come back.
    Batch(Answer<i64>),
    /// Transfers of which nothing is known.
    Unknown,
}

/// Pieces on their way.
#[derive(Debug)]
struct Flight {
    peer: String,
    pieces: Vec<Piece>,
    next: usize,
    /// Pieces and their requests, in order of submission.
    flying: VecDeque<(usize, u64)>,
    failed: Option<(usize, i64)>,
}

impl Read {
    pub(super) fn new(peer: &SessionName, pieces: &[ReadPiece], client: &Arc<Client>) -> Self {
        let pieces = pieces.iter().map(|p| (p.local as u64, p.remote.0, p.len as u64)).collect();
        Self { peer: peer.to_string(), pieces, client: client.clone() }
    }

    /// All pieces by one call, which knows no deadline of its own.
    pub(super) fn batch(self, interpreter: &Interpreter, timeout: Duration) -> Result<(), Left> {
        let deadline = Instant::now() + timeout;
        let Self { peer, pieces, client } = self;
        let answer = interpreter.start_job(move |gil| {
            let client = client.try_read();
            let engine = engine_of(client.as_deref(), gil)?;
            let arguments = [
                A::Text(&peer),
                A::Numbers(&mut pieces.iter().map(|p| p.0)),
                A::Numbers(&mut pieces.iter().map(|p| p.1)),
                A::Numbers(&mut pieces.iter().map(|p| p.2)),
            ];
            engine.method(c"batch_transfer_sync_read", arguments)?.as_number()
        })?;
        let failed = |error, rest| Err(Left { error, piece: None, rest });
        match answer.wait(deadline) {
            Some(Ok(0)) => Ok(()),
            // It returns at the first piece that fails, and does not wait for the others.
            Some(Ok(code)) => match check(code, "read") {
                Ok(()) => Ok(()),
                Err(error) => failed(error, Rest::Unknown),
            },
            Some(Err(error)) if error.kind() == ErrorKind::Closed => failed(error, Rest::Nothing),
            Some(Err(error)) => failed(error, Rest::Unknown),
            None if answer.cancel() => failed(no_thread(), Rest::Nothing),
            None => failed(still_running(), Rest::Batch(answer)),
        }
    }

    /// Each piece by a call of its own, `ahead` of them at a time.
    pub(super) fn singly(
        self,
        interpreter: &Interpreter,
        ahead: usize,
        timeout: Duration,
    ) -> Result<(), Left> {
        let started = Instant::now();
        let mut deadline = started + timeout;
        let Self { peer, pieces, client } = self;
        let (next, flying, failed) = (0, VecDeque::new(), None);
        let flight = Arc::new(Mutex::new(Flight { peer, pieces, next, flying, failed }));
        loop {
            let (job, client) = (flight.clone(), client.clone());
            let answer = interpreter.start_job(move |gil| {
                let client = client.try_read();
                job.lock().go_on(&engine_of(client.as_deref(), gil)?, ahead.max(1))
            })?;
            match answer.wait(deadline) {
                Some(Ok(())) => {}
                Some(Err(error)) => return Err(flight.lock().left(error)),
                None if answer.cancel() => return Err(flight.lock().left(no_thread())),
                None => {
                    let rest = Rest::Job(answer, flight);
                    return Err(Left { error: still_running(), piece: None, rest });
                }
            }
            let flight = flight.lock();
            if flight.flying.is_empty() && flight.next == flight.pieces.len() {
                match flight.failed {
                    None => return Ok(()),
                    Some((_, code)) => return Err(flight.left(failure(code))),
                }
            }
            let now = Instant::now();
            if let Some((_, code)) = flight.failed {
                deadline = deadline.min(now + DRAIN);
                if flight.flying.is_empty() || now >= deadline {
                    return Err(flight.left(failure(code)));
                }
            } else if now >= deadline {
                return Err(flight.left(still_running()));
            }
            drop(flight);
            // Short beside what has passed already, so that it costs little and keeps no core busy.
            let pause = ((now - started) / 16).min(MAX_PAUSE);
            std::thread::sleep(pause.min(deadline - now));
        }
    }
}

/// The engine, unless it was closed.
fn engine_of<'g>(client: Option<&Option<Parked>>, gil: Gil<'g>) -> Result<Object<'g>> {
    match client {
        Some(Some(parked)) => Ok(Object::of(parked, gil)),
        _ => Err(Error::new(ErrorKind::Closed, "read", "the engine was closed")),
    }
}

impl Flight {
    /// Submits what may be submitted and looks for the end of the oldest, for a short while.
    fn go_on(&mut self, engine: &Object<'_>, ahead: usize) -> Result<()> {
        let start = engine.attribute(c"batch_transfer_async_read")?;
        let status = engine.attribute(c"transfer_check_status")?;
        let mut since = Instant::now();
        loop {
            while self.flying.len() < ahead && self.failed.is_none() {
                let Some(&(local, remote, len)) = self.pieces.get(self.next) else { break };
                let one = |number: u64| std::iter::once(number);
                let arguments = [
                    A::Text(&self.peer),
                    A::Numbers(&mut one(local)),
                    A::Numbers(&mut one(remote)),
                    A::Numbers(&mut one(len)),
                ];
                match start.call(arguments)?.as_number()? {
                    0 => self.failed = Some((self.next, -1)),
                    request => self.flying.push_back((self.next, request as u64)),
                }
                self.next += 1;
            }
            let Some(&(piece, request)) = self.flying.front() else { return Ok(()) };
            match status.call([A::Number(request)])?.as_number()? {
                0 if since.elapsed() > SPIN => return Ok(()),
                0 => continue, // the call itself gives up the lock
                1 => {}
                -1 => {
                    self.failed.get_or_insert((piece, -1));
                }
                code => {
                    self.failed.get_or_insert((piece, code));
                    return Ok(()); // timed out in the engine: not over
                }
            }
            self.flying.pop_front();
            since = Instant::now();
        }
    }

    fn left(&self, error: Error) -> Left {
        let first = self.flying.front().map(|&(piece, _)| piece);
        let piece = self.failed.map(|(piece, _)| piece).or(first);
        Left { error, piece, rest: self.rest() }
    }

    fn rest(&self) -> Rest {
        match self.flying.is_empty() {
            true => Rest::Nothing,
            false => Rest::Requests(self.flying.iter().map(|&(_, request)| request).collect()),
        }
    }
}

/// What an answer means that is neither 0 nor 1.
fn failure(code: i64) -> Error {
    match check(code, "read") {
        Err(error) if code != -2 => error,
        _ => Error::new(ErrorKind::Timeout, "read", "the transfer timed out in the engine"),
    }
}

fn still_running() -> Error {
    Error::new(ErrorKind::Timeout, "read", "the transfer still runs")
}

fn no_thread() -> Error {
    Error::new(ErrorKind::Timeout, "read", "no thread of the interpreter was free in time")
        .remedy("earlier reads hang inside Mooncake, or the interpreter has too few threads")
}

impl From<Error> for Left {
    /// Nothing was started.
    fn from(error: Error) -> Self {
        Self { error, piece: None, rest: Rest::Nothing }
    }
}

impl Left {
    pub(super) fn into_failure(
        self,
        peer: &SessionName,
        interpreter: &Interpreter,
        client: &Arc<Client>,
    ) -> ReadFailure {
        let running: Option<Box<dyn Running>> = match self.rest {
            Rest::Nothing => None,
            rest => Some(Box::new(Remains {
                rest,
                interpreter: interpreter.clone(),
                client: Arc::downgrade(client),
            })),
        };
        ReadFailure { error: self.error.with("peer", peer), piece: self.piece, running }
    }
}

/// The rest of a read that failed.
#[derive(Debug)]
struct Remains {
    rest: Rest,
    interpreter: Interpreter,
    client: Weak<Client>,
}

impl Running for Remains {
    fn is_over(&mut self) -> bool {
        let now = Instant::now();
        self.rest = match std::mem::replace(&mut self.rest, Rest::Unknown) {
            Rest::Batch(answer) => match answer.wait(now) {
                None => Rest::Batch(answer),
                Some(Ok(0)) => Rest::Nothing, // complete, if late
                Some(_) => Rest::Unknown,
            },
            Rest::Job(answer, flight) => match answer.wait(now) {
                None => Rest::Job(answer, flight),
                Some(_) => flight.lock().rest(),
            },
            rest => rest,
        };
        let Some(client) = self.client.upgrade() else { return true };
        match client.try_read() {
            None => return false,                        // it is being closed
            Some(open) if open.is_none() => return true, // a closed engine has no transfers
            Some(_) => {}
        }
        if let Rest::Requests(requests) = &mut self.rest {
            let asked = std::mem::take(requests);
            self.rest = self.ask(client, asked);
        }
        matches!(self.rest, Rest::Nothing)
    }
}

impl Remains {
    /// Asks for the end of each request.
    fn ask(&self, client: Arc<Client>, requests: Vec<u64>) -> Rest {
        let asked = requests.clone();
        let look = self.interpreter.start_job(move |gil| {
            let client = client.try_read();
            let status = engine_of(client.as_deref(), gil)?.attribute(c"transfer_check_status")?;
            let mut open = Vec::new();
            for request in asked {
                match status.call([A::Number(request)])?.as_number()? {
                    1 | -1 => {} // over, and freed by the call
                    _ => open.push(request),
                }
            }
            Ok(open)
        });
        let Ok(look) = look else { return Rest::Requests(requests) };
        match look.wait(Instant::now() + LOOK) {
            Some(Ok(open)) if open.is_empty() => Rest::Nothing,
            Some(Ok(open)) => Rest::Requests(open),
            None if look.cancel() => Rest::Requests(requests),
            // Some may be freed: asking for them again would be asking about other requests.
            Some(Err(_)) | None => Rest::Unknown,
        }
    }
}
