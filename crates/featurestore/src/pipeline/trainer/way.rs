//! How far ahead samples are read, by what brings them where they come to lie.

use super::compare::Bounds;
use crate::config::{Receive, TransportChoice};

/// Samples that are read at a time through the host, ahead of the comparison.
///
/// Into a device too: a sample goes on to it while the rest arrives, so that the wire is what is
/// waited for, as it is by who receives in host memory. Over tcp, four calls of at most four
/// connections, each with a buffer that is filled and one that is sent on, also take all buffers that
/// there are by default; more calls would wait for buffers.
const THROUGH_HOST: (usize, usize) = (4, 3);
/// The same from device to device, and how few of them there are when more are begun. Servers may
/// use the device too, and then each reading by itself would wait for its turn.
const OF_DEVICES: (usize, usize) = (16, 8);
/// Samples that one call reads from device to device. Through the host each has a call of its own,
/// since a call ends with its slowest sample.
const TOGETHER: usize = 8;

/// What brings samples into the trainer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Nothing: they are seen where the server keeps them.
    Views,
    /// The host, into its memory.
    Host,
    /// The host, and on into device memory.
    Staged,
    /// Devices among themselves.
    Devices,
}

impl Way {
    pub(super) fn of(transport: TransportChoice, receive: Receive, views: bool) -> Self {
        if transport.is_of_devices() {
            Self::Devices
        } else if receive.is_on_device(transport) {
            Self::Staged
        } else if views {
            Self::Views
        } else {
            Self::Host
        }
    }

    /// Whether samples come to lie in device memory.
    pub(super) fn is_on_device(self) -> bool {
        matches!(self, Self::Staged | Self::Devices)
    }

    /// Samples that are read at a time, and how few of them there are when more are begun.
    pub(super) fn ahead(self) -> (usize, usize) {
        if self == Self::Devices { OF_DEVICES } else { THROUGH_HOST }
    }

    /// Samples that one call reads.
    pub(super) fn together(self) -> usize {
        if self == Self::Devices { TOGETHER } else { 1 }
    }

    /// How much is compared at a time, with a receive pool of `pool` bytes.
    pub(super) fn compared(self, pool: u64) -> Bounds {
        match self {
            // Summed up on the device, in a small part of the time that reading them takes.
            Self::Staged | Self::Devices => Bounds::SERIAL,
            Self::Views => Bounds::of_cores(u64::MAX),
            Self::Host => Bounds::of_cores(pool / 4), // another quarter is against fragments
        }
    }

    /// Bytes that are read ahead at most; none where reading takes no memory.
    pub(super) fn read_bytes(self, pool: u64) -> Option<u64> {
        (self != Self::Views).then_some(pool / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_among_themselves_are_read_by_many() {
        for (transport, receive, views, way) in [
            (TransportChoice::Shm, Receive::Auto, true, Way::Views),
            (TransportChoice::Tcp, Receive::Host, false, Way::Host),
            (TransportChoice::Tcp, Receive::Device, false, Way::Staged),
            (TransportChoice::NvlinkIntra, Receive::Auto, false, Way::Devices),
            (TransportChoice::Nvlink, Receive::Device, false, Way::Devices),
        ] {
            assert_eq!(Way::of(transport, receive, views), way, "{transport}, {receive}");
            let many = (way.ahead().0 > THROUGH_HOST.0, way.together() > 1);
            assert_eq!(many, (way == Way::Devices, way == Way::Devices), "{transport}");
        }
    }
}
