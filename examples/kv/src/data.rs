//! Commands that read or change keys of one shard.

use crate::commands::Command;
use crate::resp::{self, Args, Part};
use crate::store::{NEVER, Store, Value};

pub const SYNTAX: &str = "ERR syntax error";
pub const NOT_A_NUMBER: &str = "ERR value is not an integer or out of range";
const NOT_A_FLOAT: &str = "ERR value is not a valid float";
/// Keys SCAN looks at if it is not told how many, as in Redis.
const SCAN_COUNT: i64 = 10;
/// Milliseconds of a second.
const SECOND: u64 = 1000;

/// A reply, or the error that is one.
pub type Outcome<'a> = Result<Part<'a>, String>;

/// What a command works with.
pub struct Task<'a> {
    /// The keys of this shard.
    pub store: &'a mut Store,
    pub args: Args<'a>,
    /// This shard, and how many there are.
    pub place: (usize, usize),
    /// Bytes a value may grow to: no longer than what a request could bring.
    pub value_bytes_max: usize,
}

/// How a client tells the end of a key: in units of that many milliseconds, and since 1970 or from now on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Unit(u64, bool);

/// What SET and GETEX are told beside key and value.
#[derive(Default)]
struct Options<'a> {
    /// True for XX, false for NX.
    only_if: Option<bool>,
    /// The old value is the reply.
    get: bool,
    /// KEEPTTL or PERSIST.
    rule: bool,
    end: Option<(Unit, &'a [u8])>,
}

impl<'a> Options<'a> {
    /// Those of SET, or of GETEX, from that argument on.
    fn parse(args: Args<'a>, from: usize, is_set: bool) -> Result<Options<'a>, String> {
        let mut found = Options::default();
        let mut words = args.from(from);
        while let Some(word) = words.next() {
            let unit = match (&word.to_ascii_lowercase()[..], is_set) {
                (b"ex", _) => Unit(SECOND, false),
                (b"px", _) => Unit(1, false),
                (b"exat", _) => Unit(SECOND, true),
                (b"pxat", _) => Unit(1, true),
                (b"nx" | b"xx", true) => {
                    let exists = word[0].eq_ignore_ascii_case(&b'x');
                    if found.only_if.replace(exists).is_some_and(|other| other != exists) {
                        return Err(SYNTAX.into());
                    }
                    continue;
                }
                (b"get", true) => {
                    found.get = true;
                    continue;
                }
                (b"keepttl", true) | (b"persist", false) if found.end.is_none() => {
                    found.rule = true;
                    continue;
                }
                _ => return Err(SYNTAX.into()),
            };
            if found.rule || found.end.is_some_and(|(other, _)| other != unit) {
                return Err(SYNTAX.into());
            }
            found.end = Some((unit, words.next().ok_or(SYNTAX)?));
        }
        Ok(found)
    }
}

impl<'a> Task<'a> {
    /// Runs a command. Where the answers of shards become one reply, this is the answer.
    #[inline]
    pub fn run(mut self, command: Command) -> Outcome<'a> {
        match command {
            Command::Get => Ok(self.get()),
            Command::Set if self.args.spans.len() == 3 => Ok(self.put(1, 2, Some(NEVER))),
            _ => self.run_other(command),
        }
    }

    #[inline(never)]
    fn run_other(mut self, command: Command) -> Outcome<'a> {
        let flag = |is: bool| Ok(Part::Int(is.into()));
        match command {
            Command::Set => self.set(),
            Command::SetNx => {
                let is_new = self.find(1).is_none();
                is_new.then(|| self.put(1, 2, Some(NEVER)));
                flag(is_new)
            }
            Command::SetEx | Command::PSetEx => {
                let unit = if command == Command::SetEx { SECOND } else { 1 };
                let end = self.end_to_be(Unit(unit, false), self.args.get(2), command)?;
                Ok(self.put(1, 3, Some(end)))
            }
            Command::GetSet => {
                let old = self.old();
                self.put(1, 2, Some(NEVER));
                Ok(old)
            }
            Command::GetDel => Ok(self.delete().map_or(Part::Null, Part::Old)),
            Command::GetEx => {
                let options = Options::parse(self.args, 2, false)?;
                let end = match options.end {
                    Some((unit, time)) => Some(self.end_to_be(unit, time, command)?),
                    None => options.rule.then_some(NEVER),
                };
                let old = self.old();
                self.find(1).zip(end).into_iter().for_each(|(at, end)| self.store.set_end(at, end));
                Ok(old)
            }
            Command::Append => self.write(None, self.args.get(2)),
            Command::SetRange => {
                let from = usize::try_from(self.number(2)?).map_err(|_| "ERR offset is out of range")?;
                self.write(Some(from), self.args.get(3))
            }
            Command::StrLen => Ok(Part::Int(self.value().len() as i64)),
            Command::GetRange | Command::SubStr => {
                let (from, to) = (self.number(2)?, self.number(3)?);
                let value = self.value();
                let place =
                    |n: i64| if n < 0 { n.saturating_add(value.len() as i64).max(0) } else { n } as usize;
                let (from, to) = (place(from), place(to).saturating_add(1).min(value.len()));
                Ok(Part::Bytes(value.get(from..to).unwrap_or_default()))
            }
            Command::Incr => self.add(1),
            Command::Decr => self.add(-1),
            Command::IncrBy => self.number(2).and_then(|amount| self.add(amount)),
            Command::DecrBy => {
                let amount = self.number(2)?.checked_neg().ok_or("ERR decrement would overflow")?;
                self.add(amount)
            }
            Command::IncrByFloat => {
                let amount = resp::float(self.args.get(2)).ok_or(NOT_A_FLOAT)?;
                let before = self.find(1).map_or(Some(0.0), |at| resp::float(self.store.value(at).as_ref()));
                let after = before.ok_or(NOT_A_FLOAT)? + amount;
                if !after.is_finite() {
                    return Err("ERR increment would produce NaN or Infinity".into());
                }
                let after = resp::decimal(after).into_bytes();
                self.store.put(self.args.get(1), &after, None, None);
                Ok(Part::Old(Value::Own(after)))
            }
            Command::MSetNx => {
                let keys = || (1..self.args.spans.len()).step_by(2);
                let is_new = keys().all(|n| self.store.find(self.args.get(n)).is_none());
                if is_new {
                    keys().for_each(|n| drop(self.put(n, n + 1, Some(NEVER))));
                }
                flag(is_new)
            }
            Command::Del | Command::Unlink => flag(self.delete().is_some()),
            Command::Exists | Command::Touch => flag(self.find(1).is_some()),
            Command::Type => Ok(Part::Word(if self.find(1).is_some() { "string" } else { "none" })),
            Command::Rename | Command::RenameNx | Command::Copy => self.rename(command),
            Command::Expire => self.expire(Unit(SECOND, false), command),
            Command::PExpire => self.expire(Unit(1, false), command),
            Command::ExpireAt => self.expire(Unit(SECOND, true), command),
            Command::PExpireAt => self.expire(Unit(1, true), command),
            // To the nearest second, as Redis rounds.
            Command::Ttl => Ok(self.end(|end, now| (end - now + SECOND / 2) / SECOND)),
            Command::PTtl => Ok(self.end(|end, now| end - now)),
            Command::ExpireTime => Ok(self.end(|end, _| (end + SECOND / 2) / SECOND)),
            Command::PExpireTime => Ok(self.end(|end, _| end)),
            Command::Persist => {
                let ends = self.find(1).filter(|at| self.store.end(*at) != NEVER);
                ends.into_iter().for_each(|at| self.store.set_end(at, NEVER));
                flag(ends.is_some())
            }
            Command::Keys => {
                let keys = self.store.keys(0, usize::MAX).filter(|key| matches(self.args.get(1), key));
                Ok(Part::List(keys.map(Part::Bytes).collect()))
            }
            Command::Scan => self.scan(),
            Command::DbSize => Ok(Part::Int(self.store.figures()[0] as i64)),
            Command::FlushAll | Command::FlushDb => match &self.args.get(1).to_ascii_lowercase()[..] {
                b"" | b"sync" | b"async" if self.args.spans.len() <= 2 => {
                    self.store.clear();
                    Ok(Part::Ok)
                }
                _ => Err(SYNTAX.into()),
            },
            other => unreachable!("{other:?} is not about keys"),
        }
    }

    #[inline]
    fn find(&mut self, n: usize) -> Option<usize> {
        self.store.find(self.args.get(n))
    }

    fn number(&self, n: usize) -> Result<i64, String> {
        resp::number(self.args.get(n)).ok_or(NOT_A_NUMBER.into())
    }

    #[inline]
    fn get(self) -> Part<'a> {
        match self.store.find(self.args.get(1)) {
            Some(at) => Part::Value(self.store.value(at)),
            None => Part::Null,
        }
    }

    /// What GET would tell, of a key that is about to change.
    fn old(&mut self) -> Part<'a> {
        self.find(1).map_or(Part::Null, |at| Part::Old(self.store.value(at).clone()))
    }

    fn value(self) -> &'a [u8] {
        self.store.find(self.args.get(1)).map_or(&[], |at| self.store.value(at).as_ref())
    }

    /// Gives one argument, a key, another one as its value, and an end if it is not to keep its own.
    #[inline]
    fn put(&mut self, key: usize, value: usize, end: Option<u64>) -> Part<'a> {
        let (from, to) = self.args.spans[value];
        let kept = self.args.frame.and_then(|frame| Value::kept(frame, from, to));
        self.store.put(self.args.get(key), self.args.get(value), kept, end);
        Part::Ok
    }

    fn delete(&mut self) -> Option<Value> {
        self.find(1).and_then(|at| self.store.remove(at))
    }

    /// The end that `time` tells. `None` if Redis could not count up to it.
    fn end_of(&self, unit: Unit, time: i64) -> Option<u64> {
        let millis = time.checked_mul(unit.0 as i64)?;
        let end = if unit.1 { millis } else { millis.checked_add(self.store.now() as i64)? };
        Some(end.max(0) as u64)
    }

    fn end_to_be(&self, unit: Unit, time: &[u8], command: Command) -> Result<u64, String> {
        let time = resp::number(time).ok_or(NOT_A_NUMBER)?;
        let end = self.end_of(unit, time).filter(|_| time > 0);
        end.ok_or_else(|| format!("ERR invalid expire time in '{}' command", command.spec().name))
    }

    fn set(&mut self) -> Outcome<'a> {
        let options = Options::parse(self.args, 3, true)?;
        let end = match options.end {
            Some((unit, time)) => Some(self.end_to_be(unit, time, Command::Set)?),
            None => (!options.rule).then_some(NEVER),
        };
        let exists = self.find(1).is_some();
        let is_set = options.only_if.is_none_or(|wanted| wanted == exists);
        let reply = match (options.get, is_set) {
            (true, _) => self.old(),
            (false, true) => Part::Ok,
            (false, false) => Part::Null,
        };
        if is_set && end.is_some_and(|end| end <= self.store.now()) {
            // The past deletes.
            self.delete();
        } else if is_set {
            self.put(1, 2, end);
        }
        Ok(reply)
    }

    /// Writes over the value, from there on or behind its end.
    fn write(&mut self, from: Option<usize>, more: &[u8]) -> Outcome<'a> {
        let found = self.find(1);
        let len = found.map_or(0, |at| self.store.value(at).as_ref().len());
        if more.is_empty() && from.is_some() {
            return Ok(Part::Int(len as i64));
        }
        let from = from.unwrap_or(len);
        let to = from.saturating_add(more.len());
        if to > self.value_bytes_max.max(len) {
            return Err("ERR string exceeds maximum allowed size (proto-max-bulk-len)".into());
        }
        let at = match found {
            Some(at) => at,
            None => self.store.insert(self.args.get(1), Value::Own(Vec::new()), NEVER),
        };
        let len = self.store.change(at, |value| {
            value.resize(value.len().max(to), 0);
            value[from..to].copy_from_slice(more);
            value.len()
        });
        Ok(Part::Int(len as i64))
    }

    fn add(&mut self, amount: i64) -> Outcome<'a> {
        let before = self.find(1).map_or(Some(0), |at| resp::number(self.store.value(at).as_ref()));
        let after = before.ok_or(NOT_A_NUMBER)?.checked_add(amount);
        let after = after.ok_or("ERR increment or decrement would overflow")?;
        self.store.put(self.args.get(1), &resp::digits(after), None, None);
        Ok(Part::Int(after))
    }

    fn rename(&mut self, command: Command) -> Outcome<'a> {
        let (copies, mut replaces) = (command == Command::Copy, command == Command::Rename);
        let mut options = self.args.from(3);
        while let Some(option) = options.next() {
            match &option.to_ascii_lowercase()[..] {
                b"replace" => replaces = true,
                b"db" => match resp::number(options.next().ok_or(SYNTAX)?).ok_or(NOT_A_NUMBER)? {
                    0 => {}
                    _ => return Err("ERR DB index is out of range".into()),
                },
                _ => return Err(SYNTAX.into()),
            }
        }
        let (key, other) = (self.args.get(1), self.args.get(2));
        if copies && key == other {
            return Err("ERR source and destination objects are the same".into());
        }
        let moves = match self.store.find(key) {
            None if !copies => return Err("ERR no such key".into()),
            from => from.is_some() && (replaces || self.store.find(other).is_none()),
        };
        if moves && key != other {
            self.store.find(other).map(|at| self.store.remove(at));
            if let Some(at) = self.store.find(key) {
                let (value, end) = (self.store.value(at).clone(), self.store.end(at));
                if !copies {
                    self.store.remove(at);
                }
                self.store.insert(other, value, end);
            }
        }
        Ok(if command == Command::Rename { Part::Ok } else { Part::Int(moves.into()) })
    }

    fn expire(&mut self, unit: Unit, command: Command) -> Outcome<'a> {
        let [mut nx, mut xx, mut gt, mut lt] = [false; 4];
        for word in self.args.from(3) {
            match &word.to_ascii_lowercase()[..] {
                b"nx" => nx = true,
                b"xx" => xx = true,
                b"gt" => gt = true,
                b"lt" => lt = true,
                _ => return Err(format!("ERR Unsupported option {}", String::from_utf8_lossy(word))),
            }
        }
        if nx && (xx || gt || lt) {
            return Err("ERR NX and XX, GT or LT options at the same time are not compatible".into());
        }
        if gt && lt {
            return Err("ERR GT and LT options at the same time are not compatible".into());
        }
        let refused = || format!("ERR invalid expire time in '{}' command", command.spec().name);
        let end = self.end_of(unit, self.number(2)?).ok_or_else(refused)?;
        let found = self.find(1).filter(|at| {
            let (old, has_end) = (self.store.end(*at), self.store.end(*at) != NEVER);
            !(nx && has_end || xx && !has_end || gt && end <= old || lt && end >= old)
        });
        match found {
            Some(at) if end > self.store.now() => self.store.set_end(at, end),
            found => drop(found.map(|at| self.store.remove(at))),
        }
        Ok(Part::Int(found.is_some().into()))
    }

    fn end(&mut self, told: impl Fn(u64, u64) -> u64) -> Part<'a> {
        Part::Int(match self.find(1).map(|at| self.store.end(at)) {
            None => -2,
            Some(NEVER) => -1,
            Some(end) => told(end, self.store.now().min(end)) as i64,
        })
    }

    /// A cursor names a shard and a position there. Shards are scanned one after the other. A key that is there from the first call to
    /// the last is seen, since keys only move to lower positions, and are seen from the highest to the lowest.
    fn scan(self) -> Outcome<'a> {
        let (shard, shards) = self.place;
        let cursor = resp::number(self.args.get(1)).and_then(|cursor| usize::try_from(cursor).ok());
        let cursor = cursor.ok_or("ERR invalid cursor")?;
        let (mut count, mut pattern, mut strings, mut words) = (SCAN_COUNT, None, true, self.args.from(2));
        while let Some(word) = words.next() {
            let value = words.next().ok_or(SYNTAX)?;
            match &word.to_ascii_lowercase()[..] {
                b"match" => pattern = Some(value),
                b"type" => strings = value.eq_ignore_ascii_case(b"string"),
                b"count" => count = resp::number(value).ok_or(NOT_A_NUMBER)?,
                _ => return Err(SYNTAX.into()),
            }
        }
        if count < 1 {
            return Err(SYNTAX.into());
        }
        let len = self.store.figures()[0];
        let top = if cursor < shards { len } else { len.min(cursor / shards) };
        let from = top.saturating_sub(count as usize);
        let next = if from == 0 { (shard + 1) % shards } else { from * shards + shard };
        let wanted = |key: &&[u8]| strings && pattern.is_none_or(|pattern| matches(pattern, key));
        let keys = self.store.keys(from, top).rev().filter(wanted).map(Part::Bytes).collect();
        let next = Part::Old(Value::Own(resp::digits(next as i64).to_vec()));
        Ok(Part::List(vec![next, Part::List(keys)]))
    }
}

/// True if `text` matches `pattern` as Redis reads it: `*` is any text, `?` any byte, `[abc]`, `[^abc]` and
/// `[a-z]` a byte of a set, and `\` takes the next byte as it is. Only the last `*` is ever tried again.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    // Where to go on after the last `*`, and how much of the text it has taken.
    let (mut p, mut t, mut star) = (0, 0, None);
    loop {
        let step = match (text.get(t), &pattern[p..]) {
            (_, [b'*', ..]) => {
                p += 1;
                star = Some((p, t));
                continue;
            }
            (None, rest) => return rest.is_empty(),
            (Some(_), [b'?', ..]) => Some(1),
            (Some(byte), [b'[', set @ ..]) => in_set(set, *byte).map(|len| len + 1),
            (Some(byte), [b'\\', escaped, ..]) => (escaped == byte).then_some(2),
            (Some(byte), rest) => (rest.first() == Some(byte)).then_some(1),
        };
        match (step, &mut star) {
            (Some(len), _) => (p, t) = (p + len, t + 1),
            (None, Some((after, taken))) => {
                *taken += 1;
                (p, t) = (*after, *taken);
            }
            (None, None) => return false,
        }
    }
}

/// Bytes of a set after its `[`, with the `]`, if `byte` is in it. A set may lack the `]` at the end.
fn in_set(set: &[u8], byte: u8) -> Option<usize> {
    let negated = set.first() == Some(&b'^');
    let (mut at, mut found) = (usize::from(negated), false);
    loop {
        let (len, is_in) = match &set[at..] {
            [] => return (found != negated).then_some(at),
            [b']', ..] => return (found != negated).then_some(at + 1),
            [b'\\', escaped, ..] => (2, *escaped == byte),
            [low, b'-', high, ..] => (3, (*low.min(high)..=*low.max(high)).contains(&byte)),
            [literal, ..] => (1, *literal == byte),
        };
        (at, found) = (at + len, found | is_in);
    }
}

#[cfg(test)]
#[path = "tests/data.rs"]
mod tests;
