use super::{NOT_A_NUMBER, SYNTAX, Task, Unit};
use crate::number::{self, Digits};
use crate::reply::Out;
use crate::resp::Args;
use crate::store::{Key, Moment, NEVER};

/// What SET does with the time a key has left.
#[derive(Clone, Copy)]
enum End<'a> {
    Never,
    Kept,
    /// At this time.
    At(Unit, &'a [u8]),
}

struct SetOptions<'a> {
    /// True for XX, false for NX.
    only_if: Option<bool>,
    end: End<'a>,
    /// The old value is the reply.
    get: bool,
}

impl<'a> SetOptions<'a> {
    fn parse(mut args: Args<'a>) -> Option<SetOptions<'a>> {
        let mut options = SetOptions { only_if: None, end: End::Never, get: false };
        while let Some(word) = args.next() {
            match (&word.to_ascii_lowercase()[..], options.only_if, options.end) {
                (b"nx", None | Some(false), _) => options.only_if = Some(false),
                (b"xx", None | Some(true), _) => options.only_if = Some(true),
                (b"get", _, _) => options.get = true,
                (b"keepttl", _, End::Never | End::Kept) => options.end = End::Kept,
                (word, _, end) => {
                    let unit = match word {
                        b"ex" => Unit::Seconds,
                        b"px" => Unit::Millis,
                        b"exat" => Unit::UnixSeconds,
                        b"pxat" => Unit::UnixMillis,
                        _ => return None,
                    };
                    match end {
                        End::Kept => return None,
                        End::At(other, _) if other != unit => return None,
                        End::Never | End::At(..) => options.end = End::At(unit, args.next()?),
                    }
                }
            }
        }
        Some(options)
    }

    /// When the key ends, in milliseconds of the shard.
    fn end(&self, now: &Moment<'_>) -> Result<u64, &'static str> {
        let End::At(unit, time) = self.end else { return Ok(NEVER) };
        let time = number::parse(time).ok_or(NOT_A_NUMBER)?;
        let end = if time > 0 { unit.end(time, now) } else { None };
        end.ok_or("ERR invalid expire time in 'set' command")
    }
}

impl<O: Out> Task<'_, O> {
    #[inline]
    pub(super) fn get(&mut self, key: Key<'_>) {
        match self.store.find(key, &self.now) {
            Some(at) => self.reply.string(self.store.value(at)),
            None => self.reply.null(),
        }
    }

    #[inline]
    pub(super) fn set(&mut self, key: Key<'_>, mut args: Args<'_>) {
        let value = args.next().unwrap_or_default();
        if args.len() > 0 {
            return self.set_with(key, value, args);
        }
        self.put(key, value, NEVER);
        self.reply.ok();
    }

    #[inline]
    pub(super) fn put(&mut self, key: Key<'_>, value: &[u8], end: u64) {
        match self.store.find(key, &self.now) {
            Some(at) => {
                self.store.replace(at, value);
                self.store.set_end(at, end);
            }
            None => self.store.insert(key, value, end, &self.now),
        }
    }

    fn set_with(&mut self, key: Key<'_>, value: &[u8], args: Args<'_>) {
        let Some(options) = SetOptions::parse(args) else { return self.reply.error(SYNTAX) };
        let end = match options.end(&self.now) {
            Ok(end) => end,
            Err(error) => return self.reply.error(error),
        };
        let found = self.store.find(key, &self.now);
        if options.get {
            match found {
                Some(at) => self.reply.string(self.store.value(at)),
                None => self.reply.null(),
            }
        }
        let allowed = options.only_if.is_none_or(|exists| exists == found.is_some());
        if allowed {
            match found {
                // The past deletes.
                _ if end != NEVER && end <= self.now.millis() => {
                    found.into_iter().for_each(|at| self.store.remove(at));
                }
                Some(at) => {
                    self.store.replace(at, value);
                    if !matches!(options.end, End::Kept) {
                        self.store.set_end(at, end);
                    }
                }
                None => self.store.insert(key, value, end, &self.now),
            }
        }
        match (options.get, allowed) {
            (true, _) => {}
            (false, true) => self.reply.ok(),
            (false, false) => self.reply.null(),
        }
    }

    pub(super) fn add_given(&mut self, key: Key<'_>, mut args: Args<'_>, negated: bool) {
        let Some(amount) = args.next().and_then(number::parse) else { return self.reply.error(NOT_A_NUMBER) };
        match if negated { amount.checked_neg() } else { Some(amount) } {
            Some(amount) => self.add(key, amount),
            None => self.reply.error("ERR decrement would overflow"),
        }
    }

    #[inline]
    pub(super) fn add(&mut self, key: Key<'_>, amount: i64) {
        let found = self.store.find(key, &self.now);
        let before = match found {
            Some(at) => number::parse(self.store.value(at)),
            None => Some(0),
        };
        let Some(before) = before else { return self.reply.error(NOT_A_NUMBER) };
        let Some(after) = before.checked_add(amount) else {
            return self.reply.error("ERR increment or decrement would overflow");
        };
        let digits = Digits::of(after);
        match found {
            Some(at) => self.store.replace(at, digits.bytes()),
            None => self.store.insert(key, digits.bytes(), NEVER, &self.now),
        }
        self.reply.number(&digits);
    }

    pub(super) fn append(&mut self, key: Key<'_>, mut args: Args<'_>) {
        let more = args.next().unwrap_or_default();
        let Some(at) = self.store.find(key, &self.now) else {
            self.store.insert(key, more, NEVER, &self.now);
            return self.reply.integer(more.len() as i64);
        };
        let value = self.store.value_mut(at);
        if value.len() + more.len() > self.value_bytes_max {
            return self.reply.error("ERR string exceeds maximum allowed size (proto-max-bulk-len)");
        }
        value.extend_from_slice(more);
        let len = value.len();
        self.reply.integer(len as i64);
    }

    pub(super) fn strlen(&mut self, key: Key<'_>) {
        let len = self.store.find(key, &self.now).map_or(0, |at| self.store.value(at).len());
        self.reply.integer(len as i64);
    }
}
