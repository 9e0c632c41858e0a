//! The protocol of Redis, RESP, for servers: requests as frames, replies in both versions; with the
//! feature `resp`, which is off by default.
//!
//! ```text
//!   *2\r\n $3\r\nGET\r\n $3\r\nkey\r\n      an array of strings, as every client library sends
//!   GET key\r\n                             a line, as typed by hand
//! ```
//!
//! | | |
//! |---|---|
//! | [`Resp`], [`Request`] | the framing, and the places of the arguments, handed over with each request |
//! | [`FrameFields`](crate::FrameFields) | the arguments |
//! | [`Writer`], [`Version`] | replies, written in place; types that version 2 lacks are written as Redis does |
//! | [`MergedReply`] | one reply merged from those of several shards |
//! | [`Names`] | the commands of a server by their names; [`unknown_command`], [`unknown_subcommand`] for all others |
//! | [`Pattern`], [`GlobMatch`] | patterns, also against long texts, in parts |
//! | [`number`], [`write_number`], [`hash_tag`] | numbers, keys that stay together |
//!
//! ```no_run
//! use std::convert::Infallible;
//!
//! use ringserve::resp::{Request, Resp, Version, Writer};
//! use ringserve::{Cx, Frame, Limits, Server, Service, service::with_heads};
//!
//! /// ECHO and PING.
//! struct Echo;
//!
//! impl Service<Request> for Echo {
//!     type Session = ();
//!     type Error = Infallible;
//!
//!     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame<Request>) -> Result<(), Infallible> {
//!         let (frame, request) = frame.into_parts();
//!         let args = request.args(&frame);
//!         cx.write_with(|out| {
//!             Writer::new(out, Version::Two).reply(|out| match (request.error(), &*args.word(0)) {
//!                 (Some(error), _) => Err(format!("ERR Protocol error: {error}").into()),
//!                 (None, "ping") => out.simple("PONG"),
//!                 (None, "echo") => out.bulk(args.get(1)),
//!                 _ => Err("ERR unknown command".into()),
//!             });
//!         });
//!         if request.error().is_some() {
//!             cx.close();
//!         }
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! let limits = Limits::default().frame_bytes_max(1 << 20);
//! Server::bind("127.0.0.1:6379").framing(Resp::new(1 << 20)).limits(limits).serve(|_shard| with_heads(Echo))
//! # }
//! ```
//!
//! `examples/kv` is a server of keys on all shards.

mod glob;
mod names;
mod reply;
mod request;

pub use glob::{GlobMatch, Pattern, PatternTooLong};
pub use names::{Names, unknown_command, unknown_subcommand};
pub use reply::{MergedReply, ReplyResult, Version, Writer};
pub use request::{Request, Resp};

/// Reads a number as Redis does: only in the form in which it would be written, so neither `01` nor
/// `+1`.
pub fn number(text: &[u8]) -> Option<i64> {
    let value = std::str::from_utf8(text).ok()?.parse().ok()?;
    (itoa::Buffer::new().format(value).as_bytes() == text).then_some(value)
}

/// Appends a number to `text` in the form that [`number`] reads.
pub fn write_number(value: i64, text: &mut Vec<u8>) {
    text.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

/// The part of a key that decides on its shard: the text in the first `{}` if there is some, so
/// that keys with the same text stay together, as in a cluster of Redis; else the whole key.
#[inline]
pub fn hash_tag(key: &[u8]) -> &[u8] {
    // Nearly no key has one.
    if !has_brace(key) {
        return key;
    }
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let inside = &key[open + 1..];
        inside.iter().position(|byte| *byte == b'}').filter(|len| *len > 0).map(|len| &inside[..len])
    });
    tag.unwrap_or(key)
}

/// True if there is a `{`: a look at eight bytes takes a few instructions, where one at each byte
/// takes as many for each.
#[inline]
fn has_brace(key: &[u8]) -> bool {
    let ones = u64::from_ne_bytes([1; 8]);
    // What borrows from a bit that was not set was a zero, or lies above one.
    let has = |eight: &[u8; 8]| {
        let word = u64::from_ne_bytes(*eight) ^ (ones * u64::from(b'{'));
        word.wrapping_sub(ones) & !word & (ones << 7) != 0
    };
    match key.last_chunk() {
        Some(last) => key.as_chunks().0.iter().any(has) || has(last),
        None => key.contains(&b'{'),
    }
}

#[cfg(test)]
mod tests;
