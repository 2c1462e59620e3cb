//! The books, and what is asked of them. Whoever is at them does it, in the order in which it was
//! asked: the owner thread, or a caller who finds nobody there. Waking a thread can take longer than a
//! whole request does, and twice as long to and fro.

use std::{
    cell::Cell,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::Instant,
};

use crossbeam_channel::{Receiver, Select, Sender, unbounded};
use tokio::sync::oneshot;
use transport_core::{Error, Result};

use super::{Command, FreeRequest, Granted, HoldRequest, closed, wait::spin};
use crate::{
    Backing,
    arena::{CaptureArena, Grant, Ticket},
    reservation::{Births, FillGuard},
};

/// Work done between two looks at leases and waiting batches, as [`Command::weight`] counts it:
/// some milliseconds at most, whatever clients send.
const BURST: usize = 4096;
/// Work that a caller does who waits for it, what was asked before it included: about the time that
/// waking the owner thread and being woken takes.
const HERE: usize = 64;

thread_local! {
    /// Whether this thread is at the books of some arena.
    static IS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// The way to the books of an arena. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Desk {
    commands: Sender<Command>,
    owner: Arc<Mutex<Owner>>,
}

struct Owner {
    books: CaptureArena,
    backing: Backing,
    commands: Sender<Command>,
    desk: Weak<Mutex<Self>>,
    inbox: Option<Receiver<Command>>, // until the end
    replies: HashMap<Ticket, oneshot::Sender<Result<Granted>>>,
    last_ticket: Ticket,
    /// When the owner thread does, if nothing is sent. Where something is due before that, there is
    /// a [`Command::Look`] in the inbox: whoever takes it out sees to the next.
    wakes: Option<Instant>,
}

impl Desk {
    /// Starts the owner thread. `books` is told what to call with retired objects whose last read has
    /// ended.
    pub(super) fn start(
        backing: &Backing,
        books: impl FnOnce(Box<dyn Fn(u32) + Send + Sync>) -> Result<CaptureArena>,
    ) -> Result<(Self, JoinHandle<()>)> {
        let (commands, inbox) = unbounded();
        let reclaim = commands.clone();
        let books = books(Box::new(move |object| {
            // After the arena is closed nobody asks for the range any more.
            let _ = reclaim.send(Command::Reclaim(object));
        }))?;
        let owner = Arc::new_cyclic(|desk| {
            Mutex::new(Owner {
                books,
                backing: backing.clone(),
                commands: commands.clone(),
                desk: desk.clone(),
                inbox: Some(inbox.clone()),
                replies: HashMap::new(),
                last_ticket: 0,
                wakes: None,
            })
        });
        let desk = Self { commands, owner };
        let owner = desk.owner.clone();
        let thread = thread::Builder::new()
            .name("arena-owner".into())
            .spawn(move || run(&owner, inbox))
            .map_err(|e| Error::io("start arena", e))?;
        Ok((desk, thread))
    }

    /// Asks for something that the caller waits for. Most often it is done on return.
    pub(crate) fn ask(&self, operation: &'static str, command: Command) -> Result<()> {
        let Err(command) = self.here(command) else { return Ok(()) };
        self.commands.send(command).map_err(|_| closed(operation))
    }

    /// Leaves something to the owner thread; a closed arena has no use for it.
    pub(crate) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Does it on this thread, after what was asked before, if nobody is at the books and all that
    /// is little; gives it back otherwise.
    fn here(&self, command: Command) -> Result<(), Command> {
        if command.weight() > HERE {
            return Err(command);
        }
        let _here = Here::come();
        let _watch = Watch::over(&self.owner); // ends after the lock
        let Ok(mut owner) = self.owner.try_lock() else { return Err(command) };
        owner.serve(command)
    }

    /// Whether this thread is at the books of some arena: in a reply, which must not wait for anybody
    /// else to come to them.
    pub(super) fn is_here() -> bool {
        IS_HERE.get()
    }
}

/// This thread's time at the books.
struct Here {
    before: bool,
}

impl Here {
    fn come() -> Self {
        Self { before: IS_HERE.replace(true) }
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        IS_HERE.set(self.before);
    }
}

/// Ends an arena at whose books somebody panics: nobody knows what is in them then.
struct Watch<'a> {
    owner: &'a Mutex<Owner>,
    panicked: bool, // before
}

impl<'a> Watch<'a> {
    fn over(owner: &'a Mutex<Owner>) -> Self {
        Self { owner, panicked: thread::panicking() }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.panicked {
            self.owner.lock().unwrap_or_else(PoisonError::into_inner).abandon();
        }
    }
}

/// The owner thread: does what others leave to it, and what is due by itself.
fn run(desk: &Mutex<Owner>, inbox: Receiver<Command>) {
    let _here = Here::come();
    let _watch = Watch::over(desk);
    loop {
        // Taken out only by who is at the books: what waits here was asked before.
        let Ok(wakes) = desk.lock().map(|mut owner| owner.rests()) else { return };
        if spin(|| (!inbox.is_empty()).then_some(())).is_none() {
            let mut select = Select::new();
            select.recv(&inbox);
            match wakes {
                Some(at) => drop(select.ready_deadline(at)), // late or not, there may be work
                None => drop(select.ready()),
            }
        }
        let Ok(mut owner) = desk.lock() else { return };
        if !owner.work() {
            return owner.end();
        }
    }
}

impl Owner {
    /// Notes, and says, when something is due if nothing is sent before.
    fn rests(&mut self) -> Option<Instant> {
        self.wakes = self.books.next_deadline();
        self.wakes
    }

    /// Does what was asked, but for a flood; false at the end.
    fn work(&mut self) -> bool {
        let (mut open, mut done) = (true, 0);
        while done < BURST {
            let Some(command) = self.next() else { break };
            done += command.weight();
            open &= self.handle(command);
        }
        // What has arrived counts before anybody is refused.
        self.answer_waiting();
        open
    }

    /// Does what was asked before and then `command`, if all that is little; gives it back otherwise.
    fn serve(&mut self, command: Command) -> Result<(), Command> {
        let mut done = command.weight();
        let mut has_room = self.inbox.is_some();
        while has_room && let Some(before) = self.next() {
            if matches!(before, Command::Close) {
                // The owner thread has to hear of it, after everything that was sent before.
                let _ = self.commands.send(before);
                has_room = false;
                break;
            }
            done += before.weight();
            has_room = done <= HERE;
            self.handle(before);
        }
        let left = match has_room {
            true => {
                self.handle(command);
                Ok(())
            }
            false => Err(command),
        };
        self.answer_waiting();
        let due = self.books.next_deadline();
        if due.is_some_and(|due| self.wakes.is_none_or(|wakes| due < wakes)) {
            self.wakes = due;
            let _ = self.commands.send(Command::Look); // the thread would sleep for too long
        }
        left
    }

    fn next(&self) -> Option<Command> {
        self.inbox.as_ref()?.try_recv().ok()
    }

    /// Refuses what waits and what comes.
    fn end(&mut self) {
        for ticket in self.books.close() {
            if let Some(reply) = self.replies.remove(&ticket) {
                send(reply, Err(closed("reserve"))).ok(); // or nobody waits any more
            }
        }
        while let Some(command) = self.next() {
            self.handle(command);
        }
        self.inbox = None;
    }

    /// Has whoever waits, and whoever comes, told that the arena is closed.
    fn abandon(&mut self) {
        tracing::error!("the arena is closed after a panic");
        self.inbox = None;
        for (_, reply) in self.replies.drain() {
            send(reply, Err(closed("reserve"))).ok(); // or nobody waits any more
        }
        let _ = self.commands.send(Command::Look); // the owner thread finds out, and ends
    }

    fn answer_waiting(&mut self) {
        let books = &mut self.books;
        self.replies.retain(|ticket, reply| {
            let wanted = !reply.is_closed();
            if !wanted {
                books.cancel(*ticket);
            }
            wanted
        });
        for (ticket, answer) in self.books.poll(Instant::now()) {
            match (self.replies.remove(&ticket), answer) {
                (Some(reply), answer) => self.answer(reply, answer),
                (None, Ok(grant)) => self.books.abort(grant.batch),
                (None, Err(_)) => {}
            }
        }
    }

    /// A grant that nobody receives is dropped with the message, and gives itself up.
    fn answer(&self, reply: oneshot::Sender<Result<Granted>>, answer: Result<Grant>) {
        let granted = answer.map(|grant| {
            let owner = self.desk.upgrade().expect("who is at the books holds them");
            let desk = Desk { commands: self.commands.clone(), owner };
            let guard = FillGuard::new(grant.batch, desk, self.backing.clone());
            Granted { grant, guard: Arc::new(guard) }
        });
        drop(send(reply, granted));
    }

    /// Does what is asked; false to end.
    fn handle(&mut self, command: Command) -> bool {
        let now = Instant::now();
        match command {
            Command::Reserve { plan, deadline, reply } => {
                self.last_ticket += 1;
                match self.books.reserve(plan, self.last_ticket, deadline, now) {
                    Ok(None) => drop(self.replies.insert(self.last_ticket, reply)),
                    Ok(Some(grant)) => self.answer(reply, Ok(grant)),
                    Err(error) => self.answer(reply, Err(error)),
                }
            }
            Command::Publish { batch, reply } => {
                let lives = self.books.publish_lives(batch, now);
                let births = lives.map(|lives| Births::new(lives, self.commands.clone()));
                if let Err(Ok(unheard)) = send(reply, births) {
                    self.books.unpublish(&unheard.heard()); // before anything asked later
                }
            }
            Command::Unpublish(lives) => self.books.unpublish(&lives),
            Command::Abort(batch) => self.books.abort(batch),
            Command::Free(FreeRequest { client, objects, reply }, _queued) => {
                let outcome = self.books.free(client.as_ref(), &objects);
                call(reply, outcome);
            }
            Command::Hold(HoldRequest { client, objects, reply }, _queued) => {
                let outcome = self.books.hold(&client, &objects, now);
                call(reply, outcome);
            }
            Command::Unhold(client, objects, _queued) => self.books.unhold(&client, &objects),
            Command::Seen(client, lease, mark, _queued) => {
                self.books.client_seen(&client, lease, mark, now);
            }
            Command::Lost(client) => self.books.client_lost(&client, now),
            Command::Bye(client) => self.books.client_bye(&client, now),
            Command::Greet(client, lease, mark, reply) => {
                drop(send(reply, self.books.client_greets(&client, lease, mark, now)));
            }
            Command::Reclaim(object) => self.books.reclaim(object),
            Command::Health(reply) => drop(send(reply, self.books.health(now))),
            Command::Look => self.wakes = None,
            Command::Close => return false,
        }
        true
    }
}

/// Answers a question; gives the answer back if nobody waits for it. Whoever waits may panic when it
/// is woken, and takes nobody with it.
fn send<T>(reply: oneshot::Sender<T>, answer: T) -> std::result::Result<(), T> {
    catch_unwind(AssertUnwindSafe(|| reply.send(answer))).unwrap_or_else(|_| {
        tracing::error!("somebody who waited for an arena has panicked");
        Ok(())
    })
}

/// Calls a reply; one that panics does not take the owner thread with it.
fn call<T>(reply: Option<Box<dyn FnOnce(T) + Send>>, outcome: T) {
    if let Some(reply) = reply
        && catch_unwind(AssertUnwindSafe(|| reply(outcome))).is_err()
    {
        tracing::error!("a reply of an arena request has panicked");
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicU64, Ordering},
            mpsc,
        },
        time::Duration,
    };

    use transport_core::{Dtype, ErrorKind, FeatureName, SampleId, SampleKey, StoreId, TensorMeta};

    use super::super::{Arena, ArenaConfig, ReserveOptions};
    use super::*;
    use crate::SamplePlan;

    /// A reservation that waits, on a thread of its own.
    fn waits(arena: &Arena, for_ms: u64) -> mpsc::Receiver<ErrorKind> {
        let (said, hears) = mpsc::channel();
        let arena = arena.clone();
        thread::spawn(move || said.send(ask(&arena, for_ms).unwrap_err().kind()));
        hears
    }

    fn ask(arena: &Arena, for_ms: u64) -> Result<crate::Reservation> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
        let sample =
            SampleKey::new(StoreId::new("s")?, SampleId::new(id)?, transport_core::Generation(1));
        let meta = TensorMeta::new(Dtype::Uint8, [4096])?;
        let objects = vec![(FeatureName::new("t")?, meta)];
        let options = ReserveOptions::default().deadline(Duration::from_millis(for_ms));
        arena.reserve_blocking(vec![SamplePlan { sample, objects, holder: None }], options)
    }

    fn full() -> (Arena, crate::Reservation) {
        let arena = Arena::start(Backing::heap(4096).unwrap(), ArenaConfig::default()).unwrap();
        let all = ask(&arena, 1000).unwrap();
        (arena, all)
    }

    #[test]
    fn a_panic_at_the_books_closes_the_arena() {
        let (arena, _all) = full();
        let waiting = waits(&arena, 60_000);
        while arena.health_blocking().unwrap().waiting_batches == 0 {
            thread::yield_now();
        }
        let owner = arena.0.desk.owner.clone();
        let panics = thread::spawn(move || {
            let _watch = Watch::over(&owner);
            let _at_the_books = owner.lock().unwrap();
            panic!("scripted");
        });
        assert!(panics.join().is_err());
        let soon = Duration::from_secs(10);
        assert_eq!(waiting.recv_timeout(soon).unwrap(), ErrorKind::Closed);
        for _ in 0..2 {
            assert_eq!(arena.health_blocking().unwrap_err().kind(), ErrorKind::Closed);
        }
        arena.close();
    }

    /// Whoever is woken may panic, on the owner thread or on that of somebody who asks.
    #[test]
    fn a_waker_that_panics_takes_nobody_with_it() {
        struct Panics;
        impl std::task::Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("scripted");
            }
        }
        let (arena, _all) = full();
        let (reply, answer) = oneshot::channel();
        let mut answer = std::pin::pin!(answer);
        let waker = Arc::new(Panics).into();
        let mut context = std::task::Context::from_waker(&waker);
        assert!(answer.as_mut().poll(&mut context).is_pending());
        arena.0.desk.ask("health", Command::Health(reply)).unwrap();
        assert!(arena.health_blocking().is_ok());
        assert_eq!(waits(&arena, 5).recv().unwrap(), ErrorKind::CapacityExceeded);
    }

    /// Several who find no room ask again and again, and nobody else wakes the owner thread: each is
    /// refused in time, whoever has taken the word to look out of the inbox.
    #[test]
    fn a_deadline_is_kept_whoever_asks_meanwhile() {
        let (arena, _all) = full();
        let (longest, left) = (Mutex::new(Duration::ZERO), AtomicU64::new(4));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        let began = Instant::now();
                        assert!(ask(&arena, 2).is_err());
                        let mut longest = longest.lock().unwrap();
                        *longest = longest.max(began.elapsed());
                    }
                    left.fetch_sub(1, Ordering::SeqCst);
                });
            }
            // Wakes the owner thread where all stand still, so that the test ends.
            let began = Instant::now();
            while left.load(Ordering::SeqCst) > 0 {
                thread::sleep(Duration::from_millis(20));
                if began.elapsed() > Duration::from_secs(5) {
                    arena.client_lost(&transport_core::ClientId::random());
                }
            }
        });
        let longest = *longest.lock().unwrap();
        assert!(longest < Duration::from_secs(2), "{longest:?}");
    }
}
