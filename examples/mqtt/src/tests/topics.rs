//! Which filters match which topics, and which of two retained messages stays.

use std::sync::Arc;

use bytes::Bytes;

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
        all_of(&["a", "b", "", "$x"]).into_iter().filter(|topic| is_topic(topic.as_bytes())).collect();
    let mut tree = Filters::default();
    for filter in &filters {
        tree.insert(filter, 7, filter.clone());
        tree.insert(filter, 8, filter.clone());
        tree.remove(filter.as_bytes(), &8);
    }
    let mut kept = Retained::default();
    for topic in &topics {
        let (topic, payload) = (Bytes::from(topic.clone()), Bytes::from_static(b"x"));
        kept.set(&Arc::new(Publication { topic, payload, ..Publication::default() }));
    }
    for topic in &topics {
        let mut found = Vec::new();
        tree.matching(topic.as_bytes(), &mut |filter: &String| found.push(filter.clone()));
        found.sort();
        let expected: Vec<_> = filters.iter().filter(|filter| matches(filter, topic)).cloned().collect();
        assert_eq!(found, expected, "{topic}");
    }
    for filter in &filters {
        let found = kept.matching(filter);
        let found: Vec<_> =
            found.iter().map(|kept| String::from_utf8(kept.topic.to_vec()).unwrap()).collect();
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
    for filter in
        ["", "a#", "#/a", "a/#/b", "a+", "+a/b", "a/+b", "##", "$share/g/a", &format!("{deepest}/a")]
    {
        assert!(!is_filter(filter), "{filter}");
    }
    assert!(["a", "/", "a/b", "$SYS/x"].iter().all(|topic| is_topic(topic.as_bytes())));
    assert!(!["", "+", "a/+/b", "a/#", "a+"].iter().any(|topic| is_topic(topic.as_bytes())));
}

#[test]
fn topic_keeps_its_last_message_and_none_after_an_empty_one() {
    let message = |payload: &str| {
        let (topic, payload) = (Bytes::from_static(b"t"), Bytes::copy_from_slice(payload.as_bytes()));
        Arc::new(Publication { topic, payload, ..Publication::default() })
    };
    let mut kept = Retained::default();
    let long = "x".repeat(5000);
    // What counts before and after: at least 4 KiB.
    for (payload, before, after) in
        [("", 0, 0), ("a", 0, 4096), ("b", 4096, 4096), (&long, 4096, 5129), ("c", 5129, 4096), ("", 4096, 0)]
    {
        let message = message(payload);
        assert_eq!(kept.bytes(&message), (before, after));
        kept.set(&message);
        let found: Vec<_> = kept.matching("t").iter().map(|kept| kept.payload.clone()).collect();
        let expected: Vec<_> = Some(payload).filter(|text| !text.is_empty()).into_iter().collect();
        assert_eq!(found, expected);
    }
}
