//! The one error type of the workspace: what failed, whether to try again, and what to do about it.

use std::{borrow::Cow, error::Error as StdError, fmt};

/// Result of every fallible operation in the workspace.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, in terms that a caller can act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The key exists and `replace` was not asked for.
    AlreadyExists,
    /// The object is in use: leased, pinned, or being read.
    Busy,
    /// No room: the arena, pool or quota is full.
    CapacityExceeded,
    /// The transport, arena or connection was closed by its owner.
    Closed,
    /// A setting is missing, unknown, contradictory or out of range.
    ConfigInvalid,
    /// Bytes arrived but are not what the descriptor promises.
    Corrupt,
    /// An argument can never be valid.
    InvalidInput,
    /// The object, sample or peer is not known.
    NotFound,
    /// An address outside what the peer published.
    OutOfRange,
    /// The peer process went away or was replaced by another one.
    PeerGone,
    /// Refused by the peer or the operating system for lack of rights.
    PermissionDenied,
    /// The peer sent something that the protocol does not allow.
    Protocol,
    /// Fewer bytes than the descriptor promises.
    ShortRead,
    /// The descriptor belongs to an older life of the object or of its publisher.
    Stale,
    /// The deadline passed.
    Timeout,
    /// The operating system or a library failed in a way that has no better name here.
    Unexpected,
    /// The transport lacks the capability.
    Unsupported,
}

impl ErrorKind {
    /// Whether an error of this kind is worth retrying when nothing more is known.
    pub const fn default_status(self) -> ErrorStatus {
        match self {
            Self::Busy | Self::CapacityExceeded | Self::PeerGone | Self::Timeout => {
                ErrorStatus::Temporary
            }
            _ => ErrorStatus::Permanent,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AlreadyExists => "already exists",
            Self::Busy => "busy",
            Self::CapacityExceeded => "capacity exceeded",
            Self::Closed => "closed",
            Self::ConfigInvalid => "invalid configuration",
            Self::Corrupt => "corrupt data",
            Self::InvalidInput => "invalid input",
            Self::NotFound => "not found",
            Self::OutOfRange => "out of range",
            Self::PeerGone => "peer gone",
            Self::PermissionDenied => "permission denied",
            Self::Protocol => "protocol violation",
            Self::ShortRead => "short read",
            Self::Stale => "stale",
            Self::Timeout => "timed out",
            Self::Unexpected => "unexpected failure",
            Self::Unsupported => "unsupported",
        })
    }
}

/// Whether the same call may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorStatus {
    /// The same call fails again.
    Permanent,
    /// The same call may succeed later; [`crate::layers::RetryLayer`] retries only these.
    Temporary,
}

impl fmt::Display for ErrorStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Permanent => "permanent",
            Self::Temporary => "temporary",
        })
    }
}

/// A failure with its kind, its operation, the offenders by name, and the remedy.
///
/// `Display` is one line, fit for a log; `Debug` spells everything out over several lines.
///
/// ```
/// use transport_core::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::CapacityExceeded, "reserve", "no room for the batch")
///     .with("requested_bytes", 512)
///     .remedy("use a larger arena or a lower watermark");
/// assert_eq!(
///     error.to_string(),
///     "reserve: capacity exceeded: no room for the batch (requested_bytes=512); \
///      use a larger arena or a lower watermark"
/// );
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    status: ErrorStatus,
    operation: &'static str,
    message: Cow<'static, str>,
    context: Vec<(&'static str, String)>,
    remedy: Option<Cow<'static, str>>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `kind` in `operation`, with the default status of its kind.
    pub fn new(
        kind: ErrorKind,
        operation: &'static str,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self(Box::new(Inner {
            kind,
            status: kind.default_status(),
            operation,
            message: message.into(),
            context: Vec::new(),
            remedy: None,
            source: None,
        }))
    }

    /// An operating-system error, with the kind that its code stands for.
    pub fn io(operation: &'static str, error: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match error.kind() {
            Io::NotFound => ErrorKind::NotFound,
            Io::PermissionDenied => ErrorKind::PermissionDenied,
            Io::ConnectionRefused
            | Io::ConnectionReset
            | Io::ConnectionAborted
            | Io::BrokenPipe
            | Io::NotConnected
            | Io::UnexpectedEof
            | Io::HostUnreachable
            | Io::NetworkUnreachable => ErrorKind::PeerGone,
            Io::TimedOut | Io::WouldBlock => ErrorKind::Timeout,
            Io::InvalidData => ErrorKind::Corrupt,
            Io::OutOfMemory | Io::StorageFull => ErrorKind::CapacityExceeded,
            Io::AddrInUse | Io::AddrNotAvailable => ErrorKind::ConfigInvalid,
            // What was named is something else than it has to be.
            Io::InvalidInput | Io::InvalidFilename | Io::IsADirectory | Io::NotADirectory => {
                ErrorKind::InvalidInput
            }
            _ => ErrorKind::Unexpected,
        };
        Self::new(kind, operation, error.to_string()).source(error)
    }

    /// Adds a named offender, such as `key`, `expected` or `found`; once, whoever else names it too.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        let pair = (name, value.to_string());
        if !self.0.context.contains(&pair) {
            self.0.context.push(pair);
        }
        self
    }

    /// Says what the reader can do about it.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// Keeps the underlying error.
    #[must_use]
    pub fn source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Overrides whether the call is worth retrying.
    #[must_use]
    pub fn status(mut self, status: ErrorStatus) -> Self {
        self.0.status = status;
        self
    }

    /// The same once more, for another who waits for the same; its source stays with this one.
    #[must_use]
    pub fn repeated(&self) -> Self {
        let Inner { kind, status, operation, message, context, remedy, source: _ } = &*self.0;
        Self(Box::new(Inner {
            kind: *kind,
            status: *status,
            operation,
            message: message.clone(),
            context: context.clone(),
            remedy: remedy.clone(),
            source: None,
        }))
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later.
    pub fn is_temporary(&self) -> bool {
        self.0.status == ErrorStatus::Temporary
    }

    /// The operation that failed, such as `fetch`.
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The value of a named offender, if the error carries it.
    pub fn context(&self, name: &str) -> Option<&str> {
        self.0.context.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str())
    }

    /// The message alone, without operation, context or remedy.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let e = &*self.0;
        write!(f, "{}: {}: ", e.operation, e.kind)?;
        // A list is introduced by a line, which says what holds for all of it.
        let (head, list) = match e.message.split_once(":\n") {
            Some((head, list)) => (head, Some(list)),
            None => (&*e.message, None),
        };
        f.write_str(head)?;
        for (i, (name, value)) in e.context.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { " (" } else { ", " })?;
        }
        if !e.context.is_empty() {
            f.write_str(")")?;
        }
        if let Some(list) = list {
            write!(f, ":\n{list}")?;
        }
        if let Some(remedy) = &e.remedy {
            write!(f, "{}{remedy}", if list.is_some() { "\n" } else { "; " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let e = &*self.0;
        writeln!(f, "{} ({}) in {}: {}", e.kind, e.status, e.operation, e.message)?;
        for (name, value) in &e.context {
            writeln!(f, "    {name}: {value}")?;
        }
        if let Some(remedy) = &e.remedy {
            writeln!(f, "    remedy: {remedy}")?;
        }
        if let Some(source) = &e.source {
            writeln!(f, "    source: {source}")?;
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_is_one_line_and_debug_names_every_part() {
        let error = Error::new(ErrorKind::ShortRead, "fetch", "fewer bytes than promised")
            .with("key", "s/a/g1/x")
            .with("expected", 8)
            .with("found", 4)
            .remedy("ask for the sample again")
            .source(std::io::Error::other("reset"));
        assert_eq!(error.to_string().lines().count(), 1);
        let debug = format!("{error:?}");
        for part in ["short read", "permanent", "fetch", "s/a/g1/x", "remedy", "reset"] {
            assert!(debug.contains(part), "{debug}");
        }
        assert_eq!(error.context("found"), Some("4"));
        assert!(!error.is_temporary());
        let again = error.repeated();
        assert_eq!((again.kind(), again.to_string()), (error.kind(), error.to_string()));
        assert!(again.status(ErrorStatus::Temporary).repeated().is_temporary());
    }

    #[test]
    fn an_offender_is_named_once() {
        let error = Error::new(ErrorKind::NotFound, "open", "gone").with("file", "a");
        let error = error.with("file", "a").with("file", "b");
        assert_eq!(error.to_string(), "open: not found: gone (file=a, file=b)");
    }

    #[test]
    fn what_holds_for_a_list_stands_before_it() {
        let error = Error::new(ErrorKind::ConfigInvalid, "check", "2 problems:\n- a\n- b");
        let error = error.with("file", "x").remedy("mend it");
        let shown = "check: invalid configuration: 2 problems (file=x):\n- a\n- b\nmend it";
        assert_eq!(error.to_string(), shown);
    }

    #[test]
    fn io_errors_keep_their_meaning() {
        for (io, kind, temporary) in [
            (std::io::ErrorKind::ConnectionReset, ErrorKind::PeerGone, true),
            (std::io::ErrorKind::PermissionDenied, ErrorKind::PermissionDenied, false),
            (std::io::ErrorKind::TimedOut, ErrorKind::Timeout, true),
            (std::io::ErrorKind::AddrInUse, ErrorKind::ConfigInvalid, false),
            (std::io::ErrorKind::IsADirectory, ErrorKind::InvalidInput, false),
        ] {
            let error = Error::io("connect", std::io::Error::from(io));
            assert_eq!((error.kind(), error.is_temporary()), (kind, temporary));
        }
    }
}
