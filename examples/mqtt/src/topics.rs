//! Topics: which filters match them, and the messages that they retain.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;

use crate::packet::Publication;

/// Bytes that a level of a filter counts for: a node of the tree.
const LEVEL_BYTES: usize = 256;
/// Levels of a filter at most: each is a step of a recursion.
const LEVELS_MAX: usize = 128;
/// Bytes that a retained message counts for at least, so that a subscriber of all topics has few enough of them looked at.
const RETAINED_BYTES_MIN: usize = 4096;

/// True for a filter that is no shared one.
pub fn is_filter(filter: &str) -> bool {
    let levels = filter.split('/').count();
    let fits = |(n, level): (usize, &str)| {
        level.len() == 1 && (level == "+" || n + 1 == levels) || !level.contains(['+', '#'])
    };
    let is_one = !filter.is_empty() && !filter.starts_with("$share/") && levels <= LEVELS_MAX;
    is_one && filter.split('/').enumerate().all(fits)
}

/// What a filter counts for where it is kept.
pub fn filter_bytes(filter: &str) -> usize {
    filter.len() + LEVEL_BYTES * filter.split('/').count()
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
        let levels = filter.split('/');
        let end = levels.fold(self, |at, level| at.below.entry(level.as_bytes().into()).or_default());
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

/// The last retained message of each topic. Every shard has all of them, and they share the memory of the messages.
#[derive(Default)]
pub struct Retained(BTreeMap<Bytes, Arc<Publication>>);

impl Retained {
    /// The bytes that a topic counts for now, and after this message.
    pub fn bytes(&self, publication: &Publication) -> (usize, usize) {
        let bytes = |kept: &Publication| kept.bytes().max(RETAINED_BYTES_MIN);
        let next = if publication.payload.is_empty() { 0 } else { bytes(publication) };
        (self.0.get(&publication.topic).map_or(0, |kept| bytes(kept)), next)
    }

    /// Keeps a message in the place of an earlier one. One without payload has its topic keep none.
    pub fn set(&mut self, publication: &Arc<Publication>) {
        // A key that stayed would keep the packet of the first message.
        self.0.remove(&publication.topic);
        if !publication.payload.is_empty() {
            self.0.insert(publication.topic.clone(), publication.clone());
        }
    }

    /// The messages that a filter matches.
    pub fn matching(&self, filter: &str) -> Vec<Arc<Publication>> {
        // Filters begin with their part without wildcards; "a/#" matches "a" too.
        let prefix = filter.split(['+', '#']).next().unwrap_or_default();
        let prefix = if filter.ends_with("/#") { prefix.trim_end_matches('/') } else { prefix }.as_bytes();
        let mut wanted = Filters::default();
        wanted.insert(filter, (), ());
        let from_prefix = self.0.range::<[u8], _>((Bound::Included(prefix), Bound::Unbounded));
        let mut found = Vec::new();
        for (topic, kept) in from_prefix.take_while(|(topic, _)| topic.starts_with(prefix)) {
            wanted.matching(topic, &mut |()| found.push(kept.clone()));
        }
        found
    }
}
