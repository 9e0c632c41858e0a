//! Commands that read or change keys.

mod keys;
mod strings;

use crate::commands::Command;
use crate::reply::{Out, Reply};
use crate::resp::Args;
use crate::route::Place;
use crate::store::{Key, Keyer, Moment, NEVER, Store};

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
    pub now: Moment<'a>,
    /// Bytes a value may grow to: no longer than what a request could bring.
    pub value_bytes_max: usize,
    /// Where the reply goes.
    pub reply: Reply<O>,
}

/// How a client tells the end of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// Seconds from now.
    Seconds,
    /// Milliseconds from now.
    Millis,
    /// Seconds since 1970.
    UnixSeconds,
    /// Milliseconds since 1970.
    UnixMillis,
}

impl Unit {
    /// The end that `time` tells, in milliseconds of the shard; 0 if it lies before the shard's start. `None` if
    /// Redis could not count up to it: that is milliseconds since 1970 in an `i64`.
    fn end(self, time: i64, now: &Moment<'_>) -> Option<u64> {
        let millis = match self {
            Unit::Seconds | Unit::UnixSeconds => time.checked_mul(1000)?,
            Unit::Millis | Unit::UnixMillis => time,
        };
        let unix = now.unix_millis();
        let end = match self {
            Unit::Seconds | Unit::Millis => millis.checked_add(unix)?,
            Unit::UnixSeconds | Unit::UnixMillis => millis,
        };
        // Wider for an instant: a shard's clock and that of the system may have moved apart since the shard's start.
        let end = i128::from(end) - i128::from(unix) + i128::from(now.millis());
        Some(end.clamp(0, i128::from(NEVER - 1)) as u64)
    }
}

/// How far a reply came.
#[derive(Debug)]
pub enum Outcome {
    /// It is written.
    Done,
    /// It is too long to be written in one go.
    Long(Vec<u8>),
    /// The outbox is full after this number of elements.
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
            Command::Expire => self.expire(key, args, command, Unit::Seconds),
            Command::PExpire => self.expire(key, args, command, Unit::Millis),
            Command::ExpireAt => self.expire(key, args, command, Unit::UnixSeconds),
            Command::PExpireAt => self.expire(key, args, command, Unit::UnixMillis),
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
