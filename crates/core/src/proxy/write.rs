//! Headers that a server sends to its upstreams.

use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::net::IpAddr;

use super::tlvs::CRC32C;
use super::v2::{FIXED, crc32c_without};
use super::{Ends, LINE_BEGIN, SIGNATURE};

/// The client of a connection to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandV2 {
    /// None: the connection is the server's own, such as a health check.
    Local,
    /// A client, with its ends if it has any.
    Proxy(Option<Ends>),
}

/// ASCII appended to bytes.
struct Text<'a>(&'a mut Vec<u8>);

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.extend_from_slice(text.as_bytes());
        Ok(())
    }
}

/// Both addresses in one family, the smaller family that holds both.
fn in_one_family(ends: Ends) -> (IpAddr, IpAddr) {
    let (source, destination) = (ends.source.ip().to_canonical(), ends.destination.ip().to_canonical());
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V6(_)) => (source.to_ipv6_mapped().into(), destination),
        (IpAddr::V6(_), IpAddr::V4(destination)) => (source, destination.to_ipv6_mapped().into()),
        same => same,
    }
}

/// Writes a line of version 1; `UNKNOWN` for a client without an IP address.
pub fn write_v1(out: &mut Vec<u8>, ends: Option<Ends>) {
    out.extend_from_slice(LINE_BEGIN);
    match ends {
        None => out.extend_from_slice(b"UNKNOWN\r\n"),
        Some(ends) => {
            let (source, destination) = in_one_family(ends);
            let family = if source.is_ipv4() { 4 } else { 6 };
            let (from, to) = (ends.source.port(), ends.destination.port());
            // Writing to a vector never fails.
            let _ = write!(Text(out), "TCP{family} {source} {destination} {from} {to}\r\n");
        }
    }
}

/// Writes a block of version 2 with these further fields, the last of which is its checksum. Fields
/// beyond 64 KiB are left out.
pub fn write_v2<'a>(out: &mut Vec<u8>, command: CommandV2, fields: impl IntoIterator<Item = (u8, &'a [u8])>) {
    let begin = out.len();
    out.extend_from_slice(SIGNATURE);
    let (command, ends) = match command {
        CommandV2::Local => (0x20, None),
        CommandV2::Proxy(ends) => (0x21, ends),
    };
    match ends.map(|ends| (in_one_family(ends), ends)) {
        None => out.extend_from_slice(&[command, 0x00, 0, 0]),
        Some(((source, destination), ends)) => {
            out.extend_from_slice(&[command, if source.is_ipv4() { 0x11 } else { 0x21 }, 0, 0]);
            for addr in [source, destination] {
                match addr {
                    IpAddr::V4(addr) => out.extend_from_slice(&addr.octets()),
                    IpAddr::V6(addr) => out.extend_from_slice(&addr.octets()),
                }
            }
            out.extend_from_slice(&ends.source.port().to_be_bytes());
            out.extend_from_slice(&ends.destination.port().to_be_bytes());
        }
    }
    let sum_bytes = 3 + 4;
    // The checksum of another block, as in a header that is passed on, does not belong here.
    for (kind, value) in fields.into_iter().filter(|(kind, _)| *kind != CRC32C) {
        let len = out.len() - begin - FIXED + 3 + value.len() + sum_bytes;
        if let (Ok(bytes), Ok(_)) = (u16::try_from(value.len()), u16::try_from(len)) {
            out.push(kind);
            out.extend_from_slice(&bytes.to_be_bytes());
            out.extend_from_slice(value);
        }
    }
    out.extend_from_slice(&[CRC32C, 0, 4, 0, 0, 0, 0]);
    let len = (out.len() - begin - FIXED) as u16;
    out[begin + 14..begin + FIXED].copy_from_slice(&len.to_be_bytes());
    let at = out.len() - 4;
    let sum = crc32c_without(&out[begin..], at - begin);
    out[at..].copy_from_slice(&sum.to_be_bytes());
}
