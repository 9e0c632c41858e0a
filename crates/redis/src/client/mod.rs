//! A client of Redis, over an [`Upstream`](ringserve_upstream::Upstream): commands of all calls of
//! a shard go out together on shared connections, and their replies come in order. Cargo feature
//! `client`.
//!
//! ```no_run
//! use ringserve::framing::Lines;
//! use ringserve::redis::{RedisClient, RedisError, RedisOptions, Value};
//! use ringserve::upstream::Upstream;
//! use ringserve::{Cx, Frame, Server, Service};
//!
//! struct Front {
//!     redis: RedisClient,
//! }
//!
//! impl Service for Front {
//!     type Session = ();
//!     type Error = RedisError;
//!
//!     async fn call(&self, cx: &Cx<'_, ()>, key: Frame) -> Result<(), RedisError> {
//!         let reply = self.redis.query([&b"GET"[..], &key]).await?;
//!         match reply.value() {
//!             Value::Bytes(bytes) => cx.reply(bytes),
//!             _ => cx.reply("nothing"),
//!         }
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> Result<(), ringserve::Error> {
//!     let redis = Upstream::new("redis", ["redis.internal:6379"]);
//!     let options = RedisOptions::default().password("secret").database(2);
//!     Server::bind("127.0.0.1:7000")
//!         .framing(Lines::default())
//!         .serve(move |shard| Front { redis: RedisClient::new(&redis, shard, options.clone()) })
//! }
//! ```
//!
//! # What not to send
//!
//! Commands of several callers share a connection. So those do harm that change what the connection
//! is (SUBSCRIBE, MONITOR, SELECT, RESET, CLIENT REPLY), that keep others waiting (BLPOP and its
//! like), or that belong together (WATCH, MULTI and EXEC, as long as they are sent one by one): a
//! script does what a transaction does. Redirections of a cluster (MOVED, ASK) come back as errors.
//!
//! A command without an argument, such as the words of a blank line, is refused here with
//! `InvalidInput`: Redis would not reply to it.
// May use: the protocol's room, upstreams. Begin with: `redis.rs`.

mod redis;
mod replies;
mod value;

pub use redis::{RedisClient, RedisError, RedisOptions, Reply};
pub use replies::ReplyFrames;
pub use value::Value;
