//! Which filters match which topics, and which of two retained messages stays.

use std::sync::Arc;

use bytes::Bytes;
use ringserve::time::Time;

use crate::packet::{Publication, is_topic};
use crate::topics::{Filters, Retained, is_filter};

/// As the specification says it, level by level.
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
        let longer = all.iter().flat_map(|text| levels.iter().map(move |level| format!("{text}/{level}")));
        all.extend(longer.collect::<Vec<_>>());
    }
    all.sort();
    all.dedup();
    all
}

#[test]
fn filters_match_as_the_specification_says() {
    let filters: Vec<String> =
        all_of(&["a", "b", "", "+", "#", "$x"]).into_iter().filter(|filter| is_filter(filter)).collect();
    let topics: Vec<String> =
        all_of(&["a", "b", "", "$x"]).into_iter().filter(|topic| is_topic(topic)).collect();
    let mut tree = Filters::default();
    for filter in &filters {
        tree.insert(filter, 7, filter.clone());
        tree.insert(filter, 8, filter.clone());
        tree.remove(filter.as_bytes(), &8);
    }
    let mut kept = Retained::new(10_000);
    for (n, topic) in topics.iter().enumerate() {
        let (topic, payload) = (Bytes::from(topic.clone()), Bytes::from_static(b"x"));
        kept.set(
            (Time::ZERO, n as u64, 0),
            &Arc::new(Publication { topic, payload, ..Publication::default() }),
        );
    }
    for topic in &topics {
        let mut found = Vec::new();
        tree.matching(topic.as_bytes(), &mut |filter: &String| found.push(filter.clone()));
        found.sort();
        let expected: Vec<_> = filters.iter().filter(|filter| matches(filter, topic)).cloned().collect();
        assert_eq!(found, expected, "{topic}");
    }
    for filter in &filters {
        let mut found = Vec::new();
        let more = kept.matching(filter, Bytes::new(), |publication| {
            found.push(String::from_utf8(publication.topic.to_vec()).unwrap());
            true
        });
        assert_eq!(more, None, "{filter}");
        let expected: Vec<_> = topics.iter().filter(|topic| matches(filter, topic)).cloned().collect();
        assert_eq!(found, expected, "{filter}");
        tree.remove(filter.as_bytes(), &7);
    }
    assert!(tree.is_empty(), "nothing is left of filters that were removed");
}

#[test]
fn filters_and_topics_are_told_from_other_texts() {
    let deepest = ["a"; 128].join("/");
    for filter in ["a", "/", "+", "#", "a/#", "+/+/#", "a//b", "$SYS/#", "a b", &deepest] {
        assert!(is_filter(filter), "{filter}");
    }
    for filter in ["", "a#", "#/a", "a/#/b", "a+", "+a/b", "a/+b", "##", &format!("{deepest}/a")] {
        assert!(!is_filter(filter), "{filter}");
    }
    assert!(["a", "/", "a/b", "$SYS/x"].into_iter().all(is_topic));
    assert!(!["", "+", "a/+/b", "a/#", "a+"].into_iter().any(is_topic));
}

#[test]
fn later_retained_message_stays_in_whatever_order_they_come() {
    let at = |seconds: u64| Time::from_nanos(seconds * 1_000_000_000);
    let message = |payload: &'static str| {
        let (topic, payload) = (Bytes::from_static(b"t"), Bytes::from_static(payload.as_bytes()));
        Arc::new(Publication { topic, payload, ..Publication::default() })
    };
    // The first is published first; an empty one clears. A tie is decided by the count, then by the shard.
    let published = [
        ((at(1), 1, 0), ""),
        ((at(1), 1, 1), "a"),
        ((at(1), 2, 0), "b"),
        ((at(2), 0, 0), ""),
        ((at(3), 9, 1), "c"),
    ];
    for last in 1..published.len() {
        for first in 0..last {
            let mut kept = Retained::new(10_000);
            for n in [last, first] {
                kept.set(published[n].0, &message(published[n].1));
            }
            let mut found = Vec::new();
            kept.matching("t", Bytes::new(), |kept| {
                found.push(kept.clone());
                true
            });
            let payloads: Vec<_> = found.iter().map(|kept| kept.payload.clone()).collect();
            let expected: Vec<_> =
                Some(published[last].1).filter(|text| !text.is_empty()).into_iter().collect();
            assert_eq!(payloads, expected, "{first} comes after {last}");
        }
    }
    // What was cleared long ago is forgotten.
    let cleared = |n: usize| Publication { topic: Bytes::from(format!("{n}")), ..Publication::default() };
    let mut kept = Retained::new(10_000);
    kept.set((at(1), 1, 0), &message("a"));
    kept.set((at(2), 2, 0), &message(""));
    assert_eq!(kept.bytes, 129);
    kept.set((at(50), 3, 0), &Arc::new(cleared(0)));
    assert_eq!(kept.bytes, 2 * 129);
    kept.set((at(100), 4, 0), &message("b"));
    let of_message = message("b").bytes();
    assert_eq!(kept.bytes, of_message + 129);
    // Without room it is forgotten earlier, and so it is where a topic is set and cleared again and again.
    kept.bytes_max = of_message + 300;
    for n in 0..10 {
        kept.set((at(101), 5 + n as u64, 0), &Arc::new(cleared(n % 4)));
        let topic = Bytes::from(format!("{}", n % 4));
        let payload = Bytes::from_static(b"x");
        kept.set(
            (at(101), 5 + n as u64, 1),
            &Arc::new(Publication { topic, payload, ..Publication::default() }),
        );
        kept.set((at(101), 5 + n as u64, 2), &Arc::new(cleared(n % 4)));
    }
    assert_eq!(kept.bytes, of_message + 2 * 129);
    assert!(kept.has_room(&Publication { payload: vec![0; 170].into(), ..cleared(9) }, at(101)));
    assert_eq!(kept.bytes, of_message, "what was cleared has made room");
    assert!(!kept.has_room(&Publication { payload: vec![0; 172].into(), ..cleared(9) }, at(101)));
    let larger = Publication { payload: vec![0; 301].into(), ..(*message("b")).clone() };
    assert!(kept.has_room(&larger, at(101)), "in the place of another");
}
