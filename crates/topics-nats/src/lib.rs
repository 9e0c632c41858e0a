//! [Topics](ringserve_topics) of several nodes, connected by [NATS](https://nats.io).
//!
//! ```no_run
//! use ringserve::topics::{History, TopicOptions, Topics};
//! use ringserve_nats::NatsOptions;
//! use ringserve_topics_nats::NatsBridge;
//!
//! let topics = Topics::new(TopicOptions::new(History::last(1000)));
//! topics.bridge(NatsBridge::stream(NatsOptions::new("nats.internal:4222"), "push"));
//! // .. and on as without a bridge: `topics.register(shard)` in the factory of a server.
//! ```
//!
//! | | [`NatsBridge::live`] | [`NatsBridge::stream`] |
//! |---|---|---|
//! | needs of NATS | subjects | JetStream, nats-server 2.11 or newer |
//! | order | that of each publisher | one for all nodes |
//! | cursors | of one node | equal on all nodes |
//! | a client that comes to another node | gets the report of a gap | gets what it missed |
//! | the connection to NATS is lost | members get the report of a gap, and what their own node publishes | members get what they missed when it is back, publishing fails meanwhile |
//! | counts of members on all nodes | no | yes |
//!
//! One connection of the process, on the first shard, carries all topics. A node subscribes to a
//! topic with its first member there, and leaves it some time after the last.
//!
//! # Subjects
//!
//! For the namespace `push` and the topic `news.sport`:
//!
//! | subject | what |
//! |---|---|
//! | `push.t.news.sport` | messages as they are published; another program may publish there too |
//! | `push.live.news.sport` | messages that the stream `push` took, with their numbers |
//! | `push.count.news.sport.NODE` | the members on a node, kept by the stream `push-counts` for 15 s |
//!
//! A key is a header, `Ringserve-Key`, in which bytes are [escaped](ringserve_topics::escape).
//!
//! | room | holds | may not |
//! |---|---|---|
//! | `names` | subjects, keys, what JetStream says, as pure functions | know a connection |
//! | `follows` | the tasks of topics, and who waits for a turn | know what they do |
//! | `live`, `stream`, `counts` | the two bridges, and counts of members | know each other's topics |
//! | `bridge` | what a program says | wait |

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]

/// The programs of the guide's page.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/nodes.md")]
struct Guide;

mod bridge;
mod counts;
mod follows;
mod live;
mod names;
mod stats;
mod stream;

pub use bridge::NatsBridge;
pub use stats::{BridgeMonitor, BridgeStats};
