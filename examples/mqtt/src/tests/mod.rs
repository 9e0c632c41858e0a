//! Whole brokers by seed, in virtual time, with clients that write and read packets byte by byte.

mod bad_input;
mod bounds;
mod messages;
mod sessions;
mod statements;
mod transports;
mod wills;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};

use super::Args;

const SECOND: Duration = Duration::from_secs(1);

/// A broker on one to four shards.
fn starts(sim: &Sim, args: &[&str]) -> SimServer {
    starts_on(sim, 1 + sim.seed() as usize % 4, args)
}

fn starts_on(sim: &Sim, shards: usize, args: &[&str]) -> SimServer {
    let args = Args::parse_from([&["mqtt", "--listen", "10.0.0.1:1883"], args].concat());
    sim.start_several(args.server().unwrap().shards(shards)).unwrap()
}

fn packet(kind: u8, body: &[u8]) -> Vec<u8> {
    crate::packet::packet(kind, &[body])
}

fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    [&(text.as_ref().len() as u16).to_be_bytes()[..], text.as_ref()].concat()
}

/// The CONNECT of a client.
#[derive(Clone)]
struct Hello {
    version: u8,
    id: String,
    is_clean: bool,
    keep_alive: u16,
    properties: Vec<u8>,
    /// Flags, topic and payload.
    will: Option<(u8, String, String)>,
}

impl Hello {
    fn new(version: u8, id: &str) -> Hello {
        let (id, properties, will) = (id.to_owned(), Vec::new(), None);
        Hello { version, id, is_clean: true, keep_alive: 0, properties, will }
    }

    /// With a session that outlives the connection.
    fn kept(self) -> Hello {
        let expiry = [&[0x11][..], &3600u32.to_be_bytes()].concat();
        Hello { is_clean: false, properties: if self.version == 5 { expiry } else { vec![] }, ..self }
    }

    /// With a will of `flags`: its QoS and whether it is retained.
    fn will(self, flags: u8, topic: &str, payload: &str) -> Hello {
        Hello { will: Some((flags, topic.into(), payload.into())), ..self }
    }

    fn bytes(&self) -> Vec<u8> {
        let properties = |bytes: &[u8]| match self.version {
            5 => [&[bytes.len() as u8], bytes].concat(),
            _ => vec![],
        };
        let mut body = [&text("MQTT")[..], &[self.version]].concat();
        let will = self.will.as_ref().map_or(0, |(flags, ..)| flags | 4);
        body.push(will | u8::from(self.is_clean) << 1);
        body.extend(self.keep_alive.to_be_bytes());
        body.extend(properties(&self.properties));
        body.extend(text(&self.id));
        if let Some((_, topic, payload)) = &self.will {
            body.extend([properties(b"\x18\0\0\0\x09"), text(topic), text(payload)].concat());
        }
        packet(0x10, &body)
    }

    /// Connects. The second value is true if the session was there.
    async fn connects(&self, net: &Net, addr: SocketAddr) -> io::Result<(Client, bool)> {
        let mut stream = net.connect(addr).await?;
        stream.send(self.bytes()).await?;
        let mut client = Client { stream, version: self.version, last_id: 0, unread: Vec::new() };
        let (kind, body) = client.packet().await?;
        assert_eq!((kind, body[1]), (0x20, 0), "CONNACK is {body:?}");
        Ok((client, body[0] == 1))
    }
}

/// A message as a client was sent it.
#[derive(Clone, Debug, PartialEq)]
struct Heard {
    topic: String,
    payload: String,
    qos: u8,
    retain: bool,
    dup: bool,
    id: u16,
    properties: Vec<u8>,
}

struct Client {
    stream: ClientStream,
    version: u8,
    last_id: u16,
    /// Messages that came while something else was waited for.
    unread: Vec<Heard>,
}

impl Client {
    async fn packet(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let kind = self.stream.exactly(1).await?[0];
        let (mut len, mut shift) = (0, 0);
        loop {
            let byte = self.stream.exactly(1).await?[0];
            len |= usize::from(byte & 0x7F) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return Ok((kind, self.stream.exactly(len).await?));
            }
        }
    }

    fn heard(&self, kind: u8, body: &[u8]) -> Heard {
        let (len, rest) = body.split_at(2);
        let (topic, rest) = rest.split_at(usize::from(u16::from_be_bytes([len[0], len[1]])));
        let qos = kind >> 1 & 3;
        let (id, rest) = rest.split_at(2 * usize::from(qos));
        let id = id.try_into().map_or(0, u16::from_be_bytes);
        let (properties, payload) = match self.version {
            5 => rest[1..].split_at(rest[0].into()),
            _ => (&[][..], rest),
        };
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let (topic, payload, properties) = (text(topic), text(payload), properties.to_vec());
        Heard { topic, payload, qos, retain: kind & 1 != 0, dup: kind & 8 != 0, id, properties }
    }

    /// The next packet of this kind; messages that come before are kept.
    async fn answer(&mut self, wanted: u8) -> io::Result<Vec<u8>> {
        loop {
            let (kind, body) = self.packet().await?;
            if kind == wanted {
                return Ok(body);
            }
            assert_eq!(kind >> 4, 3, "{body:?} instead of a packet of {wanted:#x}");
            self.unread.push(self.heard(kind, &body));
        }
    }

    /// The next message, which is not acknowledged yet.
    async fn next(&mut self) -> io::Result<Heard> {
        if !self.unread.is_empty() {
            return Ok(self.unread.remove(0));
        }
        let (kind, body) = self.packet().await?;
        assert_eq!(kind >> 4, 3, "{kind:#x} {body:?} instead of a message");
        Ok(self.heard(kind, &body))
    }

    /// The next message, acknowledged.
    async fn hears(&mut self) -> io::Result<Heard> {
        let heard = self.next().await?;
        if heard.qos > 0 {
            self.acknowledges(heard.id).await?;
        }
        Ok(heard)
    }

    async fn acknowledges(&mut self, id: u16) -> io::Result<()> {
        self.stream.send(packet(0x40, &id.to_be_bytes())).await
    }

    fn message(&mut self, topic: &str, payload: &str, qos: u8, properties: &[u8]) -> Vec<u8> {
        let mut body = text(topic);
        if qos > 0 {
            self.last_id += 1;
            body.extend(self.last_id.to_be_bytes());
        }
        if self.version == 5 {
            body.push(properties.len() as u8);
            body.extend(properties);
        }
        body.extend(payload.as_bytes());
        body
    }

    /// Publishes with these flags: twice the QoS, and 1 if it is retained. With QoS 1 waits for the
    /// answer, and returns its code.
    async fn publishes(&mut self, flags: u8, topic: &str, payload: &str) -> io::Result<u8> {
        let body = self.message(topic, payload, flags >> 1, &[]);
        self.stream.send(packet(0x30 | flags, &body)).await?;
        if flags < 2 {
            return Ok(0);
        }
        let answer = self.answer(0x40).await?;
        assert_eq!(answer[..2], self.last_id.to_be_bytes());
        Ok(answer.get(2).copied().unwrap_or(0))
    }

    /// Subscribes with these options, and returns the codes.
    async fn subscribes(&mut self, filters: &[(&str, u8)]) -> io::Result<Vec<u8>> {
        self.last_id += 1;
        let mut body = self.last_id.to_be_bytes().to_vec();
        body.extend((self.version == 5).then_some(0));
        for (filter, options) in filters {
            body.extend([&text(filter)[..], &[*options]].concat());
        }
        self.stream.send(packet(0x82, &body)).await?;
        self.codes(0x90).await
    }

    async fn unsubscribes(&mut self, filter: &str) -> io::Result<Vec<u8>> {
        self.last_id += 1;
        let properties = if self.version == 5 { &[0][..] } else { &[] };
        let body = [&self.last_id.to_be_bytes()[..], properties, &text(filter)].concat();
        self.stream.send(packet(0xA2, &body)).await?;
        self.codes(0xB0).await
    }

    async fn codes(&mut self, kind: u8) -> io::Result<Vec<u8>> {
        let answer = self.answer(kind).await?;
        assert_eq!(answer[..2], self.last_id.to_be_bytes());
        Ok(answer[if self.version == 5 { 3 } else { 2 }..].to_vec())
    }

    /// Everything that was sent to it before is there when this returns.
    async fn pings(&mut self) -> io::Result<()> {
        self.stream.send([0xC0, 0]).await?;
        self.answer(0xD0).await.map(drop)
    }

    async fn disconnects(mut self) -> io::Result<()> {
        self.stream.send([0xE0, 0]).await?;
        self.stream.closed().await.map(drop)
    }
}

/// A count that clients wait for.
#[derive(Clone, Default)]
struct Steps(Rc<Cell<usize>>);

impl Steps {
    fn done(&self) {
        self.0.set(self.0.get() + 1);
    }

    async fn reach(&self, net: &Net, count: usize) {
        while self.0.get() < count {
            net.sleep(Duration::from_millis(10)).await;
        }
    }
}
