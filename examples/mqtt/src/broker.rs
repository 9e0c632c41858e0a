//! What a client asks on its connection, and what it is answered.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve::framing::FrameError;
use ringserve::limits::{ConnLimits, IdleCounts};
use ringserve::{Closed, Cx, Failure, Frame, Service};

use crate::node::{Answer, Goodbye, Message, Node, Request};
use crate::packet::{Connect, Publication, Read, Reader, Reason, disconnect, packet};

/// Bytes of a client id at most: it is kept with each message of the client.
const ID_BYTES_MAX: usize = 256;

/// Bytes of a will at most: each session may keep one.
const WILL_BYTES_MAX: usize = 4096;

/// Types of packets.
const SUBACK: u8 = 0x90;
const UNSUBACK: u8 = 0xB0;

/// The broker on one shard.
pub struct Broker(pub Rc<Node>);

/// A connection, as the framework keeps it.
#[derive(Default)]
pub struct Connection {
    /// From its CONNECT on.
    client: OnceCell<Arc<Connect>>,
    /// It was sent its CONNACK.
    is_welcome: Cell<bool>,
    goodbye: Cell<Goodbye>,
}

type MqttCx<'a> = Cx<'a, Connection>;

impl Service for Broker {
    type Session = Connection;
    type Error = Reason;

    async fn call(&self, cx: &MqttCx<'_>, packet: Frame) -> Read<()> {
        let Some(client) = cx.session().client.get() else {
            return if packet[0] == 0x10 {
                self.connect(cx, &packet).await
            } else {
                Err(Reason::ProtocolError)
            };
        };
        let mut rest = Reader::of(&packet, client.is_five)?;
        match packet[0] {
            0x30..=0x3F => self.publish(cx, client, &packet).await?,
            0x40 => {
                let request = Request::Acknowledged(rest.packet_id()?);
                // Without an answer: there are as many as messages.
                let _ended = self.0.tell(client, cx.id(), request).await;
            }
            0x82 => self.filters(cx, client, rest, SUBACK).await?,
            0xA2 => self.filters(cx, client, rest, UNSUBACK).await?,
            0xC0 => cx.write(&[0xD0, 0]),
            0xE0 => disconnected(cx, rest)?,
            // What belongs to QoS 2 and to authentication, a second CONNECT, packets of servers, and other flags.
            _ => return Err(Reason::ProtocolError),
        }
        Ok(())
    }

    fn malformed(&self, cx: &MqttCx<'_>, error: &FrameError) {
        let is_large = matches!(error, FrameError::TooLarge { .. });
        leave(cx, if is_large { Reason::TooLarge } else { Reason::MalformedPacket });
    }

    fn failed(&self, cx: &MqttCx<'_>, failure: &Failure<'_, Reason>) {
        leave(cx, if let Failure::Error(reason) = failure { **reason } else { Reason::Unspecified });
    }

    fn draining(&self, cx: &MqttCx<'_>) {
        leave(cx, Reason::ShuttingDown);
    }

    fn close(&self, closed: &Closed<'_, Connection>) {
        let (node, Connection { client, goodbye, .. }) = (&self.0, closed.session());
        // At the end of the server all sessions end, without their wills.
        if let Some(client) = client.get().filter(|_| !node.shard.is_draining()) {
            node.shard.spawn(node.tell(client, closed.id(), Request::Closed(goodbye.get())));
        }
    }
}

/// Closes the connection, after the code that version 5 has for the reason.
fn leave(cx: &MqttCx<'_>, reason: Reason) {
    let Connection { client, is_welcome, .. } = cx.session();
    if let Some(client) = client.get().filter(|client| is_welcome.get() && client.is_five) {
        cx.write(disconnect(reason, client.packet_max));
    }
    cx.close();
}

/// The client says goodbye.
fn disconnected(cx: &MqttCx<'_>, mut rest: Reader<'_>) -> Read<()> {
    let code = if rest.left.is_empty() { 0 } else { rest.number(1)? };
    let expiry =
        if rest.left.is_empty() { None } else { rest.properties(&[0x11, 0x1F, 0x26])?.seconds(0x11) };
    rest.end()?;
    cx.session().goodbye.set(Goodbye { drops_will: code == 0, expiry });
    cx.close();
    Ok(())
}

impl Broker {
    async fn connect(&self, cx: &MqttCx<'_>, frame: &[u8]) -> Read<()> {
        let mut rest = Reader::of(frame, false)?;
        let (name, version) = (rest.text()?, rest.number(1)?);
        let is_five = (name, version) == ("MQTT", 5);
        rest.is_five = is_five;
        let attached = match (name, version) {
            ("MQTT", 4 | 5) => self.attach(cx, rest).await,
            ("MQTT" | "MQIsdp", _) => Err(Reason::UnsupportedVersion),
            _ => Err(Reason::MalformedPacket),
        };
        match attached {
            Ok(_) => cx.session().is_welcome.set(true),
            Err(reason) if is_five => cx.write(packet(0x20, &[&[0, reason as u8, 0]])),
            Err(reason) => cx.write(reason.refusal_of_three()),
        }
        attached.map(drop)
    }

    async fn attach(&self, cx: &MqttCx<'_>, rest: Reader<'_>) -> Answer {
        let (node, mut connect) = (&self.0, Connect::read(rest)?);
        if connect.is_assigned && !connect.is_five && !connect.is_clean || connect.id.len() > ID_BYTES_MAX {
            return Err(Reason::IdNotValid);
        }
        if connect.will.as_ref().is_some_and(|will| will.bytes() > WILL_BYTES_MAX) {
            return Err(Reason::TooLarge);
        }
        if connect.is_assigned {
            let (shard, random) = (node.shard.index(), node.shard.random());
            connect.id = format!("shard{shard}-{random:016x}{:016x}", cx.id().bits()).into();
        }
        let idle = Some(Duration::from_millis(1500 * u64::from(connect.keep_alive)));
        let limits = ConnLimits::default().idle_timeout(idle.filter(|idle| !idle.is_zero()));
        cx.set_limits(&limits.idle_counts(IdleCounts::Received)).map_err(|_| Reason::Unspecified)?;

        // Its session hears of the end of the connection, also if that comes before the answer.
        let client = cx.session().client.get_or_init(|| Arc::new(connect));
        let message = Message::Attach(cx.handle(), client.clone());
        node.ask(&client.id, message).await
    }

    async fn publish(&self, cx: &MqttCx<'_>, client: &Connect, frame: &Frame) -> Read<()> {
        let (id, publication) = Publication::read(client.is_five, &frame.to_bytes())?;
        self.0.publish(Publication { from: client.id.clone(), ..publication }).await?;
        if id > 0 {
            cx.write(packet(0x40, &[&id.to_be_bytes()]));
        }
        Ok(())
    }

    /// SUBSCRIBE or UNSUBSCRIBE: the home of the session says a code for each filter.
    async fn filters(&self, cx: &MqttCx<'_>, client: &Connect, mut rest: Reader<'_>, answer: u8) -> Read<()> {
        let (mut reply, mut requests) = (rest.packet_id()?.to_be_bytes().to_vec(), Vec::new());
        let subscribes = answer == SUBACK;
        rest.properties(&[0x26])?;
        while !rest.left.is_empty() || requests.is_empty() {
            let filter = rest.text()?.into();
            requests.push(match subscribes {
                true => Request::Subscribe(filter, rest.options()?),
                false => Request::Unsubscribe(filter),
            });
        }
        reply.extend(client.is_five.then_some(0));
        for request in requests {
            let code = self.0.ask(&client.id, Message::Session(client.id.clone(), cx.id(), request)).await?;
            let of_three = subscribes.then_some(code.min(0x80));
            reply.extend(if client.is_five { Some(code) } else { of_three });
        }
        cx.write(packet(answer, &[&reply]));
        Ok(())
    }
}
