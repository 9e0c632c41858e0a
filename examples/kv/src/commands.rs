//! The commands there are.

/// Which keys a command reaches, and so which shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// None: it is about the connection or the server.
    Nothing,
    /// Its first argument.
    Key,
    /// All its arguments, or every other one.
    Keys {
        /// 1 or 2.
        step: usize,
    },
    /// Every key there is.
    Everything,
    /// Those of the shard that its cursor names.
    Cursor,
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
    /// As COMMAND tells them.
    pub flags: &'static [&'static str],
    /// What it is for.
    pub summary: &'static str,
    /// The version of Redis that had it first.
    pub since: &'static str,
    /// The group Redis puts it into.
    pub group: &'static str,
}

impl Spec {
    /// True if a request of `args` arguments, the name included, is whole.
    #[inline]
    pub fn fits(&self, args: usize) -> bool {
        let (args, arity) = (args as i64, self.arity);
        args == arity || (arity < 0 && args >= -arity)
    }

    /// Its first key, its last one (counted from the end if negative) and the step between, or zeros.
    pub fn keys(&self) -> (i64, i64, i64) {
        match self.reach {
            Reach::Key => (1, 1, 1),
            Reach::Keys { step } => (1, -1, step as i64),
            Reach::Nothing | Reach::Everything | Reach::Cursor => (0, 0, 0),
        }
    }
}

/// Bytes of a name that fit a word. Longer ones are looked for in the table.
const WORD_BYTES: usize = 8;

/// Leaves out the bit in which small and capital letters differ.
const LETTERS: u64 = 0xDFDF_DFDF_DFDF_DFDF;

/// The start of a name as a number, in which small and capital letters are the same.
const fn word(name: &[u8]) -> u64 {
    let mut bytes = [0; WORD_BYTES];
    let mut at = 0;
    while at < name.len() && at < WORD_BYTES {
        bytes[at] = name[at];
        at += 1;
    }
    u64::from_le_bytes(bytes) & LETTERS
}

macro_rules! commands {
    ($($command:ident $name:literal $arity:literal $reach:expr, $flags:expr, $group:literal $since:literal $summary:literal;)*) => {
        /// A command.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Command { $(#[doc = $summary] $command,)* }

        /// What is known of each, in the order of [`Command`].
        pub static SPECS: &[Spec] = &[$(Spec {
            name: $name,
            arity: $arity,
            reach: $reach,
            flags: &$flags,
            summary: $summary,
            since: $since,
            group: $group,
        },)*];

        /// The command of the name that the first `len` bytes of `text` are, in small or capital letters.
        #[inline]
        #[allow(non_upper_case_globals, reason = "each constant is named for its command")]
        pub fn find_at(text: &[u8], len: usize) -> Option<Command> {
            $(const $command: u64 = word($name.as_bytes());)*
            if !(1..=WORD_BYTES).contains(&len) {
                return find_long(text.get(..len)?);
            }
            let word = match text.first_chunk() {
                Some(eight) => u64::from_le_bytes(*eight) & LETTERS & u64::MAX >> (64 - 8 * len),
                None => word(text.get(..len)?),
            };
            let command = match word {
                $($command => Command::$command,)*
                _ => return None,
            };
            // A space or a zero behind a shorter name looks the same in a word, and so does the start of a longer name.
            (command.spec().name.len() == len).then_some(command)
        }

        /// The command of a name that does not fit a word.
        #[cold]
        fn find_long(name: &[u8]) -> Option<Command> {
            const ALL: &[Command] = &[$(Command::$command),*];
            ALL.iter().copied().find(|command| command.spec().name.as_bytes().eq_ignore_ascii_case(name))
        }
    };
}

/// The command of that name.
pub fn find(name: &[u8]) -> Option<Command> {
    find_at(name, name.len())
}

impl Command {
    /// What is known of it.
    #[inline]
    pub fn spec(self) -> &'static Spec {
        &SPECS[self as usize]
    }
}

const READ: [&str; 2] = ["readonly", "fast"];
const READ_ALL: [&str; 1] = ["readonly"];
const WRITE: [&str; 2] = ["write", "fast"];
const STORE: [&str; 3] = ["write", "denyoom", "fast"];
const REMOVE: [&str; 1] = ["write"];
const TALK: [&str; 4] = ["noscript", "loading", "stale", "fast"];
const ASK: [&str; 3] = ["noscript", "loading", "stale"];

commands! {
    Get "get" 2 Reach::Key, READ, "string" "1.0.0" "Get the value of a key";
    Set "set" -3 Reach::Key, STORE, "string" "1.0.0" "Set the string value of a key";
    Incr "incr" 2 Reach::Key, STORE, "string" "1.0.0" "Increment the integer value of a key by one";
    Decr "decr" 2 Reach::Key, STORE, "string" "1.0.0" "Decrement the integer value of a key by one";
    IncrBy "incrby" 3 Reach::Key, STORE, "string" "1.0.0" "Increment the integer value of a key by the given amount";
    DecrBy "decrby" 3 Reach::Key, STORE, "string" "1.0.0" "Decrement the integer value of a key by the given number";
    Append "append" 3 Reach::Key, STORE, "string" "2.0.0" "Append a value to a key";
    StrLen "strlen" 2 Reach::Key, READ, "string" "2.2.0" "Get the length of the value stored in a key";
    MGet "mget" -2 Reach::Keys { step: 1 }, READ, "string" "1.0.0" "Get the values of all the given keys";
    MSet "mset" -3 Reach::Keys { step: 2 }, STORE, "string" "1.0.1" "Set multiple keys to multiple values";
    Del "del" -2 Reach::Keys { step: 1 }, REMOVE, "generic" "1.0.0" "Delete a key";
    Exists "exists" -2 Reach::Keys { step: 1 }, READ, "generic" "1.0.0" "Determine if a key exists";
    Expire "expire" -3 Reach::Key, WRITE, "generic" "1.0.0" "Set a key's time to live in seconds";
    PExpire "pexpire" -3 Reach::Key, WRITE, "generic" "2.6.0" "Set a key's time to live in milliseconds";
    ExpireAt "expireat" -3 Reach::Key, WRITE, "generic" "1.2.0" "Set the expiration for a key as a UNIX timestamp";
    PExpireAt "pexpireat" -3 Reach::Key, WRITE, "generic" "2.6.0" "Set the expiration for a key as a UNIX timestamp specified in milliseconds";
    Ttl "ttl" 2 Reach::Key, READ, "generic" "1.0.0" "Get the time to live for a key in seconds";
    PTtl "pttl" 2 Reach::Key, READ, "generic" "2.6.0" "Get the time to live for a key in milliseconds";
    Type "type" 2 Reach::Key, READ, "generic" "1.0.0" "Determine the type stored at key";
    Keys "keys" 2 Reach::Everything, READ_ALL, "generic" "1.0.0" "Find all keys matching the given pattern";
    Scan "scan" -2 Reach::Cursor, READ_ALL, "generic" "2.8.0" "Incrementally iterate the keys space";
    DbSize "dbsize" 1 Reach::Everything, READ, "server" "1.0.0" "Return the number of keys in the selected database";
    FlushAll "flushall" -1 Reach::Everything, REMOVE, "server" "1.0.0" "Remove all keys from all databases";
    FlushDb "flushdb" -1 Reach::Everything, REMOVE, "server" "1.0.0" "Remove all keys from the current database";
    Ping "ping" -1 Reach::Nothing, ["fast"], "connection" "1.0.0" "Ping the server";
    Echo "echo" 2 Reach::Nothing, ["loading", "stale", "fast"], "connection" "1.0.0" "Echo the given string";
    Hello "hello" -1 Reach::Nothing, TALK, "connection" "6.0.0" "Handshake with Redis";
    Client "client" -2 Reach::Nothing, ASK, "connection" "2.4.0" "A container for client connection commands";
    Select "select" 2 Reach::Nothing, ["loading", "stale", "fast"], "connection" "1.0.0" "Change the selected database for the current connection";
    Quit "quit" -1 Reach::Nothing, TALK, "connection" "1.0.0" "Close the connection";
    Describe "command" -1 Reach::Nothing, ["loading", "stale"], "server" "2.8.13" "Get array of Redis command details";
    Config "config" -2 Reach::Nothing, ASK, "server" "2.0.0" "A container for server configuration commands";
    Info "info" -1 Reach::Nothing, ["loading", "stale"], "server" "1.0.0" "Get information and statistics about the server";
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_command_is_found_by_its_name_in_any_letters() {
        for (n, spec) in SPECS.iter().enumerate() {
            for name in [spec.name.to_owned(), spec.name.to_uppercase()] {
                assert_eq!(find(name.as_bytes()).map(|command| command as usize), Some(n), "{name}");
            }
        }
        assert_eq!(find(b"GeT"), Some(Command::Get));
    }

    proptest! {
        #[test]
        fn nothing_else_is_a_command(name in "pexpirea?t?x?|[gG'\x00 ][eE\x05][tT4 \x00]?[ \x00sS]{0,7}") {
            let expected = SPECS.iter().position(|spec| spec.name.eq_ignore_ascii_case(&name));
            prop_assert_eq!(find(name.as_bytes()).map(|command| command as usize), expected);
        }
    }

    #[test]
    fn an_arity_is_a_number_or_a_least_number() {
        let fits = |command: Command, args| command.spec().fits(args);
        assert!(fits(Command::Get, 2) && !fits(Command::Get, 1) && !fits(Command::Get, 3));
        assert!(fits(Command::Set, 3) && fits(Command::Set, 9) && !fits(Command::Set, 2));
    }
}
