//! The records of the toy transport, as bytes.
//!
//! ```text
//!   kind │ length, 2 bytes │ check, 2 bytes │ body, XORed with a stream that depends on key and count
//! ```
//!
//! The check covers kind, count and body in the clear. So a record that is altered, lost, sent
//! twice or out of order is invalid.

/// Bytes before the body.
pub const HEADER_BYTES: usize = 5;

/// A larger body is refused by its header.
pub const BODY_BYTES_MAX: usize = 4096;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The first flight of the client: its nonce, and its name.
    Hello = 0xA1,
    /// The answer: the server's nonce. All later records have keys.
    Reply = 0xA2,
    /// The second flight of the client, which shows that it knows the key.
    Proof = 0xA3,
    /// The answer, which may come after the client's first bytes.
    Welcome = 0xA4,
    Data = 0xA5,
    /// Announces another key for the sender's next records. A body of one byte that is not 0
    /// requests the same.
    Update = 0xA6,
    /// Announces the sender's end.
    Close = 0xA7,
    /// Reports that the sender cannot continue.
    Alert = 0xA8,
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        use Kind::*;
        [Hello, Reply, Proof, Welcome, Data, Update, Close, Alert]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    pub kind: Kind,
    pub len: usize,
    check: u16,
}

impl Header {
    /// Parses a header. `None` if it is invalid.
    pub fn read(bytes: [u8; HEADER_BYTES]) -> Option<Header> {
        let [kind, high, low, check @ ..] = bytes;
        let len = usize::from(u16::from_be_bytes([high, low]));
        let kind = Kind::of(kind).filter(|_| len <= BODY_BYTES_MAX)?;
        Some(Header { kind, len, check: u16::from_be_bytes(check) })
    }
}

/// One direction of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keys {
    key: u64,
    count: u64,
}

fn mixed(value: u64) -> u64 {
    // Like splitmix64.
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

impl Keys {
    /// The keys of the direction from the client, or the other one.
    pub fn of(client: u64, server: u64, from_client: bool) -> Keys {
        Keys { key: mixed(client ^ server.rotate_left(21) ^ u64::from(from_client)), count: 0 }
    }

    /// The next keys, after an update.
    pub fn renewed(self) -> Keys {
        Keys { key: mixed(self.key), count: 0 }
    }

    fn xor(&self, body: &mut [u8]) {
        for (at, piece) in body.chunks_mut(8).enumerate() {
            let stream = mixed(self.key ^ self.count << 20 ^ at as u64).to_le_bytes();
            piece.iter_mut().zip(stream).for_each(|(byte, stream)| *byte ^= stream);
        }
    }

    fn check(&self, kind: Kind, body: &[u8]) -> u16 {
        let start = mixed(self.key ^ self.count) as u32 ^ kind as u32;
        let sum = body.iter().fold(start, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)));
        (sum ^ sum >> 16) as u16
    }

    /// Appends a record.
    pub fn seal(&mut self, kind: Kind, body: &[u8], out: &mut Vec<u8>) {
        assert!(body.len() <= BODY_BYTES_MAX, "a record of {} bytes", body.len());
        out.push(kind as u8);
        out.extend((body.len() as u16).to_be_bytes());
        out.extend(self.check(kind, body).to_be_bytes());
        let at = out.len();
        out.extend_from_slice(body);
        self.xor(&mut out[at..]);
        self.count += 1;
    }

    /// Decrypts the body of a record in place. False if it is not the next one.
    pub fn open(&mut self, header: Header, body: &mut [u8]) -> bool {
        self.xor(body);
        let is_next = self.check(header.kind, body) == header.check;
        self.count += 1;
        is_next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(keys: &mut Keys, record: &[u8]) -> Option<Vec<u8>> {
        let (head, body) = record.split_at(HEADER_BYTES);
        let header = Header::read(head.try_into().unwrap())?;
        let mut body = body.to_vec();
        keys.open(header, &mut body).then_some(body)
    }

    #[test]
    fn record_is_opened_once_and_in_its_turn() {
        let (mut from, mut to) = (Keys::of(1, 2, true), Keys::of(1, 2, true));
        let mut seal = |body: &[u8]| {
            let mut out = Vec::new();
            from.seal(Kind::Data, body, &mut out);
            out
        };
        let [first, second, third] = [&b"hello, world"[..], b"", &[7; BODY_BYTES_MAX]].map(&mut seal);
        let again = to;
        for (record, body) in [(&first, &b"hello, world"[..]), (&second, b""), (&third, &[7; BODY_BYTES_MAX])]
        {
            assert_eq!(opened(&mut to, record).as_deref(), Some(body));
        }
        assert_eq!(opened(&mut again.clone(), &second), None, "a record before its turn");
        assert_eq!(opened(&mut to, &third), None, "a record twice");
        let mut altered = first.clone();
        altered[7] ^= 1;
        assert_eq!(opened(&mut again.clone(), &altered), None, "an altered record");
        assert_eq!(opened(&mut again.renewed(), &first), None, "a record of former keys");
    }

    #[test]
    fn header_of_no_record_is_refused() {
        assert!(Header::read(*b"GET /").is_none());
        assert!(Header::read([Kind::Data as u8, 0x10, 1, 0, 0]).is_none(), "a body beyond the most");
        assert!(Header::read([Kind::Data as u8, 0x10, 0, 0, 0]).is_some());
    }
}
