//! The process's interpreter and the threads that run it.

use std::{
    ffi::{CStr, CString, c_void},
    fmt,
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{
        Arc, Once,
        atomic::{AtomicU8, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use libloading::os::unix::Library;
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, Result};

use super::{
    Wheel, WheelOptions,
    libpython::PythonTable,
    object::{Argument, Gil},
};
use crate::{
    Search,
    loading::{Opened, Scope, open_file, preload},
};

const START: &str = "start Python";

/// The interpreter, once it runs. A process has at most one, for good: Mooncake's threads and
/// Python's own state cannot be taken down and set up again.
static INTERPRETER: Mutex<Option<Interpreter>> = Mutex::new(None);

/// Niceness of the threads whose jobs wait inside Mooncake, which spins: where cores are short they
/// leave them to Mooncake's own threads, which move the bytes.
const WAITING: i32 = 10;

/// What the threads of the interpreter do.
enum Job {
    Owned(Box<dyn FnOnce(Gil<'_>) + Send>),
    Lent(Lent),
}

/// A job that lies in the stack of a caller who waits for it.
struct Lent {
    slot: NonNull<()>,
    run: unsafe fn(NonNull<()>, Gil<'_>),
    /// Sends when the job has been run, and closes when it never will be.
    done: Sender<()>,
}

// SAFETY: `lend` takes only slots whose job and result may be sent.
unsafe impl Send for Lent {}

/// Where a lent job and its result lie.
struct Slot<F, T> {
    job: Option<F>,
    result: Option<thread::Result<Result<T>>>,
}

impl<F: FnOnce(Gil<'_>) -> Result<T> + Send, T: Send> Slot<F, T> {
    /// # Safety
    /// The slot is neither touched nor moved until `done` has received something or is closed.
    unsafe fn lend(&mut self, done: Sender<()>) -> Lent {
        Lent { slot: NonNull::from(self).cast(), run: Self::run, done }
    }

    /// # Safety
    /// `slot` is a slot of exactly this type that nobody else touches during the call.
    unsafe fn run(slot: NonNull<()>, gil: Gil<'_>) {
        // SAFETY: as the caller vouches.
        let slot = unsafe { slot.cast::<Self>().as_mut() };
        if let Some(job) = slot.job.take() {
            slot.result = Some(catch_unwind(AssertUnwindSafe(|| job(gil))));
        }
    }
}

impl Job {
    fn run(self, gil: Gil<'_>) {
        match self {
            Self::Owned(job) => job(gil),
            Self::Lent(Lent { slot, run, done }) => {
                // SAFETY: `run` belongs to the slot's type, see `lend`. Its owner waits for `done`,
                // which is sent or dropped only below.
                unsafe { run(slot, gil) }
                let _ = done.send(()); // the receiver waits for it
            }
        }
    }
}

/// The answer to a job that goes on whether or not anybody waits.
#[derive(Debug)]
pub(super) struct Answer<T> {
    answer: Receiver<thread::Result<Result<T>>>,
    state: Arc<AtomicU8>,
}

const IN_LINE: u8 = 0;
const STARTED: u8 = 1;
const CANCELLED: u8 = 2;

impl<T> Answer<T> {
    /// Waits for it until `deadline`; `None` if it has not come by then.
    pub(super) fn wait(&self, deadline: Instant) -> Option<Result<T>> {
        match self.answer.recv_deadline(deadline) {
            Ok(result) => Some(unpack(Some(result))),
            Err(RecvTimeoutError::Disconnected) => Some(unpack(None)),
            Err(RecvTimeoutError::Timeout) => None,
        }
    }

    /// Keeps the job from being started; false if it is too late for that.
    pub(super) fn cancel(&self) -> bool {
        let order = (Ordering::AcqRel, Ordering::Acquire);
        self.state.compare_exchange(IN_LINE, CANCELLED, order.0, order.1).is_ok()
    }
}

/// Handle to the process's embedded interpreter.
#[derive(Clone)]
pub struct Interpreter {
    shared: Arc<Shared>,
}

struct Shared {
    jobs: Sender<Job>,
    /// Jobs for threads that step aside: the same as `jobs` where this process ran Python already.
    waits: Sender<Job>,
    wheel: Wheel,
    library: PathBuf,
    threads: usize,
}

impl Interpreter {
    /// Starts the interpreter for the wheel that `options` lead to, or gives the one that runs.
    ///
    /// Fails if one runs already for another directory of packages.
    pub fn start(options: &WheelOptions) -> Result<Self> {
        Wheel::check_threads(options.threads)?;
        let wheel = Wheel::find(options)?;
        let mut running = INTERPRETER.lock();
        if let Some(running) = &*running {
            let packages = &running.shared.wheel.packages;
            if *packages == wheel.packages {
                return Ok(running.clone());
            }
            return Err(Error::new(
                ErrorKind::ConfigInvalid,
                START,
                "the process runs the interpreter for another directory of packages",
            )
            .with("running", packages.display())
            .with("asked_for", wheel.packages.display()));
        }
        preload(&options.preload)?;
        let started = Self::start_anew(wheel, options.threads)?;
        Ok(running.insert(started).clone())
    }

    fn start_anew(wheel: Wheel, threads: usize) -> Result<Self> {
        let (table, library) = open_python(&wheel)?;
        let table: &'static PythonTable = Box::leak(Box::new(table));
        // SAFETY: takes nothing, may be called at any time.
        let is_own = unsafe { (table.is_initialized)() } == 0;
        let start = |names: &'static str, niceness| {
            let (jobs, queue) = unbounded::<Job>();
            let (ready, started) = bounded(1);
            for i in 0..threads {
                let (queue, ready, wheel) = (queue.clone(), ready.clone(), wheel.clone());
                thread::Builder::new()
                    .name(format!("{names}-{i}"))
                    .spawn(move || interpreter_thread(table, &wheel, niceness, &queue, &ready))
                    .map_err(|e| Error::io(START, e))?;
                // One after the other: the first starts the interpreter.
                started.recv().map_err(|_| {
                    Error::new(ErrorKind::Unexpected, START, "the thread of the interpreter ended")
                })??;
            }
            Ok::<_, Error>(jobs)
        };
        let jobs = start("mooncake-py", 0)?;
        // Threads of Python's own must not wait for its lock while a thread with less right to run
        // holds it.
        let waits = if is_own { start("mooncake-io", WAITING)? } else { jobs.clone() };
        let shared = Shared { jobs, waits, wheel, library, threads };
        tracing::info!(
            libpython = %shared.library.display(),
            packages = %shared.wheel.packages.display(),
            threads,
            "started Python"
        );
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The wheel that it was started for.
    pub fn wheel(&self) -> &Wheel {
        &self.shared.wheel
    }

    /// The library of the interpreter, as it was opened.
    pub(super) fn library(&self) -> &Path {
        &self.shared.library
    }

    /// Measures what a call costs: the way to an interpreter thread and back, and one call of a
    /// Python function there; means over `calls`.
    pub fn round_trip(&self, calls: u32) -> Result<(Duration, Duration)> {
        let calls = calls.max(1);
        let start = Instant::now();
        for _ in 0..calls {
            self.run(|_| Ok(()))?;
        }
        let hop = start.elapsed() / calls;
        let python = self.run(|gil| {
            let int = gil.import(c"builtins")?.attribute(c"int")?;
            let start = Instant::now();
            for _ in 0..calls {
                int.call([Argument::Number(7)])?.as_number()?;
            }
            Ok(start.elapsed() / calls)
        })?;
        Ok((hop, python))
    }

    /// Runs a job with the lock held and waits for it, however long it takes.
    pub(super) fn run<T: Send>(&self, job: impl FnOnce(Gil<'_>) -> Result<T> + Send) -> Result<T> {
        Self::run_on(&self.shared.jobs, job)
    }

    /// Runs a job as [`Self::run`] does, on a thread that steps aside for others: one that waits in
    /// Mooncake for much longer than it works.
    pub(super) fn run_waiting<T: Send>(
        &self,
        job: impl FnOnce(Gil<'_>) -> Result<T> + Send,
    ) -> Result<T> {
        Self::run_on(&self.shared.waits, job)
    }

    fn run_on<T: Send>(
        jobs: &Sender<Job>,
        job: impl FnOnce(Gil<'_>) -> Result<T> + Send,
    ) -> Result<T> {
        let (done, ended) = bounded(1);
        let mut slot = Slot { job: Some(job), result: None };
        // SAFETY: the slot stays where it is and is not touched before the wait below is over. If
        // the job cannot be handed over it is dropped, and with it `done`.
        let lent = unsafe { slot.lend(done) };
        let handed = hand_over(jobs, Job::Lent(lent));
        let _ = ended.recv(); // or it was dropped
        handed?;
        unpack(slot.result)
    }

    /// Starts a job with the lock held and does not wait for it.
    pub(super) fn start_job<T: Send + 'static>(
        &self,
        job: impl FnOnce(Gil<'_>) -> Result<T> + Send + 'static,
    ) -> Result<Answer<T>> {
        let (reply, answer) = bounded(1);
        let state = Arc::new(AtomicU8::new(IN_LINE));
        let at_start = state.clone();
        let owned = Job::Owned(Box::new(move |gil| {
            let order = (Ordering::AcqRel, Ordering::Acquire);
            if at_start.compare_exchange(IN_LINE, STARTED, order.0, order.1).is_err() {
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(|| job(gil)));
            drop(reply.send(result)); // perhaps nobody waits any more
        }));
        hand_over(&self.shared.jobs, owned)?;
        Ok(Answer { answer, state })
    }
}

fn hand_over(jobs: &Sender<Job>, job: Job) -> Result<()> {
    jobs.send(job).map_err(|_| {
        Error::new(ErrorKind::Closed, "call Python", "the interpreter's threads ended")
    })
}

fn unpack<T>(answer: Option<thread::Result<Result<T>>>) -> Result<T> {
    let lost = |message| Err(Error::new(ErrorKind::Unexpected, "call Python", message));
    match answer {
        Some(Ok(result)) => result,
        Some(Err(_panic)) => lost("the job panicked"),
        None => lost("the job was lost"),
    }
}

impl fmt::Debug for Interpreter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interpreter")
            .field("packages", &self.shared.wheel.packages)
            .field("library", &self.shared.library)
            .field("threads", &self.shared.threads)
            .finish()
    }
}

/// The Python of this process if it runs one, else the first library that opens.
fn open_python(wheel: &Wheel) -> Result<(PythonTable, PathBuf)> {
    let own = Opened {
        library: Box::leak(Box::new(Library::this())),
        file: "this process".into(),
        search: Search::default(),
    };
    if let Ok(table) = PythonTable::resolve(&own) {
        // SAFETY: takes nothing, may be called at any time.
        if unsafe { (table.is_initialized)() } != 0 {
            return Ok((table, own.file));
        }
    }
    let mut search = Search::default();
    for file in &wheel.libpython {
        match open_file(file, Scope::Global) {
            Ok(library) => {
                let opened = Opened { library, file: file.clone(), search };
                return Ok((PythonTable::resolve(&opened)?, opened.file));
            }
            Err(why) => search.missed(file.display(), why),
        }
    }
    Err(search
        .error(
            START,
            "shared library of Python",
            "install the shared library of the Python that the wheel is installed for (a package \
             such as libpython3.N, or a Python built with --enable-shared), or name its file",
        )
        .with("python", &wheel.python))
}

/// Starts the interpreter or joins it, reports, and runs jobs until the end of the process.
fn interpreter_thread(
    table: &'static PythonTable,
    wheel: &Wheel,
    niceness: i32,
    queue: &Receiver<Job>,
    ready: &Sender<Result<()>>,
) {
    // SAFETY: takes nothing, may be called at any time.
    if unsafe { (table.is_initialized)() } == 0 {
        if let Some(program) = &wheel.program {
            set_program_name(table, program);
        }
        // SAFETY: the first thread of ours, and nobody else initialised it; 0 leaves signals alone.
        unsafe { (table.initialize)(0) }
    } else {
        // SAFETY: the interpreter runs; gives this thread a state and the lock, for good.
        unsafe { (table.ensure)() };
    }
    // SAFETY: both ways above leave this thread with the lock.
    let gil = unsafe { Gil::assume(table) };
    let prepared = prepare(table, wheel, gil);
    if niceness != 0
        && let Err(error) = rustix::process::nice(niceness)
    {
        tracing::debug!(%error, "threads that wait run like all others");
    }
    let failed = prepared.is_err();
    drop(ready.send(prepared)); // the starter waits for it
    // SAFETY: this thread holds the lock and lets go of it; what comes back is its state.
    let state: *mut c_void = unsafe { (table.save_thread)() };
    if failed {
        return;
    }
    while let Ok(job) = queue.recv() {
        // SAFETY: the state of this thread, which does not hold the lock now.
        unsafe { (table.restore_thread)(state) }
        // SAFETY: this thread holds the lock until `save_thread`.
        job.run(unsafe { Gil::assume(table) });
        // SAFETY: this thread holds the lock; every object of the job is gone.
        unsafe { (table.save_thread)() };
    }
}

/// Lets the interpreter find its library and packages as the environment's own program would.
fn set_program_name(table: &PythonTable, program: &Path) {
    static ONCE: Once = Once::new();
    let Some(set) = table.set_program_name else { return };
    let Ok(name) = CString::new(program.as_os_str().as_bytes()) else { return };
    ONCE.call_once(|| {
        // SAFETY: a NUL-terminated text; the length is not asked for.
        let wide = unsafe { (table.decode_locale)(name.as_ptr(), std::ptr::null_mut()) };
        if !wide.is_null() {
            // SAFETY: before initialisation; the text is never freed, as the function demands.
            unsafe { set(wide) }
        }
    });
}

/// Checks the version and makes the wheel importable.
fn prepare(table: &PythonTable, wheel: &Wheel, gil: Gil<'_>) -> Result<()> {
    // SAFETY: takes nothing and gives a static text.
    let text = unsafe { (table.version)() };
    // SAFETY: a static, NUL-terminated text.
    let version = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    let minor = version.split('.').take(2).collect::<Vec<_>>().join(".");
    if minor != wheel.python {
        return Err(Error::new(
            ErrorKind::ConfigInvalid,
            START,
            "the interpreter has another version than the wheel was installed for",
        )
        .with("expected", &wheel.python)
        .with("found", version));
    }
    let packages = wheel.packages.to_str().ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, START, "the path of the packages is not UTF-8")
    })?;
    gil.import(c"sys")?.attribute(c"path")?.append_new(&gil.text(packages)?)
}
