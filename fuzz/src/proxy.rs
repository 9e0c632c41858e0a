//! Target `proxy`: any bytes as a PROXY header, in every way of two pieces.
//!
//! ```text
//!   limit (2 bytes)  stream
//! ```
//!
//! Each prefix of the stream is unfinished, or reads like the whole: so it does not matter how
//! bytes arrive. A header that was read can be written, and reads as the same; the values that it
//! keeps are readable.

use ringserve_core::proxy::{CommandV2, Header, HeaderError, Tlvs, read, write_v1, write_v2};

/// The most bytes of the stream, so that all its prefixes are read in acceptable time.
const BYTES_MAX: usize = 1500;

/// The longest line of version 1.
const LINE_MAX: usize = 107;

/// Runs one input.
pub fn run(input: &[u8]) {
    let [high, low, stream @ ..] = input else { return };
    let bytes_max = usize::from(u16::from_be_bytes([*high, *low]));
    let stream = &stream[..stream.len().min(BYTES_MAX)];
    let whole = read(stream, bytes_max);
    for end in 0..stream.len() {
        let part = read(&stream[..end], bytes_max);
        match &whole {
            Ok(Some(header)) if end >= header.len => assert_eq!(part, whole, "bytes behind it count"),
            Ok(_) => assert_eq!(part, Ok(None), "{end} bytes"),
            Err(_) => assert!(part == Ok(None) || part == whole, "{end} bytes: {part:?} and {whole:?}"),
        }
    }
    match whole {
        Ok(Some(header)) => check(stream, &header, bytes_max),
        Ok(None) => {
            assert!(stream.len() < bytes_max.max(LINE_MAX), "more bytes are waited for than may come")
        }
        Err(error) => {
            assert_ne!(error, HeaderError::Unfinished, "that is for the end of the connection to say");
            assert!(!error.to_string().is_empty());
        }
    }
}

fn check(stream: &[u8], header: &Header, bytes_max: usize) {
    assert!(header.len <= stream.len() && header.len <= bytes_max.max(LINE_MAX));
    assert!(header.tlvs.end <= header.len);
    let (mut line, mut block) = (Vec::new(), Vec::new());
    write_v1(&mut line, header.ends);
    let fields = Tlvs::of(&stream[header.tlvs.clone()]);
    let summed = |kind: u8| kind == 0x03;
    write_v2(&mut block, CommandV2::Proxy(header.ends), fields.iter().filter(|field| !summed(field.0)));
    for written in [line, block] {
        let again = read(&written, usize::MAX).expect("what is written is a header").expect("a whole one");
        let ips = |header: &Header| {
            header.ends.map(|ends| (ends.source.ip().to_canonical(), ends.destination.ip().to_canonical()))
        };
        assert_eq!((again.len, ips(&again)), (written.len(), ips(header)));
    }
    let _ = (fields.alpn(), fields.authority(), fields.unique_id(), fields.network_namespace());
    let ssl = fields.ssl().map(|ssl| (ssl.is_verified(), ssl.version(), ssl.common_name(), ssl.cipher()));
    assert!(ssl.is_some() || fields.value(0x20).is_none(), "a field of TLS that is there is whole");
}
