//! Commands that read or change keys.

mod keys;
mod strings;

use crate::commands::Command;
use crate::reply::{Out, Reply};
use crate::resp::Args;
use crate::route::Place;
use crate::store::{Key, Keyer, Moment, Store};

const SYNTAX: &str = "ERR syntax error";
const NOT_A_NUMBER: &str = "ERR value is not an integer or out of range";

/// What a command works with.
pub struct Task<'a, O> {
    /// The keys of this shard.
    pub store: &'a mut Store,
    /// Hashes keys.
    pub keyer: &'a Keyer,
    /// Which shard this is.
    pub place: Place,
    /// The time of the request.
    pub now: Moment,
    /// Bytes a value may grow to: no longer than what a request could bring.
    pub value_bytes_max: usize,
    /// Where the reply goes.
    pub reply: Reply<O>,
}

/// How far a reply came.
#[derive(Debug)]
pub enum Outcome {
    /// It is written.
    Done,
    /// It is too long to be written in one go.
    Long(Vec<u8>),
    /// The outbox is full after so many elements.
    Full(usize),
}

impl<O: Out> Task<'_, O> {
    /// Runs a command of one key. `args` are those after the key.
    #[inline]
    pub fn run_one(&mut self, command: Command, key: Key<'_>, args: Args<'_>) {
        match command {
            Command::Get => self.get(key),
            Command::Set => self.set(key, args),
            Command::Incr => self.add(key, 1),
            Command::Decr => self.add(key, -1),
            Command::IncrBy => self.add_given(key, args, false),
            Command::DecrBy => self.add_given(key, args, true),
            Command::Append => self.append(key, args),
            Command::StrLen => self.strlen(key),
            Command::Expire => self.expire(key, args, command, 1000),
            Command::PExpire => self.expire(key, args, command, 1),
            Command::Ttl => self.ttl(key, 1000),
            Command::PTtl => self.ttl(key, 1),
            Command::Type => self.type_of(key),
            other => unreachable!("{other:?} has not one key"),
        }
    }

    /// Runs a command of several keys, of all, or of a cursor. `args` are those after the name. The first `skip` keys of
    /// MGET were answered before.
    pub fn run_many(&mut self, command: Command, args: Args<'_>, skip: usize) -> Outcome {
        match command {
            Command::MGet => return self.mget(args, skip),
            Command::Keys => return self.list_keys(args),
            Command::Scan => return self.scan(args),
            Command::MSet => self.mset(args),
            Command::Del => self.del(args),
            Command::Exists => self.exists(args),
            Command::DbSize => self.reply.integer(self.store.len() as i64),
            Command::FlushAll | Command::FlushDb => self.flush(args),
            other => unreachable!("{other:?} has not several keys"),
        }
        Outcome::Done
    }
}

#[cfg(test)]
mod tests;
