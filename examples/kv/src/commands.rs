//! The commands there are: their names, how many arguments they take, which keys they reach, and
//! what they do.

use std::sync::LazyLock;

use ringserve::framing::FrameFields;
use ringserve::resp::{Names, ReplyResult, Writer, unknown_subcommand};

use crate::client::{self, Client, Topics};
use crate::keys::{self, Bad, EX, EXAT, PX, PXAT, number};
use crate::store::Store;
use crate::walk::Query;

/// Which shards a command asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// None: it is about the connection.
    Client,
    /// The shard of the key in its first argument.
    Key,
    /// Those of all keys, with that many arguments for each. What they say becomes one reply.
    Each(usize),
    /// Those of all keys. What they say becomes the elements of an array.
    Values,
    /// All shards. What they say becomes one reply.
    All,
    /// The connection's own: it is about no key.
    Own,
}

type OnClient = fn(&Client, FrameFields<'_>, &mut Writer<'_, '_>) -> ReplyResult;
type ToQuery = fn(FrameFields<'_>) -> Result<Query, Bad>;
type OnStore = fn(&mut Store, FrameFields<'_>, &mut Writer<'_, '_>) -> ReplyResult;

/// The action of a command. One that reaches several keys does it for each, where that key is.
#[derive(Clone, Copy)]
pub enum Run {
    Client(OnClient),
    Store(OnStore),
    Topics(fn(&Topics, FrameFields<'_>, &mut Writer<'_, '_>) -> ReplyResult),
    /// Walks over the keys of one shard or of all, in parts.
    Walk(ToQuery),
    /// Begins or ends to listen, name by name.
    Listen,
}

pub struct Command {
    /// In small letters.
    pub name: &'static str,
    /// Arguments with the name; negative for a least number.
    arity: i64,
    pub to: To,
    pub run: Run,
}

impl Command {
    /// True if a request of that number of arguments, the name included, is whole.
    #[inline]
    pub fn fits(&self, args: usize) -> bool {
        let is_whole = if self.arity < 0 { args as i64 >= -self.arity } else { args as i64 == self.arity };
        is_whole && !matches!(self.to, To::Each(step) if !(args - 1).is_multiple_of(step))
    }

    /// The reply to COMMAND: name, arity, flags, first key, last key (counted from the end if
    /// negative) and the step between.
    fn tell(&self, out: &mut Writer<'_, '_>) -> ReplyResult {
        let [first, last, step] = match self.to {
            To::Key => [1, 1, 1],
            To::Each(step) => [1, -1, step as i64],
            To::Values => [1, -1, 1],
            To::Client | To::All | To::Own => [0, 0, 0],
        };
        out.array(6)?;
        out.bulk(self.name)?;
        out.integer(self.arity)?;
        out.array(0)?;
        [first, last, step].into_iter().try_for_each(|number| out.integer(number))
    }
}

/// The command of that name, in small or capital letters.
#[inline]
pub fn find(name: &[u8]) -> Option<&'static Command> {
    static BY_NAME: LazyLock<Names<&Command>> =
        LazyLock::new(|| Names::new(COMMANDS.iter().map(|command| (command.name, command))));
    BY_NAME.get(name)
}

/// COMMAND: what there is to know of all commands, or of some.
fn describe(_: &Client, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    match (&*args.word(1), args.len()) {
        ("count", 2) => out.integer(COMMANDS.len() as i64),
        ("", _) => {
            out.array(COMMANDS.len())?;
            COMMANDS.iter().try_for_each(|command| command.tell(out))
        }
        ("info", _) => {
            out.array(args.len() - 2)?;
            args.from(2).try_for_each(|name| match find(name) {
                Some(command) => command.tell(out),
                None => out.null(),
            })
        }
        // redis-cli asks at its start.
        ("docs", _) => out.map(0),
        _ => Err(unknown_subcommand(args).into()),
    }
}

const fn on_keys(name: &'static str, arity: i64, to: To, run: OnStore) -> Command {
    Command { name, arity, to, run: Run::Store(run) }
}

const fn on_client(name: &'static str, arity: i64, run: OnClient) -> Command {
    Command { name, arity, to: To::Client, run: Run::Client(run) }
}

const fn walks(name: &'static str, arity: i64, to_query: ToQuery) -> Command {
    Command { name, arity, to: To::Client, run: Run::Walk(to_query) }
}

const fn listens(name: &'static str, arity: i64) -> Command {
    Command { name, arity, to: To::Client, run: Run::Listen }
}

static COMMANDS: &[Command] = &[
    on_keys("get", 2, To::Key, keys::get),
    on_keys("set", -3, To::Key, keys::set),
    on_keys("setnx", 3, To::Key, |store, args, out| {
        let is_new = store.find(args.get(1)).is_none();
        is_new.then(|| store.put(args.get(1), args, 2, None));
        out.integer(is_new)
    }),
    on_keys("setex", 4, To::Key, |store, args, out| keys::set_with_end(store, args, out, EX)),
    on_keys("psetex", 4, To::Key, |store, args, out| keys::set_with_end(store, args, out, PX)),
    on_keys("getset", 3, To::Key, keys::get_and_set),
    on_keys("getdel", 2, To::Key, keys::get_and_delete),
    on_keys("getex", -2, To::Key, keys::get_and_end),
    on_keys("append", 3, To::Key, keys::append),
    on_keys("strlen", 2, To::Key, keys::strlen),
    on_keys("getrange", 4, To::Key, keys::get_range),
    on_keys("setrange", 4, To::Key, keys::set_range),
    on_keys("incr", 2, To::Key, |store, args, out| keys::add(store, args, out, 1)),
    on_keys("decr", 2, To::Key, |store, args, out| keys::add(store, args, out, -1)),
    on_keys("incrby", 3, To::Key, |store, args, out| keys::add(store, args, out, number(args, 2)?)),
    on_keys("decrby", 3, To::Key, |store, args, out| {
        let amount = number(args, 2)?.checked_neg().ok_or("ERR decrement would overflow")?;
        keys::add(store, args, out, amount)
    }),
    on_keys("type", 2, To::Key, |store, args, out| {
        out.simple(if store.find(args.get(1)).is_some() { "string" } else { "none" })
    }),
    on_keys("expire", -3, To::Key, |store, args, out| keys::expire(store, args, out, EX)),
    on_keys("pexpire", -3, To::Key, |store, args, out| keys::expire(store, args, out, PX)),
    on_keys("expireat", -3, To::Key, |store, args, out| keys::expire(store, args, out, EXAT)),
    on_keys("pexpireat", -3, To::Key, |store, args, out| keys::expire(store, args, out, PXAT)),
    on_keys("ttl", 2, To::Key, |store, args, out| keys::ttl(store, args, out, EX)),
    on_keys("pttl", 2, To::Key, |store, args, out| keys::ttl(store, args, out, PX)),
    on_keys("expiretime", 2, To::Key, |store, args, out| keys::ttl(store, args, out, EXAT)),
    on_keys("pexpiretime", 2, To::Key, |store, args, out| keys::ttl(store, args, out, PXAT)),
    on_keys("persist", 2, To::Key, keys::persist),
    on_keys("mget", -2, To::Values, keys::get),
    on_keys("mset", -3, To::Each(2), keys::set),
    on_keys("del", -2, To::Each(1), |store, args, out| out.integer(store.delete(args.get(1)))),
    on_keys("unlink", -2, To::Each(1), |store, args, out| out.integer(store.delete(args.get(1)))),
    on_keys("exists", -2, To::Each(1), |store, args, out| out.integer(store.find(args.get(1)).is_some())),
    on_keys("touch", -2, To::Each(1), |store, args, out| out.integer(store.find(args.get(1)).is_some())),
    walks("keys", 2, Query::of_keys),
    walks("scan", -2, Query::of_scan),
    on_keys("time", 1, To::Own, keys::time),
    on_keys("dbsize", 1, To::All, |store, _, out| out.integer(store.len() as i64)),
    on_keys("flushall", -1, To::All, keys::flush),
    on_keys("flushdb", -1, To::All, keys::flush),
    Command { name: "publish", arity: 3, to: To::All, run: Run::Topics(client::publish) },
    listens("subscribe", -2),
    listens("unsubscribe", -1),
    listens("psubscribe", -2),
    listens("punsubscribe", -1),
    on_client("ping", -1, client::ping),
    on_client("echo", 2, |_, args, out| out.bulk(args.get(1))),
    on_client("select", 2, client::select),
    on_client("hello", -1, client::hello),
    on_client("reset", 1, client::reset),
    on_client("quit", -1, |_, _, out| out.ok()),
    on_client("client", -2, client::client),
    on_client("config", -2, client::config),
    on_client("command", -1, describe),
    on_client("info", -1, client::info),
    // There are no functions to remove.
    on_client("function", -2, |_, _, out| out.ok()),
];

#[cfg(test)]
#[path = "tests/commands.rs"]
mod tests;
