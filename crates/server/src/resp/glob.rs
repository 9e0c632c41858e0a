//! Patterns.
//!
//! A pattern is compiled into segments, which its stars separate. The first one and the last one are compared where they must be;
//! each other one is looked for behind the one before, and its first place is taken: a later one would leave less for the rest.
//!
//! Plain bytes are found by `memmem`. Segments with sets or `?` are found 64 of their positions at a time: one bit for each position
//! says whether the segment, up to there, ends at the byte that is looked at. What a longer segment needs beyond that is a bit for
//! each byte of the text: where its last 64 positions ended.

use std::collections::HashMap;
use std::fmt;

use memchr::memmem;

/// Positions of a segment that are looked for at once.
const BLOCK: usize = u64::BITS as usize;

/// Any byte, and the first set, among tokens. Those below are bytes.
const ANY: u16 = 256;
const SETS: u16 = 257;

/// Some of all bytes.
type Set = [u64; 4];

/// A pattern as Redis reads it: `*` is any text, `?` any byte, `[abc]`, `[^abc]` and `[a-z]` a byte of a set, and `\` takes the next
/// byte as it is.
///
/// It takes about 3 bytes of memory for each byte, and 32 for each different set. A match costs at most a step for each byte
/// of the text and for each byte of the pattern, and where sets or `?` stand behind a `*`, a step for each byte of the text and each
/// 64 positions up to the next `*`. [`Matching`] goes on with a long one later.
///
/// ```
/// use ringserve::resp::Pattern;
///
/// let users = Pattern::new(b"user:[0-9]*")?;
/// assert!(users.matches(b"user:7:name") && !users.matches(b"user:ann"));
/// # Ok::<(), ringserve::resp::PatternTooLong>(())
/// ```
#[derive(Clone)]
pub struct Pattern {
    text: Box<[u8]>,
    /// All segments, one behind the other.
    tokens: Box<[u16]>,
    /// The same as bytes, where they are.
    bytes: Box<[u8]>,
    sets: Box<[Set]>,
    segments: Box<[Segment]>,
}

/// What is between two stars, by places among the tokens.
#[derive(Clone, Copy)]
struct Segment {
    from: u32,
    to: u32,
    /// It is bytes alone.
    is_plain: bool,
}

/// A pattern has more than 64 KiB.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PatternTooLong;

impl fmt::Display for PatternTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a pattern has at most {} bytes", Pattern::BYTES_MAX)
    }
}

ringserve_buf::debug_is_display!(PatternTooLong);

impl std::error::Error for PatternTooLong {}

/// What is found out so far about a pattern and a text: a match that stops after some steps, so that others have their turn.
///
/// ```
/// use ringserve::resp::{Matching, Pattern};
///
/// let (pattern, text) = (Pattern::new(b"*[ab]c*")?, b"x".repeat(100_000));
/// let (mut matching, mut turns) = (Matching::default(), 1);
/// let is_match = loop {
///     let mut steps = 10_000;
///     match matching.go_on(&pattern, &text, &mut steps) {
///         Some(is_match) => break is_match,
///         None => turns += 1,
///     }
/// };
/// assert!(!is_match && turns > 1);
/// # Ok::<(), ringserve::resp::PatternTooLong>(())
/// ```
#[derive(Default)]
pub struct Matching {
    /// The segment that is looked for, and from where on; 0 before the ends were compared.
    segment: usize,
    at: usize,
    search: Option<Box<Search>>,
}

/// A search for a segment with sets, block by block.
struct Search {
    block: usize,
    /// The next byte.
    at: usize,
    /// Of the positions of the block, those at which the segment may stand behind the last byte.
    ends: u64,
    /// The block before ended at the last byte.
    has_begun: bool,
    /// The positions that take each byte.
    takes: [u64; 256],
    /// The bytes at which the block before ended, for those behind `at`; and this one, for those before.
    ended: Vec<u64>,
}

impl Pattern {
    /// Bytes of a pattern at most.
    pub const BYTES_MAX: usize = 64 << 10;

    /// Compiles a pattern.
    ///
    /// # Errors
    /// If it has more than [`BYTES_MAX`](Pattern::BYTES_MAX). Everything else is a pattern: a set may lack its end.
    pub fn new(pattern: &[u8]) -> Result<Pattern, PatternTooLong> {
        if pattern.len() > Pattern::BYTES_MAX {
            return Err(PatternTooLong);
        }
        let (mut tokens, mut sets, mut segments) = (Vec::new(), Vec::new(), Vec::new());
        let (mut known, mut from, mut rest) = (HashMap::new(), 0, pattern);
        let end = |from: usize, tokens: &[u16]| {
            let is_plain = tokens[from..].iter().all(|token| *token < ANY);
            Segment { from: from as u32, to: tokens.len() as u32, is_plain }
        };
        while let [first, behind @ ..] = rest {
            rest = behind;
            let token = match (first, behind) {
                (b'*', _) => {
                    // Several in a row are one.
                    if segments.is_empty() || from < tokens.len() {
                        segments.push(end(from, &tokens));
                        from = tokens.len();
                    }
                    continue;
                }
                (b'?', _) => ANY,
                (b'[', _) => {
                    let set;
                    (set, rest) = read_set(behind);
                    *known.entry(set).or_insert_with(|| {
                        sets.push(set);
                        SETS + (sets.len() - 1) as u16
                    })
                }
                (b'\\', [escaped, behind @ ..]) => {
                    rest = behind;
                    (*escaped).into()
                }
                (byte, _) => (*byte).into(),
            };
            tokens.push(token);
        }
        segments.push(end(from, &tokens));
        let bytes = tokens.iter().map(|token| *token as u8).collect();
        let (text, tokens, sets) = (pattern.into(), tokens.into(), sets.into());
        Ok(Pattern { text, tokens, bytes, sets, segments: segments.into() })
    }

    /// The pattern as it was written.
    pub fn as_bytes(&self) -> &[u8] {
        &self.text
    }

    /// Bytes of memory that it takes.
    pub fn held_bytes(&self) -> usize {
        size_of_val(&*self.text)
            + size_of_val(&*self.tokens)
            + size_of_val(&*self.bytes)
            + size_of_val(&*self.sets)
            + size_of_val(&*self.segments)
    }

    /// The most steps that a match takes for each byte of a text: 1 for most patterns, and more where sets or `?` stand behind a
    /// `*` with more than 64 positions up to the next one.
    pub fn steps_for_a_byte(&self) -> usize {
        let between = self.segments.get(1..self.segments.len().saturating_sub(1)).unwrap_or_default();
        // Each of these looks at all of the text for each block. All others together look at it once.
        let long = between.iter().filter(|segment| !segment.is_plain && segment.len() > BLOCK);
        1 + long.map(|segment| segment.len().div_ceil(BLOCK)).sum::<usize>()
    }

    /// True if `text` matches.
    pub fn matches(&self, text: &[u8]) -> bool {
        let (mut matching, mut steps) = (Matching::default(), usize::MAX);
        loop {
            if let Some(is_match) = matching.go_on(self, text, &mut steps) {
                return is_match;
            }
            steps = usize::MAX;
        }
    }

    /// True if a token takes a byte.
    #[inline]
    fn takes(&self, token: u16, byte: u8) -> bool {
        match token {
            ANY => true,
            SETS.. => has(&self.sets[usize::from(token - SETS)], byte),
            literal => literal == u16::from(byte),
        }
    }

    /// True if a segment stands at the beginning of a text that is long enough.
    fn stands_at(&self, segment: Segment, text: &[u8]) -> bool {
        let text = &text[..segment.len()];
        if segment.is_plain {
            return self.bytes[segment.range()] == *text;
        }
        self.tokens[segment.range()].iter().zip(text).all(|(token, byte)| self.takes(*token, *byte))
    }
}

impl Segment {
    fn len(&self) -> usize {
        (self.to - self.from) as usize
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.from as usize..self.to as usize
    }
}

impl Matching {
    /// Goes on for about that many `steps`, which are taken from there. `None` if there is more to do. It has to be the same pattern
    /// and the same text each time.
    pub fn go_on(&mut self, pattern: &Pattern, text: &[u8], steps: &mut usize) -> Option<bool> {
        let [first, between @ .., last] = &*pattern.segments else {
            let [all] = *pattern.segments else { return Some(false) };
            *steps = steps.saturating_sub(all.len());
            return Some(text.len() == all.len() && pattern.stands_at(all, text));
        };
        if self.segment == 0 {
            *steps = steps.saturating_sub(first.len() + last.len());
            let is_long_enough = text.len() >= first.len() + last.len();
            let stands = is_long_enough
                && pattern.stands_at(*first, text)
                && pattern.stands_at(*last, &text[text.len() - last.len()..]);
            if !stands {
                return Some(false);
            }
            (self.segment, self.at) = (1, first.len());
        }
        let text = &text[..text.len() - last.len()];
        while let Some(segment) = between.get(self.segment - 1) {
            let place = match segment.is_plain {
                true => self.find_plain(&pattern.bytes[segment.range()], text, steps)?,
                false => self.find(pattern, *segment, text, steps)?,
            };
            let Some(place) = place else { return Some(false) };
            (self.segment, self.at) = (self.segment + 1, place + segment.len());
        }
        Some(true)
    }

    /// Looks for bytes. `None` if the steps are used up, and `Some(None)` if they are not there.
    fn find_plain(&mut self, bytes: &[u8], text: &[u8], steps: &mut usize) -> Option<Option<usize>> {
        loop {
            if *steps == 0 {
                return None;
            }
            // As many places are looked at as there are steps, and not less than what the search costs by itself.
            let places = (*steps).max(bytes.len());
            let to = self.at.saturating_add(places).saturating_add(bytes.len() - 1).min(text.len());
            if let Some(place) = memmem::find(&text[self.at..to], bytes) {
                *steps = steps.saturating_sub(place + bytes.len());
                return Some(Some(self.at + place));
            }
            *steps = steps.saturating_sub(places);
            if to == text.len() {
                return Some(None);
            }
            self.at += places;
        }
    }

    /// The same of a segment with sets.
    fn find(
        &mut self,
        pattern: &Pattern,
        segment: Segment,
        text: &[u8],
        steps: &mut usize,
    ) -> Option<Option<usize>> {
        let text = &text[self.at..];
        if self.search.is_none() && text.len() <= BLOCK {
            // Too short for it to be worth a search.
            *steps = steps.saturating_sub(text.len() * segment.len().min(text.len()));
            let places = 0..(text.len() + 1).saturating_sub(segment.len());
            let place = places.into_iter().find(|place| pattern.stands_at(segment, &text[*place..]));
            return Some(place.map(|place| self.at + place));
        }
        let tokens = &pattern.tokens[segment.range()];
        let blocks = tokens.len().div_ceil(BLOCK);
        let mut search = self.search.take().unwrap_or_else(|| Search::new(pattern, tokens, text.len()));
        loop {
            let is_last = search.block + 1 == blocks;
            if let Some(end) = search.go_on(text, is_last.then(|| (tokens.len() - 1) % BLOCK), steps) {
                return Some(Some(self.at + end + 1 - tokens.len()));
            }
            if search.at < text.len() {
                self.search = Some(search);
                return None;
            }
            if is_last || !search.has_ended() {
                return Some(None);
            }
            search.begin_block(pattern, tokens, search.block + 1);
        }
    }
}

impl Search {
    fn new(pattern: &Pattern, tokens: &[u16], len: usize) -> Box<Search> {
        let words = if tokens.len() > BLOCK { len.div_ceil(BLOCK) } else { 0 };
        let (block, at, ends, takes, ended) = (0, 0, 0, [0; 256], vec![0; words]);
        let mut search = Box::new(Search { block, at, ends, has_begun: true, takes, ended });
        search.begin_block(pattern, tokens, 0);
        search
    }

    fn begin_block(&mut self, pattern: &Pattern, tokens: &[u16], block: usize) {
        (self.block, self.at, self.ends, self.has_begun) = (block, 0, 0, block == 0);
        self.takes = [0; 256];
        for (n, token) in tokens.iter().skip(block * BLOCK).take(BLOCK).enumerate() {
            match *token {
                literal @ 0..ANY => self.takes[usize::from(literal)] |= 1 << n,
                token => {
                    let taken = (0..=255_u8).filter(|byte| pattern.takes(token, *byte));
                    taken.for_each(|byte| self.takes[usize::from(byte)] |= 1 << n);
                }
            }
        }
    }

    /// Looks at further bytes. Returns the first one at which the segment ends, whose last position in its last block is `last`.
    fn go_on(&mut self, text: &[u8], last: Option<usize>, steps: &mut usize) -> Option<usize> {
        let to = self.at.saturating_add(*steps).min(text.len());
        *steps -= to - self.at;
        let end = last.map_or(0, |last| 1_u64 << last);
        let is_first = self.block == 0;
        while self.at < to {
            let at = self.at;
            self.ends = (self.ends << 1 | u64::from(self.has_begun)) & self.takes[usize::from(text[at])];
            self.at += 1;
            if self.ends & end != 0 {
                return Some(at);
            }
            if let Some(word) = self.ended.get_mut(at / BLOCK) {
                let bit = at % BLOCK;
                self.has_begun = is_first || *word >> bit & 1 != 0;
                *word = *word & !(1 << bit) | self.ends >> (BLOCK - 1) << bit;
            }
        }
        None
    }

    /// True if the block ended anywhere.
    fn has_ended(&self) -> bool {
        self.ended.iter().any(|word| *word != 0)
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pattern").field(&self.text.escape_ascii().to_string()).finish()
    }
}

impl fmt::Debug for Matching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matching").field("at", &self.at).finish_non_exhaustive()
    }
}

#[inline]
fn has(set: &Set, byte: u8) -> bool {
    set[usize::from(byte / 64)] >> (byte % 64) & 1 != 0
}

/// Reads a set from behind its `[` on, and returns what follows it. It may lack the `]` at the end.
fn read_set(text: &[u8]) -> (Set, &[u8]) {
    let (is_negated, mut text) = text.strip_prefix(b"^").map_or((false, text), |text| (true, text));
    let mut set = [0_u64; 4];
    let mut add = |low: u8, high: u8| {
        for (word, first) in set.iter_mut().zip([0_u8, 64, 128, 192]) {
            let (low, high) = (low.max(first), high.min(first + 63));
            if low <= high {
                *word |= u64::MAX >> (63 - (high - low)) << (low - first);
            }
        }
    };
    loop {
        text = match text {
            [] | [b']', ..] => break,
            [b'\\', escaped, rest @ ..] => {
                add(*escaped, *escaped);
                rest
            }
            [low, b'-', high, rest @ ..] => {
                add(*low.min(high), *low.max(high));
                rest
            }
            [literal, rest @ ..] => {
                add(*literal, *literal);
                rest
            }
        };
    }
    if is_negated {
        set = set.map(|word| !word);
    }
    (set, text.get(1..).unwrap_or_default())
}
