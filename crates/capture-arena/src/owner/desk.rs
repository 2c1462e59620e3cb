//! The books, and what is asked of them. Whoever is at them does it, in the order in which it was
//! asked: the owner thread, or a caller who finds nobody there. Waking a thread can take longer than a
//! whole request does, and twice as long to and fro.

use std::{
    cell::Cell,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, Weak},
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
    wakes: Option<Instant>, // when the owner thread does, if nothing is sent
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
        let Ok(mut owner) = self.owner.try_lock() else { return Err(command) };
        let _here = Here::come();
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

/// The owner thread: does what others leave to it, and what is due by itself.
fn run(desk: &Mutex<Owner>, inbox: Receiver<Command>) {
    let _here = Here::come();
    loop {
        // Taken out only by who is at the books: what waits here was asked before.
        let Ok(wakes) = desk.lock().map(|mut owner| owner.rests()) else { break };
        if spin(|| (!inbox.is_empty()).then_some(())).is_none() {
            let mut select = Select::new();
            select.recv(&inbox);
            match wakes {
                Some(at) => drop(select.ready_deadline(at)), // late or not, there may be work
                None => drop(select.ready()),
            }
        }
        let Ok(mut owner) = desk.lock() else { break };
        if !owner.work() {
            return owner.end();
        }
    }
    // Somebody panicked at the books: nobody knows what is in them.
    tracing::error!("the arena is closed after a panic");
    desk.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).inbox = None;
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
            let _ = self.commands.send(Command::Look); // the thread sleeps for too long
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
                let _ = reply.send(Err(closed("reserve")));
            }
        }
        while let Some(command) = self.next() {
            self.handle(command);
        }
        self.inbox = None;
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
        let _ = reply.send(granted);
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
                if let Err(Ok(unheard)) = reply.send(births) {
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
                drop(reply.send(self.books.client_greets(&client, lease, mark, now)));
            }
            Command::Reclaim(object) => self.books.reclaim(object),
            Command::Health(reply) => drop(reply.send(self.books.health(now))),
            Command::Look => {}
            Command::Close => return false,
        }
        true
    }
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
    use transport_core::ErrorKind;

    use super::super::{Arena, ArenaConfig};
    use super::*;

    #[test]
    fn a_panic_at_the_books_closes_the_arena() {
        let arena = Arena::start(Backing::heap(4096).unwrap(), ArenaConfig::default()).unwrap();
        assert!(arena.health_blocking().is_ok());
        let owner = arena.0.desk.owner.clone();
        let panics = thread::spawn(move || {
            let _at_the_books = owner.lock().unwrap();
            panic!("scripted");
        });
        assert!(panics.join().is_err());
        for _ in 0..2 {
            assert_eq!(arena.health_blocking().unwrap_err().kind(), ErrorKind::Closed);
        }
        arena.close();
    }
}
