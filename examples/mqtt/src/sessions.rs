//! The sessions whose home a shard is, wherever their clients are connected: what they subscribe to, and the messages that wait.
//!
//! ```text
//!   keep ──▶ waiting ── the connection has room, and the client takes more ──▶ in flight ── acknowledged ──▶
//!               ▲                        (QoS 0 ends here)                        │
//!               └────────────────── the client connects again ◀──────────────────┘
//! ```

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringserve::task::JoinHandle;
use ringserve::topics::{is_filter, matching};
use ringserve::{ConnHandle, ConnId, PushError};

use crate::node::{Answer, Goodbye, Kept, Node, Request, Session, State};
use crate::packet::{Connect, DUP, EXPIRY_MAX, Publication, QOS_1, Reason, disconnect};

/// Messages of QoS 1 that a client is sent before it acknowledges the first, if it takes that many.
const IN_FLIGHT_MAX: usize = 64;

/// Bytes that a level of a filter counts for.
const LEVEL_BYTES: usize = 256;

/// What a filter counts for where it is kept.
fn filter_bytes(filter: &str) -> usize {
    filter.len() + LEVEL_BYTES * filter.split('/').count()
}

/// The QoS of a subscription: a client that asks for QoS 2 is granted QoS 1.
fn granted(options: u8) -> u8 {
    (options & 3).min(1)
}

impl Node {
    /// Gives a session to a connection, which is sent its CONNACK before all else.
    pub fn attach(self: &Rc<Self>, connection: ConnHandle, client: Arc<Connect>) -> Answer {
        let (id, old) = (client.id.clone(), self.sessions.borrow().get(&client.id).cloned());
        if old.is_none() && self.sessions.borrow().len() >= self.bounds.sessions_max {
            return Err(Reason::QuotaExceeded);
        }
        let kept = old.filter(|session| self.take_over(session, client.is_clean));
        // The connection was sent nothing before, so there is room.
        let _gone = connection.push_raw(client.answer(kept.is_some()));
        let session = kept.unwrap_or_default();
        let mut state = session.borrow_mut();
        (state.id, state.will, state.expiry) = (id.clone(), client.will.clone(), client.expiry);
        (state.connection, state.is_stalled) = (Some((connection, client)), false);
        drop(state);
        self.sessions.borrow_mut().insert(id, session.clone());
        self.send_waiting(&session);
        Ok(0)
    }

    /// Ends what a session has of its last connection, for the next one. False if the session ends with it.
    fn take_over(self: &Rc<Self>, session: &Rc<Session>, is_clean: bool) -> bool {
        let mut state = session.borrow_mut();
        state.timer.take().inspect(JoinHandle::abort);
        if let Some((connection, last)) = state.connection.take() {
            if last.is_five {
                let _full_or_gone = connection.push_raw(disconnect(Reason::TakenOver, last.packet_max));
            }
            connection.close();
        }
        // What the client did not acknowledge is sent again, in order.
        while let Some(kept) = state.in_flight.pop_back() {
            state.waiting.push_front(Kept { flags: kept.flags | DUP, ..kept });
        }
        let goes_on = !is_clean && !state.expiry.is_zero();
        drop(state);
        self.publish_will(session);
        if !goes_on {
            self.end(session);
        }
        goes_on
    }

    /// The session that a connection has, unless another connection has it by now.
    pub fn session(&self, id: &str, shard: usize, connection: ConnId) -> Option<Rc<Session>> {
        let session = self.sessions.borrow().get(id)?.clone();
        let last = session.borrow().connection.as_ref().map(|(last, _)| (last.shard(), last.id()));
        (last == Some((shard, connection))).then_some(session)
    }

    /// Does what a connection asks of its session.
    pub fn serve(self: &Rc<Self>, session: &Rc<Session>, request: Request) -> u8 {
        match request {
            Request::Subscribe(filter, options) => return self.subscribe(session, filter, options),
            Request::Unsubscribe(filter) => return self.unsubscribe(session, &filter),
            Request::Acknowledged(id) => self.acknowledged(session, id),
            Request::Closed(goodbye) => self.closed(session, goodbye),
        }
        0
    }

    fn subscribe(self: &Rc<Self>, session: &Rc<Session>, filter: Arc<str>, options: u8) -> u8 {
        if !is_filter(&filter) || filter.starts_with("$share/") {
            return Reason::FilterInvalid as u8;
        }
        let mut state = session.borrow_mut();
        let (id, is_new) = (state.id.clone(), !state.filters.contains(&filter));
        if is_new && !self.count(&mut state, filter_bytes(&filter)) {
            return Reason::QuotaExceeded as u8;
        }
        state.filters.insert(filter.clone());
        drop(state);
        self.filters.borrow_mut().insert(&filter, id, (session.clone(), options));
        // Retained messages are asked for always, with a new filter, or never.
        if matches!((options >> 4, is_new), (0, _) | (1, true)) {
            for (_, publication) in matching(&self.retained.borrow(), &filter) {
                self.keep(session, publication, options, true);
            }
        }
        granted(options)
    }

    fn unsubscribe(&self, session: &Session, filter: &str) -> u8 {
        let mut state = session.borrow_mut();
        if !state.filters.remove(filter) {
            // "No subscription existed" is a success.
            return 0x11;
        }
        self.filters.borrow_mut().remove(filter, &state.id);
        self.discount(&mut state, filter_bytes(filter));
        0
    }

    fn acknowledged(self: &Rc<Self>, session: &Rc<Session>, id: u16) {
        let mut state = session.borrow_mut();
        let place = state.in_flight.iter().position(|kept| kept.id == id);
        if let Some(kept) = place.and_then(|place| state.in_flight.remove(place)) {
            self.discount(&mut state, kept.publication.bytes());
        }
        drop(state);
        self.send_waiting(session);
    }

    fn closed(self: &Rc<Self>, session: &Rc<Session>, goodbye: Goodbye) {
        session.borrow_mut().will.take_if(|_| goodbye.drops_will);
        self.publish_will(session);
        let (node, ends, mut state) = (self.clone(), session.clone(), session.borrow_mut());
        state.connection = None;
        // A session that was to end with its connection does so.
        if !state.expiry.is_zero() {
            state.expiry = goodbye.expiry.unwrap_or(state.expiry).min(EXPIRY_MAX);
        }
        let expiry = state.expiry;
        state.timer = Some(self.shard.spawn(async move {
            node.shard.sleep(expiry).await;
            node.end(&ends);
        }));
    }

    fn publish_will(self: &Rc<Self>, session: &Session) {
        if let Some(will) = session.borrow_mut().will.take() {
            let node = self.clone();
            self.shard.spawn(async move { node.publish(will).await });
        }
    }

    fn end(&self, session: &Session) {
        let State { id, filters, bytes, .. } = session.take();
        self.sessions.borrow_mut().remove(&id);
        filters.iter().for_each(|filter| self.filters.borrow_mut().remove(filter, &id));
        self.kept_bytes.update(|all| all - bytes);
    }

    /// Has a message wait for a client, and sends it if that may be. Without room it is dropped, and so it is with QoS 0 where
    /// the client is not connected.
    pub fn keep(self: &Rc<Self>, to: &Rc<Session>, message: &Arc<Publication>, options: u8, retain: bool) {
        let mut state = to.borrow_mut();
        let qos = message.qos.min(granted(options));
        if qos == 0 && state.connection.is_none() || !self.count(&mut state, message.bytes()) {
            return;
        }
        let flags = qos << 1 | u8::from(retain);
        state.waiting.push_back(Kept { publication: message.clone(), flags, id: 0 });
        drop(state);
        self.send_waiting(to);
    }

    /// Sends what waits, as far as the connection has room and the client takes more before it acknowledges.
    fn send_waiting(self: &Rc<Self>, session: &Rc<Session>) {
        let state = &mut *session.borrow_mut();
        while let (Some((connection, client)), Some(next)) = (&state.connection, state.waiting.front_mut()) {
            let is_answered = next.flags & QOS_1 != 0;
            let in_flight_max = IN_FLIGHT_MAX.min(client.receive_max as usize);
            if state.is_stalled || is_answered && state.in_flight.len() >= in_flight_max {
                return;
            }
            while is_answered && next.id == 0 {
                state.last_id = state.last_id.checked_add(1).unwrap_or(1);
                let is_taken = state.in_flight.iter().any(|kept| kept.id == state.last_id);
                next.id = if is_taken { 0 } else { state.last_id };
            }
            let left = next.publication.expires.map(|at| at - self.shard.now());
            let packet = self.packet(client.is_five, next, left);
            let fits = left != Some(Duration::ZERO) && packet.len() <= client.packet_max as usize;
            if fits && connection.push_raw(packet) == Err(PushError::Full) {
                state.is_stalled = true;
                let (node, session, connection) = (self.clone(), session.clone(), connection.clone());
                self.shard.spawn(async move {
                    connection.ready().await;
                    session.borrow_mut().is_stalled = false;
                    node.send_waiting(&session);
                });
                return;
            }
            let Some(sent) = state.waiting.pop_front() else { return };
            if fits && is_answered {
                state.in_flight.push_back(sent);
            } else {
                self.discount(state, sent.publication.bytes());
            }
        }
    }

    fn packet(&self, is_five: bool, next: &Kept, left: Option<Duration>) -> Bytes {
        let (Kept { publication, flags, id }, mut made) = (next, self.made.borrow_mut());
        if let Some((of, of_id, of_left, packet)) = made.get(&(is_five, *flags))
            && Arc::ptr_eq(of, publication)
            && (*of_id, *of_left) == (*id, left)
        {
            return packet.clone();
        }
        let packet = publication.encode(is_five, *flags, *id, left);
        made.insert((is_five, *flags), (publication.clone(), *id, left, packet.clone()));
        packet
    }

    /// Counts what is kept for a client. False, and nothing is counted, if that is too much.
    fn count(&self, state: &mut State, bytes: usize) -> bool {
        let (of_session, of_all) = (state.bytes + bytes, self.kept_bytes.get() + bytes);
        let bounds = &self.bounds;
        let fits = of_session <= bounds.session_bytes_max && of_all <= bounds.sessions_bytes_max;
        if fits {
            state.bytes = of_session;
            self.kept_bytes.set(of_all);
        }
        fits
    }

    fn discount(&self, state: &mut State, bytes: usize) {
        state.bytes -= bytes;
        self.kept_bytes.update(|all| all - bytes);
    }
}
