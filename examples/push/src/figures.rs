//! Figures of topics and of the bridge, as text for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use ringserve::topics::TopicFigures;
use ringserve_topics_nats::BridgeStats;

type Read = fn(&TopicFigures) -> u64;

/// The names of a topic's figures, with their types and how they are read.
const OF_TOPICS: [(&str, &str, Read); 8] = [
    ("push_topic_members", "gauge", |of| of.members as u64),
    ("push_topic_lagging", "gauge", |of| of.lagging as u64),
    ("push_topic_log_bytes", "gauge", |of| of.log_bytes as u64),
    ("push_topic_messages_total", "counter", |of| of.messages),
    ("push_topic_bytes_total", "counter", |of| of.bytes),
    ("push_topic_deliveries_total", "counter", |of| of.deliveries),
    ("push_topic_skipped_total", "counter", |of| of.skipped),
    ("push_topic_cut_total", "counter", |of| of.cut),
];

/// Writes the figures of topics, each summed over the shards. Names of topics have nothing that a
/// label escapes.
pub fn write(figures: impl Iterator<Item = TopicFigures>, text: &mut String) {
    let mut sums: BTreeMap<Arc<str>, [u64; OF_TOPICS.len()]> = BTreeMap::new();
    for figure in figures {
        let sum = sums.entry(figure.topic.clone()).or_default();
        for (sum, (_, _, read)) in sum.iter_mut().zip(OF_TOPICS) {
            *sum += read(&figure);
        }
    }
    for (place, (name, kind, _)) in OF_TOPICS.into_iter().enumerate() {
        let _ = writeln!(text, "# TYPE {name} {kind}");
        for (topic, sum) in &sums {
            let _ = writeln!(text, "{name}{{topic=\"{topic}\"}} {}", sum[place]);
        }
    }
}

/// Writes the figures of the bridge.
pub fn write_bridge(stats: &BridgeStats, text: &mut String) {
    let BridgeStats { is_up, sent, received, dropped, gaps, catch_ups, malformed, .. } = *stats;
    for (name, kind, value) in [
        ("push_bridge_up", "gauge", u64::from(is_up)),
        ("push_bridge_sent_total", "counter", sent),
        ("push_bridge_received_total", "counter", received),
        ("push_bridge_dropped_total", "counter", dropped),
        ("push_bridge_gaps_total", "counter", gaps),
        ("push_bridge_catch_ups_total", "counter", catch_ups),
        ("push_bridge_malformed_total", "counter", malformed),
    ] {
        let _ = writeln!(text, "# TYPE {name} {kind}\n{name} {value}");
    }
}
