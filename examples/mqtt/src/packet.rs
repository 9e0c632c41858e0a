//! Packets of MQTT 3.1.1 and 5: how bytes are cut into them, what clients send, and what they are sent.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringserve::framing::{
    Cut, EncodeError, Encoding, FrameError, Framing, Outbox, Payload, Raw, TypedFraming,
};
use ringserve::{LocalHandle, PushError, Shard, time::Time};

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
                return Err(FrameError::coded(0x81, "the remaining length has more bytes than it needs"));
            }
            if byte & 0x80 == 0 {
                let (skip, consumed, head) = (at + 1, at + 1 + len, bytes[0]);
                let missing = consumed.saturating_sub(bytes.len());
                return Ok(if missing > 0 {
                    Cut::More(missing)
                } else {
                    Cut::Frame { skip, len, consumed, head }
                });
            }
        }
        Err(FrameError::coded(0x81, "the remaining length has more than four bytes"))
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
    BadAuthentication = 0x8C,
    TakenOver = 0x8E,
    FilterInvalid = 0x8F,
    TopicInvalid = 0x90,
    AliasInvalid = 0x94,
    TooLarge = 0x95,
    QuotaExceeded = 0x97,
    QosNotSupported = 0x9B,
    SharedNotSupported = 0x9E,
    IdsNotSupported = 0xA1,
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

/// What is left of a packet.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Read<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Reason::MalformedPacket)?;
        self.0 = rest;
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

    /// Reads the properties of a packet of version 5, of which these identifiers may occur. `found` is told each with its number,
    /// if it is one, and all its bytes.
    pub fn properties(
        &mut self,
        version: Version,
        allowed: &[u8],
        mut found: impl FnMut(u8, u32, &[u8]),
    ) -> Read<()> {
        if version == Version::Three {
            return Ok(());
        }
        let len = self.varint()?;
        let (mut rest, mut seen) = (Reader(self.take(len as usize)?), 0u64);
        while let Some(&id) = rest.0.first() {
            // Only a user property may come twice.
            if !allowed.contains(&id) || id != 0x26 && seen & 1 << id != 0 {
                return Err(Reason::ProtocolError);
            }
            let from = rest.0;
            rest.take(1)?;
            seen |= 1 << id;
            let number = match id {
                0x01 | 0x17 | 0x19 => rest.number(1)?,
                0x21..=0x23 => rest.number(2)?,
                0x02 | 0x11 | 0x18 | 0x27 => rest.number(4)?,
                0x0B => rest.varint()?,
                0x09 | 0x16 => rest.binary().map(|_| 0)?,
                0x26 => rest.text().and_then(|_| rest.text()).map(|_| 0)?,
                _ => rest.text().map(|_| 0)?,
            };
            found(id, number, &from[..from.len() - rest.0.len()]);
        }
        Ok(())
    }

    pub fn version(&mut self) -> Read<Version> {
        match (self.text()?, self.number(1)?) {
            ("MQTT", 4) => Ok(Version::Three),
            ("MQTT", 5) => Ok(Version::Five),
            ("MQTT" | "MQIsdp", _) => Err(Reason::UnsupportedVersion),
            _ => Err(Reason::MalformedPacket),
        }
    }

    pub fn end(&self) -> Read<()> {
        if self.0.is_empty() { Ok(()) } else { Err(Reason::MalformedPacket) }
    }
}

/// True if a message may be published under this name.
pub fn is_topic(topic: &str) -> bool {
    !topic.is_empty() && !topic.contains(['+', '#'])
}

/// A message, shared by all that are sent it: the payload is copied once, out of the receive buffer.
#[derive(Clone, Debug, Default)]
pub struct Publication {
    pub topic: Bytes,
    /// Those that are passed on as they are.
    pub properties: Bytes,
    pub payload: Bytes,
    pub qos: u8,
    pub retain: bool,
    /// The end of its Message Expiry Interval.
    pub expires: Option<Time>,
    /// The client id of its publisher.
    pub from: Arc<str>,
}

impl Publication {
    /// Reads a PUBLISH, with its packet id; 0 with QoS 0.
    pub fn read(
        kind: u8,
        body: &Bytes,
        version: Version,
        from: &Arc<str>,
        shard: &Shard,
    ) -> Read<(u16, Publication)> {
        let (mut rest, qos) = (Reader(body), kind >> 1 & 3);
        match qos {
            0 if kind & 8 != 0 => return Err(Reason::MalformedPacket),
            2 => return Err(Reason::QosNotSupported),
            3 => return Err(Reason::MalformedPacket),
            _ => {}
        }
        let topic = rest.text()?;
        let id = if qos == 0 { 0 } else { rest.packet_id()? };
        let (mut alias, mut lifetime, mut properties) = (false, None, Vec::new());
        rest.properties(
            version,
            &[0x01, 0x02, 0x03, 0x08, 0x09, 0x23, 0x26],
            |id, number, bytes| match id {
                0x02 => lifetime = Some(number),
                0x23 => alias = true,
                _ => properties.extend_from_slice(bytes),
            },
        )?;
        if alias {
            return Err(Reason::AliasInvalid);
        }
        if !is_topic(topic) {
            return Err(Reason::TopicInvalid);
        }
        let (topic, properties, payload) =
            (body.slice_ref(topic.as_bytes()), properties.into(), body.slice_ref(rest.0));
        let expires = lifetime.map(|seconds| shard.now() + Duration::from_secs(seconds.into()));
        Ok((
            id,
            Publication {
                topic,
                properties,
                payload,
                qos,
                retain: kind & 1 != 0,
                expires,
                from: from.clone(),
            },
        ))
    }

    /// What it counts for where it is kept.
    pub fn bytes(&self) -> usize {
        self.topic.len() + self.properties.len() + self.payload.len() + 128
    }

    /// Its Message Expiry Interval is over.
    pub fn is_over(&self, shard: &Shard) -> bool {
        self.expires.is_some_and(|at| at <= shard.now())
    }
}

/// What is published for a client that was lost.
#[derive(Clone, Debug)]
pub struct Will {
    publication: Publication,
    pub delay: Duration,
    lifetime: Option<u32>,
}

impl Will {
    pub fn bytes(&self) -> usize {
        self.publication.bytes()
    }

    /// Its message, at the time at which it is published.
    pub fn publication(self, from: &Arc<str>, shard: &Shard) -> Publication {
        let expires = self.lifetime.map(|seconds| shard.now() + Duration::from_secs(seconds.into()));
        Publication { expires, from: from.clone(), ..self.publication }
    }
}

/// A CONNECT, without user name and password, of which this broker asks nothing.
pub struct Connect {
    pub id: String,
    pub is_clean: bool,
    pub keep_alive: u16,
    /// Seconds for which the session outlives the connection.
    pub expiry: u32,
    pub receive_max: u32,
    pub packet_max: u32,
    pub will: Option<Will>,
}

impl Connect {
    /// Reads what follows the version.
    pub fn read(version: Version, mut rest: Reader<'_>) -> Read<Connect> {
        let (flags, keep_alive) = (rest.number(1)?, rest.number(2)? as u16);
        let (is_clean, has_will, qos) = (flags & 2 != 0, flags & 4 != 0, (flags >> 3 & 3) as u8);
        let password_alone = version == Version::Three && flags & 0xC0 == 0x40;
        if flags & 1 != 0 || qos == 3 || !has_will && flags & 0x38 != 0 || password_alone {
            return Err(Reason::MalformedPacket);
        }
        if qos == 2 {
            return Err(Reason::QosNotSupported);
        }
        let expiry = if version == Version::Three && !is_clean { u32::MAX } else { 0 };
        let (id, receive_max, packet_max, will) = (String::new(), 0xFFFF, u32::MAX, None);
        let mut connect = Connect { id, is_clean, keep_alive, expiry, receive_max, packet_max, will };
        let mut authenticates = false;
        let allowed = [0x11, 0x15, 0x16, 0x17, 0x19, 0x21, 0x22, 0x26, 0x27];
        rest.properties(version, &allowed, |id, number, _| match id {
            0x11 => connect.expiry = number,
            0x15 | 0x16 => authenticates = true,
            0x21 => connect.receive_max = number,
            0x27 => connect.packet_max = number,
            _ => {}
        })?;
        if authenticates {
            return Err(Reason::BadAuthentication);
        }
        if connect.receive_max == 0 || connect.packet_max == 0 {
            return Err(Reason::ProtocolError);
        }
        connect.id = rest.text()?.to_owned();
        if has_will {
            let (mut delay, mut lifetime, mut properties) = (0, None, Vec::new());
            rest.properties(
                version,
                &[0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26],
                |id, number, bytes| match id {
                    0x02 => lifetime = Some(number),
                    0x18 => delay = number,
                    _ => properties.extend_from_slice(bytes),
                },
            )?;
            let (topic, payload) = (rest.text()?, Bytes::copy_from_slice(rest.binary()?));
            if !is_topic(topic) {
                return Err(Reason::TopicInvalid);
            }
            let (topic, properties, retain) = (topic.to_owned().into(), properties.into(), flags & 0x20 != 0);
            let publication =
                Publication { topic, properties, payload, qos, retain, ..Publication::default() };
            connect.will = Some(Will { publication, delay: Duration::from_secs(delay.into()), lifetime });
        }
        if flags & 0x80 != 0 {
            rest.text()?;
        }
        if flags & 0x40 != 0 {
            rest.binary()?;
        }
        rest.end().map(|()| connect)
    }
}

fn put_varint(out: &mut Vec<u8>, mut number: usize) {
    while number > 0x7F {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// A packet of this type and flags.
pub fn packet(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = vec![kind];
    put_varint(&mut out, body.len());
    out.extend_from_slice(body);
    out
}

/// How a message is written, where subscribers differ.
#[derive(Clone, Copy, PartialEq)]
pub struct Form {
    pub version: Version,
    pub qos: u8,
    pub retain: bool,
    /// It was sent before.
    pub dup: bool,
}

/// A PUBLISH: its parts around the packet id, written once for all subscribers that take it in one form.
pub struct Publish {
    head: Vec<u8>,
    properties: Vec<u8>,
    payload: Bytes,
}

impl Publish {
    pub fn new(of: &Publication, form: Form, shard: &Shard) -> Publish {
        let (mut head, mut properties) = (Vec::with_capacity(of.topic.len() + 7), Vec::new());
        if form.version == Version::Five {
            let left = of.expires.map(|at| (at - shard.now()).as_secs() as u32);
            put_varint(&mut properties, of.properties.len() + left.map_or(0, |_| 5));
            if let Some(left) = left {
                properties.push(0x02);
                properties.extend_from_slice(&left.to_be_bytes());
            }
            properties.extend_from_slice(&of.properties);
        }
        head.push(0x30 | u8::from(form.dup) << 3 | form.qos << 1 | u8::from(form.retain));
        let id_len = 2 * usize::from(form.qos);
        put_varint(&mut head, 2 + of.topic.len() + id_len + properties.len() + of.payload.len());
        head.extend_from_slice(&(of.topic.len() as u16).to_be_bytes());
        head.extend_from_slice(&of.topic);
        Publish { head, properties, payload: of.payload.clone() }
    }

    pub fn bytes(&self) -> usize {
        let id_len = 2 * usize::from(self.head[0] >> 1 & 1);
        self.head.len() + id_len + self.properties.len() + self.payload.len()
    }

    /// Queues it for a client. From 32 KiB on the payload is shared with all others that are sent it, below it is copied.
    pub fn push(&self, to: &LocalHandle, id: Option<u16>) -> Result<(), PushError> {
        let id_bytes = id.unwrap_or_default().to_be_bytes();
        let id = if id.is_some() { &id_bytes[..] } else { &[] };
        to.push_parts([
            (&self.head).into(),
            id.into(),
            (&self.properties).into(),
            Payload::from(self.payload.clone()),
        ])
    }
}
