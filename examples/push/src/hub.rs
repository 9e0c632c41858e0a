//! The state that services of a shard share: its topics, and who is connected.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use ringserve::Shard;
use ringserve::handle::LocalHandle;
use ringserve::sync::{Mesh, Notify};
use ringserve::time::Time;
use ringserve::topics::{EntryView, Events, Form, FormId, Gap, Lines};
use ringserve::topics::{ShardTopics, TopicFigures, TopicOptions, Topics};
use ringserve_topics_nats::{BridgeMonitor, NatsBridge};
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::token::{Rights, Tokens};

/// The time in which a client has to say who it is.
const STRANGER: Duration = Duration::from_secs(10);

/// The interval of looks at connections whose time is over.
const LOOK: Duration = Duration::from_secs(1);

/// The values that are made before the server starts.
#[derive(Clone)]
pub struct Gateway {
    pub topics: Topics,
    pub lines: FormId,
    pub json: FormId,
    pub events: FormId,
    pub tokens: Tokens,
    pub api_key: Arc<str>,
    /// Ends the connections of a user, and counts them.
    pub disconnects: Mesh<Arc<str>, usize>,
    /// Asks for the figures of topics.
    pub figures: Mesh<(), Vec<TopicFigures>>,
    /// The bridge to other nodes.
    pub bridge: Option<BridgeMonitor>,
}

impl Gateway {
    pub fn new(options: TopicOptions, tokens: Tokens, api_key: &str, bridge: Option<NatsBridge>) -> Gateway {
        let (topics, monitor) = (Topics::new(options), bridge.as_ref().map(NatsBridge::monitor));
        if let Some(bridge) = bridge {
            topics.bridge(bridge);
        }
        let (lines, json, events) = (topics.form(Lines), topics.form(Json), topics.form(Events));
        let (api_key, disconnects, figures) = (api_key.into(), Mesh::new(), Mesh::new());
        Gateway { topics, lines, json, events, tokens, api_key, disconnects, figures, bridge: monitor }
    }
}

/// An object of JSON: topic, cursor and data, which are JSON themselves, or the number of messages
/// in a gap. Data of another program that are no JSON become a string.
struct Json;

/// Data as JSON: a string if they are none.
fn json_of(data: &[u8]) -> Cow<'_, [u8]> {
    match serde_json::from_slice::<IgnoredAny>(data) {
        Ok(_) => Cow::Borrowed(data),
        Err(_) => Cow::Owned(Value::from(String::from_utf8_lossy(data)).to_string().into_bytes()),
    }
}

impl Form for Json {
    fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>) {
        // Names of topics have nothing that JSON escapes.
        let head = format!(r#"{{"topic":"{}","cursor":"{}","data":"#, entry.topic, entry.cursor);
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(&json_of(entry.payload));
        out.push(b'}');
    }

    fn gap(&self, topic: &str, gap: Gap, out: &mut Vec<u8>) {
        let missed = match gap {
            Gap::Missed(count) => count.to_string(),
            _ => "null".into(),
        };
        out.extend_from_slice(format!(r#"{{"topic":"{topic}","gap":{missed}}}"#).as_bytes());
    }
}

/// A user, and the number of its connection.
type SeatKey = (Arc<str>, u64);

/// The means to end a connection.
enum Line {
    Frames(LocalHandle),
    /// A task of HTTP, which ends by itself.
    Task(Rc<Notify>),
}

/// One shard's part of the gateway, for all its services.
pub struct Hub {
    pub gateway: Gateway,
    pub topics: ShardTopics,
    seats: RefCell<BTreeMap<SeatKey, Line>>,
    /// Seats that end by themselves, by their time.
    deadlines: RefCell<BTreeSet<(Time, SeatKey)>>,
    seated: Cell<u64>,
}

/// A connection of a user, until it is dropped.
pub struct Seat {
    hub: Rc<Hub>,
    key: SeatKey,
    deadline: Option<Time>,
    /// Notified when it has to end, where it is a task.
    pub end: Rc<Notify>,
}

impl Line {
    fn end(&self) {
        match self {
            Line::Frames(handle) => handle.close(),
            Line::Task(end) => end.notify_one(),
        }
    }
}

impl Hub {
    pub fn new(shard: &Shard, gateway: &Gateway) -> Rc<Hub> {
        let topics = gateway.topics.register(shard);
        let (seats, deadlines, seated) = Default::default();
        let hub = Rc::new(Hub { gateway: gateway.clone(), topics, seats, deadlines, seated });
        shard.spawn(Hub::end_late_ones(Rc::downgrade(&hub), shard.clone()));
        let here = hub.clone();
        gateway.disconnects.register(shard, move |_from, user| here.disconnect(&user));
        let here = hub.topics.clone();
        gateway.figures.register(shard, move |_from, ()| here.figures());
        hub
    }

    /// A connection comes: one of frames, or a task. It ends when its token expires, or soon if it
    /// has no rights.
    pub fn seat(self: &Rc<Hub>, rights: Option<&Rights>, handle: Option<LocalHandle>) -> Seat {
        self.seated.set(self.seated.get() + 1);
        // No token names a user without a byte.
        let user = rights.map_or_else(|| "".into(), |rights| rights.user.clone());
        let (key, end) = ((user, self.seated.get()), Rc::new(Notify::new()));
        let line = handle.map_or_else(|| Line::Task(end.clone()), Line::Frames);
        let left = rights.map_or(Some(STRANGER), |rights| rights.time_left);
        let deadline = left.map(|left| self.topics.shard().now() + left);
        self.deadlines.borrow_mut().extend(deadline.map(|deadline| (deadline, key.clone())));
        self.seats.borrow_mut().insert(key.clone(), line);
        Seat { hub: self.clone(), key, deadline, end }
    }

    /// Ends connections whose time is over.
    async fn end_late_ones(hub: Weak<Hub>, shard: Shard) {
        loop {
            shard.sleep(LOOK).await;
            let Some(hub) = hub.upgrade() else { return };
            let now = shard.now();
            let late = {
                let mut deadlines = hub.deadlines.borrow_mut();
                let mut late = std::mem::take(&mut *deadlines);
                *deadlines = late.split_off(&(now, ("".into(), 0)));
                late
            };
            let seats = hub.seats.borrow();
            late.iter().filter_map(|(_, key)| seats.get(key)).for_each(Line::end);
        }
    }

    fn disconnect(&self, user: &Arc<str>) -> usize {
        let seats = self.seats.borrow();
        let of_user = seats.range((user.clone(), 0)..).take_while(|((of, _), _)| of == user);
        of_user.map(|(_, line)| line.end()).count()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.hub.seats.borrow_mut().remove(&self.key);
        if let Some(deadline) = self.deadline {
            self.hub.deadlines.borrow_mut().remove(&(deadline, self.key.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_are_no_json_become_a_string() {
        let cases: [(&[u8], &str); 5] = [
            (b"{\"n\": 1}", "{\"n\": 1}"),
            (b"1,2", "\"1,2\""),
            (b"\"\n", "\"\\\"\\n\""),
            (b"\xff", "\"\u{fffd}\""),
            (b"", "\"\""),
        ];
        for (data, expected) in cases {
            assert_eq!(json_of(data), expected.as_bytes(), "{data:?}");
        }
    }
}
