use super::{NOT_A_NUMBER, Outcome, SYNTAX, Task, Unit};
use crate::commands::Command;
use crate::glob;
use crate::number;
use crate::reply::{OUTBOX_BYTES_HIGH, Out, Reply};
use crate::resp::Args;
use crate::store::{Key, NEVER};

/// Keys SCAN looks at if it is not told how many, as in Redis.
const SCAN_COUNT: usize = 10;

/// When EXPIRE changes what is there.
#[derive(Default)]
struct Conditions {
    nx: bool,
    xx: bool,
    gt: bool,
    lt: bool,
}

impl Conditions {
    fn parse(args: Args<'_>) -> Result<Conditions, String> {
        let mut found = Conditions::default();
        for word in args {
            let which = match &word.to_ascii_lowercase()[..] {
                b"nx" => &mut found.nx,
                b"xx" => &mut found.xx,
                b"gt" => &mut found.gt,
                b"lt" => &mut found.lt,
                _ => return Err(format!("ERR Unsupported option {}", String::from_utf8_lossy(word))),
            };
            *which = true;
        }
        if found.nx && (found.xx || found.gt || found.lt) {
            return Err("ERR NX and XX, GT or LT options at the same time are not compatible".to_owned());
        }
        if found.gt && found.lt {
            return Err("ERR GT and LT options at the same time are not compatible".to_owned());
        }
        Ok(found)
    }

    /// True if an end may be changed from `old` to `new`.
    fn allow(&self, old: u64, new: u64) -> bool {
        let has_end = old != NEVER;
        !(self.nx && has_end || self.xx && !has_end || self.gt && new <= old || self.lt && new >= old)
    }
}

impl<O: Out> Task<'_, O> {
    pub(super) fn expire(&mut self, key: Key<'_>, mut args: Args<'_>, command: Command, unit: Unit) {
        let time = args.next().unwrap_or_default();
        let conditions = match Conditions::parse(args) {
            Ok(conditions) => conditions,
            Err(error) => return self.reply.error(error),
        };
        let Some(time) = number::parse(time) else { return self.reply.error(NOT_A_NUMBER) };
        let Some(end) = unit.end(time, &self.now) else {
            let name = command.spec().name;
            return self.reply.error(format!("ERR invalid expire time in '{name}' command"));
        };
        let Some(at) = self.store.find(key, &self.now) else { return self.reply.flag(false) };
        if !conditions.allow(self.store.end(at), end) {
            return self.reply.flag(false);
        }
        if end > self.now.millis() {
            self.store.set_end(at, end);
        } else {
            self.store.remove(at);
        }
        self.reply.flag(true);
    }

    pub(super) fn ttl(&mut self, key: Key<'_>, unit: u64) {
        let left = match self.store.find(key, &self.now).map(|at| self.store.end(at)) {
            None => -2,
            Some(NEVER) => -1,
            // To the nearest unit, as Redis rounds.
            Some(end) => ((end - self.now.millis() + unit / 2) / unit) as i64,
        };
        self.reply.integer(left);
    }

    pub(super) fn type_of(&mut self, key: Key<'_>) {
        let found = self.store.find(key, &self.now);
        self.reply.simple(if found.is_some() { "string" } else { "none" });
    }

    pub(super) fn mget(&mut self, args: Args<'_>, skip: usize) -> Outcome {
        let count = args.len();
        if skip == 0 {
            self.reply.array(count);
        }
        for (n, key) in args.enumerate().skip(skip) {
            self.get(self.keyer.key(key));
            if self.reply.is_full() && n + 1 < count {
                return Outcome::Full(n + 1);
            }
        }
        Outcome::Done
    }

    pub(super) fn mset(&mut self, mut args: Args<'_>) {
        if !args.len().is_multiple_of(2) {
            return self.reply.error("ERR wrong number of arguments for 'mset' command");
        }
        while let (Some(key), Some(value)) = (args.next(), args.next()) {
            self.put(self.keyer.key(key), value, NEVER);
        }
        self.reply.ok();
    }

    pub(super) fn del(&mut self, args: Args<'_>) {
        let mut removed = 0;
        for key in args {
            if let Some(at) = self.store.find(self.keyer.key(key), &self.now) {
                self.store.remove(at);
                removed += 1;
            }
        }
        self.reply.integer(removed);
    }

    pub(super) fn exists(&mut self, args: Args<'_>) {
        let found = args.filter(|key| self.store.find(self.keyer.key(key), &self.now).is_some()).count();
        self.reply.integer(found as i64);
    }

    pub(super) fn list_keys(&mut self, mut args: Args<'_>) -> Outcome {
        let pattern = args.next().unwrap_or_default();
        let keys: Vec<&[u8]> = self.store.keys(&self.now).filter(|key| glob::matches(pattern, key)).collect();
        let mut text = Reply::new(Vec::new(), self.reply.protocol());
        text.array(keys.len());
        keys.into_iter().for_each(|key| text.string(key));
        self.long(text.into_inner())
    }

    pub(super) fn scan(&mut self, mut args: Args<'_>) -> Outcome {
        let cursor = args.next().and_then(number::parse).and_then(|cursor| usize::try_from(cursor).ok());
        let Some(cursor) = cursor else { return self.refuse("ERR invalid cursor") };
        let (mut count, mut pattern, mut strings) = (SCAN_COUNT, None, true);
        while let Some(word) = args.next() {
            let Some(value) = args.next() else { return self.refuse(SYNTAX) };
            match &word.to_ascii_lowercase()[..] {
                b"match" => pattern = Some(value),
                b"type" => strings = value.eq_ignore_ascii_case(b"string"),
                b"count" => match number::parse(value) {
                    Some(given @ 1..) => count = given as usize,
                    Some(_) => return self.refuse(SYNTAX),
                    None => return self.refuse(NOT_A_NUMBER),
                },
                _ => return self.refuse(SYNTAX),
            }
        }
        let (next, keys) = self.store.scan(self.place.position(cursor), count, &self.now);
        let wanted = |key: &&[u8]| strings && pattern.is_none_or(|pattern| glob::matches(pattern, key));
        let keys: Vec<&[u8]> = keys.filter(wanted).collect();
        let mut text = Reply::new(Vec::new(), self.reply.protocol());
        text.array(2);
        text.string(number::Digits::of(self.place.cursor(next) as i64).bytes());
        text.array(keys.len());
        keys.into_iter().for_each(|key| text.string(key));
        self.long(text.into_inner())
    }

    pub(super) fn flush(&mut self, mut args: Args<'_>) {
        let how = args.next();
        let known =
            how.is_none_or(|how| how.eq_ignore_ascii_case(b"sync") || how.eq_ignore_ascii_case(b"async"));
        if !known || args.len() > 0 {
            return self.reply.error(SYNTAX);
        }
        self.store.clear();
        self.reply.ok();
    }

    fn long(&mut self, text: Vec<u8>) -> Outcome {
        if text.len() > OUTBOX_BYTES_HIGH {
            return Outcome::Long(text);
        }
        self.reply.raw(&text);
        Outcome::Done
    }

    fn refuse(&mut self, error: &str) -> Outcome {
        self.reply.error(error);
        Outcome::Done
    }
}
