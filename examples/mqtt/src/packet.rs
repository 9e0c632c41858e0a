//! Packets of MQTT 3.1.1 and 5: how bytes are cut into them, how they are read, and how they are written.
//!
//! A packet of 3.1.1 is read as one of version 5 without properties, so both versions are one from here on.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringserve::framing::{
    Cut, EncodeError, Encoding, FrameError, Framing, Outbox, Payload, Raw, TypedFraming,
};
use ringserve::time::Time;

/// Bytes of a packet at most.
pub const PACKET_BYTES_MAX: usize = 256 << 10;

/// Cuts bytes into packets: a byte with type and flags, a length of one to four bytes, and as many bytes.
#[derive(Clone)]
pub struct Mqtt;

impl TypedFraming for Mqtt {
    type State = ();
    /// Type, in the upper four bits, and flags.
    type Head = u8;

    fn cut(&self, _: &mut (), bytes: &[u8], _: usize) -> Result<Cut<u8>, FrameError> {
        let mut len = 0;
        for at in 1..=4 {
            let Some(&byte) = bytes.get(at) else { return Ok(Cut::More(at + 1 - bytes.len())) };
            len |= usize::from(byte & 0x7F) << (7 * (at - 1));
            if byte == 0 && at > 1 {
                break;
            }
            if byte & 0x80 == 0 {
                let (skip, consumed, head) = (at + 1, at + 1 + len, bytes[0]);
                return Ok(match consumed.saturating_sub(bytes.len()) {
                    0 => Cut::Frame { skip, len, consumed, head },
                    missing => Cut::More(missing),
                });
            }
        }
        Err(FrameError::coded(0x81, "the remaining length has more bytes than four, or than it needs"))
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        Raw.encode(payload, out)
    }

    fn reply_encoding(self: &Rc<Self>) -> Encoding {
        Encoding::of(&Raw)
    }
}

/// Why a client is refused something, by the codes of version 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Unspecified = 0x80,
    MalformedPacket = 0x81,
    ProtocolError = 0x82,
    UnsupportedVersion = 0x84,
    IdNotValid = 0x85,
    ServerBusy = 0x89,
    ShuttingDown = 0x8B,
    TakenOver = 0x8E,
    FilterInvalid = 0x8F,
    TopicInvalid = 0x90,
    TooLarge = 0x95,
    QuotaExceeded = 0x97,
    QosNotSupported = 0x9B,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?} (0x{:X})", *self as u8)
    }
}

/// What was read, or why not.
pub type Read<T> = Result<T, Reason>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// 3.1.1
    Three,
    Five,
}

/// What servers say in version 5 before they close a connection: the code, and its name if the client takes as long a packet.
pub fn disconnect(reason: Reason, packet_max: u32) -> Vec<u8> {
    let name = format!("{reason:?}");
    let len = name.len() as u8;
    let named = [&[len + 3, 0x1F, 0, len], name.as_bytes()].concat();
    packet(0xE0, &[&[reason as u8], if packet_max < 64 { &[] } else { &named }])
}

/// Which properties may occur.
const OF_PUBLISH: &[u8] = &[0x01, 0x02, 0x03, 0x08, 0x09, 0x26];
const OF_WILL: &[u8] = &[0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26];
const OF_CONNECT: &[u8] = &[0x11, 0x17, 0x19, 0x21, 0x22, 0x26, 0x27];

/// What is left of a packet.
pub struct Reader<'a> {
    pub left: &'a [u8],
    pub version: Version,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Read<&'a [u8]> {
        let (taken, left) = self.left.split_at_checked(len).ok_or(Reason::MalformedPacket)?;
        self.left = left;
        Ok(taken)
    }

    pub fn number(&mut self, bytes: usize) -> Read<u32> {
        Ok(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }

    pub fn packet_id(&mut self) -> Read<u16> {
        let id = self.number(2)? as u16;
        if id == 0 { Err(Reason::ProtocolError) } else { Ok(id) }
    }

    fn binary(&mut self) -> Read<&'a [u8]> {
        let len = self.number(2)?;
        self.take(len as usize)
    }

    pub fn text(&mut self) -> Read<&'a str> {
        let text = str::from_utf8(self.binary()?).ok().filter(|text| !text.contains('\0'));
        text.ok_or(Reason::MalformedPacket)
    }

    /// What a SUBSCRIBE says behind a filter.
    pub fn options(&mut self) -> Read<u8> {
        let reserved = if self.version == Version::Five { 0xC0 } else { 0xFC };
        let options = self.number(1)? as u8;
        let is_sound = options & reserved == 0 && options & 3 != 3 && options & 0x30 != 0x30;
        if is_sound { Ok(options) } else { Err(Reason::MalformedPacket) }
    }

    fn varint(&mut self) -> Read<u32> {
        let mut number = 0;
        for shift in [0, 7, 14, 21] {
            let byte = self.number(1)?;
            number |= (byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Reason::MalformedPacket)
    }

    /// Reads the properties, of which these may occur.
    pub fn properties(&mut self, allowed: &[u8]) -> Read<Properties> {
        let mut found = Properties::default();
        if self.version == Version::Three {
            return Ok(found);
        }
        let len = self.varint()? as usize;
        let mut rest = Reader { left: self.take(len)?, ..*self };
        while let [id, ..] = *rest.left {
            // Only a user property may come twice.
            if !allowed.contains(&id) || id != 0x26 && found.number(id).is_some() {
                return Err(Reason::ProtocolError);
            }
            let from = rest.left;
            rest.take(1)?;
            let number = match id {
                0x01 | 0x17 | 0x19 => rest.number(1)?,
                0x21 | 0x22 => rest.number(2)?,
                0x02 | 0x11 | 0x18 | 0x27 => rest.number(4)?,
                0x09 => rest.binary().map(|_| 0)?,
                0x26 => rest.text().and_then(|_| rest.text()).map(|_| 0)?,
                _ => rest.text().map(|_| 0)?,
            };
            found.numbers.push((id, number));
            if ![0x02, 0x18].contains(&id) {
                found.passed_on.extend_from_slice(&from[..from.len() - rest.left.len()]);
            }
        }
        Ok(found)
    }

    pub fn end(&self) -> Read<()> {
        if self.left.is_empty() { Ok(()) } else { Err(Reason::MalformedPacket) }
    }
}

/// The properties of a packet of version 5.
#[derive(Default)]
pub struct Properties {
    /// Each with its number; 0 for those that are none.
    numbers: Vec<(u8, u32)>,
    /// Those of a message that subscribers are sent as they are.
    passed_on: Vec<u8>,
}

impl Properties {
    fn number(&self, id: u8) -> Option<u32> {
        self.numbers.iter().find(|(of, _)| *of == id).map(|(_, number)| *number)
    }

    pub fn seconds(&self, id: u8) -> Option<Duration> {
        self.number(id).map(|seconds| Duration::from_secs(seconds.into()))
    }
}

/// A message, shared by all sessions that are sent it: the payload is copied once, out of the receive buffer.
#[derive(Clone, Default)]
pub struct Publication {
    pub topic: Bytes,
    pub payload: Bytes,
    pub qos: u8,
    pub retain: bool,
    /// Those that are passed on as they are.
    pub properties: Bytes,
    /// Its Message Expiry Interval, and the end of that, which counts from the publication on.
    pub lifetime: Option<Duration>,
    pub expires: Option<Time>,
    /// The client id of its publisher.
    pub from: Arc<str>,
}

/// True if a message may be published under this name.
pub fn is_topic(topic: &[u8]) -> bool {
    !topic.is_empty() && !topic.contains(&b'+') && !topic.contains(&b'#')
}

impl Publication {
    /// Reads a PUBLISH, with its packet id; 0 with QoS 0.
    pub fn read(head: u8, version: Version, packet: &Bytes) -> Read<(u16, Publication)> {
        let (mut rest, qos) = (Reader { left: packet, version }, head >> 1 & 3);
        if qos == 3 || qos == 0 && head & 8 != 0 {
            return Err(Reason::MalformedPacket);
        }
        let topic = rest.text()?;
        let id = if qos == 0 { 0 } else { rest.packet_id()? };
        let properties = rest.properties(OF_PUBLISH)?;
        let (topic, payload) = (packet.slice_ref(topic.as_bytes()), packet.slice_ref(rest.left));
        Ok((id, Publication::new(topic, payload, qos, head & 1 != 0, properties)?))
    }

    fn new(topic: Bytes, payload: Bytes, qos: u8, retain: bool, given: Properties) -> Read<Publication> {
        if !is_topic(&topic) {
            return Err(Reason::TopicInvalid);
        }
        if qos > 1 {
            return Err(Reason::QosNotSupported);
        }
        let (lifetime, properties) = (given.seconds(0x02), given.passed_on.into());
        Ok(Publication { topic, payload, qos, retain, properties, lifetime, ..Publication::default() })
    }

    /// What it counts for where it is kept.
    pub fn bytes(&self) -> usize {
        self.topic.len() + self.properties.len() + self.payload.len() + 128
    }

    /// As a PUBLISH with these flags, with an id if it has QoS 1, and with what is left of its lifetime.
    pub fn encode(&self, version: Version, flags: u8, id: u16, left: Option<Duration>) -> Vec<u8> {
        let mut properties = Vec::new();
        if version == Version::Five {
            put_varint(&mut properties, self.properties.len() + left.map_or(0, |_| 5));
            if let Some(left) = left {
                properties.push(0x02);
                properties.extend_from_slice(&(left.as_secs() as u32).to_be_bytes());
            }
            properties.extend_from_slice(&self.properties);
        }
        let (topic_len, id) = ((self.topic.len() as u16).to_be_bytes(), id.to_be_bytes());
        let id = if flags & 2 != 0 { &id[..] } else { &[] };
        packet(0x30 | flags, &[&topic_len, &self.topic, id, &properties, &self.payload])
    }
}

/// A CONNECT, without user name and password, of which this broker asks nothing.
#[derive(Clone)]
pub struct Connect {
    pub version: Version,
    pub id: Arc<str>,
    /// The client gave no id.
    pub is_assigned: bool,
    pub is_clean: bool,
    /// For how long the session outlives the connection.
    pub expiry: Duration,
    /// In seconds; 0 for none.
    pub keep_alive: u32,
    /// Messages of QoS 1 that are not acknowledged, and bytes of a packet: what the client takes at most.
    pub receive_max: u32,
    pub packet_max: u32,
    pub will: Option<Publication>,
}

impl Connect {
    /// Reads what is behind the version.
    pub fn read(mut rest: Reader<'_>) -> Read<Connect> {
        let (version, is_three) = (rest.version, rest.version == Version::Three);
        let (flags, keep_alive) = (rest.number(1)?, rest.number(2)?);
        let (is_clean, has_will, qos) = (flags & 2 != 0, flags & 4 != 0, (flags >> 3 & 3) as u8);
        if flags & 1 != 0 || qos == 3 || !has_will && flags & 0x38 != 0 {
            return Err(Reason::MalformedPacket);
        }
        let given = rest.properties(OF_CONNECT)?;
        let of_version = if is_three && !is_clean { Duration::MAX } else { Duration::ZERO };
        let expiry = given.seconds(0x11).unwrap_or(of_version);
        let [receive_max, packet_max] = [0x21, 0x27].map(|id| given.number(id).unwrap_or(0xFFFF_FFFF));
        if receive_max == 0 || packet_max == 0 {
            return Err(Reason::ProtocolError);
        }
        let (id, mut will) = (Arc::<str>::from(rest.text()?), None);
        if has_will {
            let given = rest.properties(OF_WILL)?;
            let (topic, payload) = (rest.text()?.to_owned().into(), rest.binary()?.to_vec().into());
            will = Some(Publication::new(topic, payload, qos, flags & 0x20 != 0, given)?);
        }
        if flags & 0x80 != 0 {
            rest.text()?;
        }
        if flags & 0x40 != 0 {
            rest.binary()?;
        }
        rest.end()?;
        let is_assigned = id.is_empty();
        Ok(Connect { version, id, is_assigned, is_clean, expiry, keep_alive, receive_max, packet_max, will })
    }

    /// Its CONNACK.
    pub fn answer(&self, is_present: bool) -> Vec<u8> {
        let flags_and_code = [u8::from(is_present), 0];
        if self.version == Version::Three {
            return packet(0x20, &[&flags_and_code]);
        }
        // QoS 1 at most, no ids of subscriptions, no shared ones, the largest packet, and how long the session lasts.
        let mut properties = vec![0x24, 1, 0x29, 0, 0x2A, 0, 0x27];
        properties.extend_from_slice(&(PACKET_BYTES_MAX as u32).to_be_bytes());
        properties.push(0x11);
        properties.extend_from_slice(&(self.expiry.as_secs() as u32).to_be_bytes());
        if self.is_assigned {
            properties.extend_from_slice(&[0x12, 0, self.id.len() as u8]);
            properties.extend_from_slice(self.id.as_bytes());
        }
        packet(0x20, &[&flags_and_code, &[properties.len() as u8], &properties])
    }
}

fn put_varint(out: &mut Vec<u8>, mut number: usize) {
    while number > 0x7F {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// A packet of this type and flags, in parts.
pub fn packet(head: u8, parts: &[&[u8]]) -> Vec<u8> {
    let len = parts.iter().map(|part| part.len()).sum();
    let mut out = Vec::with_capacity(5 + len);
    out.push(head);
    put_varint(&mut out, len);
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}
