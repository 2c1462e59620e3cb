//! A stand-in for the driver, for tests: devices whose memory is simulated, and whose calls fail
//! when the test says so.
//!
//! It is stricter than a device, so that what passes here has its order right:
//! - A stream does nothing until somebody waits for it, or for an event behind its work. Reading
//!   a copy's destination too early shows what was there before; a copy that is not ordered after
//!   its source's event takes what the source held before.
//! - Device addresses are none that the CPU can touch: whoever does so crashes. They are never
//!   given out twice, so that memory is not used after it was given back without notice.
//! - Unmapping does not wait for work; work on unmapped memory fails.
//! - Two stand-ins of one process, or of two, are strangers to each other as two processes are:
//!   they share memory by the same handles and file descriptors as with the driver.
//!
//! Everything that was not given back is listed by [`ScriptedCuda::leaks`].

mod calls;
mod space;
mod work;

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::ThreadId,
};

use parking_lot::Mutex;

pub use self::space::SimulatedMemory;
use self::{space::Space, work::Work};
use super::{ContextId, CudaError, CudaResult, DriverInfo, KernelArg, Launch, Optional, ShareAs};

/// What a simulated machine is like. [`Default`] is as the H200 machines that this was measured on:
/// the driver says that fabric handles work, and refuses to make them.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Devices.
    pub devices: u32,
    /// Memory of each, in bytes.
    pub memory: u64,
    /// What making memory with a fabric handle returns; none where it works.
    pub fabric: Option<u32>,
    /// What making memory with a file descriptor returns; none where it works.
    pub posix_fd: Option<u32>,
    /// What asking for an IPC handle returns; none where it works.
    pub ipc: Option<u32>,
    /// Whether memory for network cards is offered.
    pub rdma: bool,
    /// Unit of physical memory, in bytes.
    pub granularity: u64,
    /// CUDA version of the driver.
    pub version: (u32, u32),
    /// Optional calls that the driver has.
    pub optional: Vec<Optional>,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            devices: 1,
            memory: 1 << 30,
            fabric: Some(CudaError::NOT_PERMITTED),
            posix_fd: None,
            ipc: None,
            rdma: true,
            granularity: 2 << 20,
            version: (13, 0),
            optional: vec![Optional::BatchCopy, Optional::DmaBufExport],
        }
    }
}

/// What a simulated kernel does.
pub type Kernel =
    Arc<dyn Fn(&mut SimulatedMemory<'_>, Launch, &[KernelArg<'_>]) -> CudaResult<()> + Send + Sync>;

/// The stand-in. See the module.
pub struct ScriptedCuda {
    machine: Machine,
    info: DriverInfo,
    state: Mutex<State>,
}

struct State {
    space: Space,
    work: Work,
    contexts: HashMap<ThreadId, Vec<ContextId>>,
    shares: Vec<u64>, // of each device's context
    faults: Vec<Fault>,
    calls: HashMap<&'static str, u64>,
    kernels: HashMap<String, Kernel>,
    functions: Vec<String>,
    modules: u64,
}

struct Fault {
    call: &'static str,
    skip: u64,
    times: u64,
    code: u32,
}

impl ScriptedCuda {
    /// A machine.
    pub fn new(machine: Machine) -> Arc<Self> {
        static INSTANCES: AtomicU64 = AtomicU64::new(1);
        let instance = INSTANCES.fetch_add(1, Ordering::Relaxed);
        let info = DriverInfo {
            version: machine.version,
            library: "scripted".to_owned(),
            optional: machine.optional.clone(),
        };
        let state = State {
            space: Space::new(instance),
            work: Work::default(),
            contexts: HashMap::new(),
            shares: vec![0; machine.devices as usize],
            faults: Vec::new(),
            calls: HashMap::new(),
            kernels: HashMap::new(),
            functions: Vec::new(),
            modules: 0,
        };
        Arc::new(Self { machine, info, state: Mutex::new(state) })
    }

    /// Lets `skip` calls of the driver's function `call` pass, and makes the next `times` fail with
    /// `code`. `times` of `u64::MAX` is for good.
    ///
    /// The name is the driver's without its version, such as `cuMemCreate`; `work` stands for
    /// copies, fills and kernels when they run.
    pub fn fail(&self, call: &'static str, skip: u64, times: u64, code: u32) {
        self.state.lock().faults.push(Fault { call, skip, times, code });
    }

    /// Makes no call fail any more.
    pub fn heal(&self) {
        self.state.lock().faults.clear();
    }

    /// How often a function was called, failed calls too.
    pub fn calls(&self, call: &str) -> u64 {
        self.state.lock().calls.get(call).copied().unwrap_or_default()
    }

    /// Says what a kernel does; modules have every kernel that was named so.
    pub fn kernel(&self, name: &str, kernel: Kernel) {
        self.state.lock().kernels.insert(name.to_owned(), kernel);
    }

    /// Everything that was given out and not given back, but for the contexts that are current.
    pub fn leaks(&self) -> Vec<String> {
        let state = self.state.lock();
        let mut leaks = state.space.leaks();
        leaks.extend(state.work.leaks());
        let shares = state.shares.iter().enumerate().filter(|(_, shares)| **shares > 0);
        leaks.extend(shares.map(|(device, n)| format!("{n} shares in the context of {device}")));
        if state.modules > 0 {
            leaks.push(format!("{} modules", state.modules));
        }
        leaks
    }

    /// Bytes of device memory, as the simulated device sees them at this moment. Work that nobody
    /// has waited for has not happened.
    ///
    /// # Panics
    /// If they are not mapped.
    pub fn peek(&self, at: super::DevicePtr, len: u64) -> Vec<u8> {
        let mut state = self.state.lock();
        state.space.memory().read(at, len).expect("mapped device memory")
    }

    /// Writes device memory, at once.
    ///
    /// # Panics
    /// If it is not mapped.
    pub fn poke(&self, at: super::DevicePtr, bytes: &[u8]) {
        let mut state = self.state.lock();
        state.space.memory().write(at, bytes).expect("mapped device memory");
    }

    /// Bytes of a device's memory that are in use.
    pub fn used(&self, device: u32) -> u64 {
        self.state.lock().space.used(device)
    }
}

impl State {
    /// Counts a call, and fails it where the script says so.
    fn enter(&mut self, call: &'static str) -> CudaResult<()> {
        *self.calls.entry(call).or_default() += 1;
        for fault in self.faults.iter_mut().filter(|fault| fault.call == call) {
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if fault.times > 0 {
                fault.times = if fault.times == u64::MAX { u64::MAX } else { fault.times - 1 };
                return Err(CudaError::new(call, fault.code));
            }
        }
        Ok(())
    }

    /// The device whose context is current on this thread.
    fn bound(&self, call: &'static str) -> CudaResult<u32> {
        let stack = self.contexts.get(&std::thread::current().id());
        let context = stack.and_then(|stack| stack.last());
        context.map(device_of).ok_or_else(|| CudaError::new(call, CudaError::INVALID_CONTEXT))
    }
}

const CONTEXTS: u64 = 0xC0_0000;

fn context_of(device: u32) -> ContextId {
    ContextId(CONTEXTS + u64::from(device))
}

fn device_of(context: &ContextId) -> u32 {
    (context.0 - CONTEXTS) as u32
}

/// What making memory of a sort returns on this machine.
fn refusal(machine: &Machine, share: ShareAs) -> Option<u32> {
    match share {
        ShareAs::Fabric => machine.fabric,
        ShareAs::PosixFd => machine.posix_fd,
    }
}

impl fmt::Debug for ScriptedCuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedCuda").field("machine", &self.machine).finish_non_exhaustive()
    }
}
