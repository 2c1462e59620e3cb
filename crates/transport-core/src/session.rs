//! `host:port` names: one parser for every place that takes one.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
    str::FromStr,
    sync::Arc,
};

use crate::{Error, ErrorKind, Result};

/// Where a peer listens: `host:port`, an IPv6 host in brackets.
///
/// Port 1 to 65535; host name at most 253 bytes, ASCII letters, digits, `-`, `_` and `.`.
/// Printing and parsing agree.
///
/// ```
/// use transport_core::SessionName;
/// let name: SessionName = "[::1]:9000".parse()?;
/// assert_eq!((name.host(), name.port()), ("::1", 9000));
/// assert_eq!(name.to_string(), "[::1]:9000");
/// assert!("::1".parse::<SessionName>().is_err());
/// # Ok::<(), transport_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionName {
    host: Arc<str>,
    port: u16,
}

impl SessionName {
    /// A session at `host` (an IPv6 address may come with or without brackets) and `port`.
    pub fn new(host: &str, port: u16) -> Result<Self> {
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        check_host(bare).map_err(|why| invalid(why, host))?;
        if port == 0 {
            return Err(invalid("port 0 is no place to connect to", &format!("{host}:0")));
        }
        Ok(Self { host: bare.into(), port })
    }

    /// Host name or address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Checks a host alone: an IPv4 address, an IPv6 address (with an optional `%zone`), or a name.
pub fn check_host(host: &str) -> std::result::Result<(), &'static str> {
    if host.is_empty() {
        return Err("the host is missing");
    }
    if host.contains(':') {
        let address = host.split_once('%').map_or(
            host,
            |(address, zone)| {
                if zone.is_empty() { "" } else { address }
            },
        );
        return match address.parse::<Ipv6Addr>() {
            Ok(_) => Ok(()),
            Err(_) => Err("not an IPv6 address"),
        };
    }
    if host.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return host.parse::<Ipv4Addr>().map(drop).map_err(|_| "not an IPv4 address");
    }
    if host.len() > 253 {
        return Err("a host name is at most 253 bytes long");
    }
    if !host.is_ascii() {
        return Err("an international name must be given in its xn-- form");
    }
    let label_ok = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    if !host.strip_suffix('.').unwrap_or(host).split('.').all(label_ok) {
        return Err("not a host name");
    }
    Ok(())
}

fn invalid(why: &'static str, found: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, "parse session name", why)
        .with("found", format_args!("{:?}", found.chars().take(80).collect::<String>()))
        .remedy("write host:port, an IPv6 address in brackets: 127.0.0.1:9000, [::1]:9000")
}

impl FromStr for SessionName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some((scheme, rest)) = text.split_once("://") {
            let rest = rest.split('/').next().unwrap_or(rest);
            return Err(invalid("a URL where host:port is wanted", text)
                .remedy(format!("leave out {scheme}://: write {rest}")));
        }
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) =
                rest.split_once(']').ok_or_else(|| invalid("the bracket is not closed", text))?;
            let port =
                rest.strip_prefix(':').ok_or_else(|| invalid("the port is missing", text))?;
            if !host.contains(':') {
                return Err(invalid("brackets are for IPv6 addresses", text));
            }
            (host, port)
        } else {
            let (host, port) =
                text.rsplit_once(':').ok_or_else(|| invalid("the port is missing", text))?;
            if host.contains(':') {
                return Err(invalid("an IPv6 address needs brackets", text));
            }
            (host, port)
        };
        if port.is_empty() {
            return Err(invalid("the port is missing", text));
        }
        if !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(invalid("the port is not a number", text));
        }
        let number = port.parse().map_err(|_| invalid("the port is above 65535", text))?;
        Self::new(host, number)
    }
}

impl fmt::Display for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Debug for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl From<std::net::SocketAddr> for SessionName {
    /// The name of a bound or connected socket address, whose port is never 0.
    fn from(address: std::net::SocketAddr) -> Self {
        Self { host: address.ip().to_string().into(), port: address.port() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_names_print_as_they_were_read() {
        for text in [
            "127.0.0.1:9000",
            "[::1]:9000",
            "[fe80::1%eth0]:1",
            "capture-host:15459",
            "a_b.c-d.example:65535",
        ] {
            assert_eq!(text.parse::<SessionName>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bad_names_say_why() {
        let long = format!("{}:1", "a".repeat(300));
        for (text, why) in [
            ("::1", "brackets"),
            ("fe80::1%eth0", "brackets"),
            ("2001:db8::1", "brackets"),
            ("host:", "port is missing"),
            (":9000", "host is missing"),
            ("host:0", "port 0"),
            ("host:65536", "above 65535"),
            ("127.0.0.1:123456", "above 65535"),
            ("127.0.0.999:1", "IPv4"),
            ("host", "port is missing"),
            ("[::1", "not closed"),
            ("[host]:1", "IPv6"),
            ("[fe80::1%]:1", "IPv6"),
            ("bücher.example:1", "xn--"),
            ("a b:1", "host name"),
            ("host:+1", "number"),
            ("http://127.0.0.1:9000", "leave out http://: write 127.0.0.1:9000"),
            ("https://host:1/health", "leave out https://: write host:1"),
            ("tcp://host", "leave out tcp://"),
            (long.as_str(), "253"),
        ] {
            let error = text.parse::<SessionName>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
