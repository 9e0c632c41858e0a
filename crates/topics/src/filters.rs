//! Topics in levels, and filters for them, as MQTT has them.
//!
//! ```text
//!   topic    rooms/kitchen/light        levels, with slashes between them
//!   filter   rooms/+/light              + is any one level
//!            rooms/#                    # is all levels from there on, and none
//! ```
//!
//! A wildcard in the first level matches no topic that begins with a `$`: these are the server's
//! own.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;

/// Levels of a filter at most: each is a step of a recursion.
const LEVELS_MAX: usize = 128;

/// True for a filter: it is not empty, has 128 levels at most, `+` stands alone in its level, and
/// `#` alone in the last one.
pub fn is_filter(filter: &str) -> bool {
    let levels = filter.split('/').count();
    let is_sound = |(n, level): (usize, &str)| {
        level.len() == 1 && (level == "+" || n + 1 == levels) || !level.contains(['+', '#'])
    };
    !filter.is_empty() && levels <= LEVELS_MAX && filter.split('/').enumerate().all(is_sound)
}

/// Finds the topics in a map that a filter matches, each with its value, in order. Only topics that
/// begin as the filter does before its first wildcard are looked at; none if the filter [is
/// none](is_filter).
///
/// ```
/// use std::collections::BTreeMap;
///
/// use ringserve::topics::matching;
///
/// let last = BTreeMap::from([("rooms", 1), ("rooms/kitchen", 2), ("stairs", 3)]);
/// assert_eq!(matching(&last, "rooms/#").map(|(_, value)| *value).collect::<Vec<_>>(), [1, 2]);
/// ```
pub fn matching<'m, T: Borrow<str> + Ord, V>(
    map: &'m BTreeMap<T, V>,
    filter: &str,
) -> impl Iterator<Item = (&'m T, &'m V)> + use<'m, T, V> {
    let prefix = filter.split(['+', '#']).next().unwrap_or_default();
    // "a/#" matches "a" too.
    let prefix = if filter.ends_with("/#") { prefix.trim_end_matches('/') } else { prefix }.to_owned();
    let mut wanted = Filters::default();
    wanted.insert(filter, (), ());
    let from_prefix = map.range::<str, _>((Bound::Included(&*prefix), Bound::Unbounded));
    let with_prefix = from_prefix.take_while(move |(topic, _)| (*topic).borrow().starts_with(&prefix));
    with_prefix.filter(move |(topic, _)| {
        let mut is_wanted = false;
        wanted.matching((*topic).borrow(), |(), ()| is_wanted = true);
        is_wanted
    })
}

/// The filters of subscribers `K`, with a value for each subscription, as a tree of levels. A
/// look-up visits each level of the tree once at most, whatever the number of filters. A filter
/// takes some 200 bytes for each level that no other one shares.
///
/// ```
/// use ringserve::topics::Filters;
///
/// let mut filters = Filters::default();
/// filters.insert("rooms/+/light", "ann", 1);
/// filters.insert("rooms/#", "bob", 2);
/// let mut found = Vec::new();
/// filters.matching("rooms/kitchen/light", |subscriber, value| found.push((*subscriber, *value)));
/// found.sort();
/// assert_eq!(found, [("ann", 1), ("bob", 2)]);
/// ```
pub struct Filters<K, V> {
    here: BTreeMap<K, V>,
    below: BTreeMap<Box<str>, Filters<K, V>>,
}

impl<K: Ord, V> Filters<K, V> {
    /// Subscribes `key` to a filter, with a value in the place of an earlier one. False if the
    /// filter [is none](is_filter): nothing is changed then.
    pub fn insert(&mut self, filter: &str, key: K, value: V) -> bool {
        if !is_filter(filter) {
            return false;
        }
        let levels = filter.split('/');
        let end = levels.fold(self, |at, level| at.below.entry(level.into()).or_default());
        end.here.insert(key, value);
        true
    }

    /// Ends the subscription of `key` to a filter, if there is one.
    pub fn remove(&mut self, filter: &str, key: &K) {
        let (level, rest) = first_level(filter);
        let Some(below) = self.below.get_mut(level) else { return };
        match rest {
            Some(rest) => below.remove(rest, key),
            None => drop(below.here.remove(key)),
        }
        if below.is_empty() {
            self.below.remove(level);
        }
    }

    /// True if there is no subscription.
    pub fn is_empty(&self) -> bool {
        self.here.is_empty() && self.below.is_empty()
    }

    /// Calls `each` with the subscriptions whose filters match a topic. A subscriber with several
    /// of them comes once for each.
    pub fn matching(&self, topic: &str, mut each: impl FnMut(&K, &V)) {
        self.visit(Some(topic), topic.starts_with('$'), &mut each);
    }

    fn visit(&self, topic: Option<&str>, is_hidden: bool, each: &mut impl FnMut(&K, &V)) {
        if let Some(all) = self.below.get("#").filter(|_| !is_hidden) {
            all.here.iter().for_each(|(key, value)| each(key, value));
        }
        let Some(topic) = topic else { return self.here.iter().for_each(|(key, value)| each(key, value)) };
        let (level, rest) = first_level(topic);
        let any = self.below.get("+").filter(|_| !is_hidden);
        for below in self.below.get(level).into_iter().chain(any) {
            below.visit(rest, false, each);
        }
    }
}

/// The first level of a topic or filter, and the others.
fn first_level(topic: &str) -> (&str, Option<&str>) {
    match topic.split_once('/') {
        Some((level, rest)) => (level, Some(rest)),
        None => (topic, None),
    }
}

impl<K, V> Default for Filters<K, V> {
    fn default() -> Self {
        Filters { here: BTreeMap::new(), below: BTreeMap::new() }
    }
}

impl<K, V> fmt::Debug for Filters<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filters").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the specification of MQTT says it, level by level.
    fn matches(filter: &str, topic: &str) -> bool {
        fn rest(filter: &[&str], topic: &[&str]) -> bool {
            match (filter, topic) {
                (["#"], _) => true,
                ([], []) => true,
                ([level, filter @ ..], [name, topic @ ..]) => {
                    (level == name || *level == "+") && rest(filter, topic)
                }
                _ => false,
            }
        }
        let is_hidden = topic.starts_with('$') && filter.starts_with(['+', '#']);
        !is_hidden && rest(&filter.split('/').collect::<Vec<_>>(), &topic.split('/').collect::<Vec<_>>())
    }

    /// All texts of up to three of these levels.
    fn all_of(levels: &[&str]) -> Vec<String> {
        let mut all: Vec<String> = levels.iter().map(|level| (*level).to_owned()).collect();
        for _ in 0..2 {
            let longer =
                all.iter().flat_map(|text| levels.iter().map(move |level| format!("{text}/{level}")));
            all.extend(longer.collect::<Vec<_>>());
        }
        all.sort();
        all.dedup();
        all
    }

    #[test]
    fn filters_match_as_the_specification_says() {
        let mut filters = all_of(&["a", "b", "", "+", "#", "$x"]);
        filters.retain(|filter| is_filter(filter));
        let mut topics = all_of(&["a", "b", "", "$x"]);
        topics.retain(|topic| !topic.is_empty());
        let mut tree = Filters::default();
        for filter in &filters {
            assert!(tree.insert(filter, 7, filter.clone()));
            assert!(tree.insert(filter, 8, filter.clone()));
            tree.remove(filter, &8);
        }
        for topic in &topics {
            let mut found = Vec::new();
            tree.matching(topic, |key, filter| found.push((*key, filter.clone())));
            found.sort();
            let expected: Vec<_> = filters
                .iter()
                .filter(|filter| matches(filter, topic))
                .map(|filter| (7, filter.clone()))
                .collect();
            assert_eq!(found, expected, "{topic}");
        }
        let map: BTreeMap<_, _> = topics.iter().map(|topic| (topic.clone(), ())).collect();
        for filter in &filters {
            let found: Vec<_> = matching(&map, filter).map(|(topic, ())| topic).collect();
            let expected: Vec<_> = topics.iter().filter(|topic| matches(filter, topic)).collect();
            assert_eq!(found, expected, "{filter}");
            tree.remove(filter, &7);
        }
        assert!(tree.is_empty(), "nothing is left of filters that were removed");
    }

    #[test]
    fn filters_are_told_from_other_texts() {
        let deepest = ["a"; LEVELS_MAX].join("/");
        for filter in ["a", "/", "+", "#", "a/#", "+/+/#", "a//b", "$SYS/#", "a b", &deepest] {
            assert!(is_filter(filter), "{filter}");
        }
        let deeper = format!("{deepest}/a");
        for filter in ["", "a#", "#/a", "a/#/b", "a+", "+a/b", "a/+b", "##", &deeper] {
            let mut filters = Filters::default();
            assert!(!is_filter(filter) && !filters.insert(filter, 1, ()) && filters.is_empty(), "{filter}");
            assert_eq!(matching(&BTreeMap::from([("a", ())]), filter).count(), 0, "{filter}");
        }
    }
}
