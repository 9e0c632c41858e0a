//! Packets of MQTT 3.1.1 and 5: how bytes are cut into them, how they are read, and how they are
//! written.
//!
//! A packet of 3.1.1 is read as one of version 5 without properties, so both versions are one from
//! here on.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use ringserve::framing::{FieldError, Fields, LengthField, LengthPrefix};
use ringserve::time::Time;

/// Bytes of a client id at most: it is kept with each message of the client.
const ID_BYTES_MAX: usize = 256;
/// Bytes of a packet at most.
pub const PACKET_BYTES_MAX: usize = 256 << 10;
/// Messages of QoS 1 that a client is sent before it acknowledges the first, if it takes that many.
const IN_FLIGHT_MAX: u32 = 64;
/// For how long a session outlives its connection at most.
pub const EXPIRY_MAX: Duration = Duration::from_secs(86_400);

/// The length before properties.
const VARINT: LengthField = LengthField::varint_max(4);
/// The length before a text.
pub const TWO_BYTES: LengthPrefix = LengthPrefix::bytes(2);
/// Cuts bytes into packets: a byte with type and flags, a length, and as many bytes. A frame is all
/// of that.
pub const PACKETS: LengthField = VARINT.offset(1);

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
    BadAuthenticationMethod = 0x8C,
    TakenOver = 0x8E,
    FilterInvalid = 0x8F,
    TopicInvalid = 0x90,
    TopicAliasInvalid = 0x94,
    TooLarge = 0x95,
    QuotaExceeded = 0x97,
    QosNotSupported = 0x9B,
    SharedNotSupported = 0x9E,
    SubscriptionIdsNotSupported = 0xA1,
}

impl Reason {
    /// Why a property is refused where it stands: some belong to what this broker does not do.
    fn of_refused(property: u8) -> Reason {
        match property {
            0x0B => Reason::SubscriptionIdsNotSupported,
            0x15 | 0x16 => Reason::BadAuthenticationMethod,
            0x23 => Reason::TopicAliasInvalid,
            _ => Reason::ProtocolError,
        }
    }

    /// The CONNACK that refuses a client; none where 3.1.1 has no code for the reason.
    pub fn refusal(self, is_five: bool) -> Vec<u8> {
        let code = match self {
            _ if is_five => return packet(0x20, &[&[0, self as u8, 0]]),
            Reason::UnsupportedVersion => 1,
            Reason::IdNotValid => 2,
            Reason::QuotaExceeded | Reason::ServerBusy => 3,
            Reason::QosNotSupported => 5,
            _ => return Vec::new(),
        };
        packet(0x20, &[&[0, code]])
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?} (0x{:X})", *self as u8)
    }
}

impl From<FieldError> for Reason {
    fn from(_: FieldError) -> Reason {
        Reason::MalformedPacket
    }
}

/// The value that was read, or the reason why not.
pub type Read<T> = Result<T, Reason>;

/// Flags of a PUBLISH.
const RETAIN: u8 = 1;
pub const QOS_1: u8 = 2;
pub const DUP: u8 = 8;

/// The unread rest of a packet.
pub struct Reader<'a> {
    pub left: Fields<'a>,
    /// Version 5, and not 3.1.1.
    pub is_five: bool,
}

impl<'a> Reader<'a> {
    /// Reads what is behind the length of a packet.
    pub fn of(packet: &'a [u8], is_five: bool) -> Read<Reader<'a>> {
        let left = Fields::new(Fields::new(&packet[1..]).framed(&VARINT)?);
        Ok(Reader { left, is_five })
    }

    pub fn packet_id(&mut self) -> Read<u16> {
        let id = self.left.u16()?;
        if id == 0 { Err(Reason::ProtocolError) } else { Ok(id) }
    }

    pub fn text(&mut self) -> Read<&'a str> {
        let text = self.left.text(&TWO_BYTES)?;
        if text.contains('\0') { Err(Reason::MalformedPacket) } else { Ok(text) }
    }

    /// The options after a filter of SUBSCRIBE.
    pub fn options(&mut self) -> Read<u8> {
        let reserved = if self.is_five { 0xC0 } else { 0xFC };
        let options = self.left.u8()?;
        let is_sound = options & reserved == 0 && options & 3 != 3 && options & 0x30 != 0x30;
        if is_sound { Ok(options) } else { Err(Reason::MalformedPacket) }
    }

    /// Reads the properties, of which these may occur.
    pub fn properties(&mut self, allowed: &[u8]) -> Read<Properties> {
        let mut found = Properties::default();
        if !self.is_five {
            return Ok(found);
        }
        let mut rest = Reader { left: Fields::new(self.left.framed(&VARINT)?), ..*self };
        while let from @ [id, ..] = rest.left.left() {
            let number = match rest.left.u8()? {
                id if !allowed.contains(&id) => return Err(Reason::of_refused(id)),
                // Each of these is 0 or 1.
                0x01 | 0x17 | 0x19 => match rest.left.u8()? {
                    flag @ 0..=1 => flag.into(),
                    _ => return Err(Reason::ProtocolError),
                },
                // An answer goes to a topic, and to no filter.
                0x08 if rest.text()?.contains(['+', '#']) => return Err(Reason::ProtocolError),
                0x08 => 0,
                0x21 | 0x22 => rest.left.u16()?.into(),
                0x02 | 0x11 | 0x18 | 0x27 => rest.left.u32()?,
                0x09 => rest.left.framed(&TWO_BYTES).map(|_| 0)?,
                0x26 => rest.text().and_then(|_| rest.text()).map(|_| 0)?,
                _ => rest.text().map(|_| 0)?,
            };
            // Only a user property may come twice.
            if found.numbers.insert(*id, number).is_some() && *id != 0x26 {
                return Err(Reason::ProtocolError);
            }
            if ![0x02, 0x18].contains(id) {
                found.passed_on.extend_from_slice(&from[..from.len() - rest.left.left().len()]);
            }
        }
        Ok(found)
    }

    /// Reads what is behind the length of a PUBACK: whose it is.
    pub fn acknowledged(mut self) -> Read<u16> {
        let id = self.packet_id()?;
        if self.is_five && !self.left.is_empty() {
            let _code = self.left.u8()?;
            let _given =
                if self.left.is_empty() { Properties::default() } else { self.properties(&[0x1F, 0x26])? };
        }
        self.left.end()?;
        Ok(id)
    }

    /// Reads what is behind the length of a DISCONNECT.
    pub fn goodbye(mut self) -> Read<Goodbye> {
        if !self.is_five {
            self.left.end()?;
        }
        let code = if self.left.is_empty() { 0 } else { self.left.u8()? };
        let allowed = &[0x11, 0x1F, 0x26];
        let given = if self.left.is_empty() { Properties::default() } else { self.properties(allowed)? };
        self.left.end()?;
        Ok(Goodbye { drops_will: code == 0, expiry: given.seconds(0x11) })
    }
}

/// A DISCONNECT of a client: whether its will is dropped, and how long the session lasts.
#[derive(Default)]
pub struct Goodbye {
    pub drops_will: bool,
    pub expiry: Option<Duration>,
}

/// The properties of a packet of version 5.
#[derive(Default)]
pub struct Properties {
    /// Each with its number; 0 for those that are none.
    numbers: BTreeMap<u8, u32>,
    /// Those of a message that subscribers are sent as they are.
    passed_on: Vec<u8>,
}

impl Properties {
    pub fn seconds(&self, id: u8) -> Option<Duration> {
        self.numbers.get(&id).map(|seconds| Duration::from_secs(u64::from(*seconds)))
    }
}

/// A message, shared by all sessions that are sent it: the payload is copied once, out of the
/// receive buffer.
#[derive(Clone, Default)]
pub struct Publication {
    pub topic: Arc<str>,
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
    /// All of the packet as it came, with its version, if others may be sent just that.
    pub as_it_came: Option<(bool, Bytes)>,
}

impl Publication {
    /// Reads a PUBLISH, with its packet id; 0 with QoS 0.
    pub fn read(is_five: bool, packet: &Bytes) -> Read<(u16, Publication)> {
        let (mut rest, head) = (Reader::of(packet, is_five)?, packet[0]);
        let qos = head >> 1 & 3;
        if qos == 3 || qos == 0 && head & DUP != 0 {
            return Err(Reason::MalformedPacket);
        }
        let topic = rest.text()?;
        let id = if qos == 0 { 0 } else { rest.packet_id()? };
        let properties = rest.properties(&[0x01, 0x02, 0x03, 0x08, 0x09, 0x26])?;
        let payload = packet.slice_ref(rest.left.left());
        let read = Publication::new(topic, payload, qos, head & RETAIN != 0, properties)?;
        let is_plain = head == 0x30 && read.lifetime.is_none();
        Ok((id, Publication { as_it_came: is_plain.then(|| (is_five, packet.clone())), ..read }))
    }

    fn new(topic: &str, payload: Bytes, qos: u8, retain: bool, given: Properties) -> Read<Publication> {
        if topic.is_empty() || topic.contains(['+', '#']) {
            return Err(Reason::TopicInvalid);
        }
        if qos > 1 {
            return Err(Reason::QosNotSupported);
        }
        let (topic, lifetime) = (topic.into(), given.seconds(0x02));
        let properties = given.passed_on.into();
        Ok(Publication { topic, payload, qos, retain, properties, lifetime, ..Publication::default() })
    }

    /// The bytes that it counts for where it is kept.
    pub fn bytes(&self) -> usize {
        self.topic.len() + self.properties.len() + self.payload.len() + 128
    }

    /// As a PUBLISH with these flags, with an id if they say QoS 1, and with what is left of its
    /// lifetime.
    pub fn packet(&self, is_five: bool, flags: u8, id: u16, left: Option<Duration>) -> Bytes {
        let same = self.as_it_came.as_ref().filter(|(version, _)| flags == 0 && *version == is_five);
        if let Some((_, packet)) = same {
            return packet.clone();
        }
        let (topic_len, id) = ((self.topic.len() as u16).to_be_bytes(), id.to_be_bytes());
        let id = if flags & QOS_1 != 0 { &id[..] } else { &[] };
        let left = left.map(|left| seconds(0x02, left));
        let properties = properties(is_five, &[left.as_slice().as_flattened(), &self.properties]);
        packet(0x30 | flags, &[&topic_len, self.topic.as_bytes(), id, &properties, &self.payload]).into()
    }
}

/// A CONNECT, without user name and password, of which this broker asks nothing.
#[derive(Default)]
pub struct Connect {
    pub is_five: bool,
    pub id: Arc<str>,
    /// The client gave no id.
    pub is_assigned: bool,
    pub is_clean: bool,
    /// For how long the session outlives the connection.
    pub expiry: Duration,
    /// Zero for none.
    pub keep_alive: Duration,
    /// Messages of QoS 1 that are not acknowledged, and bytes of a packet: what the client takes at
    /// most.
    pub receive_max: u32,
    pub packet_max: u32,
    pub will: Option<Publication>,
}

impl Connect {
    /// Reads what is behind the version.
    pub fn read(mut rest: Reader<'_>) -> Read<Connect> {
        let (is_five, flags) = (rest.is_five, rest.left.u8()?);
        let keep_alive = Duration::from_secs(rest.left.u16()?.into());
        let (is_clean, has_will, qos) = (flags & 2 != 0, flags & 4 != 0, flags >> 3 & 3);
        // In 3.1.1 no password stands without a user name.
        let is_password_alone = !is_five && flags & 0xC0 == 0x40;
        if flags & 1 != 0 || qos == 3 || !has_will && flags & 0x38 != 0 || is_password_alone {
            return Err(Reason::MalformedPacket);
        }
        let given = rest.properties(&[0x11, 0x17, 0x19, 0x21, 0x22, 0x26, 0x27])?;
        let of_version = if is_five || is_clean { Duration::ZERO } else { EXPIRY_MAX };
        let expiry = given.seconds(0x11).unwrap_or(of_version).min(EXPIRY_MAX);
        let [receive_max, packet_max] = [0x21, 0x27].map(|id| *given.numbers.get(&id).unwrap_or(&u32::MAX));
        let receive_max = receive_max.min(IN_FLIGHT_MAX);
        if receive_max == 0 || packet_max == 0 {
            return Err(Reason::ProtocolError);
        }
        let (id, mut will) = (Arc::<str>::from(rest.text()?), None);
        if has_will {
            let given = rest.properties(&[0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26])?;
            let (topic, payload) = (rest.text()?, rest.left.framed(&TWO_BYTES)?.to_vec().into());
            will = Some(Publication::new(topic, payload, qos, flags & 0x20 != 0, given)?);
        }
        let _user = if flags & 0x80 != 0 { rest.text()? } else { "" };
        let _password = if flags & 0x40 != 0 { rest.left.framed(&TWO_BYTES)? } else { &[] };
        rest.left.end()?;
        let is_assigned = id.is_empty();
        if is_assigned && !is_five && !is_clean || id.len() > ID_BYTES_MAX {
            return Err(Reason::IdNotValid);
        }
        Ok(Connect { is_five, id, is_assigned, is_clean, expiry, keep_alive, receive_max, packet_max, will })
    }

    /// The DISCONNECT that it gets in version 5 before its connection is closed: the code, and its
    /// name if the client takes a packet of that length.
    pub fn goodbye(&self, reason: Reason) -> Vec<u8> {
        let name = format!("{reason:?}");
        let named = properties(true, &[&[0x1F, 0, name.len() as u8], name.as_bytes()]);
        match self.is_five {
            true => packet(0xE0, &[&[reason as u8], if self.packet_max < 64 { &[] } else { &named }]),
            false => Vec::new(),
        }
    }

    /// Its CONNACK.
    pub fn answer(&self, is_present: bool) -> Vec<u8> {
        // QoS 1 at most, no ids of subscriptions, no shared ones, the largest packet, and how long
        // the session lasts.
        let mut told = vec![0x24, 1, 0x29, 0, 0x2A, 0, 0x27];
        told.extend((PACKET_BYTES_MAX as u32).to_be_bytes());
        told.extend(seconds(0x11, self.expiry));
        if self.is_assigned {
            told.extend([&[0x12, 0, self.id.len() as u8], self.id.as_bytes()].concat());
        }
        packet(0x20, &[&[u8::from(is_present), 0], &properties(self.is_five, &[&told])])
    }
}

/// A property that is a time.
fn seconds(id: u8, time: Duration) -> [u8; 5] {
    let [a, b, c, d] = (time.as_secs() as u32).to_be_bytes();
    [id, a, b, c, d]
}

/// Properties in parts, behind their length; 3.1.1 has neither.
fn properties(is_five: bool, parts: &[&[u8]]) -> Vec<u8> {
    let framed = is_five.then(|| VARINT.frame(&[], parts).expect("a packet has room for them"));
    framed.unwrap_or_default()
}

/// A packet of this type and flags, in parts.
pub fn packet(head: u8, parts: &[&[u8]]) -> Vec<u8> {
    PACKETS.frame(&[head], parts).expect("no packet is longer than PACKET_BYTES_MAX and its topic")
}
