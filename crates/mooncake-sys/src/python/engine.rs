//! `mooncake.engine`.

use std::{sync::Arc, time::Duration};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use transport_core::{Error, ErrorKind, Result, SessionName};

use super::{
    Interpreter, WheelOptions,
    object::{Argument as A, Gil, Object, Parked},
    transfer,
};
use crate::{
    EngineApi, EngineCode, EngineSetup, EngineSupport, ProviderInfo, ReadFailure, ReadPiece,
    Submission,
};

const START: &str = "start transfer engine";
/// How often starting is tried.
const ATTEMPTS: u32 = 3;
const CLOSE_PATIENCE: Duration = Duration::from_secs(40);

/// Variables by which the wheel chooses its transport; that they are set is what counts, the value
/// is not looked at.
const CHOICE: [&str; 5] =
    ["MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL", "MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK"];
/// Engines start one after the other, because the variables are the process's.
static STARTING: Mutex<()> = Mutex::new(());

/// The engine's Python object; calls read, close writes. A job that has the interpreter's lock only
/// tries to, for whoever closes may wait for that lock.
pub(super) type Client = RwLock<Option<Parked>>;

/// A transfer engine of the wheel.
///
/// The wheel answers -1 for every failure and says why only in its log on standard error.
///
/// Pieces that are submitted singly end by the timeout of the call, and their end is looked for in
/// between, so that a peer that hangs keeps no thread of the interpreter. A batch is one call that
/// ends by `MC_TRANSFER_TIMEOUT` (30 seconds unless set), whatever its caller's patience; meanwhile it
/// keeps a thread.
#[derive(Debug)]
pub struct WheelEngine {
    interpreter: Interpreter,
    info: ProviderInfo,
    session: SessionName,
    support: EngineSupport,
    client: Arc<Client>,
}

impl WheelEngine {
    /// Starts the interpreter if need be, and an engine in it.
    ///
    /// The wheel may take another transport than the one asked for; see [`EngineSetup::protocol`].
    pub fn start(options: &WheelOptions, setup: &EngineSetup) -> Result<Self> {
        let interpreter = Interpreter::start(options)?;
        let _alone = STARTING.lock();
        let (client, file, port, support) = interpreter.run(|gil| {
            let module = gil.import(c"mooncake.engine")?;
            let file = module.attribute(c"__file__")?.as_text()?;
            let flag = |name| Some(module.attribute(name).ok()?.to_text().ok()? == "True");
            let support = EngineSupport {
                mnnvl: flag(c"SUPPORT_MNNVL"),
                intra_nvlink: flag(c"SUPPORT_INTRA_NVLINK"),
                cuda: flag(c"SUPPORT_CUDA"),
            };
            support.check(&setup.protocol)?; // it would say no more than -1
            let chosen = Chosen::set(gil, &setup.protocol)?;
            let client = initialize(&module, setup);
            chosen.put_back()?;
            let client = client.map_err(|e| {
                e.with("local_host", &setup.local_host).with("protocol", &setup.protocol)
            })?;
            let port = client.method(c"get_rpc_port", [])?.as_number()?;
            Ok((client.park(), file, port, support))
        })?;
        let info = interpreter.wheel().info(&file);
        let client = Arc::new(RwLock::new(Some(client)));
        let engine = |session| Self { interpreter, info, session, support, client };
        let port = u16::try_from(port).map_err(|_| {
            Error::new(ErrorKind::Protocol, START, "the engine has no valid port")
                .with("port", port)
        })?;
        Ok(engine(SessionName::new(bare(&setup.local_host), port)?))
    }

    fn client(&self, operation: &'static str) -> Result<RwLockReadGuard<'_, Option<Parked>>> {
        let client = self.client.read();
        if client.is_none() {
            return Err(Error::new(ErrorKind::Closed, operation, "the engine was closed"));
        }
        Ok(client)
    }
}

/// A started engine. Mooncake picks its ports at random and loses races for them, so it is tried more
/// than once.
fn initialize<'g>(module: &Object<'g>, setup: &EngineSetup) -> Result<Object<'g>> {
    for attempt in 1.. {
        let client = module.attribute(c"TransferEngine")?.call([])?;
        let arguments = [
            A::Text(&setup.local_host),
            A::Text(&setup.metadata),
            A::Text(&setup.protocol),
            A::Text(&setup.devices),
        ];
        match check(client.method(c"initialize", arguments)?.as_number()?, START) {
            Ok(()) => return Ok(client),
            Err(error) if attempt == ATTEMPTS => return Err(error),
            Err(error) => tracing::debug!(%error, attempt, "Mooncake does not start"),
        }
    }
    unreachable!("the last attempt returns")
}

/// The variables of [`CHOICE`] as one protocol wants them, and as they were.
struct Chosen<'g> {
    gil: Gil<'g>,
    environment: Object<'g>,
    before: Vec<(&'static str, String)>,
}

impl<'g> Chosen<'g> {
    /// Goes through Python, so that no other thread of the interpreter reads or writes them meanwhile.
    fn set(gil: Gil<'g>, protocol: &str) -> Result<Self> {
        let environment = gil.import(c"os")?.attribute(c"environ")?;
        let mut before = Vec::new();
        for name in CHOICE {
            // An empty text is a set variable all the same, hence the mark for one that is not.
            let value = environment.method(c"pop", [A::Text(name), A::Text("\u{1}")])?.as_text()?;
            if value != "\u{1}" {
                before.push((name, value));
            }
        }
        let wanted = match protocol {
            "tcp" => Some("MC_FORCE_TCP"),
            "nvlink" => Some("MC_FORCE_MNNVL"),
            "nvlink_intra" => Some("MC_INTRANODE_NVLINK"),
            _ => None, // rdma is what it takes by itself where there is a device for it
        };
        let chosen = Self { gil, environment, before };
        if let Some(name) = wanted {
            chosen.put(name, "1")?;
        }
        Ok(chosen)
    }

    fn put(&self, name: &str, value: &str) -> Result<()> {
        let arguments = [A::Text(name), A::Text(value)];
        self.environment.method(c"__setitem__", arguments).map(drop)
    }

    fn put_back(self) -> Result<()> {
        let _ = self.gil;
        for name in CHOICE {
            self.environment.method(c"pop", [A::Text(name), A::Text("")])?;
        }
        self.before.iter().try_for_each(|(name, value)| self.put(name, value))
    }
}

/// A host without the brackets that Mooncake wants around IPv6.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

pub(super) fn check(answer: i64, operation: &'static str) -> Result<()> {
    let answer = answer.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32;
    EngineCode::check_return(answer).map_err(|code| {
        if answer == -1 {
            // The wheel's only failure answer; it is not the INVALID_ARGUMENT of the C interface.
            return Error::new(ErrorKind::Unexpected, operation, "the transfer engine failed")
                .with("code", answer)
                .remedy("Mooncake's own log on standard error says why");
        }
        code.error(operation)
    })
}

impl EngineApi for WheelEngine {
    fn provider(&self) -> &ProviderInfo {
        &self.info
    }

    fn support(&self) -> EngineSupport {
        self.support
    }

    fn session(&self) -> Result<SessionName> {
        drop(self.client("get session name")?);
        Ok(self.session.clone())
    }

    unsafe fn register(&self, ranges: &[(*mut u8, usize)]) -> Result<()> {
        let client = self.client("register memory")?;
        let parked = client.as_ref().expect("checked by `client`");
        let ranges: Vec<_> =
            ranges.iter().map(|&(start, len)| (start as u64, len as u64)).collect();
        let answer = self.interpreter.run(|gil| {
            // The batch form gives up the interpreter's lock; the single form does not.
            let arguments = [
                A::Numbers(&mut ranges.iter().map(|r| r.0)),
                A::Numbers(&mut ranges.iter().map(|r| r.1)),
            ];
            Object::of(parked, gil).method(c"batch_register_memory", arguments)?.as_number()
        })?;
        check(answer, "register memory")
    }

    unsafe fn unregister(&self, starts: &[*mut u8]) -> Result<()> {
        let client = self.client("unregister memory")?;
        let parked = client.as_ref().expect("checked by `client`");
        let starts: Vec<_> = starts.iter().map(|&s| s as u64).collect();
        let answer = self.interpreter.run(|gil| {
            let arguments = [A::Numbers(&mut starts.iter().copied())];
            Object::of(parked, gil).method(c"batch_unregister_memory", arguments)?.as_number()
        })?;
        check(answer, "unregister memory")
    }

    unsafe fn read(
        &self,
        peer: &SessionName,
        pieces: &[ReadPiece],
        submission: Submission,
        timeout: Duration,
    ) -> Result<(), ReadFailure> {
        if pieces.is_empty() {
            return Ok(());
        }
        drop(self.client("read")?);
        let read = transfer::Read::new(peer, pieces, &self.client);
        let result = match submission {
            Submission::Batch if pieces.len() > 1 => read.batch(&self.interpreter, timeout),
            Submission::Batch => read.singly(&self.interpreter, 1, timeout),
            Submission::Single { ahead } => read.singly(&self.interpreter, ahead, timeout),
        };
        result.map_err(|left| left.into_failure(peer, &self.interpreter, &self.client))
    }

    fn close(&self) -> Result<()> {
        let Some(mut client) = self.client.try_write_for(CLOSE_PATIENCE) else {
            return Err(Error::new(ErrorKind::Busy, "stop transfer engine", "a call still runs"));
        };
        let Some(parked) = client.take() else { return Ok(()) };
        self.interpreter.run(|gil| {
            drop(Object::take_up(parked, gil)); // the last reference stops the engine
            Ok(())
        })
    }
}

impl Drop for WheelEngine {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "leaving a transfer engine behind");
        }
    }
}
