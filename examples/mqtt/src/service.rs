//! What a client asks, and what it is answered.

use std::cell::{Cell, OnceCell};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve::framing::FrameError;
use ringserve::limits::{ConnLimits, IdleCounts};
use ringserve::{Closed, Cx, Failure, Frame, Service};

use crate::node::{Client, Node};
use crate::packet::{Connect, Publication, Read, Reader, Reason, Version, packet};
use crate::session::{Attach, Goodbye, Message};
use crate::topics::{Options, is_filter};

/// Bytes of a client id at most: it is kept with each message of the client.
const ID_BYTES_MAX: usize = 256;

/// A connection, as the framework keeps it.
#[derive(Default)]
pub struct Connection {
    /// From its CONNECT on.
    client: OnceCell<Rc<Client>>,
    goodbye: Cell<Goodbye>,
}

/// The broker on one shard.
pub struct Broker(pub Rc<Node>);

impl Service<u8> for Broker {
    type Session = Connection;
    type Error = Reason;

    async fn call(&self, cx: &Cx<'_, Connection>, frame: Frame<u8>) -> Read<()> {
        let Some(client) = cx.session().client.get() else {
            return if *frame.head() == 0x10 {
                self.connect(cx, &frame).await
            } else {
                Err(Reason::ProtocolError)
            };
        };
        match *frame.head() {
            0x30..=0x3F => self.publish(cx, client, &frame).await,
            0x40 => {
                let id = Reader(&frame).packet_id()?;
                if client.acknowledges(id) {
                    let acknowledged = Message::Acknowledged(client.id.clone(), cx.id(), id);
                    self.0.tell(client.home, acknowledged).await;
                }
                Ok(())
            }
            0x82 => self.subscribe(cx, client, &frame).await,
            0xA2 => self.unsubscribe(cx, client, &frame).await,
            0xC0 => {
                cx.write(&[0xD0, 0]);
                Ok(())
            }
            0xE0 => self.disconnect(cx, client, &frame),
            // What belongs to QoS 2 and to authentication, a second CONNECT, and packets of servers.
            0x10 | 0x20 | 0x50 | 0x62 | 0x70 | 0x90 | 0xB0 | 0xD0 | 0xF0 => Err(Reason::ProtocolError),
            _ => Err(Reason::MalformedPacket),
        }
    }

    fn malformed(&self, cx: &Cx<'_, Connection>, error: &FrameError) {
        let reason = if error.code().is_some() { Reason::MalformedPacket } else { Reason::TooLarge };
        cx.session().client.get().inspect(|client| client.disconnect(reason));
    }

    fn failed(&self, cx: &Cx<'_, Connection>, failure: &Failure<'_, Reason>) {
        let reason = if let Failure::Error(reason) = failure { **reason } else { Reason::Unspecified };
        cx.session().client.get().inspect(|client| client.disconnect(reason));
    }

    fn draining(&self, cx: &Cx<'_, Connection>) {
        cx.session().client.get().inspect(|client| client.disconnect(Reason::ShuttingDown));
    }

    fn close(&self, closed: &Closed<'_, Connection>) {
        let (node, Connection { client, goodbye }) = (&self.0, closed.session());
        let Some(client) = client.get() else { return };
        node.clients.borrow_mut().remove(&closed.id());
        for filter in client.filters.take() {
            node.filters.borrow_mut().remove(filter.as_bytes(), &closed.id());
        }
        // At the end of the server all sessions end, without their wills.
        if !node.shard.is_draining() {
            // Not before its session heard of it: a connection may end in the turn of its CONNECT.
            node.post_behind(client.home, Message::Detach(client.id.clone(), closed.id(), goodbye.get()));
        }
    }
}

impl Broker {
    async fn connect(&self, cx: &Cx<'_, Connection>, frame: &[u8]) -> Read<()> {
        let mut rest = Reader(frame);
        let version = rest.version().inspect_err(|reason| {
            if *reason == Reason::UnsupportedVersion {
                cx.write(&[0x20, 2, 0, 1]);
            }
        })?;
        let attached = self.attach(cx, version, rest).await;
        if let Err(reason) = attached {
            let code = match (version, reason) {
                (Version::Five, _) => {
                    return Err(reason).inspect_err(|_| cx.write(&[0x20, 3, 0, reason as u8, 0]));
                }
                (_, Reason::IdNotValid) => 2,
                (_, Reason::QuotaExceeded | Reason::ServerBusy) => 3,
                (_, Reason::QosNotSupported) => 5,
                _ => return Err(reason),
            };
            cx.write(&[0x20, 2, 0, code]);
        }
        attached
    }

    async fn attach(&self, cx: &Cx<'_, Connection>, version: Version, rest: Reader<'_>) -> Read<()> {
        let (node, connect) = (&self.0, Connect::read(version, rest)?);
        let is_assigned = connect.id.is_empty();
        if is_assigned && version == Version::Three && !connect.is_clean || connect.id.len() > ID_BYTES_MAX {
            return Err(Reason::IdNotValid);
        }
        let assigned =
            || format!("shard{}-{:016x}{:016x}", node.shard.index(), node.shard.random(), cx.id().bits());
        let id: Arc<str> = if is_assigned { assigned().into() } else { connect.id.into() };
        // The same on all shards.
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(&id);
        let home = (hash % node.shard.count() as u64) as usize;
        let expiry = Duration::from_secs(connect.expiry.min(node.bounds.session_expiry_max).into());
        let packet_max = connect.packet_max as usize;
        let client =
            Client::new((id.clone(), home), version, cx.local_handle(), packet_max, !expiry.is_zero());
        let _ = cx.session().client.set(client.clone());
        node.clients.borrow_mut().insert(cx.id(), client.clone());

        let idle = Duration::from_millis(1500 * u64::from(connect.keep_alive));
        let limits = ConnLimits::default().idle_timeout(Some(idle).filter(|idle| !idle.is_zero()));
        cx.set_limits(&limits.idle_counts(IdleCounts::Received)).map_err(|_| Reason::Unspecified)?;
        let (connection, is_clean, will) = (cx.id(), connect.is_clean, connect.will);
        let in_flight_max = connect.receive_max as usize;
        let attach = Attach { id: id.clone(), connection, is_clean, expiry, in_flight_max, will };
        let answer = node.ask(home, Message::Attach(Box::new(attach))).await?;
        for (filter, options) in answer.filters {
            node.listen(&client, filter, options);
        }
        let mut connack = vec![u8::from(answer.is_present), 0];
        if version == Version::Five {
            // At most QoS 1, no ids of subscriptions, no shared ones, and the largest packet.
            let mut properties = vec![0x24, 1, 0x29, 0, 0x2A, 0, 0x27];
            properties.extend_from_slice(&node.bounds.packet_bytes_max.to_be_bytes());
            if expiry.as_secs() != connect.expiry.into() {
                properties.push(0x11);
                properties.extend_from_slice(&(expiry.as_secs() as u32).to_be_bytes());
            }
            if is_assigned {
                properties.extend_from_slice(&[0x12, 0, id.len() as u8]);
                properties.extend_from_slice(id.as_bytes());
            }
            connack.push(properties.len() as u8);
            connack.append(&mut properties);
        }
        cx.write(packet(0x20, &connack));
        client.is_welcome.set(true);
        node.shard.spawn(client.catch_up());
        Ok(())
    }

    async fn publish(&self, cx: &Cx<'_, Connection>, client: &Client, frame: &Frame<u8>) -> Read<()> {
        let (node, body) = (&self.0, frame.to_bytes());
        let (id, publication) =
            Publication::read(*frame.head(), &body, client.version, &client.id, &node.shard)?;
        let [high, low] = id.to_be_bytes();
        if publication.retain && !node.has_room(&publication) {
            // Without QoS 1 of version 5 there is no other answer than the end.
            if publication.qos == 0 || client.version == Version::Three {
                return Err(Reason::QuotaExceeded);
            }
            cx.write(&[0x40, 3, high, low, Reason::QuotaExceeded as u8]);
            return Ok(());
        }
        let qos = publication.qos;
        node.publish(Arc::new(publication)).await?;
        if qos > 0 {
            cx.write(&[0x40, 2, high, low]);
        }
        Ok(())
    }

    async fn subscribe(&self, cx: &Cx<'_, Connection>, client: &Rc<Client>, frame: &[u8]) -> Read<()> {
        let (node, mut rest) = (&self.0, Reader(frame));
        let (mut reply, mut has_id) = (rest.packet_id()?.to_be_bytes().to_vec(), false);
        rest.properties(client.version, &[0x0B, 0x26], |id, _, _| has_id |= id == 0x0B)?;
        if has_id {
            return Err(Reason::IdsNotSupported);
        }
        if rest.0.is_empty() {
            return Err(Reason::ProtocolError);
        }
        let (mut checked, mut asked) = (Vec::new(), Vec::new());
        while !rest.0.is_empty() {
            let (filter, options) = (rest.text()?, rest.number(1)? as u8);
            let reserved = if client.version == Version::Five { 0xC0 } else { 0xFC };
            if options & reserved != 0 || options & 3 == 3 || options & 0x30 == 0x30 {
                return Err(Reason::MalformedPacket);
            }
            let refused = match filter {
                _ if filter.starts_with("$share/") => Some(Reason::SharedNotSupported),
                _ if !is_filter(filter) => Some(Reason::FilterInvalid),
                _ if asked.len() == node.bounds.filters_max => Some(Reason::QuotaExceeded),
                _ => None,
            };
            if refused.is_none() {
                asked.push((Arc::from(filter), Options(options)));
            }
            checked.push(refused);
        }
        let message = Message::Subscribe(client.id.clone(), cx.id(), asked.clone());
        let codes = node.ask(client.home, message).await?.codes;
        let (mut answers, mut wanted) = (asked.into_iter().zip(codes), Vec::new());
        reply.extend((client.version == Version::Five).then_some(0));
        for refused in checked {
            let mut code = refused.map_or(0x80, |reason| reason as u8);
            if refused.is_none()
                && let Some(((filter, options), (granted, is_new))) = answers.next()
            {
                code = granted;
                if code < 0x80 {
                    node.listen(client, filter.clone(), options);
                    wanted.extend(options.wants_retained(is_new).then_some((filter, code)));
                }
            }
            reply.push(if client.version == Version::Three { code.min(0x80) } else { code });
        }
        cx.write(packet(0x90, &reply));
        if !client.wants_retained(wanted, 2 * node.bounds.filters_max)? {
            return Ok(());
        }
        // Beside the calls, which bring the acknowledgements for which it may wait.
        let retained = node.clone().send_all_retained(client.clone());
        cx.spawn_on_connection(retained).map_err(|_| Reason::QuotaExceeded).map(drop)
    }

    async fn unsubscribe(&self, cx: &Cx<'_, Connection>, client: &Client, frame: &[u8]) -> Read<()> {
        let (node, mut rest, mut filters) = (&self.0, Reader(frame), Vec::new());
        let mut reply = rest.packet_id()?.to_be_bytes().to_vec();
        rest.properties(client.version, &[0x26], |_, _, _| {})?;
        while !rest.0.is_empty() {
            filters.push(Arc::<str>::from(rest.text()?));
        }
        if filters.is_empty() {
            return Err(Reason::ProtocolError);
        }
        for filter in &filters {
            client.filters.borrow_mut().remove(filter);
            node.filters.borrow_mut().remove(filter.as_bytes(), &cx.id());
        }
        let message = Message::Unsubscribe(client.id.clone(), cx.id(), filters);
        let codes = node.ask(client.home, message).await?.codes;
        if client.version == Version::Five {
            reply.push(0);
            reply.extend(codes.iter().map(|(code, _)| code));
        }
        cx.write(packet(0xB0, &reply));
        Ok(())
    }

    fn disconnect(&self, cx: &Cx<'_, Connection>, client: &Client, frame: &[u8]) -> Read<()> {
        let (mut rest, mut expiry) = (Reader(frame), None);
        if client.version == Version::Three {
            rest.end()?;
        }
        let code = if frame.is_empty() { 0 } else { rest.number(1)? };
        if !rest.0.is_empty() {
            rest.properties(client.version, &[0x11, 0x1F, 0x26], |id, seconds, _| {
                expiry = Some(Duration::from_secs(seconds.into())).filter(|_| id == 0x11).or(expiry);
            })?;
        }
        rest.end()?;
        if expiry.is_some_and(|expiry| !expiry.is_zero()) && !client.outlives {
            return Err(Reason::ProtocolError);
        }
        let expiry =
            expiry.map(|expiry| expiry.min(Duration::from_secs(self.0.bounds.session_expiry_max.into())));
        cx.session().goodbye.set(Goodbye { drops_will: code == 0, expiry });
        cx.close();
        Ok(())
    }
}
