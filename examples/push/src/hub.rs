//! The state that services of a shard share: its topics, and who is connected.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use ringserve::Shard;
use ringserve::handle::LocalHandle;
use ringserve::sync::{Mesh, Notify};
use ringserve::topics::{EntryView, Events, Form, FormId, Gap, Lines};
use ringserve::topics::{ShardTopics, TopicFigures, TopicOptions, Topics};
use ringserve_topics_nats::{BridgeMonitor, NatsBridge};

use crate::token::Tokens;

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
/// in a gap.
struct Json;

impl Form for Json {
    fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>) {
        // Names of topics have nothing that JSON escapes.
        let head = format!(r#"{{"topic":"{}","cursor":"{}","data":"#, entry.topic, entry.cursor);
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(entry.payload);
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
    seats: RefCell<BTreeMap<(Arc<str>, u64), Line>>,
    seated: Cell<u64>,
}

/// A connection of a user, until it is dropped.
pub struct Seat {
    hub: Rc<Hub>,
    key: (Arc<str>, u64),
    /// Notified when it has to end, where it is a task.
    pub end: Rc<Notify>,
}

impl Hub {
    pub fn new(shard: &Shard, gateway: &Gateway) -> Rc<Hub> {
        let topics = gateway.topics.register(shard);
        let (seats, seated) = Default::default();
        let hub = Rc::new(Hub { gateway: gateway.clone(), topics, seats, seated });
        let here = hub.clone();
        gateway.disconnects.register(shard, move |_from, user| here.disconnect(&user));
        let here = hub.topics.clone();
        gateway.figures.register(shard, move |_from, ()| here.figures());
        hub
    }

    /// A connection of a user comes: one of frames, or a task.
    pub fn seat(self: &Rc<Hub>, user: &Arc<str>, handle: Option<LocalHandle>) -> Seat {
        self.seated.set(self.seated.get() + 1);
        let (key, end) = ((user.clone(), self.seated.get()), Rc::new(Notify::new()));
        let line = handle.map_or_else(|| Line::Task(end.clone()), Line::Frames);
        self.seats.borrow_mut().insert(key.clone(), line);
        Seat { hub: self.clone(), key, end }
    }

    fn disconnect(&self, user: &Arc<str>) -> usize {
        let seats = self.seats.borrow();
        let of_user = seats.range((user.clone(), 0)..).take_while(|((of, _), _)| of == user);
        let ended = of_user.map(|(_, line)| match line {
            Line::Frames(handle) => handle.close(),
            Line::Task(end) => end.notify_one(),
        });
        ended.count()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.hub.seats.borrow_mut().remove(&self.key);
    }
}
