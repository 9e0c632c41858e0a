//! Commands that read or change keys of one shard.

use std::borrow::Cow;

use ringserve::framing::FrameFields;
use ringserve::resp::{self, ReplyResult, Writer};

use crate::store::{NEVER, Store};

/// The text of an error reply.
pub type Bad = Cow<'static, str>;

pub const SYNTAX: Bad = Bad::Borrowed("ERR syntax error");
pub const NO_MEMORY: Bad = Bad::Borrowed("TRYAGAIN memory is used up");
const NOT_A_NUMBER: Bad = Bad::Borrowed("ERR value is not an integer or out of range");

/// The form in which a client names the end of a key: in units of that many milliseconds, and since
/// 1970 or from now on.
#[derive(Clone, Copy)]
pub struct Unit(i64, bool);

pub const EX: Unit = Unit(1000, false);
pub const PX: Unit = Unit(1, false);
pub const EXAT: Unit = Unit(1000, true);
pub const PXAT: Unit = Unit(1, true);

/// Words that tell the end of a key, of which a request has one at most. A time follows the first
/// four.
const ENDS: [(&str, Option<Unit>); 6] = [
    ("ex", Some(EX)),
    ("px", Some(PX)),
    ("exat", Some(EXAT)),
    ("pxat", Some(PXAT)),
    ("keepttl", None),
    ("persist", None),
];

/// A number among the arguments.
pub fn number(args: FrameFields<'_>, n: usize) -> Result<i64, Bad> {
    resp::number(args.get(n)).ok_or(NOT_A_NUMBER)
}

/// The options of SET, GETEX and EXPIRE that a request has.
struct Options<'a> {
    words: Vec<&'static str>,
    /// The number after the unit of the end.
    time: Option<(Unit, &'a [u8])>,
}

impl<'a> Options<'a> {
    /// Reads those that the command knows, from an argument on. The error is one that it does not.
    fn parse(args: FrameFields<'a>, from: usize, known: &[&'static str]) -> Result<Options<'a>, &'a [u8]> {
        let mut found = Options { words: Vec::new(), time: None };
        let mut args = args.from(from);
        while let Some(arg) = args.next() {
            let is_it = |word: &&&str| arg.eq_ignore_ascii_case(word.as_bytes());
            let word = *known.iter().find(is_it).ok_or(arg)?;
            if let Some((_, Some(unit))) = ENDS.iter().find(|(end, _)| *end == word) {
                found.time = Some((*unit, args.next().ok_or(arg)?));
            }
            if !found.has(word) {
                found.words.push(word);
            }
        }
        Ok(found)
    }

    fn has(&self, word: &str) -> bool {
        self.words.contains(&word)
    }

    /// The end that SET or GETEX names.
    fn end(&self, store: &mut Store, command: &str) -> Result<Option<u64>, Bad> {
        if ENDS.iter().filter(|(word, _)| self.has(word)).count() > 1 || self.has("nx") && self.has("xx") {
            return Err(SYNTAX);
        }
        self.time.map(|(unit, time)| end_to_be(store, unit, resp::number(time), command)).transpose()
    }
}

fn invalid(command: &str) -> Bad {
    format!("ERR invalid expire time in '{command}' command").into()
}

/// The end that a time names: a span by the shard's clock, a time since 1970 by that of the wall.
/// `None` if Redis could not count up to it.
fn end_of(store: &mut Store, unit: Unit, time: i64) -> Option<u64> {
    let millis = time.checked_mul(unit.0)?;
    let end = match unit {
        Unit(_, true) => millis.saturating_sub(store.ahead()),
        Unit(_, false) => millis.checked_add(store.now() as i64)?,
    };
    Some(end.max(0) as u64)
}

fn end_to_be(store: &mut Store, unit: Unit, time: Option<i64>, command: &str) -> Result<u64, Bad> {
    let time = time.ok_or(NOT_A_NUMBER)?;
    end_of(store, unit, time).filter(|_| time > 0).ok_or_else(|| invalid(command))
}

pub fn get(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    match store.find(args.get(1)) {
        Some(at) => out.bulk_kept(store.value(at)),
        None => out.null(),
    }
}

/// The bytes of the value that a command answers with, before it runs.
pub fn answer_bytes(store: &mut Store, command: &str, args: FrameFields<'_>) -> usize {
    match command {
        "get" | "mget" | "getset" | "getdel" | "getex" => store.value_of(args.get(1)).len(),
        "set" if args.from(3).any(|option| option.eq_ignore_ascii_case(b"get")) => {
            store.value_of(args.get(1)).len()
        }
        "getrange" => range(store, args).map_or(0, <[u8]>::len),
        _ => 0,
    }
}

pub fn set(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    if args.len() <= 3 {
        store.put(args.get(1), args, 2, Some(NEVER));
        return out.ok();
    }
    let known = ["nx", "xx", "get", "keepttl", "ex", "px", "exat", "pxat"];
    let options = Options::parse(args, 3, &known).map_err(|_| SYNTAX)?;
    let end = options.end(store, "set")?.or((!options.has("keepttl")).then_some(NEVER));
    let found = store.find(args.get(1));
    let is_set = if found.is_some() { !options.has("nx") } else { !options.has("xx") };
    match (options.has("get"), is_set) {
        (true, _) => get(store, args, out)?,
        (false, true) => out.ok()?,
        (false, false) => out.null()?,
    }
    if is_set && end.is_some_and(|end| end <= store.now()) {
        // The past deletes.
        store.delete(args.get(1));
    } else if is_set {
        store.put(args.get(1), args, 2, end);
    }
    Ok(())
}

/// SETEX and PSETEX.
pub fn set_with_end(
    store: &mut Store,
    args: FrameFields<'_>,
    out: &mut Writer<'_, '_>,
    unit: Unit,
) -> ReplyResult {
    let end = end_to_be(store, unit, resp::number(args.get(2)), &args.word(0))?;
    store.put(args.get(1), args, 3, Some(end));
    out.ok()
}

pub fn get_and_set(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    get(store, args, out)?;
    store.put(args.get(1), args, 2, Some(NEVER));
    Ok(())
}

pub fn get_and_delete(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    get(store, args, out)?;
    store.delete(args.get(1));
    Ok(())
}

pub fn get_and_end(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    let known = ["persist", "ex", "px", "exat", "pxat"];
    let options = Options::parse(args, 2, &known).map_err(|_| SYNTAX)?;
    let end = options.end(store, "getex")?.or(options.has("persist").then_some(NEVER));
    get(store, args, out)?;
    store.find(args.get(1)).zip(end).into_iter().for_each(|(at, end)| store.set_end(at, end));
    Ok(())
}

pub fn append(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    let len = store.value_of(args.get(1)).len();
    out.integer(overwrite(store, args.get(1), len, args.get(2))?)
}

pub fn set_range(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    let from = usize::try_from(number(args, 2)?).map_err(|_| "ERR offset is out of range")?;
    match args.get(3) {
        b"" => strlen(store, args, out),
        bytes => out.integer(overwrite(store, args.get(1), from, bytes)?),
    }
}

/// Writes bytes into a value, and returns its length.
fn overwrite(store: &mut Store, key: &[u8], from: usize, bytes: &[u8]) -> Result<i64, Bad> {
    let to = from.saturating_add(bytes.len());
    if to > store.value_bytes_max && !bytes.is_empty() {
        return Err("ERR string exceeds maximum allowed size (proto-max-bulk-len)".into());
    }
    Ok(store.change(key, |value| {
        value.resize(value.len().max(to), 0);
        value[from..to].copy_from_slice(bytes);
        value.len() as i64
    }))
}

pub fn strlen(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    out.integer(store.value_of(args.get(1)).len() as i64)
}

pub fn get_range(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    out.bulk(range(store, args)?)
}

/// The part of a value that GETRANGE asks for.
fn range<'a>(store: &'a mut Store, args: FrameFields<'_>) -> Result<&'a [u8], Bad> {
    let (from, to) = (number(args, 2)?, number(args, 3)?);
    if from < 0 && to < 0 && from > to {
        return Ok(&[]);
    }
    let value = store.value_of(args.get(1));
    let place = |n: i64| if n < 0 { n.saturating_add(value.len() as i64).max(0) } else { n } as usize;
    Ok(value.get(place(from)..place(to).saturating_add(1).min(value.len())).unwrap_or_default())
}

pub fn add(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>, amount: i64) -> ReplyResult {
    let before = store.find(args.get(1)).map_or(Some(0), |at| resp::number(store.value(at)));
    let after = before.ok_or(NOT_A_NUMBER)?.checked_add(amount);
    let after = after.ok_or("ERR increment or decrement would overflow")?;
    store.change(args.get(1), |value| {
        value.clear();
        resp::write_number(after, value);
    });
    out.integer(after)
}

/// EXPIRE, PEXPIRE, EXPIREAT and PEXPIREAT.
pub fn expire(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>, unit: Unit) -> ReplyResult {
    let options = Options::parse(args, 3, &["nx", "xx", "gt", "lt"])
        .map_err(|word| format!("ERR Unsupported option {}", String::from_utf8_lossy(word)))?;
    let [nx, xx, gt, lt] = ["nx", "xx", "gt", "lt"].map(|word| options.has(word));
    if nx && (xx || gt || lt) {
        return Err("ERR NX and XX, GT or LT options at the same time are not compatible".into());
    }
    if gt && lt {
        return Err("ERR GT and LT options at the same time are not compatible".into());
    }
    let end = end_of(store, unit, number(args, 2)?).ok_or_else(|| invalid(&args.word(0)))?;
    let found = store.find(args.get(1)).filter(|at| {
        let (old, has_end) = (store.end(*at), store.end(*at) != NEVER);
        !(nx && has_end || xx && !has_end || gt && end <= old || lt && end >= old)
    });
    match found {
        Some(at) if end > store.now() => store.set_end(at, end),
        found => found.into_iter().for_each(|at| store.remove(at)),
    }
    out.integer(found.is_some())
}

/// TTL, PTTL, EXPIRETIME and PEXPIRETIME. Redis rounds to the nearest second.
pub fn ttl(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>, unit: Unit) -> ReplyResult {
    let end = store.find(args.get(1)).map(|at| store.end(at));
    out.integer(match end {
        None => -2,
        Some(NEVER) => -1,
        Some(end) => {
            let zero = if unit.1 { -store.ahead() } else { store.now() as i64 };
            (end as i64).saturating_sub(zero).saturating_add(unit.0 / 2) / unit.0
        }
    })
}

pub fn persist(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    let found = store.find(args.get(1)).filter(|at| store.end(*at) != NEVER);
    found.into_iter().for_each(|at| store.set_end(at, NEVER));
    out.integer(found.is_some())
}

/// TIME: seconds since 1970, and microseconds of the next one.
pub fn time(store: &mut Store, _: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    let now = store.wall();
    out.array(2)?;
    out.bulk_integer(now.as_secs() as i64)?;
    out.bulk_integer(now.subsec_micros().into())
}

pub fn flush(store: &mut Store, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    if args.len() > 2 || !["", "sync", "async"].contains(&&*args.word(1)) {
        return Err(SYNTAX);
    }
    store.clear();
    out.ok()
}

#[cfg(test)]
#[path = "tests/keys_of_one.rs"]
mod tests;
