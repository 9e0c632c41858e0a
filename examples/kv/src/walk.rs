//! KEYS and SCAN: a walk over the keys of a shard, in parts, between which others are served.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Weak;

use ringserve::framing::Parts;
use ringserve::resp::{self, Matching, Pattern, PatternTooLong, Version, Writer};

use crate::keys::{Bad, SYNTAX, number};
use crate::store::{Place, Store};

/// Keys SCAN looks at if it is not told how many, as in Redis.
const SCAN_COUNT: i64 = 10;
/// Steps of a part, as [`Pattern`] counts them: some hundred microseconds.
pub const STEPS: usize = 100_000;
/// Steps that a key costs beside its match.
const KEY_STEPS: usize = 10;

/// What KEYS or SCAN asks of a shard.
#[derive(Clone)]
pub struct Query {
    pattern: Option<Pattern>,
    /// What it asks for are strings, as all there is.
    strings: bool,
    /// Where SCAN begins and how many keys it looks at; KEYS looks at all.
    part: Option<(usize, usize)>,
    /// Gone once the client does not wait for the answer.
    pub asker: Weak<()>,
}

/// What a shard found: keys as strings of the protocol, and how many they are.
#[derive(Default)]
pub struct Found {
    pub keys: Vec<u8>,
    pub count: usize,
    /// The cursor for the rest of a scan.
    pub cursor: i64,
}

pub fn too_long(error: PatternTooLong) -> Bad {
    format!("ERR {error}").into()
}

impl Query {
    /// Reads KEYS.
    pub fn of_keys(args: Parts<'_>) -> Result<Query, Bad> {
        let pattern = Some(Pattern::new(args.get(1)).map_err(too_long)?);
        Ok(Query { pattern, strings: true, part: None, asker: Weak::new() })
    }

    /// Reads SCAN.
    pub fn of_scan(args: Parts<'_>) -> Result<Query, Bad> {
        let cursor = resp::number(args.get(1)).and_then(|cursor| usize::try_from(cursor).ok());
        let cursor = cursor.ok_or("ERR invalid cursor")?;
        let (mut count, mut pattern, mut strings) = (SCAN_COUNT, None, true);
        for n in (2..args.len()).step_by(2) {
            match &*args.word(n) {
                _ if n + 1 == args.len() => return Err(SYNTAX),
                "match" => pattern = Some(Pattern::new(args.get(n + 1)).map_err(too_long)?),
                "type" => strings = args.word(n + 1) == "string",
                "count" => count = number(args, n + 1)?,
                _ => return Err(SYNTAX),
            }
        }
        if count < 1 {
            return Err(SYNTAX);
        }
        Ok(Query { pattern, strings, part: Some((cursor, count as usize)), asker: Weak::new() })
    }

    /// The shard that it asks; `None` for all.
    pub fn shard(&self, shards: usize) -> Option<usize> {
        self.part.map(|(cursor, _)| cursor % shards)
    }
}

/// A walk over keys, from the highest position to the lowest. Keys only move to lower ones, so each that is there all the time is
/// found, and once: those that were seen and moved are known.
///
/// A cursor names a shard and a position there. Shards are scanned one after the other. A scan may find a key again that moved.
pub struct Walk {
    query: Query,
    place: Rc<RefCell<Place>>,
    /// The lowest position.
    from: usize,
    /// The key whose match takes longer than a part.
    long: Option<(Box<[u8]>, Matching)>,
    found: Found,
}

impl Walk {
    pub fn begin(store: &mut Store, query: Query) -> Walk {
        let ((shard, shards), mut top, mut from, mut found) = (store.place, store.len(), 0, Found::default());
        if let Some((cursor, count)) = query.part {
            top = if cursor < shards { top } else { top.min(cursor / shards) };
            from = top.saturating_sub(count);
            found.cursor = if from == 0 { (shard + 1) % shards } else { from * shards + shard } as i64;
        }
        Walk { query, place: store.walked(top), from, long: None, found }
    }

    /// Goes on for about that many steps. `None` if there is more to do.
    pub fn go_on(&mut self, store: &Store, mut steps: usize) -> Option<Found> {
        if let Some((key, mut matching)) = self.long.take() {
            match self.query.pattern.as_ref().map(|pattern| matching.go_on(pattern, &key, &mut steps)) {
                Some(None) => {
                    self.long = Some((key, matching));
                    return None;
                }
                is_match => self.add(&key, is_match.flatten().unwrap_or(true)),
            }
        }
        loop {
            let at = match &mut self.place.borrow_mut().at {
                at if *at <= self.from => return Some(std::mem::take(&mut self.found)),
                at => {
                    *at -= 1;
                    *at
                }
            };
            if steps == 0 {
                self.place.borrow_mut().at += 1;
                return None;
            }
            steps = steps.saturating_sub(KEY_STEPS);
            let Some(key) = store.key(at).filter(|key| !self.place.borrow().seen.contains(*key)) else {
                continue;
            };
            let mut matching = Matching::default();
            match self.query.pattern.as_ref().map(|pattern| matching.go_on(pattern, key, &mut steps)) {
                Some(None) => {
                    self.long = Some((key.into(), matching));
                    return None;
                }
                is_match => self.add(key, is_match.flatten().unwrap_or(true)),
            }
        }
    }

    fn add(&mut self, key: &[u8], is_match: bool) {
        if is_match && self.query.strings {
            Writer::to_vec(&mut self.found.keys, Version::Two).reply(|out| out.bulk(key));
            self.found.count += 1;
        }
    }
}
