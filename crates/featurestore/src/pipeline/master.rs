//! The store's master of a run: one of its own, or one that runs already.

use std::{
    fs::File,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use mooncake_sys::master::{Admin, ManagedMaster, MasterOptions};
use transport_core::{ClientId, Error, ErrorKind, Result};

use super::{Options, blame, children, producer::QUIET, report::MooncakeReport};
use crate::{
    choose,
    config::{Master, MooncakeConfig, TransportChoice},
    mooncake,
    process::{STOPPED, at_rest, note},
};

/// Pause between two looks at whether the master runs.
const LOOK: Duration = Duration::from_millis(100);

/// The store of a run. A master of its own ends when this is dropped.
#[derive(Debug)]
pub(super) struct Store {
    /// For the processes of the run: with the address of the master.
    pub(super) config: MooncakeConfig,
    admin: Option<Admin>,
    master: Option<ManagedMaster>,
    log: Log,
}

/// Where the log of a managed master is. It is kept unless the run goes well.
#[derive(Debug, Default)]
struct Log(Option<PathBuf>);

impl Log {
    /// Makes a log in `temporary` that only this user can read, under a name nobody can foresee.
    ///
    /// # Errors
    /// If it cannot be made, or something has that name: a file or a link of somebody else's.
    fn make(temporary: &Path, id: impl std::fmt::Display) -> Result<Self> {
        let path = temporary.join(format!("featurestore-mooncake-master-{id}.log"));
        let made = File::options().write(true).create_new(true).mode(0o600).open(&path);
        made.map_err(|e| {
            Error::io("make log of mooncake_master", e)
                .with("log", path.display())
                .remedy("run again; or let TMPDIR name a folder in which you can make files")
        })?;
        Ok(Self(Some(path)))
    }
}

impl Store {
    /// Starts the master or finds it, and makes sure that there is a Mooncake to talk to it. Does
    /// nothing for a run by another transport.
    pub(super) async fn of(options: &Options) -> Result<Self> {
        let config = options.mooncake.clone();
        if options.transport != TransportChoice::Store {
            return Ok(Self { config, admin: None, master: None, log: Log::default() });
        }
        let starting = tokio::task::spawn_blocking(move || Self::start_blocking(config));
        starting.await.map_err(panicked)?
    }

    fn start_blocking(mut config: MooncakeConfig) -> Result<Self> {
        if config.master != Some(Master::Managed) {
            mooncake::setup(&config, 0)?; // names what is missing
        }
        mooncake::Provider::find(&config)?;
        if config.master != Some(Master::Managed) {
            let admin = config.admin.as_ref().map(choose::store::address_of).transpose()?;
            let admin = admin.map(Admin::at);
            return Ok(Self { config, admin, master: None, log: Log::default() });
        }
        let options = MasterOptions::find(config.venv.as_deref())?.lease(config.lease);
        let log = Log::make(&std::env::temp_dir(), ClientId::random())?;
        let path = log.0.clone().unwrap_or_default();
        let master = ManagedMaster::start(&options.log(&path))
            .map_err(|error| error.with("log", path.display()))?;
        config.master = Some(Master::At(master.address().to_string()));
        let admin = Some(master.admin());
        Ok(Self { config, admin, master: Some(master), log })
    }

    /// What the master counts now, if it is known where to ask.
    pub(super) async fn report(&self) -> Result<Option<MooncakeReport>> {
        let Some(admin) = self.admin else { return Ok(None) };
        let asking = tokio::task::spawn_blocking(move || admin.metrics());
        let metrics = asking.await.map_err(panicked)??;
        let count = |name| metrics.value(name) as u64;
        let master = self.config.master.as_ref().map(ToString::to_string).unwrap_or_default();
        Ok(Some(MooncakeReport {
            master,
            managed: self.master.is_some(),
            objects: count("master_key_count"),
            allocated_bytes: count("master_allocated_bytes"),
            capacity_bytes: count("master_total_capacity_bytes"),
            clients: count("master_active_clients"),
            written_objects: count("master_batch_put_end_items_total")
                + count("master_put_end_requests_total"),
            evicted_objects: count("master_evicted_key_count"),
        }))
    }

    /// Completes when a master of its own ends, which it should not.
    pub(super) async fn died(&self) -> Error {
        let Some(master) = &self.master else { return std::future::pending().await };
        let mut stopped = 0;
        loop {
            if let Some(status) = master.exit_status() {
                return children::died(&name(master), Ok(status));
            }
            stopped = if at_rest(master.pid()) == Some(STOPPED) { stopped + 1 } else { 0 };
            if stopped * LOOK == QUIET {
                note(format_args!("featurestore: {} {STOPPED}", name(master)));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The error to end with: `error`, unless it comes of a master of its own that has died or is
    /// stopped; and where the master's log is.
    pub(super) async fn explain(&self, error: Error) -> Error {
        let Some(master) = &self.master else { return error };
        let error = match tokio::time::timeout(blame::SOON, self.died()).await {
            Ok(dead) => blame::because(dead, &error),
            Err(_) => match at_rest(master.pid()) {
                Some(STOPPED) => blame::because(blame::stopped(&name(master), STOPPED), &error),
                _ => error,
            },
        };
        match &self.log.0 {
            Some(path) => error.with("mooncake_log", path.display()),
            None => error,
        }
    }

    /// Ends a master of its own after a run that went well.
    pub(super) async fn stop(self) -> Result<()> {
        let Self { master, mut log, .. } = self;
        let stopping = tokio::task::spawn_blocking(move || {
            drop(master);
            if let Some(path) = log.0.take() {
                let _ = std::fs::remove_file(path); // a temporary file that nobody needs any more
            }
        });
        stopping.await.map_err(panicked)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if let Some(path) = &self.0
            && path.exists()
        {
            note(format_args!(
                "featurestore: the log of mooncake_master is kept: {}",
                path.display()
            ));
        }
    }
}

fn name(master: &ManagedMaster) -> String {
    format!("mooncake_master (pid {})", master.pid())
}

fn panicked(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorKind::Unexpected, "run pipeline", "the master's keeper panicked").source(error)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_log_is_a_new_file_of_this_users_and_follows_no_link() {
        let temporary = tempfile::tempdir().unwrap();
        let at = |name: &str| temporary.path().join(name);
        std::fs::write(at("kept"), "").unwrap();
        symlink("kept", at("featurestore-mooncake-master-1.log")).unwrap();
        symlink("nowhere", at("featurestore-mooncake-master-2.log")).unwrap();
        std::fs::write(at("featurestore-mooncake-master-3.log"), "another's").unwrap();
        for id in 1..=3 {
            let error = Log::make(temporary.path(), id).unwrap_err().to_string();
            assert!(error.contains("master-") && error.contains("TMPDIR"), "{error}");
        }
        assert!(!at("nowhere").exists());
        let mut log = Log::make(temporary.path(), 4).unwrap();
        let mode = log.0.take().unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
