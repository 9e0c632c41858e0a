//! Ends of records and handshake messages, as far as they are visible from outside.
//!
//! ```text
//!   type: 1 byte │ version: 2 │ length: 2 │ ...                         a record
//!                                          └▶ type: 1 │ length: 3 │ ..  the messages of a handshake, in one or more of them
//! ```

use std::borrow::Cow;

/// Bytes of a record before its content.
pub(crate) const HEADER: usize = 5;

/// The most bytes of plaintext in a record.
pub(crate) const PLAIN_MAX: usize = 16 * 1024;

/// The most content of a record, with the bytes that TLS 1.2 allows a cipher to add.
const BODY_MAX: usize = PLAIN_MAX + 2048;

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// The extent of the first record of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// It has this many bytes, header included. They may not have arrived yet.
    Record(usize),
    /// The header is not whole.
    Unknown,
    /// The bytes are no record.
    Broken,
}

/// Reads the header of the first record.
pub(crate) fn extent(bytes: &[u8]) -> Extent {
    match *bytes {
        [kind, ..] if !(CHANGE_CIPHER_SPEC..=APPLICATION_DATA).contains(&kind) => Extent::Broken,
        [_, _, _, high, low, ..] => match usize::from(u16::from_be_bytes([high, low])) {
            body if body > BODY_MAX => Extent::Broken,
            body => Extent::Record(HEADER + body),
        },
        _ => Extent::Unknown,
    }
}

/// The whole records at the front of `bytes`, then the rest, which is no record.
pub(crate) fn whole(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut left = bytes;
    std::iter::from_fn(move || {
        let end = match extent(left) {
            Extent::Record(end) if end <= left.len() => end,
            Extent::Broken => left.len(),
            _ => return None,
        };
        let (record, rest) = left.split_at(end);
        left = rest;
        Some(record)
    })
}

/// Bytes of the whole records at the front of `bytes`.
pub(crate) fn whole_bytes(bytes: &[u8]) -> usize {
    whole(bytes).map(<[u8]>::len).sum()
}

/// True if one of them announces that later bytes are encrypted.
pub(crate) fn changes_cipher(bytes: &[u8]) -> bool {
    whole(bytes).any(|record| record[0] == CHANGE_CIPHER_SPEC)
}

/// The progress through the records of an unfinished message, so that each is read once.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// Bytes of the records that were read.
    end: usize,
    /// Bytes of the message in them.
    gathered: usize,
    /// The part of the message's header that arrived.
    header: u32,
    encrypted: bool,
    /// A step has to be made.
    calls: bool,
}

impl Scan {
    /// True if there is something to do: a whole handshake message, or a record of another type.
    /// `bytes` begins with the bytes of earlier calls.
    ///
    /// `encrypted` means that bytes that look like a handshake may be encrypted, so that each
    /// record is reported.
    pub(crate) fn calls_for_a_step(&mut self, bytes: &[u8], encrypted: bool) -> bool {
        self.encrypted |= encrypted;
        let mut new = whole(&bytes[self.end..]);
        while !self.calls
            && let Some(record) = new.next()
        {
            self.end += record.len();
            self.calls = match record[0] {
                _ if extent(record) == Extent::Broken => true,
                CHANGE_CIPHER_SPEC if record.len() == HEADER + 1 => {
                    self.encrypted = true;
                    false
                }
                HANDSHAKE if !self.encrypted => self.gather(&record[HEADER..]),
                _ => true,
            };
        }
        self.calls
    }

    /// True if the message is complete with `part`.
    fn gather(&mut self, part: &[u8]) -> bool {
        for byte in part.iter().take(4_usize.saturating_sub(self.gathered)) {
            self.header = self.header << 8 | u32::from(*byte);
        }
        self.gathered += part.len();
        self.gathered >= 4 && self.gathered - 4 >= (self.header & 0xff_ffff) as usize
    }
}

/// The first message of a handshake, with its header, if it is whole: its bytes if they lie in one
/// record, or a copy.
fn first_message(bytes: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut records = whole(bytes)
        .filter(|record| record[0] != CHANGE_CIPHER_SPEC)
        .take_while(|record| record[0] == HANDSHAKE);
    let first = &records.next()?[HEADER..];
    if let Some(message) = cut_message(first) {
        return Some(Cow::Borrowed(message));
    }
    let mut gathered = first.to_vec();
    for record in records {
        gathered.extend_from_slice(&record[HEADER..]);
    }
    let end = cut_message(&gathered)?.len();
    gathered.truncate(end);
    Some(Cow::Owned(gathered))
}

fn cut_message(bytes: &[u8]) -> Option<&[u8]> {
    let length = bytes.get(1..4)?.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    bytes.get(..4 + length)
}

/// The name that a ClientHello asks for. rustls parses it too, and refuses a malformed hello: the
/// result for such a hello does not matter.
pub(crate) fn server_name(bytes: &[u8]) -> Option<Box<str>> {
    let hello = first_message(bytes)?;
    let mut hello = Reader(hello.get(4..)?);
    hello.take(2 + 32)?; // version, random
    hello.sized::<1>()?; // session
    hello.sized::<2>()?; // cipher suites
    hello.sized::<1>()?; // compression
    let mut extensions = Reader(hello.sized::<2>()?);
    while let Some(kind) = extensions.take(2) {
        let content = extensions.sized::<2>()?;
        if kind == [0, 0] {
            let mut names = Reader(Reader(content).sized::<2>()?);
            while let Some(kind) = names.take(1) {
                let name = names.sized::<2>()?;
                if kind == [0] {
                    let name = std::str::from_utf8(name).ok()?;
                    let name = name.strip_suffix('.').unwrap_or(name);
                    // An address is not a name, for rustls either.
                    return (name.parse::<std::net::IpAddr>().is_err())
                        .then(|| name.to_ascii_lowercase().into());
                }
            }
        }
    }
    None
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// The bytes after a length of `N` bytes.
    fn sized<const N: usize>(&mut self) -> Option<&'a [u8]> {
        let length = self.take(N)?.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        self.take(length)
    }
}

/// The alert that `sent` ends with, if it is readable.
pub(crate) fn plain_alert(sent: &[u8]) -> Option<u8> {
    match *sent.last_chunk::<7>()? {
        [ALERT, 3, _, 0, 2, _, alert] => Some(alert),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u8, body: &[u8]) -> Vec<u8> {
        [&[kind, 3, 3][..], &(body.len() as u16).to_be_bytes(), body].concat()
    }

    #[test]
    fn extent_is_known_from_the_header() {
        let whole = record(23, b"12345");
        for cut in 0..HEADER {
            assert_eq!(extent(&whole[..cut]), Extent::Unknown);
        }
        assert_eq!(extent(&whole[..HEADER]), Extent::Record(10));
        assert_eq!(extent(&[23, 3, 3, 0x48, 0]), Extent::Record(HEADER + BODY_MAX));
        assert_eq!(extent(&[23, 3, 3, 0x48, 1]), Extent::Broken);
        assert_eq!(extent(b"GET / HTTP/1.1"), Extent::Broken);
    }

    fn calls_for_a_step(bytes: &[u8], encrypted: bool) -> bool {
        Scan::default().calls_for_a_step(bytes, encrypted)
    }

    #[test]
    fn records_are_looked_at_once_until_their_message_is_whole() {
        let message = [&[1, 0, 1, 0][..], &[7; 256]].concat();
        let mut all: Vec<u8> = message.chunks(1).flat_map(|part| record(HANDSHAKE, part)).collect();
        let (mut scan, count) = (Scan::default(), all.len());
        for cut in 0..count {
            assert!(!scan.calls_for_a_step(&all[..cut], false), "{cut}");
            // A second reading would find no record.
            all[..cut - cut % 6].fill(0);
        }
        for _ in 0..2 {
            assert!(scan.calls_for_a_step(&all, false), "until the step is made");
        }
    }

    #[test]
    fn handshake_calls_for_a_step_once_its_message_is_whole() {
        let message = [&[1, 0, 0, 6][..], b"abcdef"].concat();
        for size in 1..=message.len() {
            let all: Vec<u8> = message.chunks(size).flat_map(|part| record(HANDSHAKE, part)).collect();
            for cut in 0..=all.len() {
                assert_eq!(calls_for_a_step(&all[..cut], false), cut == all.len(), "{cut} of {size}");
            }
            assert_eq!(first_message(&all).unwrap(), message);
        }
    }

    #[test]
    fn encrypted_records_call_for_steps_one_by_one() {
        let ccs = record(CHANGE_CIPHER_SPEC, &[1]);
        assert!(!calls_for_a_step(&ccs, false) && !calls_for_a_step(&ccs, true));
        let finished = [&ccs[..], &record(HANDSHAKE, b"\x99\xff\xff\xff, encrypted")].concat();
        assert!(calls_for_a_step(&finished, false) && calls_for_a_step(&finished[6..], true));
        assert!(!calls_for_a_step(&finished[6..], false), "an invalid length");
        assert!(calls_for_a_step(&record(APPLICATION_DATA, b"x"), false));
        assert!(calls_for_a_step(b"GET /", false));
    }

    /// A ClientHello that asks for `name`.
    fn hello_for(name: &[u8]) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([0; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        let list = [&[0][..], &(name.len() as u16).to_be_bytes(), name].concat();
        let list = [&(list.len() as u16).to_be_bytes()[..], &list].concat();
        let extension = [&[0, 0][..], &(list.len() as u16).to_be_bytes(), &list].concat();
        body.extend((extension.len() as u16).to_be_bytes());
        body.extend(extension);
        let message = [&[1, 0, 0, body.len() as u8][..], &body].concat();
        record(HANDSHAKE, &message)
    }

    #[test]
    fn name_with_a_trailing_dot_is_the_name_without() {
        assert_eq!(server_name(&hello_for(b"www.example.org.")).as_deref(), Some("www.example.org"));
    }

    #[test]
    fn name_of_cut_or_changed_hello_is_none_or_text() {
        let hello = hello_for(b"WWW.example.org");
        assert_eq!(server_name(&hello).as_deref(), Some("www.example.org"));
        for at in 0..hello.len() {
            assert_eq!(server_name(&hello[..at]), None);
            for value in 0..=255 {
                let mut changed = hello.clone();
                changed[at] = value;
                let _ = server_name(&changed);
            }
        }
    }
}
