//! Mooncake's numbers: what they are called, what they mean, whether to try again.

use std::fmt;

use transport_core::{Error, ErrorKind, ErrorStatus};

use ErrorKind as K;
use ErrorStatus::{Permanent, Temporary};

/// Answer of a store call, as Mooncake numbers it. Unknown numbers are kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct StoreCode(pub i32);

/// Code, name, kind, status. Sorted from -1 downwards.
const STORE: &[(i32, &str, K, ErrorStatus)] = &[
    (-1, "INTERNAL_ERROR", K::Unexpected, Permanent),
    (-10, "BUFFER_OVERFLOW", K::CapacityExceeded, Temporary),
    (-100, "SHARD_INDEX_OUT_OF_RANGE", K::Unexpected, Permanent),
    (-101, "SEGMENT_NOT_FOUND", K::PeerGone, Temporary),
    (-102, "SEGMENT_ALREADY_EXISTS", K::AlreadyExists, Permanent),
    (-103, "CLIENT_NOT_FOUND", K::PeerGone, Temporary),
    (-200, "NO_AVAILABLE_HANDLE", K::CapacityExceeded, Temporary),
    (-300, "INVALID_VERSION", K::Protocol, Permanent),
    (-400, "INVALID_KEY", K::InvalidInput, Permanent),
    (-500, "WRITE_FAIL", K::Unexpected, Temporary),
    (-600, "INVALID_PARAMS", K::InvalidInput, Permanent),
    (-601, "ILLEGAL_CLIENT", K::PermissionDenied, Permanent),
    (-700, "INVALID_WRITE", K::InvalidInput, Permanent),
    (-701, "INVALID_READ", K::InvalidInput, Permanent),
    (-702, "INVALID_REPLICA", K::Unexpected, Permanent),
    (-703, "REPLICA_IS_NOT_READY", K::Busy, Temporary),
    (-704, "OBJECT_NOT_FOUND", K::NotFound, Permanent),
    (-705, "OBJECT_ALREADY_EXISTS", K::AlreadyExists, Permanent),
    (-706, "OBJECT_HAS_LEASE", K::Busy, Temporary),
    (-707, "LEASE_EXPIRED", K::Stale, Temporary),
    (-708, "OBJECT_HAS_REPLICATION_TASK", K::Busy, Temporary),
    (-709, "OBJECT_NO_REPLICATION_TASK", K::Unexpected, Permanent),
    (-710, "REPLICA_NOT_FOUND", K::NotFound, Permanent),
    (-711, "REPLICA_ALREADY_EXISTS", K::AlreadyExists, Permanent),
    (-712, "REPLICA_IS_GONE", K::NotFound, Permanent),
    (-713, "REPLICA_NOT_IN_LOCAL_MEMORY", K::Unsupported, Permanent),
    (-714, "OBJECT_REPLICA_BUSY", K::Busy, Temporary),
    (-800, "TRANSFER_FAIL", K::PeerGone, Temporary),
    (-801, "CHECKSUM_MISMATCH", K::Corrupt, Temporary),
    (-900, "RPC_FAIL", K::PeerGone, Temporary),
    (-901, "RPC_TIMEOUT", K::Timeout, Temporary),
    (-1010, "UNAVAILABLE_IN_CURRENT_STATUS", K::Busy, Temporary),
    (-1011, "UNAVAILABLE_IN_CURRENT_MODE", K::Unsupported, Permanent),
    (-1012, "NOT_SUPPORTED", K::Unsupported, Permanent),
    (-1400, "TASK_NOT_FOUND", K::NotFound, Permanent),
    (-1401, "TASK_PENDING_LIMIT_EXCEEDED", K::CapacityExceeded, Temporary),
    (-1402, "JOB_NOT_FOUND", K::NotFound, Permanent),
    (-1700, "TENANT_QUOTA_EXCEEDED", K::CapacityExceeded, Permanent),
    (-1701, "TENANT_NOT_REGISTERED", K::ConfigInvalid, Permanent),
    (-1702, "TENANT_NOT_EMPTY", K::Busy, Permanent),
];

/// Ranges of codes that only say which subsystem failed: last, first, name.
const STORE_RANGES: &[(i32, i32, &str)] = &[
    (-1007, -1000, "ETCD_OR_OPLOG"),
    (-1106, -1100, "FILE"),
    (-1203, -1200, "BUCKET"),
    (-1301, -1300, "OFFLOAD"),
    (-1503, -1500, "SERIALIZE_OR_PERSIST"),
    (-1605, -1600, "DFS"),
];

impl StoreCode {
    /// Everything went well.
    pub const OK: Self = Self(0);
    /// No segment has room.
    pub const NO_AVAILABLE_HANDLE: Self = Self(-200);
    /// An argument is wrong; among others a destination shorter than the object.
    pub const INVALID_PARAMS: Self = Self(-600);
    /// The object is still being written, or its writer died.
    pub const REPLICA_IS_NOT_READY: Self = Self(-703);
    /// There is no such object.
    pub const OBJECT_NOT_FOUND: Self = Self(-704);
    /// The key is taken.
    pub const OBJECT_ALREADY_EXISTS: Self = Self(-705);
    /// A reader's lease keeps the object from being removed.
    pub const OBJECT_HAS_LEASE: Self = Self(-706);
    /// The read took longer than its lease: the bytes may be another object's.
    pub const LEASE_EXPIRED: Self = Self(-707);
    /// The replica was evicted.
    pub const REPLICA_IS_GONE: Self = Self(-712);
    /// The bytes did not arrive, or not all of them.
    pub const TRANSFER_FAIL: Self = Self(-800);

    /// Reads a count-or-code answer: what is not negative is a count.
    pub fn count(answer: i64) -> Result<u64, Self> {
        u64::try_from(answer).map_err(|_| Self::saturating(answer))
    }

    /// Reads an answer that is a code and nothing else; positive numbers are failures as well.
    pub fn check(answer: i64) -> Result<(), Self> {
        if answer == 0 { Ok(()) } else { Err(Self::saturating(answer)) }
    }

    fn saturating(answer: i64) -> Self {
        Self(answer.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32)
    }

    /// Mooncake's name of the code; `UNKNOWN` if it is not in the table.
    pub fn name(self) -> &'static str {
        if self.0 == 0 {
            return "OK";
        }
        let range = || STORE_RANGES.iter().find(|r| (r.0..=r.1).contains(&self.0)).map(|r| r.2);
        self.row().map(|row| row.1).or_else(range).unwrap_or("UNKNOWN")
    }

    /// What it means to a caller.
    pub fn kind(self) -> ErrorKind {
        self.row().map_or(K::Unexpected, |row| row.2)
    }

    /// Whether the same call may succeed later.
    pub fn status(self) -> ErrorStatus {
        self.row().map_or(Permanent, |row| row.3)
    }

    /// Whether the object is gone, which is all that a removal wants.
    pub fn is_gone(self) -> bool {
        self == Self::OBJECT_NOT_FOUND
    }

    /// The error of a call that answered this.
    pub fn error(self, operation: &'static str) -> Error {
        Error::new(self.kind(), operation, format!("Mooncake Store answered {}", self.name()))
            .status(self.status())
            .with("code", self.0)
    }

    fn row(self) -> Option<&'static (i32, &'static str, K, ErrorStatus)> {
        STORE.iter().find(|row| row.0 == self.0)
    }
}

impl fmt::Display for StoreCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.name())
    }
}

impl fmt::Debug for StoreCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Answer of a transfer engine call. Most calls answer with negative numbers, those about batches
/// with positive ones that mean the same; unknown numbers are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineCode {
    /// From a call that answers 0 or a negative number.
    Return(i32),
    /// From a call that answers a positive status code.
    Status(i32),
}

/// Magnitude, name, kind, status: the part that both conventions share.
const ENGINE: &[(i32, &str, K, ErrorStatus)] = &[
    (1, "INVALID_ARGUMENT", K::InvalidInput, Permanent),
    (2, "TOO_MANY_REQUESTS", K::CapacityExceeded, Permanent),
    (3, "ADDRESS_NOT_REGISTERED", K::OutOfRange, Permanent),
    (4, "BATCH_BUSY", K::Busy, Temporary),
    (6, "DEVICE_NOT_FOUND", K::ConfigInvalid, Permanent),
    (7, "ADDRESS_OVERLAPPED", K::InvalidInput, Permanent),
    (101, "DNS", K::ConfigInvalid, Temporary),
    (102, "SOCKET", K::PeerGone, Temporary),
    (103, "MALFORMED_JSON", K::Protocol, Permanent),
    (104, "REJECT_HANDSHAKE", K::PermissionDenied, Permanent),
    (200, "METADATA", K::PeerGone, Temporary),
    (201, "ENDPOINT", K::PeerGone, Temporary),
    (202, "CONTEXT", K::Unexpected, Permanent),
    (300, "NUMA", K::Unexpected, Permanent),
    (301, "CLOCK", K::Unexpected, Permanent),
    (302, "MEMORY", K::CapacityExceeded, Permanent),
];
/// Only among the negative numbers.
const ENGINE_RETURN: &[(i32, &str, K, ErrorStatus)] =
    &[(303, "NOT_IMPLEMENTED", K::Unsupported, Permanent)];
/// Only among the positive numbers.
const ENGINE_STATUS: &[(i32, &str, K, ErrorStatus)] = &[
    (8, "NOT_SUPPORTED_TRANSPORT", K::Unsupported, Permanent),
    (999, "NOT_IMPLEMENTED", K::Unsupported, Permanent),
];

impl EngineCode {
    /// Reads the answer of a call with negative codes.
    pub fn check_return(answer: i32) -> Result<(), Self> {
        if answer == 0 { Ok(()) } else { Err(Self::Return(answer)) }
    }

    /// Reads the answer of a call with positive codes.
    pub fn check_status(answer: i32) -> Result<(), Self> {
        if answer == 0 { Ok(()) } else { Err(Self::Status(answer)) }
    }

    /// The number as it came.
    pub fn number(self) -> i32 {
        match self {
            Self::Return(number) | Self::Status(number) => number,
        }
    }

    /// Mooncake's name of the code; `UNKNOWN` if it is not in the table.
    pub fn name(self) -> &'static str {
        if self.number() == 0 { "OK" } else { self.row().map_or("UNKNOWN", |row| row.1) }
    }

    /// What it means to a caller.
    pub fn kind(self) -> ErrorKind {
        self.row().map_or(K::Unexpected, |row| row.2)
    }

    /// Whether the same call may succeed later.
    pub fn status(self) -> ErrorStatus {
        self.row().map_or(Permanent, |row| row.3)
    }

    /// The error of a call that answered this.
    pub fn error(self, operation: &'static str) -> Error {
        Error::new(self.kind(), operation, format!("the transfer engine answered {}", self.name()))
            .status(self.status())
            .with("code", self.number())
    }

    fn row(self) -> Option<&'static (i32, &'static str, K, ErrorStatus)> {
        let (magnitude, own) = match self {
            Self::Return(number) => (number.checked_neg()?, ENGINE_RETURN),
            Self::Status(number) => (number, ENGINE_STATUS),
        };
        ENGINE.iter().chain(own).find(|row| row.0 == magnitude)
    }
}

/// State of one transfer, as the engine numbers it. Unknown numbers are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are Mooncake's
pub enum TransferState {
    Waiting,
    Pending,
    Invalid,
    Canceled,
    Completed,
    Timeout,
    Failed,
    /// A number that this table does not know.
    Unknown(i32),
}

impl TransferState {
    /// Reads the engine's number.
    pub fn from_raw(raw: i32) -> Self {
        match raw {
            0 => Self::Waiting,
            1 => Self::Pending,
            2 => Self::Invalid,
            3 => Self::Canceled,
            4 => Self::Completed,
            5 => Self::Timeout,
            6 => Self::Failed,
            other => Self::Unknown(other),
        }
    }

    /// `None` while the transfer runs, then how it ended.
    ///
    /// After [`Self::Timeout`] and [`Self::Unknown`] the peer may still write.
    pub fn outcome(self, operation: &'static str) -> Option<Result<(), Error>> {
        let failed = |kind, message: &'static str| Some(Err(Error::new(kind, operation, message)));
        match self {
            Self::Waiting | Self::Pending => None,
            Self::Completed => Some(Ok(())),
            Self::Invalid => failed(K::InvalidInput, "the engine calls the transfer invalid"),
            Self::Canceled => failed(K::Closed, "the transfer was cancelled"),
            Self::Timeout => failed(K::Timeout, "the transfer timed out in the engine"),
            Self::Failed => failed(K::PeerGone, "the transfer failed"),
            Self::Unknown(raw) => Some(Err(Error::new(
                K::Protocol,
                operation,
                "the engine reports a state that is not known here",
            )
            .with("state", raw))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of both conventions, with what it must mean; written out a second time so that
    /// a slip in the tables above does not go unseen.
    #[test]
    fn every_number_has_its_meaning_and_unknown_ones_stay() {
        let store = [
            (-1, K::Unexpected, Permanent),
            (-10, K::CapacityExceeded, Temporary),
            (-100, K::Unexpected, Permanent),
            (-101, K::PeerGone, Temporary),
            (-102, K::AlreadyExists, Permanent),
            (-103, K::PeerGone, Temporary),
            (-200, K::CapacityExceeded, Temporary),
            (-300, K::Protocol, Permanent),
            (-400, K::InvalidInput, Permanent),
            (-500, K::Unexpected, Temporary),
            (-600, K::InvalidInput, Permanent),
            (-601, K::PermissionDenied, Permanent),
            (-700, K::InvalidInput, Permanent),
            (-701, K::InvalidInput, Permanent),
            (-702, K::Unexpected, Permanent),
            (-703, K::Busy, Temporary),
            (-704, K::NotFound, Permanent),
            (-705, K::AlreadyExists, Permanent),
            (-706, K::Busy, Temporary),
            (-707, K::Stale, Temporary),
            (-708, K::Busy, Temporary),
            (-709, K::Unexpected, Permanent),
            (-710, K::NotFound, Permanent),
            (-711, K::AlreadyExists, Permanent),
            (-712, K::NotFound, Permanent),
            (-713, K::Unsupported, Permanent),
            (-714, K::Busy, Temporary),
            (-800, K::PeerGone, Temporary),
            (-801, K::Corrupt, Temporary),
            (-900, K::PeerGone, Temporary),
            (-901, K::Timeout, Temporary),
            (-1005, K::Unexpected, Permanent),
            (-1010, K::Busy, Temporary),
            (-1011, K::Unsupported, Permanent),
            (-1012, K::Unsupported, Permanent),
            (-1103, K::Unexpected, Permanent),
            (-1400, K::NotFound, Permanent),
            (-1401, K::CapacityExceeded, Temporary),
            (-1402, K::NotFound, Permanent),
            (-1603, K::Unexpected, Permanent),
            (-1700, K::CapacityExceeded, Permanent),
            (-1701, K::ConfigInvalid, Permanent),
            (-1702, K::Busy, Permanent),
            (-31_337, K::Unexpected, Permanent),
            (17, K::Unexpected, Permanent),
        ];
        for (number, kind, status) in store {
            let code = StoreCode(number);
            assert_eq!((code.kind(), code.status()), (kind, status), "{code}");
            let known = number != -31_337 && number != 17;
            assert_eq!(code.name() != "UNKNOWN", known, "{code}");
            let error = code.error("get");
            assert_eq!(error.context("code"), Some(number.to_string().as_str()));
            assert_eq!((error.kind(), error.is_temporary()), (kind, status == Temporary));
        }
        assert!(STORE.iter().all(|row| store.iter().any(|s| s.0 == row.0)), "a row is not tested");
        assert!(STORE.windows(2).all(|w| w[0].0 > w[1].0), "sorted, and no code twice");

        let engine = [
            (1, K::InvalidInput, Permanent),
            (2, K::CapacityExceeded, Permanent),
            (3, K::OutOfRange, Permanent),
            (4, K::Busy, Temporary),
            (6, K::ConfigInvalid, Permanent),
            (7, K::InvalidInput, Permanent),
            (101, K::ConfigInvalid, Temporary),
            (102, K::PeerGone, Temporary),
            (103, K::Protocol, Permanent),
            (104, K::PermissionDenied, Permanent),
            (200, K::PeerGone, Temporary),
            (201, K::PeerGone, Temporary),
            (202, K::Unexpected, Permanent),
            (300, K::Unexpected, Permanent),
            (301, K::Unexpected, Permanent),
            (302, K::CapacityExceeded, Permanent),
            (31_337, K::Unexpected, Permanent),
        ];
        for (magnitude, kind, status) in engine {
            for code in [EngineCode::Return(-magnitude), EngineCode::Status(magnitude)] {
                assert_eq!((code.kind(), code.status()), (kind, status), "{code:?}");
                let error = code.error("read");
                assert_eq!(error.context("code"), Some(code.number().to_string().as_str()));
            }
        }
        for (code, kind) in [
            (EngineCode::Return(-303), K::Unsupported),
            (EngineCode::Status(999), K::Unsupported),
            (EngineCode::Status(8), K::Unsupported),
            (EngineCode::Status(303), K::Unexpected), // the other convention's number
            (EngineCode::Return(-8), K::Unexpected),
            (EngineCode::Return(1), K::Unexpected), // a sign that does not belong there
            (EngineCode::Status(-1), K::Unexpected),
            (EngineCode::Return(i32::MIN), K::Unexpected),
        ] {
            assert_eq!(code.kind(), kind, "{code:?}");
        }
    }

    #[test]
    fn counts_and_codes_are_told_apart() {
        assert_eq!(StoreCode::count(0), Ok(0));
        assert_eq!(StoreCode::count(1 << 40), Ok(1 << 40));
        assert_eq!(StoreCode::count(-704), Err(StoreCode::OBJECT_NOT_FOUND));
        assert_eq!(StoreCode::count(i64::MIN), Err(StoreCode(i32::MIN)));
        assert_eq!(StoreCode::check(0), Ok(()));
        assert_eq!(StoreCode::check(3), Err(StoreCode(3)), "a count is no success here");
    }

    #[test]
    fn every_state_ends_a_transfer_or_says_that_it_runs() {
        let kinds: Vec<_> = (0..9)
            .map(|raw| {
                TransferState::from_raw(raw).outcome("read").map(|r| r.map_err(|e| e.kind()))
            })
            .collect();
        assert_eq!(
            kinds,
            [
                None,
                None,
                Some(Err(K::InvalidInput)),
                Some(Err(K::Closed)),
                Some(Ok(())),
                Some(Err(K::Timeout)),
                Some(Err(K::PeerGone)),
                Some(Err(K::Protocol)),
                Some(Err(K::Protocol)),
            ]
        );
        let error = TransferState::from_raw(77).outcome("read").unwrap().unwrap_err();
        assert_eq!(error.context("state"), Some("77"));
    }
}
