//! A page: messages for members that lack them, as far as outboxes have room.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringserve_server::task::Page;
use ringserve_server::time::Time;
use ringserve_server::{PushError, SharedPayload};

use crate::form::{Form, Gap};
use crate::node::state::{CUT, Connection, Debts, LATEST, QUEUE, Room, State, VisitPlace};
use crate::options::Slow;
use crate::topic::Topic;

/// Members that a topic's part of a page visits before other topics have theirs.
const QUANTUM: u32 = 32;

/// Topics that one step of a sweep looks at.
const SWEPT_IN_A_STEP: u32 = 16;

/// Looks at an idle topic of a bridge that numbers before it is forgotten. What is kept of it is
/// not lost, but clients that come back soon get it without asking the broker again.
const NUMBERED_IDLE_LOOKS: u8 = 30;

/// The result of a visit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    /// The member has everything, or is gone.
    Done,
    /// Its outbox is full.
    Full,
    /// The page is.
    PageFull,
    /// It was reset.
    Cut,
}

impl State {
    /// Does as much as the page takes: first for connections that have room again, then topic by
    /// topic. True if there is more.
    pub(crate) fn page(&mut self, page: &mut Page, now: Time, forms: &[Arc<dyn Form>]) -> bool {
        while !page.is_full()
            && let Some(number) = self.due.pop_front()
        {
            if !self.resume(number, page, forms) {
                self.due.push_front(number);
            }
            self.visited = None;
        }
        while !page.is_full()
            && let Some(number) = self.active.pop_front()
        {
            if !self.walk(number, page, now, forms) {
                self.active.push_back(number);
            }
            self.visited = None;
        }
        while self.sweep_left > 0 && page.take(0) {
            self.sweep(now);
        }
        !self.due.is_empty() || !self.active.is_empty() || self.sweep_left > 0
    }

    /// Goes on behind a visit that panicked, in a form or in the framing of a service: its member
    /// goes without that message.
    pub(crate) fn step_over(&mut self) {
        let Some(VisitPlace { topic: number, place, due }) = self.visited.take() else { return };
        match due {
            Some(connection) => self.due.push_front(connection),
            None => self.active.push_front(number),
        }
        let Some(topic) = self.topics.get_mut(number) else { return };
        let (first, head) = (topic.log.first(), topic.log.head());
        let member = topic.members.get_mut(place);
        // Either the report of a gap panicked, or the message.
        if member.owes_gap() {
            self.owed.remove(&(member.connection, number));
            member.set_owes_gap(false);
        } else if member.next < first {
            topic.moved.skipped += first - member.next;
            member.next = first;
        } else {
            topic.moved.unframed += 1;
            member.next = head.min(member.next + 1);
        }
    }

    /// Goes on with a connection that waited for room. False if the page ends first.
    fn resume(&mut self, number: u32, page: &mut Page, forms: &[Arc<dyn Form>]) -> bool {
        let Some(connection) = self.connections.get_mut(number).filter(|found| found.room == Room::Due)
        else {
            return true;
        };
        for n in 0..connection.topics.len() {
            let (in_topic, place) = connection.topics[n];
            let Some(topic) = self.topics.get_mut(in_topic) else { continue };
            if !topic.members.get(place as usize).lags() {
                continue;
            }
            self.visited = Some(VisitPlace { topic: in_topic, place: place as usize, due: Some(number) });
            match deliver(topic, in_topic, place as usize, connection, page, forms, &mut self.owed) {
                Visit::Done | Visit::Cut => topic.members.set_lags(place as usize, false),
                Visit::PageFull => return false,
                Visit::Full => {
                    page.take(0);
                    match waits(connection, self.waker.as_ref()) {
                        true => self.waiting.push(number),
                        false => self.due.push_back(number),
                    }
                    return true;
                }
            }
        }
        // It looked at its list at least.
        page.take(0);
        connection.room = Room::Free;
        true
    }

    /// Goes on with the pass through the members of a topic. False if it is not at its end.
    fn walk(&mut self, number: u32, page: &mut Page, now: Time, forms: &[Arc<dyn Form>]) -> bool {
        let Some(topic) = self.topics.get_mut(number) else { return true };
        for _ in 0..QUANTUM {
            let Some(place) = topic.members.to_visit() else {
                topic.is_active = false;
                return true;
            };
            if page.is_full() {
                return false;
            }
            let (of, taken) = (topic.members.get(place).connection, page.taken());
            if let Some(connection) = self.connections.get_mut(of) {
                self.visited = Some(VisitPlace { topic: number, place, due: None });
                let visit = match connection.room {
                    Room::Free => deliver(topic, number, place, connection, page, forms, &mut self.owed),
                    Room::Due | Room::Waits => Visit::Full,
                };
                match visit {
                    Visit::PageFull => return false,
                    Visit::Full => {
                        topic.members.set_lags(place, true);
                        if connection.room == Room::Free {
                            match waits(connection, self.waker.as_ref()) {
                                true => self.waiting.push(of),
                                false => self.due.push_back(of),
                            }
                        }
                        if is_cut(topic, place, &self.slows, now) {
                            cut(topic, place, connection);
                        }
                    }
                    Visit::Done | Visit::Cut => {}
                }
            }
            if page.taken() == taken {
                page.take(0);
            }
            topic.members.visited();
        }
        false
    }

    /// Looks at the next topics: drops messages that are too old, and topics that are not used.
    fn sweep(&mut self, now: Time) {
        for _ in 0..SWEPT_IN_A_STEP {
            let Some(left) = self.sweep_left.checked_sub(1) else { return };
            self.sweep_left = left;
            let Some(topic) = self.topics.get_mut(left) else { continue };
            let before = topic.log.bytes();
            topic.log.expire(now);
            let is_idle = topic.is_unused();
            if !topic.log.history().is_kept && (is_idle || !topic.is_active && topic.members.lagging() == 0) {
                topic.drop_read();
            }
            self.log_bytes = self.log_bytes + topic.log.bytes() - before;
            // Members may come back in a moment, and a shard without them has no use for the log.
            if !is_idle || !(topic.log.is_empty() || !topic.is_home || self.is_numbered) {
                topic.idle_looks = 0;
            } else if topic.idle_looks >= if self.is_numbered { NUMBERED_IDLE_LOOKS } else { 1 } {
                self.forget(left);
                continue;
            } else {
                topic.idle_looks += 1;
            }
            if self.is_bridged {
                self.uncounted.push(left);
            }
        }
    }
}

/// Waits for room in a connection's outbox. False if there is some already.
fn waits(connection: &mut Connection, waker: Option<&Waker>) -> bool {
    let is_waiting = waker.is_some_and(|waker| {
        let mut ready = std::pin::pin!(connection.handle.ready());
        ready.as_mut().poll(&mut Context::from_waker(waker)) == Poll::Pending
    });
    connection.room = if is_waiting { Room::Waits } else { Room::Due };
    is_waiting
}

/// True if a member that has no room is too far behind.
fn is_cut(topic: &Topic, place: usize, slows: &[Slow], now: Time) -> bool {
    let member = topic.members.get(place);
    let has_fallen_off = member.next < topic.log.first();
    match slows.get(usize::from(member.slow)) {
        Some(Slow::Queue) => has_fallen_off,
        Some(Slow::Cut { behind, within }) => {
            let lacks = topic.log.head().saturating_sub(member.next);
            let is_late = topic.log.at(member.next).is_some_and(|at| now - at > *within);
            has_fallen_off || lacks > *behind || is_late
        }
        _ => false,
    }
}

fn cut(topic: &mut Topic, place: usize, connection: &Connection) {
    connection.handle.abort();
    topic.moved.cut += 1;
    topic.members.get_mut(place).next = topic.log.head();
}

/// Queues what a member lacks.
fn deliver(
    topic: &mut Topic,
    number: u32,
    place: usize,
    connection: &Connection,
    page: &mut Page,
    forms: &[Arc<dyn Form>],
    owed: &mut Debts,
) -> Visit {
    let (form, slow) = (connection.form, topic.members.get(place).slow);
    let by = &*forms[usize::from(form)];
    if let Err(visit) = tell_gaps(topic, number, place, connection, by, owed) {
        return visit;
    }
    let (name, head) = (topic.name.clone(), topic.log.head());
    let member = topic.members.get_mut(place);
    while member.next < head {
        if page.is_full() {
            return Visit::PageFull;
        }
        let Some((stored, is_superseded)) = topic.log.get_mut(member.next) else { break };
        if slow == LATEST && is_superseded {
            member.next += 1;
            page.take(0);
            continue;
        }
        let Some(payload) = stored.shared(&name, form, by) else {
            page.take(0);
            topic.moved.unframed += 1;
            member.next += 1;
            continue;
        };
        match connection.handle.push_shared(payload) {
            Ok(()) => {
                page.take(payload.payload().len());
                topic.moved.deliveries += 1;
                member.next += 1;
            }
            Err(PushError::Full) => return Visit::Full,
            // Its session ends its subscriptions in a moment.
            Err(PushError::Gone) => member.next = head,
            // The publisher's fault, which costs its members this message alone.
            Err(PushError::Unframed) => {
                page.take(0);
                topic.moved.unframed += 1;
                member.next += 1;
            }
        }
    }
    Visit::Done
}

/// Tells a member what it does not get. An error is what comes of the visit instead.
fn tell_gaps(
    topic: &mut Topic,
    number: u32,
    place: usize,
    connection: &Connection,
    by: &dyn Form,
    owed: &mut Debts,
) -> Result<(), Visit> {
    let (first, member) = (topic.log.first(), *topic.members.get(place));
    if member.owes_gap() {
        let of = (member.connection, number);
        let gap = owed.get(&of).map_or(Gap::Unknown, |missed| Gap::Missed(*missed));
        tell(topic, connection, by, gap)?;
        topic.moved.skipped += owed.remove(&of).unwrap_or(0);
        topic.members.get_mut(place).set_owes_gap(false);
    }
    let missed = first.saturating_sub(member.next);
    match member.slow {
        _ if missed == 0 => return Ok(()),
        QUEUE | CUT.. => {
            cut(topic, place, connection);
            return Err(Visit::Cut);
        }
        LATEST => {}
        _ => tell(topic, connection, by, Gap::Missed(missed))?,
    }
    topic.moved.skipped += missed;
    topic.members.get_mut(place).next = first;
    Ok(())
}

/// Queues the report of a gap.
fn tell(topic: &Topic, connection: &Connection, by: &dyn Form, gap: Gap) -> Result<(), Visit> {
    let mut text = Vec::new();
    by.gap(&topic.name, gap, &mut text);
    // One that has no frame is left out, as a message is.
    let shared = SharedPayload::new(text);
    if !shared.payload().is_empty() && connection.handle.push_shared(&shared) == Err(PushError::Full) {
        return Err(Visit::Full);
    }
    Ok(())
}
