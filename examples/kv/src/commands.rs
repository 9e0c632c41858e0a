//! The commands there are.

/// Which keys a command reaches, and so which shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// None: it is about the connection or the server.
    Nothing,
    /// Its first argument.
    Key,
    /// Several, each with that many arguments, which are all of one shard.
    Together(usize),
    /// Each argument. The reply is the sum of what the shards say of them.
    Sum,
    /// Each argument. The reply is an array of the values.
    Values,
    /// Each pair of key and value.
    Pairs,
    /// All keys, and more that each shard has. The answers become one reply.
    All(Merge),
    /// Those of the shard that its cursor names.
    Cursor,
}

/// How the answers of shards become one reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// They are counts, and the reply is their sum.
    Sum,
    /// The reply is `OK`.
    Ok,
    /// They are elements of one array.
    Array,
    /// One of them is the reply, the likelier the more keys its shard has.
    Any,
}

/// What is known of a command.
#[derive(Debug)]
pub struct Spec {
    /// Its name in small letters.
    pub name: &'static str,
    /// Arguments with the name; negative for a least number.
    pub arity: i64,
    /// Keys it reaches.
    pub reach: Reach,
    /// What it is for.
    pub summary: &'static str,
}

impl Spec {
    /// True if a request of `args` arguments, the name included, is whole.
    #[inline]
    pub fn fits(&self, args: usize) -> bool {
        let args = args as i64;
        args == self.arity || (self.arity < 0 && args >= -self.arity)
    }

    /// Its first key, its last one (counted from the end if negative) and the step between, or zeros.
    pub fn keys(&self) -> [i64; 3] {
        match self.reach {
            Reach::Key => [1, 1, 1],
            Reach::Together(2) | Reach::Pairs => [1, -1, 2],
            Reach::Together(_) => [1, 2, 1],
            Reach::Sum | Reach::Values => [1, -1, 1],
            Reach::Nothing | Reach::All(_) | Reach::Cursor => [0, 0, 0],
        }
    }
}

/// A name as a number, in which small and capital letters are the same. What is behind 16 bytes is left out.
#[inline]
const fn word(name: &[u8]) -> u128 {
    let (mut word, mut at) = (0, 0);
    while at < name.len() && at < 16 {
        word = word << 8 | (name[at] & 0xDF) as u128;
        at += 1;
    }
    word
}

macro_rules! commands {
    ($($command:ident $name:literal $arity:literal $reach:expr, $summary:literal;)*) => {
        /// A command.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Command { $(#[doc = $summary] $command,)* }

        /// What is known of each, in the order of [`Command`].
        pub static SPECS: &[Spec] =
            &[$(Spec { name: $name, arity: $arity, reach: $reach, summary: $summary },)*];

        /// The command of that name, in small or capital letters.
        #[inline]
        #[allow(non_upper_case_globals, reason = "each constant is named for its command")]
        pub fn find(name: &[u8]) -> Option<Command> {
            $(const $command: u128 = word($name.as_bytes());)*
            let command = match word(name) {
                $($command => Command::$command,)*
                _ => return None,
            };
            // A space or a zero before a name looks like nothing, and the end of a long one is not seen.
            (command.spec().name.len() == name.len()).then_some(command)
        }
    };
}

impl Command {
    /// What is known of it.
    #[inline]
    pub fn spec(self) -> &'static Spec {
        &SPECS[self as usize]
    }
}

commands! {
    Get "get" 2 Reach::Key, "Get the value of a key";
    Set "set" -3 Reach::Key, "Set the string value of a key";
    SetNx "setnx" 3 Reach::Key, "Set the value of a key if it does not exist";
    SetEx "setex" 4 Reach::Key, "Set the value of a key and its time to live in seconds";
    PSetEx "psetex" 4 Reach::Key, "Set the value of a key and its time to live in milliseconds";
    GetSet "getset" 3 Reach::Key, "Set the value of a key and return the old one";
    GetDel "getdel" 2 Reach::Key, "Get the value of a key and delete it";
    GetEx "getex" -2 Reach::Key, "Get the value of a key and set its time to live";
    Append "append" 3 Reach::Key, "Append a value to a key";
    StrLen "strlen" 2 Reach::Key, "Get the length of the value stored in a key";
    GetRange "getrange" 4 Reach::Key, "Get a part of the value of a key";
    SubStr "substr" 4 Reach::Key, "Get a part of the value of a key";
    SetRange "setrange" 4 Reach::Key, "Overwrite a part of the value of a key";
    Incr "incr" 2 Reach::Key, "Increment the integer value of a key by one";
    Decr "decr" 2 Reach::Key, "Decrement the integer value of a key by one";
    IncrBy "incrby" 3 Reach::Key, "Increment the integer value of a key by the given amount";
    DecrBy "decrby" 3 Reach::Key, "Decrement the integer value of a key by the given number";
    IncrByFloat "incrbyfloat" 3 Reach::Key, "Increment the float value of a key by the given amount";
    MGet "mget" -2 Reach::Values, "Get the values of all the given keys";
    MSet "mset" -3 Reach::Pairs, "Set multiple keys to multiple values";
    MSetNx "msetnx" -3 Reach::Together(2), "Set multiple keys to multiple values if none of them exists";
    Del "del" -2 Reach::Sum, "Delete a key";
    Unlink "unlink" -2 Reach::Sum, "Delete a key";
    Exists "exists" -2 Reach::Sum, "Determine if a key exists";
    Touch "touch" -2 Reach::Sum, "Count the keys that exist";
    Type "type" 2 Reach::Key, "Determine the type stored at key";
    Rename "rename" 3 Reach::Together(1), "Rename a key";
    RenameNx "renamenx" 3 Reach::Together(1), "Rename a key if the new one does not exist";
    Copy "copy" -3 Reach::Together(1), "Copy a key";
    Expire "expire" -3 Reach::Key, "Set a key's time to live in seconds";
    PExpire "pexpire" -3 Reach::Key, "Set a key's time to live in milliseconds";
    ExpireAt "expireat" -3 Reach::Key, "Set the expiration for a key as a UNIX timestamp";
    PExpireAt "pexpireat" -3 Reach::Key, "Set the expiration for a key as a UNIX timestamp specified in milliseconds";
    Ttl "ttl" 2 Reach::Key, "Get the time to live for a key in seconds";
    PTtl "pttl" 2 Reach::Key, "Get the time to live for a key in milliseconds";
    ExpireTime "expiretime" 2 Reach::Key, "Get the expiration of a key as a UNIX timestamp";
    PExpireTime "pexpiretime" 2 Reach::Key, "Get the expiration of a key as a UNIX timestamp in milliseconds";
    Persist "persist" 2 Reach::Key, "Remove the expiration from a key";
    Keys "keys" 2 Reach::All(Merge::Array), "Find all keys matching the given pattern";
    Scan "scan" -2 Reach::Cursor, "Incrementally iterate the keys space";
    RandomKey "randomkey" 1 Reach::All(Merge::Any), "Return a random key";
    DbSize "dbsize" 1 Reach::All(Merge::Sum), "Return the number of keys in the selected database";
    FlushAll "flushall" -1 Reach::All(Merge::Ok), "Remove all keys from all databases";
    FlushDb "flushdb" -1 Reach::All(Merge::Ok), "Remove all keys from the current database";
    Publish "publish" 3 Reach::All(Merge::Sum), "Post a message to a channel";
    Subscribe "subscribe" -2 Reach::Nothing, "Listen for messages published to the given channels";
    Unsubscribe "unsubscribe" -1 Reach::Nothing, "Stop listening for messages posted to the given channels";
    PSubscribe "psubscribe" -2 Reach::Nothing, "Listen for messages published to channels matching the given patterns";
    PUnsubscribe "punsubscribe" -1 Reach::Nothing, "Stop listening for messages posted to channels matching the given patterns";
    PubSub "pubsub" -2 Reach::Nothing, "Tell the channels and patterns that are listened to";
    Ping "ping" -1 Reach::Nothing, "Ping the server";
    Echo "echo" 2 Reach::Nothing, "Echo the given string";
    Hello "hello" -1 Reach::Nothing, "Handshake with Redis";
    Reset "reset" 1 Reach::Nothing, "Reset the connection";
    Client "client" -2 Reach::Nothing, "A container for client connection commands";
    Select "select" 2 Reach::Nothing, "Change the selected database for the current connection";
    Quit "quit" -1 Reach::Nothing, "Close the connection";
    Describe "command" -1 Reach::Nothing, "Get array of Redis command details";
    Config "config" -2 Reach::Nothing, "A container for server configuration commands";
    Function "function" -2 Reach::Nothing, "A container for function commands, of which there are none";
    Info "info" -1 Reach::Nothing, "Get information and statistics about the server";
    Time "time" 1 Reach::Nothing, "Return the current server time";
}

#[cfg(test)]
#[path = "tests/commands.rs"]
mod tests;
