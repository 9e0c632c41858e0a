//! The figures that a shard shows of itself while it runs. It stores them now and then where other
//! threads read them, and no reader asks it or waits for it: a shard that is blocked is in every
//! report, with figures that are little older than the block.
//!
//! ```text
//!   shard    sequence odd ─▶ stores each figure ─▶ sequence even        at the end of a turn, each 100 ms at most
//!   reader   sequence even? ─▶ loads each figure ─▶ sequence the same?  three times, then what it found
//! ```
//!
//! All of it is written by one thread, so nothing is a locked instruction: a load and a store where
//! something is added.

pub(crate) mod durations;
pub(crate) mod working;

use std::sync::atomic::{AtomicU64, Ordering, fence};

use durations::Durations;
use ringserve_buf::BufferStats;
use ringserve_core::{ConnStats, DriverStats, Time, WaitCounts};
use working::WorkWords;

use crate::stats::{ServiceNames, ServiceStats, ShardStats, UpstreamStats};

/// The number of times that a reader tries again. Then it takes figures of two publications: the
/// writer may have lost its CPU between its first store and its last.
const TRIES: u32 = 3;

/// Figures on lines that no other shard writes: 128 bytes, since processors fetch lines of 64 in
/// pairs.
#[repr(align(128))]
struct Line([AtomicU64; 16]);

/// The figures that are published for the watchdog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WatchedFigures {
    /// Connections of all services.
    pub(crate) connections: usize,
    pub(crate) held_bytes: usize,
    /// Times that accepting paused.
    pub(crate) accept_paused: u64,
    /// Accepting is paused now.
    pub(crate) is_paused: bool,
}

/// The figures that one shard publishes.
#[repr(align(128))]
pub(crate) struct Snapshot {
    /// Odd while the figures are stored.
    sequence: AtomicU64,
    /// When the turn began that the shard is in, or its last one: nanoseconds of its clock. Zero
    /// before the first, and after the end. Whether it is in it, its inbox tells.
    turn: AtomicU64,
    /// Turns since the start, in parts of whole ones.
    turn_parts: AtomicU64,
    /// Frames that might have been shed since the start, and those for which a service was asked.
    shedding: [AtomicU64; 2],
    /// The figures that the watchdog reads, without all the others.
    watched: [AtomicU64; 4],
    /// The shard's work in that turn.
    pub(crate) work: WorkWords,
    lines: Box<[Line]>,
    names: ServiceNames,
    pub(crate) durations: Durations,
}

impl Snapshot {
    pub(crate) fn new(names: ServiceNames) -> Snapshot {
        let mut words = 0;
        each_word(&mut blank(&names), |_| words += 1);
        let line = || Line([const { AtomicU64::new(0) }; 16]);
        let lines = (0..usize::div_ceil(words, 16)).map(|_| line()).collect();
        Snapshot {
            sequence: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            turn_parts: AtomicU64::new(0),
            shedding: Default::default(),
            watched: Default::default(),
            work: WorkWords::default(),
            lines,
            durations: Durations::of(&names),
            names,
        }
    }

    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        self.lines.iter().flat_map(|Line(words)| words)
    }

    /// On the shard: begins to store figures, all of them, in the order of the methods.
    pub(crate) fn publish(&self) -> Publishing<'_, impl Iterator<Item = &AtomicU64>> {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        Publishing { words: self.words(), sequence: &self.sequence, to: sequence + 2 }
    }

    /// The figures that were published last; zeros before the first time.
    pub(crate) fn read(&self) -> ShardStats {
        let mut stats = blank(&self.names);
        for _ in 0..TRIES {
            let sequence = self.sequence.load(Ordering::Acquire);
            let mut words = self.words();
            each_word(&mut stats, |count| {
                *count = words.next().map_or(0, |word| word.load(Ordering::Relaxed));
            });
            fence(Ordering::Acquire);
            if sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence {
                break;
            }
        }
        stats.accepted_waiting = stats.accepted_waiting_by.total();
        for service in std::mem::take(&mut stats.services) {
            stats.add(service);
        }
        stats
    }

    /// On the shard: a turn begins, behind one that was so much of a whole one
    /// ([`turn_part`](ringserve_core::Shard::turn_part)).
    #[inline]
    pub(crate) fn begin_turn(&self, now: Time, last: u32) {
        self.turn.store(now.as_nanos(), Ordering::Relaxed);
        self.turn_parts.store(self.turn_parts.load(Ordering::Relaxed) + u64::from(last), Ordering::Relaxed);
    }

    /// On the shard, in a turn while some frames may be shed: how many might have been since the
    /// start, and for how many a service was asked.
    pub(crate) fn show_shedding(&self, (asked, drawn): (u64, u64)) {
        self.shedding
            .iter()
            .zip([asked, drawn])
            .for_each(|(word, count)| word.store(count, Ordering::Relaxed));
    }

    /// The same, as they were in the last such turn.
    pub(crate) fn shedding(&self) -> (u64, u64) {
        let [asked, drawn] = self.shedding.each_ref().map(|word| word.load(Ordering::Relaxed));
        (asked, drawn)
    }

    /// On the shard, before figures are stored.
    pub(crate) fn show(&self, figures: WatchedFigures) {
        let WatchedFigures { connections, held_bytes, accept_paused, is_paused } = figures;
        let each = [connections as u64, held_bytes as u64, accept_paused, is_paused.into()];
        self.watched.iter().zip(each).for_each(|(word, figure)| word.store(figure, Ordering::Relaxed));
    }

    /// The figures that were shown last.
    pub(crate) fn watched(&self) -> WatchedFigures {
        let [connections, held_bytes, accept_paused, is_paused] =
            self.watched.each_ref().map(|word| word.load(Ordering::Relaxed));
        let (connections, held_bytes) = (connections as usize, held_bytes as usize);
        WatchedFigures { connections, held_bytes, accept_paused, is_paused: is_paused != 0 }
    }

    /// A number that each publication changes.
    pub(crate) fn publication(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    /// Turns since the start, in parts of whole ones
    /// ([`WHOLE_TURN`](ringserve_core::Shard::WHOLE_TURN)): several that were cut, as turns before
    /// them took long, count as one. So a shard whose turns are cut is as late as it was.
    pub(crate) fn turn_parts(&self) -> u64 {
        self.turn_parts.load(Ordering::Relaxed)
    }

    /// On the shard: the turn's work is done, and what follows is the shard's own.
    #[inline]
    pub(crate) fn end_turn(&self) {
        self.work.end();
    }

    /// On the shard: there is no further turn.
    pub(crate) fn end(&self) {
        self.turn.store(0, Ordering::Relaxed);
    }

    /// When its last turn began, which it may be in; `None` before the first, and after the end.
    pub(crate) fn last_turn(&self) -> Option<Time> {
        let turn = self.turn.load(Ordering::Relaxed);
        (turn != 0).then(|| Time::from_nanos(turn))
    }
}

/// Figures that are being stored.
pub(crate) struct Publishing<'a, W> {
    words: W,
    sequence: &'a AtomicU64,
    to: u64,
}

impl<'a, W: Iterator<Item = &'a AtomicU64>> Publishing<'a, W> {
    fn put(&mut self, figure: u64) {
        if let Some(word) = self.words.next() {
            word.store(figure, Ordering::Relaxed);
        }
    }

    /// Of each service in turn, then of the upstreams.
    pub(crate) fn connections(&mut self, mut counters: ConnStats, connections: usize) {
        counters.each_count(|count| self.put(*count));
        self.put(connections as u64);
    }

    pub(crate) fn driver(&mut self, mut stats: DriverStats) {
        stats.each_count(|count| self.put(*count));
    }

    pub(crate) fn buffers(&mut self, mut stats: BufferStats) {
        each_of_buffers(&mut stats, |count| self.put(*count));
    }

    pub(crate) fn sizes(&mut self, held_bytes: usize, mut waiting: WaitCounts) {
        self.put(held_bytes as u64);
        waiting.each_count(|count| self.put(*count as u64));
    }
}

impl<W> Drop for Publishing<'_, W> {
    fn drop(&mut self) {
        self.sequence.store(self.to, Ordering::Release);
    }
}

/// Figures of services with these names, in none of their sums.
fn blank(names: &ServiceNames) -> ShardStats {
    let service = |name: &std::sync::Arc<str>| ServiceStats {
        name: name.clone(),
        counters: ConnStats::default(),
        connections: 0,
    };
    ShardStats { services: names.lanes().map(|(_, name)| service(name)).collect(), ..ShardStats::default() }
}

/// Shows `visit` each figure, in the order in which they are published.
fn each_word(stats: &mut ShardStats, mut visit: impl FnMut(&mut u64)) {
    for ServiceStats { counters, connections, .. } in &mut stats.services {
        counters.each_count(&mut visit);
        visit_size(connections, &mut visit);
    }
    let UpstreamStats { counters, connections } = &mut stats.upstreams;
    counters.each_count(&mut visit);
    visit_size(connections, &mut visit);
    stats.driver.each_count(&mut visit);
    each_of_buffers(&mut stats.buffers, &mut visit);
    visit_size(&mut stats.held_bytes, &mut visit);
    stats.accepted_waiting_by.each_count(|count| visit_size(count, &mut visit));
}

fn each_of_buffers(stats: &mut BufferStats, mut visit: impl FnMut(&mut u64)) {
    stats.each_count(|size| visit_size(size, &mut visit));
}

fn visit_size(size: &mut usize, mut visit: impl FnMut(&mut u64)) {
    let mut count = *size as u64;
    visit(&mut count);
    *size = count as usize;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    fn names() -> ServiceNames {
        ServiceNames::new([("chat".into(), 1), ("http".into(), 2)])
    }

    /// Publishes figures that all have this value.
    fn publish(snapshot: &Snapshot, value: u64) {
        let mut figures = blank(&snapshot.names);
        each_word(&mut figures, |count| *count = value);
        let mut publishing = snapshot.publish();
        for service in figures.services {
            publishing.connections(service.counters, service.connections);
        }
        publishing.connections(figures.upstreams.counters, figures.upstreams.connections);
        publishing.driver(figures.driver);
        publishing.buffers(figures.buffers);
        publishing.sizes(figures.held_bytes, figures.accepted_waiting_by);
        assert!(publishing.words.next().is_none_or(|rest| rest.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn what_is_published_is_read_with_its_names_and_sums() {
        let snapshot = Snapshot::new(names());
        assert_eq!(snapshot.read().services.len(), 2, "before the first time");
        publish(&snapshot, 7);
        let stats = snapshot.read();
        let named: Vec<_> = stats.services.iter().map(|of| (&*of.name, of.connections)).collect();
        assert_eq!(named, [("chat", 7), ("http", 7)]);
        assert_eq!((stats.connections, stats.counters.frames, stats.upstreams.counters.closed), (14, 14, 7));
        assert_eq!((stats.driver.turns, stats.driver.submissions_delayed), (7, 7));
        let buffers = stats.buffers;
        assert_eq!((buffers.total, buffers.free, buffers.with_kernel, buffers.leased), (7, 7, 7, 7));
        assert_eq!((stats.held_bytes, stats.accepted_waiting), (7, 4 * 7));
        assert!(stats.accepted_waiting_by.named().iter().all(|(_, count)| *count == 7));
        assert!(stats.services.iter().all(|of| of.counters.reasons().all(|(_, count)| count == 7)));
    }

    #[test]
    fn reader_beside_a_writer_reads_one_publication() {
        let (snapshot, over) = (Snapshot::new(names()), AtomicBool::new(false));
        let (mut whole, mut torn) = (0u32, 0u32);
        thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1.. {
                    publish(&snapshot, value);
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    // Longer than a reader needs, or it would find no time between two.
                    (0..5000).for_each(|_| std::hint::spin_loop());
                }
            });
            let mut last = 0;
            while whole < 1000 {
                let mut stats = snapshot.read();
                let (mut least, mut most) = (u64::MAX, 0);
                each_word(&mut stats, |count| (least, most) = (least.min(*count), most.max(*count)));
                assert!(least >= last, "no figure falls");
                last = least;
                whole += u32::from(least == most);
                torn += u32::from(least != most);
                if least != most {
                    // The writer may have lost its CPU in the middle.
                    thread::yield_now();
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        assert!(torn < whole, "{torn} were torn, and {whole} whole");
    }

    #[test]
    fn last_turn_is_known_until_the_end() {
        let snapshot = Snapshot::new(names());
        assert_eq!(snapshot.last_turn(), None);
        let now = Time::from_nanos(5_000_000_000);
        snapshot.begin_turn(now, 1);
        snapshot.end_turn();
        assert_eq!(snapshot.last_turn(), Some(now));
        snapshot.end();
        assert_eq!(snapshot.last_turn(), None);
    }
}
