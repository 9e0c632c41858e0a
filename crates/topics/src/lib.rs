//! Publish and subscribe over all shards: topics with a log, recovery from a cursor, and members
//! that may read slowly. Users depend on `ringserve`, which re-exports this crate as its module
//! `topics`.
//!
//! ```text
//!   publish ──▶ home of the topic: numbers it ──▶ log of each shard with members [.. 41 42 43]
//!                                                    │
//!                      end of a turn: one page of members, each of which lacks what is in the log from its cursor on
//!                                                    ├─▶ outbox has room: what it lacks, in one send
//!                                                    └─▶ no room: it stays where it is, at no cost, and goes on when there is
//! ```
//!
//! * [`Topics`] belong to the server, [`ShardTopics`] to a shard, and a [`Subscriber`] to a
//!   connection, whose session holds it. A [`TopicReader`] reads a topic in a task, such as the
//!   body of an answer by HTTP.
//! * **Order**: the home of a topic numbers its messages, so all members get them in one order,
//!   each once at most.
//! * **Pages**: a message for 100 000 members does not hold up its shard. Members get it by
//!   [pages](ringserve_server::Shard::pages) at the end of turns, and what peers ask meanwhile goes
//!   first.
//! * **Recovery**: members get the [`Cursor`] of each message by the [`Form`] of their protocol. A
//!   client that comes back with the last one gets what it missed, as far as [`History`] has it,
//!   and else the report of a [`Gap`].
//! * **Slow members** cost no memory: a member is 16 bytes, with 8 more at its connection, and the
//!   log has what it lacks. [`Slow`] says what happens when the log does not have it any longer.
//! * **Bounds**: [`TopicOptions`]. Names are checked ([`is_name`]), and any bytes become a token of
//!   one by [`escape`].
//!
//! A drain does not wait for what members lack. Everything is in memory, and of one process.
//!
//! ```no_run
//! use std::rc::Rc;
//!
//! use ringserve::framing::Lines;
//! use ringserve::topics::{self, FormId, History, Since, ShardTopics, Slow, SubscribeError, Subscriber, TopicOptions, Topics};
//! use ringserve::{Cx, Frame, Server, Service, service::{OpenCx, Refusal, Session}};
//!
//! struct News { topics: ShardTopics, form: FormId }
//!
//! struct Reader(Subscriber);
//! impl Session for Reader {}
//!
//! impl Service for News {
//!     type Session = Reader;
//!     type Error = SubscribeError;
//!
//!     async fn open(&self, opening: &OpenCx<'_>) -> Result<Reader, Refusal> {
//!         Ok(Reader(self.topics.subscriber(opening.local_handle(), self.form)))
//!     }
//!
//!     async fn call(&self, cx: &Cx<'_, Reader>, line: Frame) -> Result<(), SubscribeError> {
//!         let line = String::from_utf8_lossy(&line).into_owned();
//!         match line.split_once(' ') {
//!             // A topic alone subscribes to it; text behind it is published.
//!             None => drop(cx.session().0.subscribe(&line, Since::Newest, Slow::Skip).await?),
//!             Some((topic, text)) => {
//!                 if let Err(error) = self.topics.publish(topic, text.to_owned()) {
//!                     cx.reply(error.to_string());
//!                 }
//!             }
//!         }
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! let topics = Topics::new(TopicOptions::new(History::last(1024)));
//! let form = topics.form(topics::Lines);
//! Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(move |shard| {
//!     News { topics: topics.register(shard), form }
//! })
//! # }
//! ```
//!
//! Without an order over shards and without history, subscribers of one shard that are reached by
//! its own code are [`listeners`]. Topics of several levels, and filters with wildcards for them,
//! are [`Filters`].

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]

pub mod bridge;
mod delivery;
mod filters;
mod form;
pub mod listeners;
mod log;
mod members;
mod name;
mod node;
mod options;
mod reader;
mod shared;
mod slab;
mod topic;
mod topics;

pub use filters::{Filters, is_filter, matching};
pub use form::{Bare, Cursor, CursorError, EntryView, Events, Form, Gap, Lines};
pub use log::History;
pub use name::{escape, is_name};
pub use options::{PublishError, Since, Slow, SubscribeError, TopicOptions};
pub use reader::TopicReader;
pub use topics::{FormId, ShardTopics, Subscriber, TopicFigures, Topics};
