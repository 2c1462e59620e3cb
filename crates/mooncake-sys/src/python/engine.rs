//! `mooncake.engine`.

use std::time::Duration;

use parking_lot::{RwLock, RwLockReadGuard};
use transport_core::{Error, ErrorKind, Result, SessionName};

use super::{
    Interpreter, WheelOptions,
    object::{Argument as A, Object, Parked},
};
use crate::{EngineApi, EngineCode, EngineSetup, ProviderInfo, ReadPiece};

const START: &str = "start transfer engine";
const CLOSE_PATIENCE: Duration = Duration::from_secs(40);

/// A transfer engine of the wheel.
///
/// The wheel answers -1 for every failure and says why only in its log on standard error. Its reads
/// end by `MC_TRANSFER_TIMEOUT` (30 seconds unless set); a shorter timeout here lets the caller go
/// while the read goes on.
#[derive(Debug)]
pub struct WheelEngine {
    interpreter: Interpreter,
    info: ProviderInfo,
    session: SessionName,
    client: RwLock<Option<Parked>>, // calls read, close writes
}

impl WheelEngine {
    /// Starts the interpreter if need be, and an engine in it.
    ///
    /// The wheel chooses its transport by itself; see [`EngineSetup::protocol`].
    pub fn start(options: &WheelOptions, setup: &EngineSetup) -> Result<Self> {
        let interpreter = Interpreter::start(options)?;
        let (client, file, port) = interpreter.run(|gil| {
            let module = gil.import(c"mooncake.engine")?;
            let file = module.attribute(c"__file__")?.as_text()?;
            let client = module.attribute(c"TransferEngine")?.call([])?;
            let arguments = [
                A::Text(&setup.local_host),
                A::Text(&setup.metadata),
                A::Text(&setup.protocol),
                A::Text(&setup.devices),
            ];
            let answer = client.method(c"initialize", arguments)?.as_number()?;
            check(answer, START).map_err(|e| {
                e.with("local_host", &setup.local_host).with("protocol", &setup.protocol)
            })?;
            let port = client.method(c"get_rpc_port", [])?.as_number()?;
            Ok((client.park(), file, port))
        })?;
        let info = interpreter.wheel().info(&file);
        let engine =
            |session| Self { interpreter, info, session, client: RwLock::new(Some(client)) };
        let port = u16::try_from(port).map_err(|_| {
            Error::new(ErrorKind::Protocol, START, "the engine has no valid port")
                .with("port", port)
        })?;
        Ok(engine(SessionName::new(&setup.local_host, port)?))
    }

    fn client(&self, operation: &'static str) -> Result<RwLockReadGuard<'_, Option<Parked>>> {
        let client = self.client.read();
        if client.is_none() {
            return Err(Error::new(ErrorKind::Closed, operation, "the engine was closed"));
        }
        Ok(client)
    }
}

fn check(answer: i64, operation: &'static str) -> Result<()> {
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
        one_by_one: bool,
        timeout: Duration,
    ) -> Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        let client = self.client("read")?;
        let parked = client.as_ref().expect("checked by `client`");
        // The job may outlive this call, so it holds a reference of its own.
        let own = self.interpreter.run(|gil| Ok(Object::of(parked, gil).park()))?;
        let pieces: Vec<_> =
            pieces.iter().map(|p| (p.local as u64, p.remote.0, p.len as u64)).collect();
        let name = peer.to_string();
        let answer = self.interpreter.run_within(timeout, move |gil| {
            let engine = Object::take_up(own, gil);
            if one_by_one || pieces.len() == 1 {
                for &(local, remote, len) in &pieces {
                    let arguments =
                        [A::Text(&name), A::Number(local), A::Number(remote), A::Number(len)];
                    let answer = engine.method(c"transfer_sync_read", arguments)?.as_number()?;
                    if answer != 0 {
                        return Ok(answer);
                    }
                }
                return Ok(0);
            }
            let arguments = [
                A::Text(&name),
                A::Numbers(&mut pieces.iter().map(|p| p.0)),
                A::Numbers(&mut pieces.iter().map(|p| p.1)),
                A::Numbers(&mut pieces.iter().map(|p| p.2)),
            ];
            engine.method(c"batch_transfer_sync_read", arguments)?.as_number()
        })?;
        check(answer, "read").map_err(|e| e.with("peer", peer))
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
