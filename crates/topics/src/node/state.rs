//! The state of a shard: its topics, its connections, and the bounds that both keep.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use ringserve_server::LocalHandle;
use ringserve_server::time::Time;

use crate::options::{Slow, SubscribeError};
use crate::slab::Slab;
use crate::topic::{Topic, TopicCounts};

/// Topics that are looked at for one to forget, where a shard has as many as it may.
const LOOKS_FOR_ROOM: u32 = 64;

/// Numbers of `Slow` in the table of a shard: `Skip` is 0, and `Cut` has all from 3 on.
pub(crate) const LATEST: u8 = 1;
pub(crate) const QUEUE: u8 = 2;
pub(crate) const CUT: u8 = 3;

/// The member that a page is at.
pub(crate) struct VisitPlace {
    pub(crate) topic: u32,
    pub(crate) place: usize,
    /// Its connection, if that is gone on with for its room, and not the topic.
    pub(crate) due: Option<u32>,
}

/// Numbers of messages, by connection and topic.
pub(crate) type Debts = HashMap<(u32, u32), u64, foldhash::fast::RandomState>;

/// Whether the outbox of a connection has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Free,
    /// It had none, and is in the list of those that are gone on with.
    Due,
    /// It has none, and wakes the shard's task when it has.
    Waits,
}

/// A connection with topics, or about to have some.
pub(crate) struct Connection {
    pub(crate) handle: LocalHandle,
    pub(crate) form: u8,
    pub(crate) room: Room,
    /// The name that other members see.
    pub(crate) shown: Option<Arc<str>>,
    /// Its topics, each with its place among the topic's members.
    pub(crate) topics: Vec<(u32, u32)>,
}

/// The state that changes.
pub(crate) struct State {
    pub(crate) names: HashMap<Arc<str>, u32, foldhash::fast::RandomState>,
    pub(crate) topics: Slab<Topic>,
    pub(crate) connections: Slab<Connection>,
    /// Topics whose pass goes on.
    pub(crate) active: VecDeque<u32>,
    /// Connections that are gone on with, and those that wait for room.
    pub(crate) due: VecDeque<u32>,
    pub(crate) waiting: Vec<u32>,
    /// The member that the page is at, for as long as it is.
    pub(crate) visited: Option<VisitPlace>,
    /// The waker of the task that goes on with them.
    pub(crate) waker: Option<Waker>,
    /// By its number in members.
    pub(crate) slows: Vec<Slow>,
    /// Topics that this sweep has yet to look at: those with smaller numbers.
    pub(crate) sweep_left: u32,
    /// Bytes of all logs, and the number of the topic that gave some up last.
    pub(crate) log_bytes: usize,
    pub(crate) evicted: u32,
    /// The number of the topic that was looked at last for one to forget.
    pub(crate) looked: u32,
    /// Topics of other homes, or of a bridge, that were forgotten, until those know.
    pub(crate) left: Vec<Arc<str>>,
    /// Topics whose counts the bridge on this shard has yet to get: those that were swept.
    pub(crate) uncounted: Vec<u32>,
    /// There is a bridge, on this shard or another one.
    pub(crate) is_bridged: bool,
    /// A bridge gives messages their numbers.
    pub(crate) is_numbered: bool,
    /// Topics with shards that had no room for a message, each until it has what it lacks.
    pub(crate) behind: BTreeSet<(u32, usize)>,
    /// The number of messages that members are owed the report of, by connection and topic. Not of
    /// those who owe it without a number.
    pub(crate) owed: Debts,
    /// The counts of all topics that were forgotten.
    pub(crate) forgotten: TopicCounts,
    /// Subscriptions since this second began.
    pub(crate) joins: u32,
    pub(crate) joins_since: Time,
}

impl State {
    /// The number of a `Slow` in members.
    pub(crate) fn number_of(&mut self, slow: Slow) -> Result<u8, SubscribeError> {
        let known = self.slows.iter().position(|known| *known == slow);
        // A service has a few bounds, and no peer chooses them.
        let place = u8::try_from(known.unwrap_or(self.slows.len())).map_err(|_| SubscribeError::Full)?;
        if known.is_none() {
            self.slows.push(slow);
        }
        Ok(place)
    }

    /// Ends one membership of a connection, by its place in the connection's list.
    pub(crate) fn remove_member(&mut self, of: u32, place: usize) {
        let Some(connection) = self.connections.get_mut(of) else { return };
        let (number, at) = connection.topics.swap_remove(place);
        let moved = connection.topics.get(place).copied();
        if let Some(topic) = self.topics.get_mut(number) {
            topic.left();
            if topic.members.get(at as usize).owes_gap() {
                self.owed.remove(&(of, number));
            }
            if let Some(member) = topic.members.remove(at as usize) {
                let (other, place) = (member.connection, usize::from(member.place));
                if let Some(pair) =
                    self.connections.get_mut(other).and_then(|other| other.topics.get_mut(place))
                {
                    pair.1 = at;
                }
            }
        }
        if let Some((number, at)) = moved
            && let Some(topic) = self.topics.get_mut(number)
        {
            topic.members.get_mut(at as usize).place = place as u16;
        }
    }

    /// Has logs give up messages until all fit: those of the topic that got one, then those of
    /// others in turn.
    pub(crate) fn evict(&mut self, number: u32, bytes_max: usize) {
        let end = self.topics.end();
        let mut looked = 0;
        let mut at = number;
        while self.log_bytes > bytes_max && looked <= end {
            let keeps = u64::from(at == number);
            if let Some(topic) = self.topics.get_mut(at) {
                let before = topic.log.bytes();
                while self.log_bytes + topic.log.bytes() > bytes_max + before
                    && topic.log.head() - topic.log.first() > keeps
                {
                    topic.log.pop();
                }
                self.log_bytes = self.log_bytes + topic.log.bytes() - before;
            }
            looked += 1;
            self.evicted = if self.evicted + 1 < end { self.evicted + 1 } else { 0 };
            at = self.evicted;
        }
    }

    /// Forgets one topic that is not used: of those looked at, the one whose last message is
    /// oldest. False if all of them are used.
    pub(crate) fn make_room(&mut self) -> bool {
        let end = self.topics.end();
        let mut oldest: Option<(Option<Time>, u32)> = None;
        for _ in 0..LOOKS_FOR_ROOM.min(end) {
            self.looked = if self.looked + 1 < end { self.looked + 1 } else { 0 };
            if let Some(topic) = self.topics.get(self.looked).filter(|topic| topic.is_unused()) {
                let at = (topic.log.newest_at(), self.looked);
                oldest = Some(oldest.map_or(at, |known| known.min(at)));
            }
        }
        oldest.map(|(_, number)| self.forget(number)).is_some()
    }

    /// Forgets a topic that is not used.
    pub(crate) fn forget(&mut self, number: u32) {
        let Some(topic) = self.topics.remove(number) else { return };
        self.names.remove(&topic.name);
        self.log_bytes -= topic.log.bytes();
        self.forgotten += topic.moved;
        if !topic.is_home || self.is_bridged {
            self.left.push(topic.name);
        }
    }

    /// The shown members of a topic on this shard, from this one on.
    pub(crate) fn members(&self, topic: &str, from: usize, most: usize) -> Vec<Arc<str>> {
        let topic = self.names.get(topic).and_then(|number| self.topics.get(*number));
        let Some(topic) = topic else { return Vec::new() };
        let shown = topic.members.iter().filter_map(|member| {
            self.connections.get(member.connection).and_then(|found| found.shown.clone())
        });
        let shown = shown.chain(topic.feeds.iter().filter_map(|feed| feed.shown.clone()));
        shown.skip(from).take(most).collect()
    }
}
