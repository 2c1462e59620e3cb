//! Whether and how Mooncake's transfer engine runs here.

use transport_core::Result;
use transport_mooncake_direct::{MooncakeEngine, MooncakeOptions, Protocol};

use super::Finding;
use crate::{config::MooncakeConfig, mooncake};

/// Starts an engine, as only that shows what it runs, and stops it. Blocks, for a second or two.
pub(super) fn probe(config: &MooncakeConfig) -> Finding {
    let tried = start(config).and_then(|engine| {
        let found = format!("protocol {} of {}; one copy", engine.protocol(), engine.provider());
        engine.close().map(|()| found)
    });
    tried.map_err(|error| error.to_string())
}

/// Only looks whether there is one: a started engine listens on every address.
pub(super) fn look(config: &MooncakeConfig) -> Finding {
    let found = mooncake::Provider::find(config).map_err(|error| error.to_string())?;
    Ok(format!("{}; it is started, and its protocol checked, when asked for", found.reason))
}

/// Starts the engine that the configuration asks for. Blocks.
pub(super) fn start(config: &MooncakeConfig) -> Result<MooncakeEngine> {
    let protocol: Protocol = config
        .protocol
        .parse()
        .map_err(|e: transport_core::Error| e.with("setting", "mooncake_protocol"))?;
    let options = MooncakeOptions::new(protocol);
    #[cfg(feature = "mooncake-python")]
    return MooncakeEngine::of_wheel(&mooncake::wheel_options(config), &config.host, options);
    #[cfg(not(feature = "mooncake-python"))]
    {
        // `mooncake_library` is the store's; the engine's is named by its own variable.
        let mut library = mooncake::library_options(config);
        library.path = None;
        MooncakeEngine::of_library(&library, &config.host, options)
    }
}

#[cfg(test)]
mod tests {
    use super::Protocol;

    #[test]
    fn the_engine_knows_every_protocol_that_may_be_configured() {
        for name in crate::config::PROTOCOLS {
            assert_eq!(name.parse::<Protocol>().unwrap().name(), name);
        }
    }
}
