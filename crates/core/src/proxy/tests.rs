use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::net::SocketAddr;
use std::format;

use proptest::prelude::*;

use super::tlvs::{CRC32C, SSL, UNIQUE_ID};
use super::v2::crc32c;
use super::*;
use crate::driver::canonical;

const MAX: usize = 4096;

fn ends(source: &str, destination: &str) -> Ends {
    Ends { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
}

fn v1(ends: Option<Ends>) -> Vec<u8> {
    let mut out = Vec::new();
    write_v1(&mut out, ends);
    out
}

fn v2(command: CommandV2, fields: &[(u8, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    write_v2(&mut out, command, fields.iter().copied());
    out
}

/// A block as it is, whether or not its content is valid.
fn block(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let length = (rest.len() as u16).to_be_bytes();
    [&SIGNATURE[..], &[command, family, length[0], length[1]], rest].concat()
}

fn tlv(kind: u8, value: &[u8]) -> Vec<u8> {
    [&[kind], &(value.len() as u16).to_be_bytes()[..], value].concat()
}

/// Reads a header that comes in every way of two pieces, and byte by byte: the answer to each start
/// of it is either "unfinished", or that to the whole header.
fn read_split(bytes: &[u8]) -> Result<Option<Header>, HeaderError> {
    let whole = read(bytes, MAX);
    for end in 0..bytes.len() {
        let part = read(&bytes[..end], MAX);
        match &whole {
            Ok(Some(header)) if end < header.len => assert_eq!(part, Ok(None), "{end} bytes"),
            Ok(None) => assert_eq!(part, Ok(None), "{end} bytes"),
            whole => assert!(part == Ok(None) || part == *whole, "{end} bytes: {part:?} and {whole:?}"),
        }
    }
    whole
}

fn refusal(bytes: &[u8]) -> HeaderError {
    read_split(bytes).unwrap_err()
}

#[test]
fn line_is_read_whatever_it_is_cut_into() {
    for (line, wanted) in [
        (
            "PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n",
            Some(ends("192.0.2.1:56324", "198.51.100.7:443")),
        ),
        ("PROXY TCP6 2001:db8::1 ::1 0 65535\r\n", Some(ends("[2001:db8::1]:0", "[::1]:65535"))),
        ("PROXY UNKNOWN\r\n", None),
        ("PROXY UNKNOWN ffff::1 what\tever 1 \r\n", None),
    ] {
        let behind = format!("{line}GET /");
        let header = read_split(behind.as_bytes()).unwrap().unwrap();
        assert_eq!(header, Header { len: line.len(), ends: wanted, tlvs: 0..0 });
    }
}

#[test]
fn longest_line_is_read_and_a_longer_one_is_not() {
    let addr = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    let line = format!("PROXY UNKNOWN {addr} {addr} 65535 65535\r\n");
    assert_eq!(line.len(), LINE_MAX);
    assert_eq!(read_split(line.as_bytes()).unwrap().unwrap().len, LINE_MAX);
    let longer = line.replace("\r\n", "0\r\n");
    assert_eq!(refusal(longer.as_bytes()), HeaderError::too_large(108, 107));
}

#[test]
fn line_that_breaks_a_rule_is_refused() {
    for line in [
        "PROXY TCP4 192.0.2.1 198.51.100.7 1 2\n",
        "PROXY TCP4 192.0.2.1 198.51.100.7 1 2 \r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.7 1\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.7 1 2 3\r\n",
        "PROXY TCP4  192.0.2.1 198.51.100.7 1 2\r\n",
        "PROXY TCP4 192.0.2.01 198.51.100.7 1 2\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.7 01 2\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.7 +1 2\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.7 1 65536\r\n",
        "PROXY TCP4 ::1 ::1 1 2\r\n",
        "PROXY TCP6 192.0.2.1 198.51.100.7 1 2\r\n",
        "PROXY TCP6 fe80::1%eth0 ::1 1 2\r\n",
        "PROXY TCP4\t192.0.2.1 198.51.100.7 1 2\r\n",
        "PROXY TCP5 192.0.2.1 198.51.100.7 1 2\r\n",
        "PROXY UNKNOWNS\r\n",
        "PROXY \r\n",
        "PROXY TCP4 192.0.2.1\r198.51.100.7 1 2\r\n",
        "PROXY TCP4 \u{661} 198.51.100.7 1 2\r\n",
    ] {
        assert!(matches!(refusal(line.as_bytes()), HeaderError::Malformed(_)), "{line:?}");
    }
    for begin in
        ["GET / HTTP/1.1\r\n", "PROXYTCP4", "proxy TCP4", "P OXY", "\r\n\r\n\0\r\nQUIS\n", "\x16\x03\x01"]
    {
        assert_eq!(refusal(begin.as_bytes()), HeaderError::NotProxy, "{begin:?}");
    }
}

#[test]
fn block_is_read_whatever_it_is_cut_into() {
    for ends in [ends("192.0.2.1:56324", "198.51.100.7:443"), ends("[2001:db8::1]:0", "[::1]:65535")] {
        let fields: [(u8, &[u8]); 2] = [(UNIQUE_ID, b"id 7"), (0xEA, b"\x01vpce-1")];
        let mut bytes = v2(CommandV2::Proxy(Some(ends)), &fields);
        let len = bytes.len();
        bytes.extend_from_slice(b"hello");
        let header = read_split(&bytes).unwrap().unwrap();
        assert_eq!((header.len, header.ends), (len, Some(ends)));
        let tlvs = Tlvs::of(&bytes[header.tlvs]);
        assert_eq!(tlvs.iter().take(2).collect::<Vec<_>>(), fields);
    }
}

#[test]
fn proxy_that_speaks_for_itself_or_no_address_is_let_through() {
    let local = v2(CommandV2::Local, &[]);
    for bytes in [
        local.clone(),
        block(0x20, 0x00, b""),
        // Family and addresses of a LOCAL header must be ignored.
        block(0x20, 0xFF, b"anything"),
        block(0x20, 0x12, b""),
        block(0x21, 0x00, b"\xFF\xFF\xFF"),
        block(0x21, 0x31, &[0; 216]),
        v2(CommandV2::Proxy(None), &[]),
    ] {
        let header = read_split(&bytes).unwrap().unwrap();
        assert_eq!((header.len, header.ends), (bytes.len(), None));
    }
    let unix = [&[b'/'; 216][..], &tlv(UNIQUE_ID, b"seven")].concat();
    let bytes = block(0x21, 0x31, &unix);
    let header = read_split(&bytes).unwrap().unwrap();
    assert_eq!(Tlvs::of(&bytes[header.tlvs]).unique_id(), Some(&b"seven"[..]));
}

#[test]
fn block_of_datagrams_or_of_no_family_is_read_where_it_parses() {
    let wrong = tlv(CRC32C, &[1, 2, 3, 4]);
    for (family, addrs) in [(0x00, 0), (0x12, 12), (0x22, 36), (0x32, 216)] {
        let read = |behind: &[u8]| {
            let bytes = block(0x21, family, &[&vec![7; addrs][..], behind].concat());
            let header = read_split(&bytes)?.unwrap();
            assert_eq!((header.len, header.ends), (bytes.len(), None), "{family:#x}");
            Ok(Tlvs::of(&bytes[header.tlvs]).unique_id().map(<[u8]>::to_vec))
        };
        assert_eq!(read(&tlv(UNIQUE_ID, b"id")), Ok(Some(b"id".to_vec())));
        // Half a field, and incomplete addresses.
        assert_eq!(read(&[tlv(UNIQUE_ID, b"id"), vec![4]].concat()), Ok(None));
        let short = block(0x21, family, &vec![0; addrs.saturating_sub(1)]);
        assert_eq!(read_split(&short).unwrap().unwrap().ends, None);
        assert_eq!(read(&wrong), Err(HeaderError::Checksum));
    }
}

#[test]
fn block_of_another_version_command_or_family_is_refused() {
    for command in (0..=255).filter(|command| ![0x20, 0x21].contains(command)) {
        assert!(
            matches!(refusal(&block(command, 0x11, &[0; 12])), HeaderError::Malformed(_)),
            "{command:#x}"
        );
    }
    let known = [0x00, 0x11, 0x12, 0x21, 0x22, 0x31, 0x32];
    for family in (0..=255).filter(|family| !known.contains(family)) {
        assert!(matches!(refusal(&block(0x21, family, &[0; 216])), HeaderError::Malformed(_)), "{family:#x}");
    }
    for (family, short) in [(0x11, 11), (0x21, 35), (0x31, 215)] {
        let bytes = block(0x21, family, &vec![0; short]);
        assert!(matches!(refusal(&bytes), HeaderError::Malformed(_)), "{family:#x}");
        // The length alone is enough: the bytes themselves need not come.
        assert!(matches!(read(&bytes[..16], MAX), Err(HeaderError::Malformed(_))));
    }
}

#[test]
fn block_over_the_limit_is_refused_before_its_bytes_come() {
    let bytes = block(0x20, 0, &[0; 48]);
    assert_eq!(read(&bytes, 64).unwrap().unwrap().len, 64);
    assert_eq!(read(&bytes[..16], 63), Err(HeaderError::too_large(64, 63)));
}

#[test]
fn field_that_goes_beyond_its_block_is_refused() {
    let addrs = [0; 12];
    let ssl = |inside: &[u8]| tlv(SSL, &[&[1, 0, 0, 0, 0], inside].concat());
    for fields in [
        vec![0x04],
        vec![0x04, 0],
        vec![0x04, 0, 1],
        tlv(UNIQUE_ID, &[0; 129]),
        tlv(CRC32C, &[0; 3]),
        tlv(CRC32C, b""),
        tlv(SSL, &[1, 0, 0, 0]),
        ssl(&[0x21]),
        ssl(&[0x21, 0, 9, b'T']),
    ] {
        let bytes = block(0x21, 0x11, &[&addrs[..], &fields].concat());
        assert!(matches!(refusal(&bytes), HeaderError::Malformed(_)), "{fields:?}");
    }
    for fields in [tlv(0x04, &[]), tlv(0x04, &[7; 40]), tlv(0xF7, b"?"), tlv(UNIQUE_ID, &[0; 128]), ssl(b"")]
    {
        let bytes = block(0x21, 0x11, &[&addrs[..], &fields].concat());
        assert!(read_split(&bytes).unwrap().is_some(), "{fields:?}");
    }
}

#[test]
fn each_bit_of_a_block_counts_in_its_checksum() {
    assert_eq!(!crc32c(!0, b"123456789"), 0xE306_9283, "the check value of CRC32C");
    let ends = ends("192.0.2.1:1", "192.0.2.2:2");
    let whole = v2(CommandV2::Proxy(Some(ends)), &[(UNIQUE_ID, b"id")]);
    assert!(read(&whole, MAX).unwrap().is_some());
    for bit in 0..8 * (whole.len() - FIXED_AND_SUM) {
        let mut broken = whole.clone();
        broken[16 + bit / 8] ^= 1 << (bit % 8);
        assert!(!matches!(read(&broken, MAX), Ok(Some(_))), "bit {bit}");
    }
}

/// The part of a block that the test leaves unchanged: everything before the addresses, and type
/// and length of the checksum.
const FIXED_AND_SUM: usize = 16 + 7;

#[test]
fn what_a_proxy_says_of_tls_is_read() {
    let inside = [tlv(0x21, b"TLSv1.3"), tlv(0x22, b"alice"), tlv(0x23, b"TLS_AES_256_GCM_SHA384")].concat();
    let value = [&[1 | 2, 0, 0, 0, 0], &inside[..]].concat();
    let fields: [(u8, &[u8]); 4] = [(0x01, b"h2"), (0x02, b"example.org"), (SSL, &value), (0x30, b"blue")];
    let bytes = v2(CommandV2::Proxy(Some(ends("[::1]:1", "[::1]:2"))), &fields);
    let tlvs = Tlvs::of(&bytes[read(&bytes, MAX).unwrap().unwrap().tlvs]);
    assert_eq!((tlvs.alpn(), tlvs.authority()), (Some(&b"h2"[..]), Some("example.org")));
    assert_eq!((tlvs.unique_id(), tlvs.network_namespace()), (None, Some("blue")));
    let ssl = tlvs.ssl().unwrap();
    assert!(ssl.is_tls() && ssl.has_certificate() && ssl.is_verified());
    assert_eq!((ssl.version(), ssl.common_name()), (Some("TLSv1.3"), Some("alice")));
    assert_eq!((ssl.cipher(), ssl.iter().count()), (Some("TLS_AES_256_GCM_SHA384"), 3));
    for (begin, is_verified) in [([1, 0, 0, 0, 0], false), ([7, 0, 0, 0, 1], false), ([5, 0, 0, 0, 0], true)]
    {
        let bytes = tlv(SSL, &begin);
        assert_eq!(Tlvs::of(&bytes).ssl().unwrap().is_verified(), is_verified, "{begin:?}");
    }
}

#[test]
fn addresses_of_two_families_are_written_as_one() {
    let mapped = ends("[::ffff:192.0.2.1]:7", "192.0.2.2:8");
    assert_eq!(v1(Some(mapped)), b"PROXY TCP4 192.0.2.1 192.0.2.2 7 8\r\n");
    let mixed = ends("192.0.2.1:7", "[2001:db8::1]:8");
    assert_eq!(v1(Some(mixed)), b"PROXY TCP6 ::ffff:192.0.2.1 2001:db8::1 7 8\r\n");
    let read = read(&v2(CommandV2::Proxy(Some(mixed)), &[]), MAX).unwrap().unwrap();
    assert_eq!(read.ends, Some(mixed), "an IPv4 address has one form");
    assert_eq!(super::read(&v1(Some(mixed)), MAX).unwrap().unwrap().ends, Some(mixed));
}

#[test]
fn fields_that_do_not_fit_are_left_out() {
    let much = vec![0; 65_000];
    let bytes = v2(CommandV2::Local, &[(0xE0, &much), (0xE1, &much), (0xE2, b"fits")]);
    assert_eq!(read(&bytes, usize::MAX).unwrap().unwrap().len, bytes.len());
    let kinds: Vec<u8> = tlvs::fields(&bytes[16..]).map(|field| field.unwrap().0).collect();
    assert_eq!(kinds, [0xE0, 0xE2, CRC32C]);
}

/// A header as the crate `ppp` reads it, in the types of this crate.
fn read_by_ppp(bytes: &[u8]) -> Option<(usize, Option<Ends>)> {
    use ppp::{v1, v2};
    let both = |source: SocketAddr, destination: SocketAddr| {
        Some(Ends { source: canonical(source), destination: canonical(destination) })
    };
    if bytes.first() == Some(&b'P') {
        let header = v1::Header::try_from(bytes).ok()?;
        let ends = match header.addresses {
            v1::Addresses::Unknown => None,
            v1::Addresses::Tcp4(ip) => both(
                (ip.source_address, ip.source_port).into(),
                (ip.destination_address, ip.destination_port).into(),
            ),
            v1::Addresses::Tcp6(ip) => both(
                (ip.source_address, ip.source_port).into(),
                (ip.destination_address, ip.destination_port).into(),
            ),
        };
        return Some((header.header.len(), ends));
    }
    let header = v2::Header::try_from(bytes).ok()?;
    let ends = match header.addresses {
        _ if header.command == v2::Command::Local || header.protocol == v2::Protocol::Datagram => None,
        v2::Addresses::IPv4(ip) => both(
            (ip.source_address, ip.source_port).into(),
            (ip.destination_address, ip.destination_port).into(),
        ),
        v2::Addresses::IPv6(ip) => both(
            (ip.source_address, ip.source_port).into(),
            (ip.destination_address, ip.destination_port).into(),
        ),
        v2::Addresses::Unspecified | v2::Addresses::Unix(_) => None,
    };
    Some((header.len(), ends))
}

fn any_ends() -> impl Strategy<Value = Ends> {
    let v4 = any::<([u8; 4], u16, [u8; 4], u16)>()
        .prop_map(|(from, port, to, at)| Ends { source: (from, port).into(), destination: (to, at).into() });
    let v6 = any::<([u16; 8], u16, [u16; 8], u16)>()
        .prop_map(|(from, port, to, at)| Ends { source: (from, port).into(), destination: (to, at).into() });
    prop_oneof![v4, v6]
}

fn any_header() -> impl Strategy<Value = Vec<u8>> {
    let fields = prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..9)), 0..4);
    let blocks = (prop::option::of(any_ends()), fields).prop_map(|(ends, fields)| {
        let known = |kind: &u8| [CRC32C, SSL].contains(kind);
        let fields: Vec<(u8, &[u8])> =
            fields.iter().filter(|field| !known(&field.0)).map(|field| (field.0, &field.1[..])).collect();
        v2(CommandV2::Proxy(ends), &fields)
    });
    prop_oneof![prop::option::of(any_ends()).prop_map(v1), blocks]
}

proptest! {
    #[test]
    fn what_is_written_is_read_here_and_by_others(ends in prop::option::of(any_ends()), behind: Vec<u8>) {
        for mut bytes in [v1(ends), v2(CommandV2::Proxy(ends), &[])] {
            let len = bytes.len();
            bytes.extend_from_slice(&behind);
            let header = read_split(&bytes).unwrap().unwrap();
            let canonical = |ends: Ends| (ends.source.ip().to_canonical(), ends.destination.ip().to_canonical());
            prop_assert_eq!(header.ends.map(canonical), ends.map(canonical));
            prop_assert_eq!(header.len, len);
            prop_assert_eq!(read_by_ppp(&bytes), Some((len, header.ends)));
        }
    }

    #[test]
    fn nothing_is_read_that_another_parser_refuses(
        header in any_header(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = header;
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = read_split(&bytes);
        if let Ok(Some(header)) = read(&bytes, MAX) {
            // The crate checks what must be ignored: the family of a LOCAL header, and the text
            // after UNKNOWN.
            let lenient = header.ends.is_none();
            match read_by_ppp(&bytes) {
                Some(theirs) => prop_assert_eq!(theirs, (header.len, header.ends)),
                None => prop_assert!(lenient, "{:?}", String::from_utf8_lossy(&bytes).to_string()),
            }
            prop_assert!(bytes[header.len..].len() + header.len == bytes.len());
            bytes.truncate(cut.index(header.len));
            prop_assert_eq!(read(&bytes, MAX), Ok(None));
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>) {
        let _ = read_split(&bytes);
        let _ = read_split(&block(0x21, 0x11, &bytes));
        let tlvs = Tlvs::of(&bytes);
        let _ = (tlvs.iter().count(), tlvs.ssl().map(|ssl| (ssl.is_verified(), ssl.iter().count())));
    }
}

#[test]
fn sum_of_another_block_is_not_passed_on() {
    let ends = ends("192.0.2.1:1", "192.0.2.2:2");
    let with = |fields: &[(u8, &[u8])]| v2(CommandV2::Proxy(Some(ends)), fields);
    let bytes = with(&[(CRC32C, &[1, 2, 3, 4]), (UNIQUE_ID, b"seven")]);
    assert_eq!(bytes, with(&[(UNIQUE_ID, b"seven")]));
    assert!(read(&bytes, MAX).unwrap().is_some(), "its own sum is right");
}
