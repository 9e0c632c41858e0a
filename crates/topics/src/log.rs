//! The newest entries of a topic, by their numbers: bounded by count, bytes and age.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ringserve_server::time::Time;

/// Bytes that an entry counts for in addition to its own.
pub(crate) const ENTRY_BYTES: usize = 128;

/// The part of a topic that is kept for clients that come back: none, unless a bound says more.
/// Entries beyond a bound go, the oldest first.
///
/// ```
/// use std::time::Duration;
/// use ringserve::topics::History;
///
/// let of_an_hour = History::last(1024).within(Duration::from_secs(3600)).bytes_max(1 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct History {
    pub(crate) entries_max: usize,
    pub(crate) bytes_max: usize,
    pub(crate) age_max: Option<Duration>,
    /// Entries stay though no member waits for them.
    pub(crate) is_kept: bool,
}

impl History {
    /// Keeps nothing beyond what members that read slowly have yet to get: 1024 messages or 1 MiB
    /// of a topic at most.
    pub fn none() -> History {
        History { is_kept: false, ..History::last(1024) }
    }

    /// Keeps the last `entries` messages of each topic, at least 1, and 1 MiB of them at most.
    pub fn last(entries: usize) -> History {
        History { entries_max: entries.max(1), bytes_max: 1 << 20, age_max: None, is_kept: true }
    }

    /// The messages of a topic that are kept at most.
    pub fn entries(&self) -> usize {
        self.entries_max
    }

    /// The bytes of a topic's messages that are kept at most, each counted with 128 more.
    pub fn bytes(&self) -> usize {
        self.bytes_max
    }

    /// The longest time for which they are kept, if there is one.
    pub fn age(&self) -> Option<Duration> {
        self.age_max
    }

    /// Keeps no message for longer than this; looked at once a second.
    pub fn within(self, age: Duration) -> History {
        History { age_max: Some(age), ..self }
    }

    /// Keeps at most this many bytes of each topic, each message counted with 128 more, and the
    /// newest message in any case.
    pub fn bytes_max(self, bytes: usize) -> History {
        History { bytes_max: bytes, ..self }
    }
}

/// The facts about an entry that a log needs.
pub(crate) trait LogEntry {
    /// Its number on this node, without holes.
    fn seq(&self) -> u64;
    /// Its number in cursors, which a bridge may have given, with holes.
    fn cursor_seq(&self) -> u64;
    fn bytes(&self) -> usize;
    fn at(&self) -> Time;
    fn key(&self) -> &[u8];
}

struct Kept<E> {
    entry: E,
    /// A later entry has the same key.
    is_superseded: bool,
}

/// Entries with numbers in a row.
pub(crate) struct Log<E> {
    history: History,
    entries: VecDeque<Kept<E>>,
    /// The number that the next entry has.
    head: u64,
    /// All entries that there were behind this number, of cursors, are there.
    floor: u64,
    bytes: usize,
    /// The newest entry of each key.
    newest: HashMap<Box<[u8]>, u64>,
}

impl<E: LogEntry> Log<E> {
    /// A log without an entry, whose next one has the number `head`. Cursors before `floor` are of
    /// entries that it does not have.
    pub(crate) fn new(history: History, head: u64, floor: u64) -> Log<E> {
        Log { history, entries: VecDeque::new(), head, floor, bytes: 0, newest: HashMap::new() }
    }

    pub(crate) fn history(&self) -> History {
        self.history
    }

    /// The number of the next entry.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// The number of the oldest entry, or of the next one if there is none.
    pub(crate) fn first(&self) -> u64 {
        self.head - self.entries.len() as u64
    }

    /// The number in cursors behind which no entry is missing.
    pub(crate) fn floor(&self) -> u64 {
        self.floor
    }

    /// Says that entries up to this number, of cursors, are missing: those that are there are
    /// older, or none are.
    pub(crate) fn set_floor(&mut self, floor: u64) {
        self.floor = floor;
    }

    /// The number of the first entry behind a cursor.
    pub(crate) fn behind(&self, cursor_seq: u64) -> u64 {
        let place = self.entries.partition_point(|kept| kept.entry.cursor_seq() <= cursor_seq);
        self.first() + place as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds an entry. If others before it are missing, those that are there go: numbers stay in a
    /// row.
    pub(crate) fn push(&mut self, entry: E) {
        if entry.seq() != self.head {
            self.skip_to(entry.seq(), entry.cursor_seq() - 1);
        }
        let seq = self.head;
        let before = match self.newest.get_mut(entry.key()) {
            Some(newest) => Some(std::mem::replace(newest, seq)),
            None => self.newest.insert(entry.key().into(), seq),
        };
        if let Some(kept) = before.and_then(|before| self.place(before)) {
            self.entries[kept].is_superseded = true;
        }
        self.head += 1;
        self.bytes += entry.bytes() + ENTRY_BYTES;
        self.entries.push_back(Kept { entry, is_superseded: false });
        let History { entries_max, bytes_max, .. } = self.history;
        while self.entries.len() > 1 && (self.entries.len() > entries_max || self.bytes > bytes_max) {
            self.pop();
        }
    }

    fn place(&self, seq: u64) -> Option<usize> {
        let place = seq.checked_sub(self.first())? as usize;
        (place < self.entries.len()).then_some(place)
    }

    /// Drops the oldest entry.
    pub(crate) fn pop(&mut self) {
        let Some(Kept { entry, is_superseded }) = self.entries.pop_front() else { return };
        self.bytes -= entry.bytes() + ENTRY_BYTES;
        self.floor = self.floor.max(entry.cursor_seq());
        if !is_superseded {
            self.newest.remove(entry.key());
        }
    }

    /// Drops all entries. Their numbers are not given again.
    pub(crate) fn clear(&mut self) {
        if let Some(last) = self.entries.back() {
            self.floor = self.floor.max(last.entry.cursor_seq());
        }
        self.entries = VecDeque::new();
        self.newest = HashMap::new();
        self.bytes = 0;
    }

    /// Drops all entries. The next one has the number `head`, and in cursors one behind `floor`.
    pub(crate) fn skip_to(&mut self, head: u64, floor: u64) {
        self.clear();
        (self.head, self.floor) = (head, floor);
    }

    /// Drops entries that are too old.
    pub(crate) fn expire(&mut self, now: Time) {
        let Some(age_max) = self.history.age_max else { return };
        while self.entries.front().is_some_and(|oldest| now - oldest.entry.at() > age_max) {
            self.pop();
        }
    }

    /// An entry, and whether a later one has its key.
    pub(crate) fn get_mut(&mut self, seq: u64) -> Option<(&mut E, bool)> {
        let place = self.place(seq)?;
        let Kept { entry, is_superseded } = &mut self.entries[place];
        Some((entry, *is_superseded))
    }

    /// When the entry with this number was published, if it is there.
    pub(crate) fn at(&self, seq: u64) -> Option<Time> {
        Some(self.entries[self.place(seq)?].entry.at())
    }

    /// When the newest entry was published, if there is one.
    pub(crate) fn newest_at(&self) -> Option<Time> {
        self.entries.back().map(|newest| newest.entry.at())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &E> {
        self.entries.iter().map(|kept| &kept.entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tested(u64, &'static str, usize, Time);

    impl LogEntry for Tested {
        fn seq(&self) -> u64 {
            self.0
        }

        fn cursor_seq(&self) -> u64 {
            10 * self.0
        }

        fn bytes(&self) -> usize {
            self.2
        }

        fn at(&self) -> Time {
            self.3
        }

        fn key(&self) -> &[u8] {
            self.1.as_bytes()
        }
    }

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn numbers(log: &Log<Tested>) -> Vec<u64> {
        log.iter().map(LogEntry::seq).collect()
    }

    #[test]
    fn log_keeps_the_newest_within_its_bounds() {
        let mut log = Log::new(History::last(3).bytes_max(3 * ENTRY_BYTES + 30), 7, 60);
        assert_eq!((log.first(), log.head(), log.is_empty()), (7, 7, true));
        (7..11).for_each(|seq| log.push(Tested(seq, "", 10, at(0))));
        assert_eq!((numbers(&log), log.first(), log.head()), (vec![8, 9, 10], 8, 11));
        assert_eq!((log.floor(), log.behind(70), log.behind(89), log.behind(100)), (70, 8, 9, 11));
        log.push(Tested(11, "", 11, at(0)));
        assert_eq!(numbers(&log), [10, 11], "bytes are a bound");
        log.push(Tested(12, "", 1 << 20, at(0)));
        assert_eq!((numbers(&log), log.bytes()), (vec![12], (1 << 20) + ENTRY_BYTES), "the newest stays");
        log.push(Tested(20, "", 10, at(0)));
        assert_eq!((numbers(&log), log.first(), log.floor()), (vec![20], 20, 199), "some are missing");
        log.clear();
        assert_eq!((log.floor(), log.behind(200)), (200, 21));
        log.push(Tested(21, "", 10, at(0)));
        log.set_floor(290);
        log.pop();
        assert_eq!(log.floor(), 290, "what is missing is newer than what goes");
    }

    #[test]
    fn entries_go_when_they_are_too_old() {
        let mut log = Log::new(History::last(10).within(Duration::from_secs(5)), 0, 0);
        (0..4).for_each(|seq| log.push(Tested(seq, "", 0, at(seq))));
        log.expire(at(5));
        assert_eq!(numbers(&log).len(), 4);
        log.expire(at(7));
        assert_eq!((numbers(&log), log.at(2), log.at(1)), (vec![2, 3], Some(at(2)), None));
        log.expire(at(100));
        assert_eq!((log.is_empty(), log.head(), log.bytes(), log.newest.len()), (true, 4, 0, 0));
    }

    #[test]
    fn later_entry_of_a_key_supersedes_the_one_before() {
        let mut log = Log::new(History::last(4), 0, 0);
        for (seq, key) in ["a", "b", "a", "a", "c"].into_iter().enumerate() {
            log.push(Tested(seq as u64, key, 0, at(0)));
        }
        let superseded =
            |log: &mut Log<Tested>, seq| log.get_mut(seq).map(|(_, is_superseded)| is_superseded);
        let found: Vec<_> = (0..6).map(|seq| superseded(&mut log, seq)).collect();
        assert_eq!(found, [None, Some(false), Some(true), Some(false), Some(false), None]);
        (0..4).for_each(|_| log.pop());
        assert!(log.newest.is_empty(), "keys go with their entries");
    }
}
