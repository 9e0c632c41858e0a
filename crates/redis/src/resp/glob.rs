//! Patterns.
//!
//! A pattern is compiled into segments, which its stars separate. The first one and the last one
//! are compared where they must be; each other one is looked for behind the one before, and its
//! first place is taken: a later one would leave less for the rest.
//!
//! Plain bytes are found by `memmem`. Segments with sets or `?` are found 64 of their positions at
//! a time: one bit for each position says whether the segment, up to there, ends at the byte that
//! is looked at. What a longer segment needs beyond that is a bit for each byte of the text: where
//! its last 64 positions ended.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use memchr::memmem;

/// Positions of a segment that are looked for at once.
const BLOCK: usize = u64::BITS as usize;

/// Up to this number of comparisons of a byte, what is looked for is compared at each place: a
/// search costs as much before it begins.
const COMPARED_MAX: usize = 4 * BLOCK;

/// Any byte, and the first set, among tokens. Those below are bytes.
const ANY: u16 = 256;
const SETS: u16 = 257;

/// Some of all bytes.
type Set = [u64; 4];

/// A pattern as Redis reads it: `*` is any text, `?` any byte, `[abc]`, `[^abc]` and `[a-z]` a byte
/// of a set, and `\` takes the next byte as it is.
///
/// It takes about 3 bytes of memory for each byte, and 32 for each different set. A match costs at
/// most a step for each byte of the text and for each byte of the pattern. Where sets or `?` stand
/// between two `*`, it is a step for each byte of the text and each 64 positions between them, and
/// for each set up to 128 more, as it has or lacks that many bytes. [`GlobMatch`] goes on with a
/// long one later.
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

/// The tokens between two stars, by their places.
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

impl fmt::Debug for PatternTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for PatternTooLong {}

/// The state of a match between a pattern and a text, which stops after some steps so that other
/// work has its turn.
///
/// ```
/// use ringserve::resp::{GlobMatch, Pattern};
///
/// let (pattern, text) = (Pattern::new(b"*[ab]c*")?, b"x".repeat(100_000));
/// let (mut matching, mut turns) = (GlobMatch::default(), 1);
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
pub struct GlobMatch {
    /// The segment that is looked for, and from where on; 0 before the ends were compared.
    segment: usize,
    at: usize,
    /// Made for the first segment that needs one.
    search: Option<Box<Search>>,
}

/// A search for a segment with sets, block by block.
struct Search {
    /// The block, by places among all tokens of the pattern; empty while nothing is looked for.
    block: Range<usize>,
    is_first: bool,
    /// The next byte.
    at: usize,
    /// Of the positions of the block, those at which the segment may stand behind the last byte.
    ends: u64,
    /// The block before ended at the last byte.
    has_begun: bool,
    /// The positions that take all bytes but some.
    most: u64,
    /// The positions for which a byte is one of the others: those that take it, or, among `most`,
    /// those that do not. All are zero while nothing is looked for.
    others: [u64; 256],
    /// The bytes at which the block before ended, for those behind `at`; and this one, for those
    /// before.
    ended: Vec<u64>,
}

impl Pattern {
    /// Bytes of a pattern at most.
    pub const BYTES_MAX: usize = 64 << 10;

    /// Compiles a pattern.
    ///
    /// # Errors
    /// If it has more than [`BYTES_MAX`](Pattern::BYTES_MAX). Everything else is a pattern: a set
    /// may lack its end.
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

    /// The most steps that a match takes for each byte of a text: 1 for most patterns, and more
    /// where sets or `?` stand between two `*`, by the positions between them and the bytes of the
    /// sets.
    pub fn steps_for_a_byte(&self) -> usize {
        let between = self.segments.get(1..self.segments.len().saturating_sub(1)).unwrap_or_default();
        let with_sets = || between.iter().filter(|segment| !segment.is_plain);
        // Each of these looks at all of the text for each block. All others together look at it
        // once.
        let long = with_sets().filter(|segment| segment.len() > BLOCK);
        // A segment that is looked for needs as many bytes of the text as it has positions.
        let begun = with_sets().map(|segment| {
            let steps = self.tokens[segment.range()].iter().map(|token| self.others_of(*token).2);
            (segment.len() + steps.sum::<usize>()).div_ceil(segment.len())
        });
        1 + long.map(|segment| segment.len().div_ceil(BLOCK)).sum::<usize>() + begun.max().unwrap_or(0)
    }

    /// Whether a token takes most bytes, which ones are the others, and how many these are.
    fn others_of(&self, token: u16) -> (bool, Set, usize) {
        let set = match token {
            ANY => return (true, Set::default(), 0),
            SETS.. => self.sets[usize::from(token - SETS)],
            literal => {
                let mut one = Set::default();
                one[usize::from(literal / 64)] = 1 << (literal % 64);
                return (false, one, 1);
            }
        };
        let count = set.iter().map(|word| word.count_ones() as usize).sum();
        if count > 128 { (true, set.map(|word| !word), 256 - count) } else { (false, set, count) }
    }

    /// True if `text` matches.
    pub fn matches(&self, text: &[u8]) -> bool {
        let (mut matching, mut steps) = (GlobMatch::default(), usize::MAX);
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

    fn range(&self) -> Range<usize> {
        self.from as usize..self.to as usize
    }
}

impl GlobMatch {
    /// Goes on for about that many `steps`, which are taken from there. `None` if there is more to
    /// do. It has to be the same pattern and the same text each time.
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
            // As many places are looked at as there are steps, and not less than what the search
            // costs by itself.
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
        let places = (text.len() + 1).saturating_sub(segment.len());
        let is_begun = self.search.as_ref().is_some_and(|search| search.is_begun());
        if !is_begun && places * segment.len() <= COMPARED_MAX {
            let place = (0..places).find(|place| pattern.stands_at(segment, &text[*place..]));
            *steps = steps.saturating_sub(place.map_or(places, |place| place + 1) * segment.len());
            return Some(place.map(|place| self.at + place));
        }
        let search = self.search.get_or_insert_with(|| Box::new(Search::new()));
        let end = search.find(pattern, segment, text, steps)?;
        Some(end.map(|end| self.at + end + 1 - segment.len()))
    }
}

impl Search {
    fn new() -> Search {
        let (most, others, ended) = (0, [0; 256], Vec::new());
        Search { block: 0..0, is_first: true, at: 0, ends: 0, has_begun: true, most, others, ended }
    }

    fn is_begun(&self) -> bool {
        !self.block.is_empty()
    }

    /// Looks for a segment, and returns its last byte. `None` if the steps are used up, and
    /// `Some(None)` if it is not there.
    fn find(
        &mut self,
        pattern: &Pattern,
        segment: Segment,
        text: &[u8],
        steps: &mut usize,
    ) -> Option<Option<usize>> {
        if !self.is_begun() {
            self.ended.clear();
            self.ended.resize(if segment.len() > BLOCK { text.len().div_ceil(BLOCK) } else { 0 }, 0);
            self.begin_block(pattern, segment, 0, steps);
        }
        loop {
            let is_last = self.block.end == segment.range().end;
            let end = self.go_on(text, is_last.then(|| self.block.len() - 1), steps);
            if end.is_none() && self.at < text.len() {
                return None;
            }
            self.flip(pattern);
            if end.is_some() || is_last || !self.has_ended() {
                self.block = 0..0;
                return Some(end);
            }
            self.begin_block(pattern, segment, self.block.end - segment.range().start, steps);
        }
    }

    fn begin_block(&mut self, pattern: &Pattern, segment: Segment, at: usize, steps: &mut usize) {
        let of = segment.range();
        self.block = of.start + at..of.end.min(of.start + at + BLOCK);
        (self.is_first, self.at, self.ends, self.has_begun) = (at == 0, 0, 0, at == 0);
        *steps = steps.saturating_sub(self.block.len() + self.flip(pattern));
    }

    /// Notes what the positions of the block take, or forgets it, if it was noted. Returns how many
    /// entries it changed.
    fn flip(&mut self, pattern: &Pattern) -> usize {
        let mut flipped = 0;
        for (n, token) in pattern.tokens[self.block.clone()].iter().enumerate() {
            let (is_most, others, count) = pattern.others_of(*token);
            self.most ^= u64::from(is_most) << n;
            for (word, first) in others.into_iter().zip([0, 64, 128, 192]) {
                let mut left = word;
                while left != 0 {
                    self.others[first + left.trailing_zeros() as usize] ^= 1 << n;
                    left &= left - 1;
                }
            }
            flipped += count;
        }
        flipped
    }

    /// Looks at further bytes. Returns the first one at which the segment ends, whose last position
    /// in its last block is `last`.
    fn go_on(&mut self, text: &[u8], last: Option<usize>, steps: &mut usize) -> Option<usize> {
        let from = self.at;
        let to = from.saturating_add(*steps).min(text.len());
        let end = last.map_or(0, |last| 1_u64 << last);
        let mut found = None;
        while self.at < to && found.is_none() {
            let at = self.at;
            let takes = self.most ^ self.others[usize::from(text[at])];
            self.ends = (self.ends << 1 | u64::from(self.has_begun)) & takes;
            self.at += 1;
            if self.ends & end != 0 {
                found = Some(at);
            } else if let Some(word) = self.ended.get_mut(at / BLOCK) {
                let bit = at % BLOCK;
                self.has_begun = self.is_first || *word >> bit & 1 != 0;
                *word = *word & !(1 << bit) | self.ends >> (BLOCK - 1) << bit;
            }
        }
        *steps -= self.at - from;
        found
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

impl fmt::Debug for GlobMatch {
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
