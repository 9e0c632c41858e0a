//! KEYS and SCAN: a walk over the keys of a shard, in parts, between which others are served.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use ringserve::framing::FrameFields;
use ringserve::resp::{self, GlobMatch, Pattern, PatternTooLong, Version, Writer};

use crate::keys::{Bad, NO_MEMORY, SYNTAX, number};
use crate::store::{Place, Store};

/// Keys that SCAN looks at without a COUNT, as in Redis.
const SCAN_COUNT: i64 = 10;
/// Steps of a part, as [`Pattern`] counts them: some hundred microseconds.
pub const STEPS: usize = 100_000;
/// Steps that a key costs beside its match.
const KEY_STEPS: usize = 10;
/// Bytes of a long reply that are kept together, and written at once.
pub const PIECE_BYTES: usize = 64 << 10;
/// Bytes that a shard found, for all clients together, and for which no client has memory reserved
/// yet.
pub const FOUND_BYTES_MAX: usize = 64 << 20;

/// A question of KEYS or SCAN to a shard.
#[derive(Clone)]
pub struct Query {
    pattern: Option<Pattern>,
    /// The question is for strings, as all values are.
    strings: bool,
    /// The begin of SCAN and the number of keys that it looks at; KEYS looks at all.
    part: Option<(usize, usize)>,
    /// Gone once the client does not wait for the answer.
    pub asker: Weak<()>,
}

/// The keys that a shard found, as strings of the protocol, in pieces, and their number.
#[derive(Default)]
pub struct Found {
    pub keys: Vec<Vec<u8>>,
    pub held: Held,
    pub count: usize,
    /// The cursor for the rest of a scan.
    pub cursor: i64,
}

/// A part of the [bytes](FOUND_BYTES_MAX) that a shard found. What it found goes to other shards,
/// as no [`Room`](ringserve::limits::Room) does.
#[derive(Default)]
pub struct Held {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl Held {
    /// A part of these bytes, which only their shard makes more.
    fn of(all: &Arc<AtomicUsize>) -> Held {
        Held { all: all.clone(), bytes: 0 }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn add(&mut self, bytes: usize) -> Result<(), Bad> {
        if self.all.load(Ordering::Relaxed) + bytes > FOUND_BYTES_MAX {
            return Err(NO_MEMORY);
        }
        self.all.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Found {
    /// Adds a key, if there is room for it.
    fn add(&mut self, key: &[u8]) -> Result<(), Bad> {
        // Its length before it, and the ends of both lines.
        let len = key.len() + 16;
        self.held.add(len)?;
        if self.keys.last().is_none_or(|piece| piece.len() >= PIECE_BYTES) {
            self.keys.last_mut().into_iter().for_each(Vec::shrink_to_fit);
            self.keys.push(Vec::with_capacity(len));
        }
        let piece = self.keys.last_mut().expect("there is one");
        Writer::to_vec(piece, Version::Two).reply(|out| out.bulk(key));
        self.count += 1;
        Ok(())
    }
}

pub fn too_long(error: PatternTooLong) -> Bad {
    format!("ERR {error}").into()
}

impl Query {
    /// Reads KEYS.
    pub fn of_keys(args: FrameFields<'_>) -> Result<Query, Bad> {
        let pattern = Some(Pattern::new(args.get(1)).map_err(too_long)?);
        Ok(Query { pattern, strings: true, part: None, asker: Weak::new() })
    }

    /// Reads SCAN.
    pub fn of_scan(args: FrameFields<'_>) -> Result<Query, Bad> {
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

/// A walk over keys, from the highest position to the lowest. Keys only move to lower ones, so each
/// that is there all the time is found, and once: those that were seen and moved are known.
///
/// A cursor names a shard and a position there. Shards are scanned one after the other. A scan may
/// find a key again that moved.
pub struct Walk {
    query: Query,
    place: Rc<RefCell<Place>>,
    /// The lowest position.
    from: usize,
    /// The key whose match takes longer than a part.
    long: Option<(Box<[u8]>, GlobMatch)>,
    found: Found,
}

impl Walk {
    /// Begins one that counts what it finds among `held`.
    pub fn begin(store: &mut Store, query: Query, held: &Arc<AtomicUsize>) -> Walk {
        let ((shard, shards), mut top, mut from) = (store.place, store.len(), 0);
        let mut found = Found { held: Held::of(held), ..Found::default() };
        if let Some((cursor, count)) = query.part {
            top = if cursor < shards { top } else { top.min(cursor / shards) };
            from = top.saturating_sub(count);
            found.cursor = if from == 0 { (shard + 1) % shards } else { from * shards + shard } as i64;
        }
        Walk { query, place: store.walked(top), from, long: None, found }
    }

    /// Goes on for about that many steps. `None` if there is more to do. An error ends it: what was
    /// found is too much.
    pub fn go_on(&mut self, store: &Store, mut steps: usize) -> Option<Result<Found, Bad>> {
        if let Some((key, mut matching)) = self.long.take() {
            match self.query.pattern.as_ref().map(|pattern| matching.go_on(pattern, &key, &mut steps)) {
                Some(None) => {
                    self.long = Some((key, matching));
                    return None;
                }
                is_match => {
                    if let Err(error) = self.add(&key, is_match.flatten().unwrap_or(true)) {
                        return Some(Err(error));
                    }
                }
            }
        }
        loop {
            let at = match &mut self.place.borrow_mut().at {
                at if *at <= self.from => return Some(Ok(std::mem::take(&mut self.found))),
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
            let mut matching = GlobMatch::default();
            match self.query.pattern.as_ref().map(|pattern| matching.go_on(pattern, key, &mut steps)) {
                Some(None) => {
                    self.long = Some((key.into(), matching));
                    return None;
                }
                is_match => {
                    if let Err(error) = self.add(key, is_match.flatten().unwrap_or(true)) {
                        return Some(Err(error));
                    }
                }
            }
        }
    }

    fn add(&mut self, key: &[u8], is_match: bool) -> Result<(), Bad> {
        if is_match && self.query.strings { self.found.add(key) } else { Ok(()) }
    }
}
