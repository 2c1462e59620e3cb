//! What a call through the embedded interpreter costs: the hop to its thread, and Python itself.
//!
//! ```text
//! FEATURESTORE_MOONCAKE_VENV=… MC_TCP_BIND_ADDRESS=127.0.0.1 \
//!     cargo run --release -p mooncake-sys --features mooncake-python --example call_cost
//! ```

use std::{error::Error, path::PathBuf, time::Instant};

use mooncake_sys::{
    StoreApi, StoreSetup,
    master::{ManagedMaster, MasterOptions},
    python::{Interpreter, WheelOptions, WheelStore},
};

const CALLS: u32 = 20_000;

fn main() -> Result<(), Box<dyn Error>> {
    let venv = std::env::var_os("FEATURESTORE_MOONCAKE_VENV").map(PathBuf::from);
    let venv = venv.ok_or("set FEATURESTORE_MOONCAKE_VENV: cargo xtask mooncake-venv makes one")?;
    if std::env::var("MC_TCP_BIND_ADDRESS").is_err() {
        return Err("set MC_TCP_BIND_ADDRESS=127.0.0.1: Mooncake listens everywhere else".into());
    }
    let options = WheelOptions::at(&venv);
    let start = Instant::now();
    let interpreter = Interpreter::start(&options)?;
    println!("interpreter started in {:?}", start.elapsed());
    println!("nothing, in its thread:  {:?} a call", interpreter.round_trip(CALLS)?.0);
    println!("int(7), in its thread:   {:?} a call more", interpreter.round_trip(CALLS)?.1);

    let master = ManagedMaster::start(&MasterOptions::of_environment(&venv))?;
    let setup = StoreSetup::client("127.0.0.1", master.address().to_string());
    let store = WheelStore::connect(&options, &setup)?;
    let start = Instant::now();
    for _ in 0..CALLS {
        store.hostname()?;
    }
    println!("get_hostname():          {:?} a call", start.elapsed() / CALLS);
    store.close()?;
    master.stop();
    Ok(())
}
