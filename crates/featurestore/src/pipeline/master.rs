//! The store's master of a run: one of its own, or one that runs already.

use std::path::PathBuf;

use mooncake_sys::master::{Admin, ManagedMaster, MasterOptions};
use transport_core::{Error, ErrorKind, Result};

use super::{Options, report::MooncakeReport};
use crate::{
    choose,
    config::{Master, MooncakeConfig, TransportChoice},
    mooncake,
};

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
        let file = format!("featurestore-mooncake-master-{}.log", std::process::id());
        let log = Log(Some(std::env::temp_dir().join(file)));
        let options = MasterOptions::find(config.venv.as_deref())?.lease(config.lease);
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

    /// Adds to an error where the master's log is.
    pub(super) fn explain(&self, error: Error) -> Error {
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
            crate::process::note(format_args!(
                "featurestore: the log of mooncake_master is kept: {}",
                path.display()
            ));
        }
    }
}

fn panicked(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorKind::Unexpected, "run pipeline", "the master's keeper panicked").source(error)
}
