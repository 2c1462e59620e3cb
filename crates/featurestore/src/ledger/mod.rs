//! The durable record of what has been trained: committed before anything is freed.
//!
//! One SQLite file (write-ahead log, full synchronous), owned by one process of a run. What is in
//! flight is in it from before it is handed to a trainer until its memory is free again, so that a
//! crash at any moment leaves nothing to guess:
//!
//! | found at a restart | means | done |
//! |---|---|---|
//! | in flight | handed out, not trained for sure | handed out again |
//! | acknowledged, not freed | trained; the free may not have arrived | freed again |
//! | acknowledged | trained and freed | never handed out again |
//!
//! Nothing here is ordered by a clock: steps are numbered by the trainer.

mod ids;
mod points;

use std::{collections::HashMap, path::Path, time::SystemTime};

use rusqlite::{Connection, OpenFlags, params};
use transport_core::{Error, ErrorKind, Result, SampleId};

use ids::Form;
pub use ids::IdSet;
pub use points::{Observer, Point};

/// Format of the file.
const FORMAT: i64 = 1;
/// Acknowledged steps that are kept one by one; more are folded together when the file is opened.
const STEPS_KEPT: i64 = 8192;

const SCHEMA: &str = "
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE sample(seq INTEGER PRIMARY KEY, id TEXT NOT NULL, record BLOB NOT NULL);
CREATE TABLE step(step INTEGER PRIMARY KEY, ids TEXT NOT NULL, at_unix_ms INTEGER NOT NULL);
CREATE TABLE range(name TEXT, first INTEGER, last INTEGER, PRIMARY KEY(name, first)) WITHOUT ROWID;
CREATE TABLE digest(digest BLOB PRIMARY KEY) WITHOUT ROWID;
";

/// How a [`Ledger`] behaves.
#[derive(Clone)]
#[non_exhaustive]
pub struct LedgerOptions {
    /// Largest size of the file in bytes; none leaves it to the disk.
    pub max_bytes: Option<u64>,
    /// Where the time of a step comes from. It is recorded for people and never compared.
    pub clock: fn() -> SystemTime,
    /// Told about every point at which a crash matters.
    pub observer: Observer,
}

impl Default for LedgerOptions {
    fn default() -> Self {
        Self { max_bytes: None, clock: SystemTime::now, observer: Observer::default() }
    }
}

impl std::fmt::Debug for LedgerOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LedgerOptions").field("max_bytes", &self.max_bytes).finish_non_exhaustive()
    }
}

/// What the ledger knows about a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing: it was new and is in flight now.
    New,
    /// It is in flight already.
    InFlight,
    /// It is trained, durably.
    Acknowledged,
}

/// What [`Ledger::acknowledge`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Acknowledged {
    /// Samples that became durable with this step.
    pub new: usize,
    /// Samples that were durable before, which happens when an answer was lost.
    pub repeated: usize,
}

/// The durable record of one run. See the [module](self).
pub struct Ledger {
    connection: Connection,
    options: LedgerOptions,
    history: IdSet,
    marker: Option<u64>,
    samples: HashMap<SampleId, Held>, // what the table `sample` holds; acknowledged if in `history`
    freed: Vec<i64>,                  // rows to delete with the next transaction
    next: i64,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    seq: i64,
    acknowledged: bool,
    form: Form,
}

impl Ledger {
    /// Opens or creates the ledger of run `run`.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while another process has it open; [`ErrorKind::ConfigInvalid`] if it
    /// belongs to another run; [`ErrorKind::Corrupt`] if it is no ledger.
    pub fn open(path: &Path, run: &str, options: LedgerOptions) -> Result<Self> {
        Self::open_at(path, run, options).map_err(|e| e.with("ledger", path.display()))
    }

    fn open_at(path: &Path, run: &str, options: LedgerOptions) -> Result<Self> {
        if path.is_dir() {
            return Err(Error::new(ErrorKind::InvalidInput, "ledger", "that is a folder")
                .remedy("name a file in it"));
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(failed("open"))?;
        let pragma = |name, value: &str| {
            connection
                .pragma_update_and_check(None, name, value, |_| Ok(()))
                .or_else(|e| match e {
                    rusqlite::Error::QueryReturnedNoRows => Ok(()),
                    other => Err(other),
                })
                .map_err(failed("open"))
        };
        // One owner: a second authority would free what the first has not recorded.
        pragma("locking_mode", "EXCLUSIVE")?;
        pragma("journal_mode", "WAL")?;
        pragma("synchronous", "FULL")?;
        pragma("cache_size", "-8192")?;
        if let Some(bytes) = options.max_bytes {
            pragma("max_page_count", &(bytes / 4096).max(1).to_string())?;
        }
        connection.set_prepared_statement_cache_capacity(32);
        let tables: i64 = connection
            .query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0))
            .map_err(failed("open"))?;
        if tables == 0 {
            let transaction = connection.unchecked_transaction().map_err(failed("create"))?;
            transaction.execute_batch(SCHEMA).map_err(failed("create"))?;
            transaction
                .execute("INSERT INTO meta VALUES('format', ?1), ('run', ?2)", params![FORMAT, run])
                .map_err(failed("create"))?;
            transaction.commit().map_err(failed("create"))?;
        }
        check_owner(&connection, run)?;
        let mut ledger = Self {
            connection,
            options,
            history: IdSet::default(),
            marker: None,
            samples: HashMap::new(),
            freed: Vec::new(),
            next: 1,
        };
        ledger.load()?;
        Ok(ledger)
    }

    fn load(&mut self) -> Result<()> {
        let read = failed("read");
        self.marker = self
            .connection
            .query_row("SELECT max(step) FROM step", [], |row| row.get::<_, Option<i64>>(0))
            .map_err(&read)?
            .map(|step| step as u64); // written from one that fits
        self.load_history().map_err(&read)?;
        let mut statement =
            self.connection.prepare("SELECT seq, id FROM sample ORDER BY seq").map_err(&read)?;
        let mut rows = statement.query([]).map_err(&read)?;
        while let Some(row) = rows.next().map_err(&read)? {
            let (seq, id): (i64, String) = (row.get(0).map_err(&read)?, row.get(1).map_err(&read)?);
            let form = ids::form(&id);
            let acknowledged = self.history.contains_as(&id, form);
            self.samples.insert(SampleId::new(id)?, Held { seq, acknowledged, form });
            self.next = seq + 1;
        }
        drop(rows);
        drop(statement);
        let steps: i64 = self
            .connection
            .query_row("SELECT count(*) FROM step", [], |row| row.get(0))
            .map_err(&read)?;
        if steps > STEPS_KEPT { self.fold() } else { Ok(()) }
    }

    fn load_history(&mut self) -> rusqlite::Result<()> {
        let mut statement = self.connection.prepare("SELECT name, first, last FROM range")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let (name, first, last): (String, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
            self.history.restore_range(&name, first as u64, last as u64);
        }
        let count = "SELECT count(*) FROM digest";
        let digests: i64 = self.connection.query_row(count, [], |row| row.get(0))?;
        self.history.expect_digests(digests as usize); // as many as a file has, so they fit
        let mut statement = self.connection.prepare("SELECT digest FROM digest")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            self.history.restore_digest(row.get(0)?);
        }
        let mut statement = self.connection.prepare("SELECT ids FROM step")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let ids: String = row.get(0)?;
            for id in ids.lines() {
                self.history.insert(id);
            }
        }
        Ok(())
    }

    /// Folds the steps before the newest one into ranges, so that the file stays small.
    fn fold(&mut self) -> Result<()> {
        let write = failed("fold");
        let Some(marker) = self.marker else { return Ok(()) };
        let transaction = self.connection.unchecked_transaction().map_err(&write)?;
        {
            transaction.execute_batch("DELETE FROM range; DELETE FROM digest").map_err(&write)?;
            let mut range =
                transaction.prepare("INSERT INTO range VALUES(?1, ?2, ?3)").map_err(&write)?;
            for (name, first, last) in self.history.ranges() {
                range.execute(params![name, first as i64, last as i64]).map_err(&write)?;
            }
            let mut digest =
                transaction.prepare("INSERT INTO digest VALUES(?1)").map_err(&write)?;
            for value in self.history.digests() {
                digest.execute([value]).map_err(&write)?;
            }
            transaction
                .execute("DELETE FROM step WHERE step < ?1", [marker as i64])
                .map_err(&write)?;
        }
        transaction.commit().map_err(&write)
    }

    /// The newest durable step; none before the first.
    pub fn marker(&self) -> Option<u64> {
        self.marker
    }

    /// Samples that are durable.
    pub fn acknowledged(&self) -> &IdSet {
        &self.history
    }

    /// Whether it has never recorded anything.
    pub fn is_empty(&self) -> bool {
        self.marker.is_none() && self.samples.is_empty() && self.history.is_empty()
    }

    /// Puts samples in flight, with the record that a restart needs to find them again, in one
    /// transaction. Those that it knows already are left as they are.
    pub fn commit(&mut self, batch: &[(SampleId, Vec<u8>)]) -> Result<Vec<Standing>> {
        let mut standings = Vec::with_capacity(batch.len());
        let mut new: HashMap<SampleId, Held> = HashMap::new();
        let mut rows = Vec::new();
        // All at once, and then looked up together: what is not in a cache comes side by side.
        let forms: Vec<Form> = batch.iter().map(|(id, _)| ids::form(id.as_str())).collect();
        let known =
            |((id, _), form): (&(SampleId, _), &Form)| self.history.contains_as(id.as_str(), *form);
        let known: Vec<bool> = batch.iter().zip(&forms).map(known).collect();
        for (((id, record), form), known) in batch.iter().zip(forms).zip(known) {
            let standing = if known {
                Standing::Acknowledged
            } else if self.samples.contains_key(id) || new.contains_key(id) {
                Standing::InFlight
            } else {
                let seq = self.next + rows.len() as i64;
                new.insert(id.clone(), Held { seq, acknowledged: false, form });
                rows.push((seq, id, record));
                Standing::New
            };
            standings.push(standing);
        }
        if rows.is_empty() {
            return Ok(standings);
        }
        self.write("commit samples", |connection| {
            let mut insert = connection.prepare_cached("INSERT INTO sample VALUES(?1, ?2, ?3)")?;
            for (seq, id, record) in &rows {
                insert.execute(params![seq, id.as_str(), record])?;
            }
            Ok(())
        })?;
        self.next += rows.len() as i64;
        self.samples.extend(new);
        Ok(standings)
    }

    /// Records that step `step` has trained `ids`, in one transaction that is on the disk when this
    /// returns. Only then may they be freed.
    ///
    /// The same step again is no error if all its samples are durable: an answer was lost.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a sample that is not in flight; [`ErrorKind::Stale`] for a step
    /// that is older than the newest; [`ErrorKind::CapacityExceeded`] if the disk is full. Then
    /// nothing is recorded, and the same call may be made again.
    pub fn acknowledge(&mut self, step: u64, ids: &[SampleId]) -> Result<Acknowledged> {
        let refuse = |kind, why: &'static str| {
            Error::new(kind, "acknowledge", why).with("step", step).with("samples", ids.len())
        };
        let mut outcome = Acknowledged::default();
        let mut fresh: Vec<(&SampleId, Form)> = Vec::with_capacity(ids.len());
        for id in ids {
            match self.samples.get(id) {
                Some(held) if held.acknowledged => {}
                Some(held) => fresh.push((id, held.form)),
                None if self.history.contains(id.as_str()) => {}
                None => {
                    return Err(refuse(ErrorKind::NotFound, "a sample was never in flight")
                        .with("sample_id", id)
                        .remedy("acknowledge only what this run has handed out"));
                }
            }
        }
        fresh.sort_unstable_by_key(|(id, _)| *id);
        fresh.dedup_by_key(|(id, _)| *id);
        outcome.repeated = ids.len() - fresh.len();
        outcome.new = fresh.len();
        if i64::try_from(step).is_err() {
            return Err(refuse(ErrorKind::InvalidInput, "a step number is too large"));
        }
        if self.marker.is_some_and(|marker| step <= marker) {
            if fresh.is_empty() && self.marker == Some(step) {
                return Ok(outcome);
            }
            return Err(refuse(ErrorKind::Stale, "the step is not newer than the newest one")
                .with("newest", self.marker.unwrap_or(0))
                .remedy("resume from the checkpoint of the newest durable step"));
        }
        let mut text =
            String::with_capacity(fresh.iter().map(|(id, _)| id.as_str().len() + 1).sum());
        for (id, _) in &fresh {
            text.push_str(id.as_str());
            text.push('\n'); // ids hold no control characters
        }
        let now = (self.options.clock)().duration_since(SystemTime::UNIX_EPOCH);
        let at = now.map_or(0, |since| since.as_millis() as i64);
        self.write("acknowledge", |connection| {
            let mut insert = connection.prepare_cached("INSERT INTO step VALUES(?1, ?2, ?3)")?;
            insert.execute(params![step as i64, text, at]).map(drop)
        })?;
        self.marker = Some(step);
        for (id, form) in &fresh {
            self.history.insert_as(id.as_str(), *form);
        }
        for (id, _) in fresh {
            self.samples.get_mut(id).expect("checked above").acknowledged = true;
        }
        Ok(outcome)
    }

    /// Notes that the memory of acknowledged samples is free. It becomes durable with the next
    /// transaction; until then a restart frees them again, which is harmless.
    pub fn freed<'a>(&mut self, ids: impl IntoIterator<Item = &'a SampleId>) {
        for id in ids {
            if self.samples.get(id).is_some_and(|held| held.acknowledged) {
                let held = self.samples.remove(id).expect("looked up above");
                self.freed.push(held.seq);
            }
        }
    }

    /// Forgets samples in flight that cannot be had any more, so that they may be captured again.
    pub fn lost<'a>(&mut self, ids: impl IntoIterator<Item = &'a SampleId>) -> Result<usize> {
        let known = |id: &&SampleId| self.samples.get(*id).is_some_and(|held| !held.acknowledged);
        let ids: Vec<&SampleId> = ids.into_iter().filter(known).collect();
        let rows: Vec<i64> = ids.iter().map(|id| self.samples[*id].seq).collect();
        self.write("forget samples", |connection| delete(connection, &rows))?;
        for id in &ids {
            self.samples.remove(*id);
        }
        Ok(ids.len())
    }

    /// Makes everything noted durable now.
    pub fn flush(&mut self) -> Result<()> {
        if self.freed.is_empty() { Ok(()) } else { self.write("flush", |_| Ok(())) }
    }

    /// The steps that are kept one by one, oldest first, with what became durable in each.
    pub fn steps(&self) -> Result<Vec<(u64, Vec<SampleId>)>> {
        let read = failed("read");
        let mut select = self
            .connection
            .prepare_cached("SELECT step, ids FROM step ORDER BY step")
            .map_err(&read)?;
        let mut rows = select.query([]).map_err(&read)?;
        let mut steps = Vec::new();
        while let Some(row) = rows.next().map_err(&read)? {
            let (step, ids): (i64, String) =
                (row.get(0).map_err(&read)?, row.get(1).map_err(&read)?);
            let ids = ids.lines().map(SampleId::new).collect::<Result<_>>()?;
            steps.push((step as u64, ids));
        }
        Ok(steps)
    }

    /// Samples in flight with their records, oldest first.
    pub fn in_flight(&self) -> Result<Vec<(SampleId, Vec<u8>)>> {
        self.records(false)
    }

    /// Acknowledged samples whose memory may not be free, with their records, oldest first.
    pub fn unfreed(&self) -> Result<Vec<(SampleId, Vec<u8>)>> {
        self.records(true)
    }

    fn records(&self, acknowledged: bool) -> Result<Vec<(SampleId, Vec<u8>)>> {
        let read = failed("read");
        let mut wanted: Vec<(i64, &SampleId)> = self
            .samples
            .iter()
            .filter(|(_, held)| held.acknowledged == acknowledged)
            .map(|(id, held)| (held.seq, id))
            .collect();
        wanted.sort_unstable();
        let mut select = self
            .connection
            .prepare_cached("SELECT record FROM sample WHERE seq = ?1")
            .map_err(&read)?;
        let record = |(seq, id): (i64, &SampleId)| {
            let record = select.query_row([seq], |row| row.get(0)).map_err(&read)?;
            Ok((id.clone(), record))
        };
        wanted.into_iter().map(record).collect()
    }

    /// One transaction: what was noted before, and what `write` does.
    fn write(
        &mut self,
        operation: &'static str,
        write: impl FnOnce(&Connection) -> rusqlite::Result<()>,
    ) -> Result<()> {
        let observer = self.options.observer.clone();
        let attempt = || -> rusqlite::Result<()> {
            // Dropping an unfinished transaction rolls it back.
            let transaction = self.connection.unchecked_transaction()?;
            delete(&transaction, &self.freed)?;
            write(&transaction)?;
            observer.at(Point::InsideCommit);
            transaction.commit()
        };
        observer.at(Point::BeforeCommit);
        let named = |e: Error| match self.connection.path() {
            Some(path) => e.with("ledger", path),
            None => e,
        };
        attempt().map_err(failed(operation)).map_err(named)?;
        self.freed.clear();
        observer.at(Point::AfterCommit);
        Ok(())
    }
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger")
            .field("marker", &self.marker)
            .field("acknowledged", &self.history.len())
            .field("samples", &self.samples.len())
            .finish_non_exhaustive()
    }
}

fn delete(connection: &Connection, rows: &[i64]) -> rusqlite::Result<()> {
    let mut delete = connection.prepare_cached("DELETE FROM sample WHERE seq = ?1")?;
    rows.iter().try_for_each(|seq| delete.execute([seq]).map(drop))
}

fn check_owner(connection: &Connection, run: &str) -> Result<()> {
    let value = |name: &str| {
        connection.query_row("SELECT value FROM meta WHERE name = ?1", [name], |row| {
            row.get::<_, rusqlite::types::Value>(0)
        })
    };
    let not_one = |e| {
        Error::new(ErrorKind::Corrupt, "open ledger", "the file is no ledger of this program")
            .source(e)
    };
    let format = value("format").map_err(not_one)?;
    if format != rusqlite::types::Value::Integer(FORMAT) {
        return Err(Error::new(ErrorKind::Unsupported, "open ledger", "an unknown format")
            .with("expected", FORMAT)
            .with("found", format_args!("{format:?}")));
    }
    match value("run").map_err(not_one)? {
        rusqlite::types::Value::Text(found) if found == run => Ok(()),
        found => Err(Error::new(
            ErrorKind::ConfigInvalid,
            "open ledger",
            "the ledger belongs to another run",
        )
        .with("expected", run)
        .with("found", format_args!("{found:?}"))
        .remedy("give each run a ledger of its own, or resume the run that it belongs to")),
    }
}

/// Turns what SQLite says into an error of `operation`.
fn failed(operation: &'static str) -> impl Fn(rusqlite::Error) -> Error + Copy {
    use rusqlite::ErrorCode;
    move |error| {
        let code = error.sqlite_error_code();
        let (kind, remedy) = match code {
            Some(ErrorCode::DiskFull) => (
                ErrorKind::CapacityExceeded,
                "make room on the ledger's disk, then call again: nothing was recorded",
            ),
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                (ErrorKind::Busy, "another process owns the ledger: end it first")
            }
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
                (ErrorKind::Corrupt, "restore the ledger from a copy, or begin a new run")
            }
            Some(ErrorCode::CannotOpen) => {
                (ErrorKind::NotFound, "check that the folder exists and can be written")
            }
            Some(ErrorCode::PermissionDenied | ErrorCode::ReadOnly) => {
                (ErrorKind::PermissionDenied, "check who may write the ledger's folder")
            }
            _ => (ErrorKind::Unexpected, "see what the disk says"),
        };
        Error::new(kind, "ledger", error.to_string())
            .with("doing", operation)
            .remedy(remedy)
            .source(error)
    }
}

#[cfg(test)]
mod tests;
