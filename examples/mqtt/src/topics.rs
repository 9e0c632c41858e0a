//! Topics: which filters match them, and the messages that they retain.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringserve::time::Time;

use crate::packet::Publication;

/// What a level of a filter counts for.
const LEVEL_BYTES: usize = 256;
/// Levels of a filter at most: each is a step of a recursion.
const LEVELS_MAX: usize = 128;
/// Retained messages that are looked at at once, before others are served.
const LOOKED_AT_ONCE: usize = 1000;
/// How long a topic is remembered to have been cleared: no message is on its way between shards for longer.
const CLEARED: Duration = Duration::from_secs(60);

pub fn is_filter(filter: &str) -> bool {
    let levels = filter.split('/').count();
    let fits = |(n, level): (usize, &str)| {
        level.len() == 1 && (level == "+" || n + 1 == levels) || !level.contains(['+', '#'])
    };
    !filter.is_empty() && levels <= LEVELS_MAX && filter.split('/').enumerate().all(fits)
}

/// What a filter counts for where it is kept.
pub fn filter_bytes(filter: &str) -> usize {
    filter.len() + LEVEL_BYTES * filter.split('/').count()
}

/// What a SUBSCRIBE says beside a filter.
#[derive(Clone, Copy)]
pub struct Options(pub u8);

impl Options {
    /// QoS 2 is not supported: a client that asks for it is granted QoS 1.
    pub fn qos(self) -> u8 {
        (self.0 & 3).min(1)
    }

    pub fn no_local(self) -> bool {
        self.0 & 4 != 0
    }

    pub fn keeps_retain(self) -> bool {
        self.0 & 8 != 0
    }

    /// Whether retained messages are sent: for a filter that is new, or for each one.
    pub fn wants_retained(self, is_new: bool) -> bool {
        matches!((self.0 >> 4 & 3, is_new), (0, _) | (1, true))
    }
}

/// The first level of a topic or filter, and the others.
fn levels(topic: &[u8]) -> (&[u8], Option<&[u8]>) {
    match topic.iter().position(|byte| *byte == b'/') {
        Some(at) => (&topic[..at], Some(&topic[at + 1..])),
        None => (topic, None),
    }
}

/// Filters as a tree of their levels, with what each subscriber `K` has of them. A look-up visits a level at most once.
pub struct Filters<K, V> {
    here: BTreeMap<K, V>,
    below: BTreeMap<Box<[u8]>, Filters<K, V>>,
}

impl<K: Ord, V> Filters<K, V> {
    pub fn insert(&mut self, filter: &str, key: K, value: V) {
        let end =
            filter.split('/').fold(self, |at, level| at.below.entry(level.as_bytes().into()).or_default());
        end.here.insert(key, value);
    }

    pub fn remove(&mut self, filter: &[u8], key: &K) {
        let (level, rest) = levels(filter);
        let Some(below) = self.below.get_mut(level) else { return };
        match rest {
            Some(rest) => below.remove(rest, key),
            None => drop(below.here.remove(key)),
        }
        if below.is_empty() {
            self.below.remove(level);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.here.is_empty() && self.below.is_empty()
    }

    /// Finds all that match a topic. Wildcards match no first level with a `$`.
    pub fn matching(&self, topic: &[u8], each: &mut impl FnMut(&V)) {
        self.visit(Some(topic), topic.starts_with(b"$"), each);
    }

    fn visit(&self, topic: Option<&[u8]>, is_hidden: bool, each: &mut impl FnMut(&V)) {
        if let Some(all) = self.below.get(&b"#"[..]).filter(|_| !is_hidden) {
            all.here.values().for_each(&mut *each);
        }
        let Some(topic) = topic else { return self.here.values().for_each(each) };
        let (level, rest) = levels(topic);
        let any = self.below.get(&b"+"[..]).filter(|_| !is_hidden);
        for below in self.below.get(level).into_iter().chain(any) {
            below.visit(rest, false, each);
        }
    }
}

impl<K, V> Default for Filters<K, V> {
    fn default() -> Self {
        Filters { here: BTreeMap::new(), below: BTreeMap::new() }
    }
}

/// Which of two messages for a topic is the later one, on whichever shards they were published: by the clock of all shards, then
/// by a count, then by the shard.
pub type Stamp = (Time, u64, usize);

/// What a topic counts for that was cleared.
fn cleared_bytes(topic: &Bytes) -> usize {
    topic.len() + 128
}

/// The last retained message of each topic. Every shard has all of them, and they share the memory of the messages.
#[derive(Default)]
pub struct Retained {
    pub bytes_max: usize,
    pub bytes: usize,
    topics: BTreeMap<Bytes, (Stamp, Option<Arc<Publication>>)>,
    /// Topics that were cleared, in that order: a message that was published before may still come from another shard.
    cleared: VecDeque<(Time, Bytes)>,
}

impl Retained {
    pub fn new(bytes_max: usize) -> Retained {
        Retained { bytes_max, ..Retained::default() }
    }

    /// Whether a message can be kept, in the place of what its topic keeps.
    pub fn has_room(&mut self, of: &Publication, now: Time) -> bool {
        let more = of.bytes().saturating_sub(self.bytes_of(&of.topic));
        self.forget_cleared(now, more);
        of.payload.is_empty() || self.bytes + more <= self.bytes_max
    }

    fn bytes_of(&self, topic: &[u8]) -> usize {
        self.topics.get(topic).and_then(|(_, kept)| kept.as_ref()).map_or(0, |kept| kept.bytes())
    }

    /// Keeps a message in the place of an earlier one. One without payload has its topic keep none.
    pub fn set(&mut self, stamp: Stamp, publication: &Arc<Publication>) {
        // A copy: a part of the packet would keep all of it.
        let topic = Bytes::copy_from_slice(&publication.topic);
        match self.topics.get(&topic) {
            Some((of, _)) if *of > stamp => return,
            _ => self.bytes -= self.bytes_of(&topic),
        }
        let kept = Some(publication).filter(|publication| !publication.payload.is_empty()).cloned();
        if kept.is_none() {
            self.bytes += cleared_bytes(&topic);
            self.cleared.push_back((stamp.0, topic.clone()));
        }
        self.topics.insert(topic.clone(), (stamp, kept));
        self.bytes += self.bytes_of(&topic);
        self.forget_cleared(stamp.0, 0);
    }

    /// Forgets that topics were cleared: after a while, and earlier where others need the room.
    fn forget_cleared(&mut self, now: Time, room: usize) {
        let is_over = |at: Time, bytes: usize| at + CLEARED < now || bytes + room > self.bytes_max;
        while self.cleared.front().is_some_and(|(at, _)| is_over(*at, self.bytes)) {
            let Some((at, topic)) = self.cleared.pop_front() else { break };
            self.bytes -= cleared_bytes(&topic);
            // It may have been set since.
            if self.topics.get(&topic).is_some_and(|(of, kept)| kept.is_none() && of.0 == at) {
                self.topics.remove(&topic);
            }
        }
    }

    /// Hands messages that a filter matches to `each` until it refuses one, beginning behind the topic `after`, or with the first
    /// if that is empty. Returns behind which topic to go on, if there may be more.
    pub fn matching(
        &self,
        filter: &str,
        after: Bytes,
        mut each: impl FnMut(&Arc<Publication>) -> bool,
    ) -> Option<Bytes> {
        // Filters begin with their part without wildcards; "a/#" matches "a" too.
        let prefix = filter.split(['+', '#']).next().unwrap_or_default();
        let prefix = if filter.ends_with("/#") { prefix.trim_end_matches('/') } else { prefix }.as_bytes();
        let mut wanted = Filters::default();
        wanted.insert(filter, (), ());
        let from = if after.is_empty() { Bound::Included(prefix) } else { Bound::Excluded(&after[..]) };
        let mut last = after.clone();
        for (n, (topic, (_, kept))) in self.topics.range::<[u8], _>((from, Bound::Unbounded)).enumerate() {
            if !topic.starts_with(prefix) {
                break;
            }
            if n == LOOKED_AT_ONCE {
                return Some(last);
            }
            let mut is_wanted = false;
            wanted.matching(topic, &mut |()| is_wanted = true);
            if let Some(kept) = kept
                && is_wanted
                && !each(kept)
            {
                return Some(last);
            }
            last = topic.clone();
        }
        None
    }
}
