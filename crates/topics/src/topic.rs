//! A topic on one shard: its log, its members, and what it has to do with the other shards.

use std::collections::VecDeque;
use std::ops::AddAssign;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use bytes::Bytes;
use ringserve_server::SharedPayload;
use ringserve_server::time::Time;

use crate::form::{Cursor, EntryView, Form};
use crate::log::{History, Log, LogEntry};
use crate::members::Members;
use crate::slab::Slab;

/// Forms of a server at most.
pub(crate) const FORMS_MAX: usize = 8;

/// A message, which all shards share.
pub(crate) struct Entry {
    /// Its number on this node, without holes.
    pub(crate) seq: u64,
    pub(crate) cursor: Cursor,
    /// Gaps of the topic before it.
    pub(crate) gaps: u64,
    pub(crate) key: Box<[u8]>,
    pub(crate) payload: Bytes,
    pub(crate) at: Time,
    /// The payload for members of the form that got it first, made there, and those for members of
    /// other forms, which few servers have. `None` if a form panicked.
    made: OnceLock<(u8, Option<Bytes>)>,
    made_more: OnceLock<Box<[OnceLock<Option<Bytes>>; FORMS_MAX]>>,
}

impl Entry {
    /// The payload for members of a form.
    ///
    /// # Panics
    /// If the form does. It is `None` for all who ask later.
    pub(crate) fn made(&self, topic: &str, form: u8, by: &dyn Form) -> Option<Bytes> {
        let mut panicked = None;
        let mut make = || {
            let view = EntryView { topic, cursor: self.cursor, key: &self.key, payload: &self.payload };
            let mut out = Vec::new();
            let made = panic::catch_unwind(AssertUnwindSafe(|| by.entry(&view, &mut out)));
            made.map(|()| Bytes::from(out)).map_err(|panic| panicked = Some(panic)).ok()
        };
        let made = match self.made.get_or_init(|| (form, make())) {
            (first, made) if *first == form => made,
            _ => self.made_more.get_or_init(Box::default)[usize::from(form)].get_or_init(make),
        };
        let made = made.clone();
        match panicked {
            Some(panic) => panic::resume_unwind(panic),
            None => made,
        }
    }
}

/// A message in the log of a shard.
pub(crate) struct StoredEntry {
    pub(crate) entry: Arc<Entry>,
    /// The payload for connections of each form, which is encoded once for each service.
    shared: Vec<(u8, SharedPayload)>,
}

impl StoredEntry {
    pub(crate) fn new(entry: Arc<Entry>) -> StoredEntry {
        StoredEntry { entry, shared: Vec::new() }
    }

    /// The payload for connections of a form. `None` if the form panicked.
    pub(crate) fn shared(&mut self, topic: &str, form: u8, by: &dyn Form) -> Option<&SharedPayload> {
        let place = match self.shared.iter().position(|(of, _)| *of == form) {
            Some(known) => known,
            None => {
                // Most shards have members of one form.
                self.shared.reserve_exact(1);
                self.shared.push((form, SharedPayload::new(self.entry.made(topic, form, by)?)));
                self.shared.len() - 1
            }
        };
        Some(&self.shared[place].1)
    }
}

impl LogEntry for StoredEntry {
    fn seq(&self) -> u64 {
        self.entry.seq
    }

    fn cursor_seq(&self) -> u64 {
        self.entry.cursor.seq
    }

    fn bytes(&self) -> usize {
        self.entry.payload.len() + self.entry.key.len()
    }

    fn at(&self) -> Time {
        self.entry.at
    }

    fn key(&self) -> &[u8] {
        &self.entry.key
    }
}

/// The state of a topic that its home knows.
pub(crate) struct TopicNews {
    pub(crate) epoch: u64,
    pub(crate) last: u64,
    pub(crate) gaps: u64,
    pub(crate) head: u64,
    floor: u64,
    pub(crate) entries: Vec<Arc<Entry>>,
    count: Arc<AtomicUsize>,
}

/// Messages that no member gets.
#[derive(Clone, Copy)]
pub(crate) struct GapLetter {
    pub(crate) epoch: u64,
    /// The number in cursors up to which messages are missing.
    pub(crate) floor: u64,
    /// The number of this gap.
    pub(crate) gaps: u64,
}

/// Counts of a topic on a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TopicCounts {
    pub(crate) messages: u64,
    pub(crate) refused: u64,
    pub(crate) bytes: u64,
    pub(crate) deliveries: u64,
    pub(crate) skipped: u64,
    pub(crate) unframed: u64,
    pub(crate) cut: u64,
}

impl AddAssign for TopicCounts {
    fn add_assign(&mut self, more: TopicCounts) {
        self.messages += more.messages;
        self.refused += more.refused;
        self.bytes += more.bytes;
        self.deliveries += more.deliveries;
        self.skipped += more.skipped;
        self.unframed += more.unframed;
        self.cut += more.cut;
    }
}

/// A member that pulls its messages.
pub(crate) struct Feed {
    /// The name that other members see.
    pub(crate) shown: Option<Arc<str>>,
    /// The number of the next message that it gets.
    pub(crate) next: u64,
    /// Woken when there is another message.
    waker: Option<Waker>,
}

impl Feed {
    pub(crate) fn new(next: u64) -> Feed {
        Feed { shown: None, next, waker: None }
    }

    /// Wakes the task with the next message, in place of the one that waited before.
    pub(crate) fn wake_by(&mut self, waker: &Waker) {
        if !self.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            self.waker = Some(waker.clone());
        }
    }
}

/// A topic on one shard.
pub(crate) struct Topic {
    pub(crate) name: Arc<str>,
    pub(crate) is_home: bool,
    /// The shard knows its log and its numbers.
    pub(crate) is_joined: bool,
    pub(crate) epoch: u64,
    /// The number, in cursors, of the newest message that there was.
    pub(crate) last: u64,
    /// Times that a bridge said what there is.
    pub(crate) fills: u64,
    /// Gaps that were reported to all members.
    pub(crate) gaps: u64,
    pub(crate) log: Log<StoredEntry>,
    pub(crate) members: Members,
    /// It waits for its part of a page.
    pub(crate) is_active: bool,
    pub(crate) feeds: Slab<Feed>,
    /// Subscriptions that have not begun.
    pub(crate) pending: usize,
    /// Woken when it is joined, or has another message: few, beside those of feeds.
    pub(crate) wakers: Vec<Waker>,
    /// At home: the other shards that have members.
    pub(crate) shards: Vec<usize>,
    /// The members on all shards.
    pub(crate) count: Arc<AtomicUsize>,
    /// Looks in a row that found it idle.
    pub(crate) idle_looks: u8,
    pub(crate) moved: TopicCounts,
}

impl Topic {
    /// A topic, at its home or not. Without an epoch it is not joined: its home, or a bridge, has
    /// to say what there is.
    pub(crate) fn new(name: Arc<str>, history: History, is_home: bool, epoch: Option<u64>) -> Topic {
        Topic {
            name,
            is_home,
            is_joined: epoch.is_some(),
            epoch: epoch.unwrap_or_default(),
            last: 0,
            fills: 0,
            gaps: 0,
            log: Log::new(history, 1, 0),
            members: Members::default(),
            is_active: false,
            feeds: Slab::default(),
            pending: 0,
            wakers: Vec::new(),
            shards: Vec::new(),
            count: Arc::default(),
            idle_looks: 0,
            moved: TopicCounts::default(),
        }
    }

    /// True if nothing on this shard needs it.
    pub(crate) fn is_unused(&self) -> bool {
        self.members.len() + self.feeds.len() + self.pending == 0 && (!self.is_home || self.shards.is_empty())
    }

    /// Makes an entry of a message, under the next number.
    pub(crate) fn entry(&self, seq: u64, key: Box<[u8]>, payload: Bytes, at: Time) -> Arc<Entry> {
        let cursor = Cursor { epoch: self.epoch, seq };
        let (number, gaps) = (self.log.head(), self.gaps);
        let (made, made_more) = Default::default();
        Arc::new(Entry { seq: number, cursor, gaps, key, payload, at, made, made_more })
    }

    /// True if the message of a cursor has been here.
    pub(crate) fn has_seen(&self, cursor: Cursor) -> bool {
        self.epoch == cursor.epoch && self.last >= cursor.seq
    }

    /// The cursor of the message before the one with this number.
    pub(crate) fn cursor_before(&mut self, number: u64) -> Cursor {
        match self.log.get_mut(number) {
            Some((stored, _)) => {
                let Cursor { epoch, seq } = stored.entry.cursor;
                Cursor { epoch, seq: seq - 1 }
            }
            None => Cursor { epoch: self.epoch, seq: self.last },
        }
    }

    /// Takes in a message. It is for those that are members by now.
    pub(crate) fn take_in(&mut self, entry: Arc<Entry>, active: &mut VecDeque<u32>, number: u32) {
        self.moved.messages += 1;
        self.moved.bytes += entry.payload.len() as u64;
        self.last = entry.cursor.seq;
        self.log.push(StoredEntry::new(entry));
        self.visit_all(active, number);
    }

    /// Goes on behind these numbers, here and in cursors: what was before them is gone.
    pub(crate) fn skip_to(&mut self, head: u64, last: u64, active: &mut VecDeque<u32>, number: u32) {
        self.log.skip_to(head, last);
        self.last = last;
        self.visit_all(active, number);
    }

    /// Has a pass visit all members, and wakes feeds.
    fn visit_all(&mut self, active: &mut VecDeque<u32>, number: u32) {
        self.idle_looks = 0;
        if self.members.len() > 0 {
            self.members.begin_pass();
            if !std::mem::replace(&mut self.is_active, true) {
                active.push_back(number);
            }
        }
        self.wake_all();
    }

    /// Takes in that messages are missing here, up to the number `floor` of cursors.
    pub(crate) fn gap(&mut self, gap: GapLetter, active: &mut VecDeque<u32>, number: u32) {
        let GapLetter { epoch, floor, gaps } = gap;
        if gaps <= self.gaps {
            return;
        }
        if floor < self.last {
            // The numbers begin again.
            self.log.clear();
        }
        self.log.set_floor(floor);
        (self.epoch, self.last, self.gaps) = (epoch, floor, gaps);
        self.members.owe_gap();
        self.visit_all(active, number);
    }

    pub(crate) fn wake_all(&mut self) {
        let of_feeds = self.feeds.iter_mut().filter_map(|feed| feed.waker.take());
        of_feeds.chain(self.wakers.drain(..)).for_each(Waker::wake);
    }

    /// Drops the messages that each feed has.
    pub(crate) fn drop_read(&mut self) {
        let needed = self.feeds.iter().map(|feed| feed.next).min();
        match needed.filter(|needed| *needed < self.log.head()) {
            None => self.log.clear(),
            Some(needed) => {
                while self.log.first() < needed {
                    self.log.pop();
                }
            }
        }
    }

    /// Begins with what a bridge knows: all messages behind this number follow.
    pub(crate) fn begin(&mut self, epoch: u64, floor: u64) {
        self.log.set_floor(floor);
        (self.epoch, self.last) = (epoch, floor);
    }

    /// Takes over what its home knows.
    pub(crate) fn joined(&mut self, known: TopicNews) {
        let TopicNews { epoch, last, gaps, head, floor, entries, count } = known;
        self.log = Log::new(self.log.history(), head - entries.len() as u64, floor);
        entries.into_iter().for_each(|entry| self.log.push(StoredEntry::new(entry)));
        (self.epoch, self.last, self.gaps, self.is_joined, self.count) = (epoch, last, gaps, true, count);
        self.wake_all();
    }

    /// The state that other shards have to know.
    pub(crate) fn known(&self) -> TopicNews {
        TopicNews {
            epoch: self.epoch,
            last: self.last,
            gaps: self.gaps,
            head: self.log.head(),
            floor: self.log.floor(),
            entries: self.log.iter().map(|stored| stored.entry.clone()).collect(),
            count: self.count.clone(),
        }
    }

    /// Counts a member that comes.
    pub(crate) fn came(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a member that leaves.
    pub(crate) fn left(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use crate::form::Gap;

    use super::*;

    // What a message counts for beside its own bytes, with its place in the log.
    const _: () = assert!(size_of::<Entry>() + size_of::<StoredEntry>() <= 200);

    struct Nothing;

    impl Wake for Nothing {
        fn wake(self: Arc<Self>) {}
    }

    /// The message behind these bytes.
    struct Named(&'static str);

    impl Form for Named {
        fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>) {
            assert_ne!(self.0, "boom", "planted");
            out.extend_from_slice(self.0.as_bytes());
            out.extend_from_slice(entry.payload);
        }

        fn gap(&self, _topic: &str, _gap: Gap, _out: &mut Vec<u8>) {}
    }

    #[test]
    fn entry_is_made_once_for_each_form() {
        let topic = Topic::new("a".into(), History::none(), true, Some(7));
        let entry = topic.entry(1, [].into(), "text".into(), Time::ZERO);
        let made = |form, name| entry.made("a", form, &Named(name));
        for (form, name) in [(3, "3 "), (0, "0 "), (7, "7 "), (3, "? "), (0, "? "), (7, "? ")] {
            assert_eq!(made(form, name), Some(format!("{form} text").into()));
        }
        let mut panics = Vec::new();
        for _ in 0..2 {
            let made = panic::catch_unwind(AssertUnwindSafe(|| made(5, "boom")));
            panics.push(made.is_err());
            assert!(made.ok().flatten().is_none());
        }
        assert_eq!(panics, [true, false], "the one that makes it panics alone");
    }

    #[test]
    fn feed_wakes_the_task_that_read_last() {
        let mut topic = Topic::new("a".into(), History::none(), true, Some(7));
        let (first, last) = (Arc::new(Nothing), Arc::new(Nothing));
        let feed = topic.feeds.add(Feed::new(1));
        for task in [&first, &first, &last, &last] {
            topic.feeds.get_mut(feed).unwrap().wake_by(&task.clone().into());
        }
        assert_eq!([&first, &last].map(Arc::strong_count), [1, 2], "one waker for each feed");
        let entry = topic.entry(1, [].into(), Bytes::new(), Time::ZERO);
        topic.take_in(entry, &mut VecDeque::new(), 0);
        assert_eq!(Arc::strong_count(&last), 1, "a message wakes it");
        topic.drop_read();
        assert_eq!(topic.log.first(), 1);
        topic.feeds.get_mut(feed).unwrap().next += 1;
        topic.drop_read();
        assert!(topic.log.is_empty());
    }
}
