//! Packets of a client on its connection, and the answers.

use std::cell::{Cell, OnceCell};
use std::{rc::Rc, sync::Arc};

use ringserve::framing::{Fields, FrameError};
use ringserve::limits::{ConnLimits, IdleActivity};
use ringserve::service::{CloseCx, Failure};
use ringserve::{Cx, Frame, Service};

use crate::packet::{Connect, Goodbye, Publication, Read, Reader, Reason, TWO_BYTES, packet};
use crate::sessions::{Answer, Node, job, subscription};

/// Bytes of a will at most: each session may keep one.
const WILL_BYTES_MAX: usize = 4096;

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
        let node = &self.0;
        let Some(client) = cx.session().client.get() else {
            return self.connect(cx, &packet).await;
        };
        let rest = Reader::of(&packet, client.is_five)?;
        match packet[0] {
            0x30..=0x3F => self.publish(cx, client, &packet).await?,
            0x40 => {
                let id = rest.acknowledged()?;
                // Without an answer: there are as many as messages.
                let job = job(client, move |node, session| node.acknowledged(session, id));
                let _ended = node.tell(&client.id, job).await;
            }
            0x82 | 0xA2 => self.filters(cx, client, &packet).await?,
            0xC0 => {
                rest.left.end()?;
                cx.write(&[0xD0, 0]);
            }
            0xE0 => {
                let goodbye = rest.goodbye()?;
                // A session that was to end with its connection is not kept by its end.
                if client.expiry.is_zero() && goodbye.expiry.is_some_and(|expiry| !expiry.is_zero()) {
                    return Err(Reason::ProtocolError);
                }
                cx.session().goodbye.set(goodbye);
                cx.close();
            }
            // What belongs to QoS 2 and to authentication, a second CONNECT, packets of servers,
            // and other flags.
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

    fn close(&self, closed: &CloseCx<'_, Connection>) {
        let (node, Connection { client, goodbye, .. }) = (&self.0, closed.session());
        // At the end of the server all sessions end, without their wills.
        if let Some(client) = client.get().filter(|_| !node.shard.is_draining()) {
            let goodbye = goodbye.take();
            let job = job(client, |node, session| node.closed(session, goodbye));
            node.shard.spawn(node.tell(&client.id, job));
        }
    }
}

/// Closes the connection, after the code that version 5 has for the reason.
fn leave(cx: &MqttCx<'_>, reason: Reason) {
    let Connection { client, is_welcome, .. } = cx.session();
    if let Some(client) = client.get().filter(|_| is_welcome.get()) {
        cx.write(client.goodbye(reason));
    }
    cx.close();
}

impl Broker {
    async fn connect(&self, cx: &MqttCx<'_>, frame: &[u8]) -> Read<()> {
        let mut rest = Reader::of(frame, false)?;
        let (name, version) = (rest.text()?, rest.left.u8()?);
        let is_five = version == 5;
        rest.is_five = is_five;
        let attached = match (frame[0], name, version) {
            (0x10, "MQTT", 4 | 5) => self.attach(cx, rest).await,
            (0x10, "MQTT" | "MQIsdp", _) => Err(Reason::UnsupportedVersion),
            // Another packet, or another protocol.
            _ => return Err(Reason::MalformedPacket),
        };
        cx.session().is_welcome.set(attached.is_ok());
        attached.map(drop).inspect_err(|reason| cx.write(reason.refusal(is_five)))
    }

    async fn attach(&self, cx: &MqttCx<'_>, rest: Reader<'_>) -> Answer {
        let (node, mut connect) = (&self.0, Connect::read(rest)?);
        if connect.will.as_ref().is_some_and(|will| will.bytes() > WILL_BYTES_MAX) {
            return Err(Reason::TooLarge);
        }
        if connect.is_assigned {
            let (shard, random) = (node.shard.index(), node.shard.random());
            connect.id = format!("shard{shard}-{random:016x}{:016x}", cx.id().bits()).into();
        }
        let idle = Some(connect.keep_alive * 3 / 2).filter(|idle| !idle.is_zero());
        let limits = ConnLimits::default().idle_timeout(idle).idle_counts(IdleActivity::Received);
        cx.set_limits(&limits).map_err(|_| Reason::Unspecified)?;

        // Its session learns of the end of the connection, also if that comes before the answer.
        let client = cx.session().client.get_or_init(|| Arc::new(connect));
        let (handle, connect) = (cx.handle(), client.clone());
        node.ask(&client.id, Box::new(|node, reply| reply.answer(node.attach(handle, connect)))).await
    }

    async fn publish(&self, cx: &MqttCx<'_>, client: &Connect, frame: &Frame) -> Read<()> {
        let (id, publication) = Publication::read(client.is_five, &frame.to_bytes())?;
        self.0.publish(Publication { from: client.id.clone(), ..publication }).await?;
        if id > 0 {
            cx.write(packet(0x40, &[&id.to_be_bytes()]));
        }
        Ok(())
    }

    /// SUBSCRIBE, which adds filters, or UNSUBSCRIBE: the home of the session says a code for each.
    async fn filters(&self, cx: &MqttCx<'_>, client: &Arc<Connect>, frame: &[u8]) -> Read<()> {
        let (mut rest, adds) = (Reader::of(frame, client.is_five)?, frame[0] == 0x82);
        let mut reply = rest.packet_id()?.to_be_bytes().to_vec();
        rest.properties(&[0x26])?;
        // All are read before one is done, and none is kept meanwhile: there may be thousands.
        let mut count = 0;
        let mut all = Fields::new(rest.left.left());
        while !rest.left.is_empty() || count == 0 {
            rest.text()?;
            if adds {
                rest.options()?;
            }
            count += 1;
        }
        reply.extend(client.is_five.then_some(0));
        for _ in 0..count {
            let filter = Arc::<str>::from(all.text(&TWO_BYTES)?);
            let job = match adds {
                true => subscription(client, filter, all.u8()?),
                false => job(client, move |node, session| node.unsubscribe(session, &filter)),
            };
            let code = self.0.ask(&client.id, job).await?;
            let of_three = adds.then_some(code.min(0x80));
            reply.extend(if client.is_five { Some(code) } else { of_three });
        }
        cx.write(packet(if adds { 0x90 } else { 0xB0 }, &[&reply]));
        Ok(())
    }
}
