//! The sessions whose home a shard is, wherever their clients are connected.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringserve::task::JoinHandle;

use crate::node::Node;
use crate::packet::{Publication, Read, Reason, Will};
use crate::session::{Answer, Attach, Goodbye, Kept, Message, Place, Session, State};
use crate::topics::{Options, filter_bytes};

/// Messages of QoS 1 that a client is sent before it acknowledges the first, if it takes that many.
const IN_FLIGHT_MAX: usize = 64;

impl Node {
    pub fn attach(self: &Rc<Self>, shard: usize, attach: Attach) -> Read<Answer> {
        let mut old = self.sessions.borrow().get(&attach.id).cloned();
        let will_bytes = attach.will.as_ref().map_or(0, Will::bytes);
        let is_one_more = old.is_none() && self.sessions.borrow().len() >= self.bounds.sessions_max;
        // The client's last will makes room, and so does all that a clean start ends.
        let left = old.as_ref().map_or(0, |session| {
            let state = session.state.borrow();
            state.will_bytes + if attach.is_clean { state.bytes } else { 0 }
        });
        if is_one_more || self.kept_bytes.get() - left + will_bytes > self.bounds.sessions_bytes_max {
            return Err(Reason::QuotaExceeded);
        }
        if let Some(session) = &old {
            let (before, will, ends) = {
                let mut state = session.state.borrow_mut();
                let (before, will) = (state.connection.take(), state.will.take());
                let ends = attach.is_clean || state.expiry.is_zero();
                state.timer.take().inspect(JoinHandle::abort);
                // One with a delay is not published if the session goes on.
                (before, will.filter(|will| ends || before.is_some() && will.delay.is_zero()), ends)
            };
            if let Some((shard, connection)) = before {
                self.post(shard, Message::Evict(connection));
            }
            self.publish_will(session, will);
            if ends {
                self.end(session);
                old = None;
            }
        }
        let is_present = old.is_some();
        let session =
            old.unwrap_or_else(|| Rc::new(Session { id: attach.id.clone(), state: RefCell::default() }));
        self.sessions.borrow_mut().insert(attach.id, session.clone());
        let filters = {
            let mut state = session.state.borrow_mut();
            state.connection = Some((shard, attach.connection));
            state.in_flight_max = attach.in_flight_max.min(IN_FLIGHT_MAX);
            (state.expiry, state.will) = (attach.expiry, attach.will);
            self.kept_bytes.update(|bytes| bytes + will_bytes - state.will_bytes);
            state.will_bytes = will_bytes;
            // What the client did not acknowledge is sent again, in order.
            while let Some(kept) = state.in_flight.pop_back() {
                state.waiting.push_front(kept);
            }
            state.filters.iter().map(|(filter, options)| (filter.clone(), *options)).collect()
        };
        self.send_waiting(&session);
        Ok(Answer { is_present, filters, ..Answer::default() })
    }

    pub fn detach(self: &Rc<Self>, id: &Arc<str>, from: Place, goodbye: Goodbye) {
        let Some(session) = self.session(id, from) else { return };
        let mut state = session.state.borrow_mut();
        state.connection = None;
        state.expiry = goodbye.expiry.unwrap_or(state.expiry);
        if goodbye.drops_will {
            state.will = None;
        }
        let (expiry, delay) = (state.expiry, state.will.as_ref().map_or(Duration::ZERO, |will| will.delay));
        let delay = delay.min(expiry);
        let will = state.will.take_if(|_| delay.is_zero());
        if !expiry.is_zero() {
            let (node, session) = (self.clone(), session.clone());
            state.timer = Some(self.shard.spawn(async move {
                node.shard.sleep(delay).await;
                let will = session.state.borrow_mut().will.take();
                node.publish_will(&session, will);
                node.shard.sleep(expiry - delay).await;
                node.end(&session);
            }));
        }
        drop(state);
        self.publish_will(&session, will);
        if expiry.is_zero() {
            self.end(&session);
        }
    }

    fn publish_will(self: &Rc<Self>, session: &Session, will: Option<Will>) {
        if let Some(will) = will {
            let (node, mut publication) = (self.clone(), will.publication(&session.id, &self.shard));
            publication.retain &= self.has_room(&publication);
            self.shard.spawn(async move { node.publish(Arc::new(publication)).await });
        }
    }

    fn end(&self, session: &Session) {
        self.sessions.borrow_mut().remove(&session.id);
        let state = session.state.take();
        state.filters.keys().for_each(|filter| self.kept.borrow_mut().remove(filter.as_bytes(), &session.id));
        self.kept_bytes.update(|bytes| bytes - state.bytes - state.will_bytes);
    }

    /// The session of a client, unless another connection has it by now.
    fn session(&self, id: &Arc<str>, from: Place) -> Option<Rc<Session>> {
        let sessions = self.sessions.borrow();
        sessions.get(id).filter(|session| session.state.borrow().connection == Some(from)).cloned()
    }

    /// Answers each filter with its code, and whether it is a new one.
    pub fn subscribe(&self, id: &Arc<str>, from: Place, filters: Vec<(Arc<str>, Options)>) -> Read<Answer> {
        let Some(session) = self.session(id, from) else { return Err(Reason::TakenOver) };
        let mut state = session.state.borrow_mut();
        let subscribe = |(filter, options): (Arc<str>, Options)| {
            let is_new = !state.filters.contains_key(&filter);
            let bytes = if is_new { filter_bytes(&filter) } else { 0 };
            let is_one_more = is_new && state.filters.len() >= self.bounds.filters_max;
            if is_one_more || !self.count(&mut state, bytes) {
                return (Reason::QuotaExceeded as u8, false);
            }
            match options.qos() {
                0 => self.kept.borrow_mut().remove(filter.as_bytes(), id),
                _ => self.kept.borrow_mut().insert(&filter, id.clone(), (session.clone(), options)),
            }
            state.filters.insert(filter, options);
            (options.qos(), is_new)
        };
        Ok(Answer { codes: filters.into_iter().map(subscribe).collect(), ..Answer::default() })
    }

    pub fn unsubscribe(&self, id: &Arc<str>, from: Place, filters: &[Arc<str>]) -> Read<Answer> {
        let Some(session) = self.session(id, from) else { return Err(Reason::TakenOver) };
        let unsubscribe = |filter: &Arc<str>| {
            self.kept.borrow_mut().remove(filter.as_bytes(), id);
            // "No subscription existed" is a success.
            let mut state = session.state.borrow_mut();
            if state.filters.remove(filter).is_none() {
                return (0x11, false);
            }
            self.discount(&mut state, filter_bytes(filter));
            (0, false)
        };
        Ok(Answer { codes: filters.iter().map(unsubscribe).collect(), ..Answer::default() })
    }

    /// Has a session be sent retained messages of QoS 1 behind a topic. Says behind which one to go on once it has room.
    pub fn send_retained(
        self: &Rc<Self>,
        id: &Arc<str>,
        from: Place,
        filter: &str,
        after: Bytes,
    ) -> Read<Answer> {
        let Some(session) = self.session(id, from) else { return Err(Reason::TakenOver) };
        let next = self.retained.borrow().matching(filter, after, |publication| {
            publication.qos == 0 || self.keep(&session, publication, true)
        });
        Ok(Answer { next, ..Answer::default() })
    }

    /// Keeps a message of QoS 1 for a client, and sends it if that may be. False if too many wait: then it is dropped.
    pub fn keep(self: &Rc<Self>, session: &Session, publication: &Arc<Publication>, retain: bool) -> bool {
        let mut state = session.state.borrow_mut();
        if !self.count(&mut state, publication.bytes()) {
            return false;
        }
        state.waiting.push_back(Kept { id: None, retain, publication: publication.clone() });
        drop(state);
        self.send_waiting(session);
        true
    }

    fn send_waiting(self: &Rc<Self>, session: &Session) {
        while let Some((shard, message)) = self.next_waiting(&mut session.state.borrow_mut()) {
            self.post(shard, message);
        }
    }

    /// The next message for a client that is connected and may be sent one.
    fn next_waiting(&self, state: &mut State) -> Option<(usize, Message)> {
        let (shard, connection) = state.connection.filter(|_| state.in_flight.len() < state.in_flight_max)?;
        let mut kept = state.waiting.pop_front()?;
        while kept.publication.is_over(&self.shard) {
            self.discount(state, kept.publication.bytes());
            kept = state.waiting.pop_front()?;
        }
        let (dup, retain, publication) = (kept.id.is_some(), kept.retain, kept.publication.clone());
        let mut next = state.last_id;
        while !dup && (next == state.last_id || state.in_flight.iter().any(|kept| kept.id == Some(next))) {
            next = next.checked_add(1).unwrap_or(1);
        }
        let id = *kept.id.get_or_insert(next);
        state.last_id = next;
        state.in_flight.push_back(kept);
        Some((shard, Message::Deliver { connection, id, dup, retain, publication }))
    }

    /// Counts what is kept for a client. False, and nothing is counted, if that is too much.
    fn count(&self, state: &mut State, bytes: usize) -> bool {
        let (of_session, of_all) = (state.bytes + bytes, self.kept_bytes.get() + bytes);
        let fits = of_session <= self.bounds.session_bytes_max() && of_all <= self.bounds.sessions_bytes_max;
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

    pub fn acknowledged(self: &Rc<Self>, id: &Arc<str>, from: Place, packet: u16) {
        let Some(session) = self.session(id, from) else { return };
        let mut state = session.state.borrow_mut();
        let place = state.in_flight.iter().position(|kept| kept.id == Some(packet));
        if let Some(kept) = place.and_then(|place| state.in_flight.remove(place)) {
            self.discount(&mut state, kept.publication.bytes());
        }
        drop(state);
        self.send_waiting(&session);
    }
}
