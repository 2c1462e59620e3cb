//! The peer handshake: one framed JSON request and one reply per connection.
//!
//! A frame is a `u64` little-endian length, a type byte that the length counts, and JSON text.
//! Peers of the first generation send no type byte; such frames are recognised and answered alike.
//!
//! ```
//! use control_proto::mooncake::handshake::{Frame, Kind, MAX_FRAME_BYTES};
//! let mut bytes = Vec::new();
//! Frame::new(Kind::Probe, "{}").encode(&mut bytes);
//! assert_eq!(bytes, b"\x03\0\0\0\0\0\0\0\x03{}");
//! let (frame, used) = Frame::decode(&bytes, MAX_FRAME_BYTES)?.expect("a whole frame");
//! assert_eq!((frame.kind, frame.json, used), (Some(Kind::Probe), "{}", 11));
//! # Ok::<(), transport_core::Error>(())
//! ```

use serde::{Deserialize, Serialize};
use transport_core::{Epoch, Error, ErrorKind, RemoteAddr, Result, SessionName};

/// Length of the length.
pub const LENGTH_BYTES: usize = 8;

/// Longest frame body that peers take by default: 1 MiB.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// Longest frame body that a peer can be configured to take: 128 MiB.
pub const MAX_CONFIGURABLE_FRAME_BYTES: usize = 128 << 20;

/// What a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// RDMA queue pairs: [`Connection`] both ways.
    Connection = 0,
    /// [`SegmentDescriptor`] both ways: each side tells its own.
    Metadata = 1,
    /// [`Notify`] both ways.
    Notify = 2,
    /// Anything, answered by a [`ProbeReply`].
    Probe = 3,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Connection, Self::Metadata, Self::Notify, Self::Probe]
            .get(usize::from(byte))
            .copied()
    }
}

/// One request or reply, its JSON not yet read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What it is about; `None` in frames of the first generation, which are about connections.
    pub kind: Option<Kind>,
    /// The JSON text.
    pub json: &'a str,
}

impl<'a> Frame<'a> {
    /// A frame with a type byte.
    pub fn new(kind: Kind, json: &'a str) -> Self {
        Self { kind: Some(kind), json }
    }

    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let length = self.json.len() + usize::from(self.kind.is_some());
        out.extend_from_slice(&(length as u64).to_le_bytes());
        out.extend(self.kind.map(|kind| kind as u8));
        out.extend_from_slice(self.json.as_bytes());
    }

    /// Number of bytes after the length, of 1 to `max_bytes`.
    pub fn body_len(length: [u8; LENGTH_BYTES], max_bytes: usize) -> Result<usize> {
        let length = u64::from_le_bytes(length);
        match usize::try_from(length) {
            Ok(0) => Err(protocol("the frame is empty")),
            Ok(length) if length <= max_bytes.min(MAX_CONFIGURABLE_FRAME_BYTES) => Ok(length),
            _ => Err(protocol("the frame is too long")
                .with("found", length)
                .with("max_bytes", max_bytes)
                .remedy("check that the peer speaks Mooncake's handshake on this port")),
        }
    }

    /// Reads what follows the length.
    pub fn decode_body(body: &'a [u8]) -> Result<Self> {
        let (kind, json) = match body.split_first() {
            None => return Err(protocol("the frame is empty")),
            // No type is an opening bracket, so JSON without a type byte shows itself.
            Some((b'{' | b'[' | b' ' | b'\n', _)) => (None, body),
            Some((&byte, json)) => match Kind::from_byte(byte) {
                Some(kind) => (Some(kind), json),
                None => return Err(protocol("the frame type is unknown").with("type", byte)),
            },
        };
        let json = std::str::from_utf8(json)
            .map_err(|error| protocol("the frame is not UTF-8").with("at", error.valid_up_to()))?;
        Ok(Self { kind, json })
    }

    /// Takes a frame off the front of `input`, with the number of bytes it used; `None` if its end
    /// has not come yet.
    pub fn decode(input: &'a [u8], max_bytes: usize) -> Result<Option<(Self, usize)>> {
        let Some((length, rest)) = input.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = Self::body_len(*length, max_bytes)?;
        let Some(body) = rest.get(..length) else { return Ok(None) };
        Ok(Some((Self::decode_body(body)?, LENGTH_BYTES + length)))
    }
}

/// What a peer says about itself: its name, how it is reached, and its memory.
///
/// Fields of other transports and of newer peers are ignored; absent ones have their defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentDescriptor {
    /// Registered memory; an address that is transferred must lie in one of them.
    pub buffers: Vec<Buffer>,
    /// How device memory of a featurestore process is opened; other peers do not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub featurestore_device: Option<DeviceShare>,
    /// Life of a featurestore process; other peers do not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub featurestore_epoch: Option<Epoch>,
    /// Version of this description.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata_version: Option<u64>,
    /// The peer's session, `host:port`.
    pub name: String,
    /// Transport that it really installed: `tcp`, `rdma`, `nvlink`, `nvlink_intra`.
    pub protocol: String,
    /// Name for RDMA peers; empty with others.
    pub rdma_server_name: String,
    /// Host of the data port; empty with older peers, which mean the host of `name`.
    pub tcp_data_host: String,
    /// Data port; 0 if there is none.
    pub tcp_data_port: u16,
    /// Newest version of data frames that it speaks; see
    /// [`data::Version::of_peer`](super::data::Version::of_peer).
    pub tcp_proto_version: u32,
    /// When it was written, for people.
    pub timestamp: String,
}

/// One registered buffer of a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Buffer {
    /// First address, in the peer's address space.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// Location, such as `cpu:0` or `*`, or the peer's name.
    pub name: String,
    /// With nvlink transports, the handle of the memory in hexadecimal.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub shm_name: String,
}

/// What Mooncake's own fields do not say about device memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceShare {
    /// The host and boot that handles and sockets mean: the kernel's random id.
    pub boot_id: String,
    /// Identity of the device, 32 hexadecimal digits.
    pub device_uuid: String,
    /// Where the memory's file descriptor is handed out, to processes of the same user: a Unix
    /// socket in the abstract namespace. See [`fd_grant`](crate::fd_grant).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd_socket: Option<String>,
}

impl Buffer {
    /// Memory of `length` bytes at `addr`.
    pub fn new(addr: RemoteAddr, length: u64, name: impl Into<String>) -> Self {
        Self { addr: addr.0, length, name: name.into(), shm_name: String::new() }
    }

    /// Whether all `len` bytes from `address` on lie in it.
    pub fn contains(&self, address: RemoteAddr, len: u64) -> bool {
        match (address.0.checked_sub(self.addr), address.checked_add(len)) {
            (Some(offset), Some(_)) => offset <= self.length && len <= self.length - offset,
            _ => false,
        }
    }
}

impl Default for SegmentDescriptor {
    /// What absent fields mean.
    fn default() -> Self {
        Self {
            buffers: Vec::new(),
            featurestore_device: None,
            featurestore_epoch: None,
            metadata_version: None,
            name: String::new(),
            protocol: String::new(),
            rdma_server_name: String::new(),
            tcp_data_host: String::new(),
            tcp_data_port: 0,
            tcp_proto_version: 1,
            timestamp: String::new(),
        }
    }
}

impl SegmentDescriptor {
    /// Reads the JSON of a [`Kind::Metadata`] frame; refuses memory beyond the address space.
    pub fn parse(json: &str) -> Result<Self> {
        let descriptor: Self = from_json(json, "metadata")?;
        for buffer in &descriptor.buffers {
            if buffer.addr.checked_add(buffer.length).is_none() {
                return Err(protocol("a buffer leaves the address space")
                    .with("addr", format_args!("{:#x}", buffer.addr))
                    .with("length", buffer.length));
            }
        }
        Ok(descriptor)
    }

    /// The JSON, compact, fields in alphabetical order as Mooncake writes them.
    pub fn to_json(&self) -> String {
        to_json(self)
    }

    /// Where the data port of the peer at `session` is.
    ///
    /// A peer that listens on every address means the one it was reached at.
    pub fn data_session(&self, session: &SessionName) -> Result<SessionName> {
        if self.tcp_data_port == 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "read handshake",
                "the peer has no tcp data port",
            )
            .with("peer", session)
            .with("protocol", format_args!("{:?}", self.protocol))
            .remedy("start the peer with protocol tcp, or choose its protocol's engine"));
        }
        let host = match &*self.tcp_data_host {
            "" | "0.0.0.0" | "::" | "[::]" | "*" => session.host(),
            host => host,
        };
        SessionName::new(host, self.tcp_data_port)
    }

    /// Whether all `len` bytes from `address` on lie in one registered buffer.
    pub fn covers(&self, address: RemoteAddr, len: u64) -> bool {
        self.buffers.iter().any(|buffer| buffer.contains(address, len))
    }
}

/// A message between peers. The reply carries the same fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notify {
    /// Sender or topic.
    pub name: String,
    /// Text.
    pub notify_msg: String,
}

impl Notify {
    /// Reads the JSON of a [`Kind::Notify`] frame.
    pub fn parse(json: &str) -> Result<Self> {
        from_json(json, "notify")
    }

    /// The JSON.
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

/// Answer to a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeReply {
    /// `success`, or what is wrong.
    pub status: String,
}

impl ProbeReply {
    /// The peer lives.
    pub fn success() -> Self {
        Self { status: "success".into() }
    }

    /// Reads the JSON of the reply to a [`Kind::Probe`] frame.
    pub fn parse(json: &str) -> Result<Self> {
        from_json(json, "probe")
    }

    /// The JSON.
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

/// Queue pairs of an RDMA connection. Recognised so that it can be refused with a reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Connection {
    /// Local identifier of the sender's port.
    pub local_lid: u16,
    /// Global identifier of the sender's port.
    pub local_gid: String,
    /// The sender's NIC, `host:port@device`.
    pub local_nic_path: String,
    /// The receiver's NIC.
    pub peer_nic_path: String,
    /// Queue pair numbers of the sender.
    pub qp_num: Vec<u32>,
    /// Why the receiver refuses; empty if it does not.
    pub reply_msg: String,
}

impl Connection {
    /// A reply that refuses the connection.
    pub fn refuse(reason: impl Into<String>) -> Self {
        Self { reply_msg: reason.into(), ..Self::default() }
    }

    /// Reads the JSON of a [`Kind::Connection`] frame or of one without a type byte.
    pub fn parse(json: &str) -> Result<Self> {
        from_json(json, "connection")
    }

    /// The JSON.
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

fn from_json<'a, T: Deserialize<'a>>(json: &'a str, what: &'static str) -> Result<T> {
    let invalid = |column: usize| {
        protocol("the JSON of the frame is not what its type says")
            .with("type", what)
            .with("column", column)
    };
    if !json.trim_ascii_start().starts_with('{') {
        return Err(invalid(0)); // serde would take a list for the fields in order
    }
    serde_json::from_str(json).map_err(|error| invalid(error.column()))
}

fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("strings and integers are always serialisable")
}

fn protocol(message: &'static str) -> Error {
    Error::new(ErrorKind::Protocol, "read handshake", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_piece_by_piece_and_in_both_generations() {
        let mut bytes = Vec::new();
        Frame::new(Kind::Metadata, "{\"a\":1}").encode(&mut bytes);
        Frame { kind: None, json: "{\"b\":2}" }.encode(&mut bytes);
        for end in 0..16 {
            assert_eq!(Frame::decode(&bytes[..end], 100).unwrap(), None);
        }
        let (first, used) = Frame::decode(&bytes, 100).unwrap().unwrap();
        assert_eq!((first, used), (Frame::new(Kind::Metadata, "{\"a\":1}"), 16));
        let (second, used) = Frame::decode(&bytes[16..], 100).unwrap().unwrap();
        assert_eq!((second.kind, second.json, used), (None, "{\"b\":2}", 15));
    }

    #[test]
    fn absurd_frames_are_refused() {
        for (bytes, why) in [
            (&b"\0\0\0\0\0\0\0\0"[..], "empty"),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff", "too long"),
            (b"\x65\0\0\0\0\0\0\0", "too long"),
            (b"\x02\0\0\0\0\0\0\0\x04{", "type is unknown"),
            (b"\x02\0\0\0\0\0\0\0\x01\xff", "UTF-8"),
        ] {
            let error = Frame::decode(bytes, 100).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(Frame::body_len((129u64 << 20).to_le_bytes(), usize::MAX).is_err());
    }

    #[test]
    fn metadata_is_read_leniently_but_not_blindly() {
        let peer = SegmentDescriptor::parse("{\"later\":[{}]}").unwrap();
        assert_eq!(peer, SegmentDescriptor::default());
        for bad in [
            "[]",
            "",
            "{\"tcp_data_port\":65536}",
            "{\"tcp_data_port\":-1}",
            "{\"buffers\":[{\"addr\":1,\"length\":18446744073709551615}]}",
        ] {
            assert!(SegmentDescriptor::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ranges_must_lie_in_one_buffer() {
        let peer = SegmentDescriptor {
            buffers: vec![
                Buffer::new(RemoteAddr(100), 50, "a"),
                Buffer::new(RemoteAddr(150), 50, "b"),
            ],
            ..SegmentDescriptor::default()
        };
        for (address, len, inside) in [
            (100, 50, true),
            (150, 0, true),
            (149, 1, true),
            (149, 2, false),
            (99, 1, false),
            (u64::MAX, 2, false),
            (150, u64::MAX, false),
        ] {
            assert_eq!(peer.covers(RemoteAddr(address), len), inside, "{address} {len}");
        }
    }

    #[test]
    fn the_data_port_is_found_for_every_kind_of_peer() {
        let session: SessionName = "[::1]:15459".parse().unwrap();
        let mut peer = SegmentDescriptor { tcp_data_port: 9, ..SegmentDescriptor::default() };
        for (host, expected) in [
            ("", "[::1]:9"),
            ("0.0.0.0", "[::1]:9"),
            ("10.0.0.2", "10.0.0.2:9"),
            ("::2", "[::2]:9"),
        ] {
            peer.tcp_data_host = host.into();
            assert_eq!(peer.data_session(&session).unwrap().to_string(), expected);
        }
        peer.tcp_data_port = 0;
        assert_eq!(peer.data_session(&session).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
