//! Which addresses may connect.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

use transport_core::{Error, ErrorKind};

/// A block of addresses, such as `10.0.0.0/8` or `fd00::/8`; a single address without a length.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    network: Ipv6Addr, // IPv4 as mapped addresses, so that both families compare alike
    bits: u8,          // of 128
    v4: bool,
}

impl Cidr {
    /// Whether the block holds `address`; an IPv4 address in its IPv6 form counts as itself.
    pub fn contains(&self, address: IpAddr) -> bool {
        (address.to_canonical().is_ipv4() == self.v4)
            && masked(widened(address), self.bits) == self.network
    }
}

fn widened(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

fn masked(address: Ipv6Addr, bits: u8) -> Ipv6Addr {
    let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
    Ipv6Addr::from_bits(address.to_bits() & mask)
}

impl FromStr for Cidr {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = |why: &'static str| {
            Error::new(ErrorKind::ConfigInvalid, "parse address block", why)
                .with("found", format_args!("{:?}", text.chars().take(80).collect::<String>()))
                .remedy("write address/length: 10.0.0.0/8, 192.168.1.7, fd00::/8")
        };
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid("not an address"))?;
        let full = if address.is_ipv4() { 32 } else { 128 };
        let bits = match length {
            None => full,
            Some(length) => length
                .parse::<u8>()
                .ok()
                .filter(|&bits| bits <= full && length.bytes().all(|b| b.is_ascii_digit()))
                .ok_or_else(|| invalid("the length is not a number of bits"))?,
        };
        let (v4, bits) = (full == 32, bits + (128 - full));
        let network = masked(widened(address), bits);
        if network != widened(address) {
            return Err(invalid("the address has bits beyond the length"));
        }
        Ok(Self { network, bits, v4 })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.network.to_ipv4_mapped().filter(|_| self.v4) {
            Some(v4) => write!(f, "{v4}/{}", self.bits - 96),
            None => write!(f, "{}/{}", self.network, self.bits),
        }
    }
}

impl fmt::Debug for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Addresses that may connect: all, unless blocks are named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList(Vec<Cidr>);

impl AllowList {
    /// Only addresses in one of `blocks` may connect; everybody may if there are none.
    pub fn new(blocks: Vec<Cidr>) -> Self {
        Self(blocks)
    }

    /// Whether `address` may connect.
    pub fn allows(&self, address: IpAddr) -> bool {
        self.0.is_empty() || self.0.iter().any(|block| block.contains(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_hold_their_addresses_and_no_others() {
        for (block, inside, outside) in [
            ("10.0.0.0/8", "10.255.1.2", "11.0.0.1"),
            ("0.0.0.0/0", "1.2.3.4", "::1"),
            ("::/0", "fe80::1", "1.2.3.4"),
            ("192.168.1.7", "192.168.1.7", "192.168.1.6"),
            ("127.0.0.0/8", "::ffff:127.0.0.1", "::1"),
            ("fd00::/8", "fd12::1", "fe00::1"),
        ] {
            let block: Cidr = block.parse().unwrap();
            assert!(block.contains(inside.parse().unwrap()), "{block} {inside}");
            assert!(!block.contains(outside.parse().unwrap()), "{block} {outside}");
            assert_eq!(block.to_string().parse::<Cidr>().unwrap(), block);
        }
        assert!(AllowList::default().allows("8.8.8.8".parse().unwrap()));
        let list = AllowList::new(vec!["10.0.0.0/8".parse().unwrap()]);
        assert!(!list.allows("8.8.8.8".parse().unwrap()));
    }

    #[test]
    fn bad_blocks_say_why() {
        for (text, why) in [
            ("10.0.0.1/8", "beyond"),
            ("10.0.0.0/33", "number of bits"),
            ("10.0.0.0/+8", "number of bits"),
            ("host/8", "not an address"),
            ("", "not an address"),
        ] {
            let error = text.parse::<Cidr>().unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
