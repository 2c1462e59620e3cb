//! The variables by which Mooncake's own users configure a store, and their sizes.

use transport_core::{ByteSize, Error, ErrorKind, Result};

use crate::Settings;

/// Settings, and the variables that give them: those that come first win. Variables of this
/// library, files and flags come before all of them.
pub const VARIABLES: [(&str, [&str; 2]); 7] = [
    ("mooncake", ["MOONCAKE_MASTER", "MC_MASTER_SERVER"]),
    ("mooncake_protocol", ["MOONCAKE_PROTOCOL", "MC_PROTOCOL"]),
    ("mooncake_metadata", ["MOONCAKE_TE_META_DATA_SERVER", "MC_METADATA_SERVER"]),
    ("mooncake_devices", ["MOONCAKE_DEVICE", "MC_DEVICE"]),
    ("mooncake_host", ["MOONCAKE_LOCAL_HOSTNAME", "MC_LOCAL_HOSTNAME"]),
    ("pool", ["MOONCAKE_LOCAL_BUFFER_SIZE", "MC_BUFFER_SIZE"]),
    (SEGMENT, ["MOONCAKE_GLOBAL_SEGMENT_SIZE", "MC_SEGMENT_SIZE"]),
];

/// Not a setting of its own: bytes of object memory that a producer adds.
const SEGMENT: &str = "segment";

/// Adds what these variables say to settings that nothing else has given, and returns the object
/// memory that a producer adds, if a variable says so.
pub fn apply(
    mut settings: Settings,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<(Settings, Option<ByteSize>)> {
    let mut segment = None;
    for (setting, names) in VARIABLES {
        let found = names.iter().find_map(|&name| Some((name, variable(name)?)));
        let Some((name, value)) = found.filter(|(_, value)| !value.trim().is_empty()) else {
            continue;
        };
        let named = |error: Error| error.with("variable", name);
        match setting {
            SEGMENT => segment = Some(size(&value).map_err(named)?),
            // Mooncake's word for any.
            "mooncake_devices" if value.trim().eq_ignore_ascii_case("auto") => {}
            "pool" => {
                let size = size(&value).map_err(named)?;
                settings = settings.or_variable(setting, size.to_string(), name)?;
            }
            _ => settings = settings.or_variable(setting, value.trim().to_owned(), name)?,
        }
    }
    Ok((settings, segment))
}

/// Reads a size as Mooncake's users write it: `2gb`, `512mb`, `4g`, or a number of bytes. All units
/// are powers of 1024.
pub fn size(text: &str) -> Result<ByteSize> {
    let folded = text.trim().to_ascii_lowercase();
    let digits = folded.find(|c: char| !c.is_ascii_digit()).unwrap_or(folded.len());
    let (number, unit) = folded.split_at(digits);
    let shift = match unit.trim() {
        "" | "b" => Some(0),
        "k" | "kb" | "kib" => Some(10),
        "m" | "mb" | "mib" => Some(20),
        "g" | "gb" | "gib" => Some(30),
        "t" | "tb" | "tib" => Some(40),
        _ => None,
    };
    let bytes = number
        .parse::<u64>()
        .ok()
        .zip(shift)
        .and_then(|(number, shift)| number.checked_mul(1 << shift))
        .and_then(ByteSize::new);
    bytes.ok_or_else(|| {
        Error::new(ErrorKind::ConfigInvalid, "read size", "not a size")
            .with("found", format_args!("{text:?}"))
            .remedy("write a whole number with a unit, such as 2gb, 512mb or 4g, or bytes")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn sizes_are_read_as_mooncakes_users_write_them() {
        for (text, bytes) in [
            ("2gb", 2 << 30),
            ("512mb", 512 << 20),
            ("4g", 4 << 30),
            (" 8 GB ", 8 << 30),
            ("64KiB", 64 << 10),
            ("1t", 1 << 40),
            ("1073741824", 1 << 30),
            ("7b", 7),
            ("0", 0),
        ] {
            assert_eq!(size(text).unwrap().get(), bytes, "{text:?}");
        }
        for text in
            ["", "gb", "2.5gb", "-1", "1e9", "2gigs", "99999999999t", "18446744073709551616"]
        {
            let error = size(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{text:?}");
        }
    }

    #[test]
    fn variables_come_after_settings_and_in_their_order() {
        let variable = |name: &str| {
            Some(match name {
                "MOONCAKE_MASTER" => "127.0.0.1:1234".to_owned(),
                "MC_MASTER_SERVER" => "127.0.0.1:9".to_owned(),
                "MC_PROTOCOL" => "tcp".to_owned(),
                "MOONCAKE_DEVICE" => "auto".to_owned(),
                "MC_BUFFER_SIZE" => "256mb".to_owned(),
                "MOONCAKE_GLOBAL_SEGMENT_SIZE" => "8gb".to_owned(),
                _ => return None,
            })
        };
        let (settings, segment) = apply(Settings::new(), variable).unwrap();
        let config = Config::from_settings(&settings).unwrap();
        assert_eq!(config.mooncake.master.unwrap().to_string(), "127.0.0.1:1234");
        assert_eq!(config.mooncake.devices, "");
        assert_eq!(config.pool, Some(ByteSize::mib(256)));
        assert_eq!(segment, Some(ByteSize::mib(8 << 10)));

        let mut given = Settings::new();
        given.set("mooncake", "127.0.0.1:77").unwrap();
        let (settings, _) = apply(given, variable).unwrap();
        let config = Config::from_settings(&settings).unwrap();
        assert_eq!(config.mooncake.master.unwrap().to_string(), "127.0.0.1:77");

        let bad = |name: &str| (name == "MC_SEGMENT_SIZE").then(|| "much".to_owned());
        let error = apply(Settings::new(), bad).unwrap_err();
        assert_eq!(error.context("variable"), Some("MC_SEGMENT_SIZE"));
    }
}
