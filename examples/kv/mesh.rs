//! Messages between shards: the place of what the framework is going to have, with the same names. Until then there is one
//! shard, so nothing is ever sent.

use std::marker::PhantomData;

use ringserve::Shard;

/// Carries messages from shard to shard.
pub struct Shards<T>(PhantomData<fn(T)>);

impl<T> Shards<T> {
    /// Made before the server starts, and cloned into its factory.
    pub fn new() -> Shards<T> {
        Shards(PhantomData)
    }

    /// Has `receive` called on this shard with each message and the shard it comes from.
    pub fn join(&self, _shard: &Shard, _receive: impl Fn(usize, T) + 'static) {}

    /// Sends a message. It never waits.
    ///
    /// # Errors
    /// If it could not be sent, with the message.
    pub fn send(&self, _to: usize, message: T) -> Result<(), SendError<T>> {
        Err(SendError::Gone(message))
    }
}

impl<T> Clone for Shards<T> {
    fn clone(&self) -> Shards<T> {
        Shards(PhantomData)
    }
}

/// Why a message was not sent. It is given back.
#[derive(Debug)]
pub enum SendError<T> {
    /// Too many wait there already.
    #[allow(dead_code, reason = "made by the framework, once it carries messages")]
    Full(T),
    /// The shard ended.
    Gone(T),
}
