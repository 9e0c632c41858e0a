//! Gauges of the accept queues, for each listener and shard: the connections that wait there, and
//! the packets lost.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use ringserve_base::machine::{files::MachineFiles, queue_overflows};
use ringserve_drivers::{Listener, ListenerGauge, QueueReading};

use crate::stats::AcceptQueueStats;

/// The gauges of all TCP listeners of a server.
#[derive(Clone, Default)]
pub(crate) struct AcceptQueues(Arc<Gauges>);

#[derive(Default)]
struct Gauges {
    each: Box<[Gauge]>,
    overflows: Overflows,
}

struct Gauge {
    listener: usize,
    shard: Option<usize>,
    gauge: ListenerGauge,
    tally: Mutex<Tally>,
}

/// The number of times that queues of the network namespace overflowed.
struct Overflows {
    /// With a file that stays open: queues overflow when descriptors are used up.
    machine: MachineFiles,
    /// As it was read last; [`UNREAD`] where it cannot be.
    last: AtomicU64,
}

/// No count of overflows is known.
const UNREAD: u64 = u64::MAX;

impl Default for Overflows {
    fn default() -> Overflows {
        Overflows { machine: MachineFiles::here().keeping(), last: AtomicU64::new(UNREAD) }
    }
}

impl Overflows {
    /// Reads the count. `None` where the machine does not tell.
    fn read(&self) -> Option<u64> {
        let now = queue_overflows(&self.machine);
        self.last.store(now.unwrap_or(UNREAD), Ordering::Relaxed);
        now
    }

    /// The count as it was read last.
    fn last(&self) -> Option<u64> {
        Some(self.last.load(Ordering::Relaxed)).filter(|count| *count != UNREAD)
    }
}

/// The drops that are known at a listener.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    /// As of the last look.
    dropped: u64,
    /// Of no later than that look.
    overflows: Option<u64>,
    lost: u64,
}

impl Tally {
    /// Takes in what was dropped until now. The kernel drops packets at a listener for many
    /// reasons, so the queue has to have been near its capacity, or the namespace to have counted
    /// overflows meanwhile. `overflows` is read if that is needed, and `last` is what it was
    /// before. Returns the losses since the beginning.
    fn take(
        &mut self,
        reading: &QueueReading,
        last: Option<u64>,
        overflows: impl FnOnce() -> Option<u64>,
    ) -> Option<u64> {
        let dropped = reading.dropped?;
        let more = dropped.saturating_sub(self.dropped);
        if more == 0 {
            self.overflows = last.max(self.overflows);
            return Some(self.lost);
        }
        self.dropped = dropped;
        let (before, now) = (self.overflows, overflows());
        self.overflows = now;
        self.lost += match (before, now) {
            _ if is_near_full(reading) => more,
            (Some(before), Some(now)) => more.min(now.saturating_sub(before)),
            _ => 0,
        };
        Some(self.lost)
    }

    /// The losses since the beginning that are known without the count of overflows. It takes
    /// nothing in: the next look finds what is to be found out yet.
    fn sure(&self, reading: &QueueReading) -> Option<u64> {
        let more = reading.dropped?.saturating_sub(self.dropped);
        Some(self.lost + if is_near_full(reading) { more } else { 0 })
    }
}

/// True if the queue holds four fifths of what it may.
fn is_near_full(reading: &QueueReading) -> bool {
    let (waiting, capacity) = (u64::from(reading.waiting), u64::from(reading.capacity));
    waiting > 0 && waiting * 5 >= capacity * 4
}

impl AcceptQueues {
    /// Those of the listeners of all shards, each shard's in the same order.
    pub(crate) fn of(sockets: &[Vec<Listener>]) -> AcceptQueues {
        let overflows = Overflows::default();
        overflows.read();
        let mut each = Vec::new();
        let count = sockets.first().map_or(0, Vec::len);
        for listener in 0..count {
            let mut of_shards = sockets.iter().map(|of_shard| &of_shard[listener]).enumerate().peekable();
            let adopted = of_shards.next_if(|(_, first)| first.is_adopted());
            if let Some((_, first)) = adopted {
                let one = ListenerGauge::of([first].into_iter().chain(of_shards.map(|(_, other)| other)));
                each.extend(one.map(|gauge| Gauge::new(listener, None, gauge, &overflows)));
                continue;
            }
            let its = of_shards.filter_map(|(shard, socket)| {
                let gauge = ListenerGauge::of([socket])?;
                Some(Gauge::new(listener, Some(shard), gauge, &overflows))
            });
            each.extend(its);
        }
        AcceptQueues(Arc::new(Gauges { each: each.into(), overflows }))
    }

    /// Reads how often queues of the namespace overflowed, so that what is dropped from now on is
    /// not laid to what was before. For a caller that looks now and then.
    pub(crate) fn note_overflows(&self) {
        if !self.0.each.is_empty() {
            self.0.overflows.read();
        }
    }

    /// Each queue as it is now.
    pub(crate) fn read(&self) -> impl Iterator<Item = AcceptQueueStats> {
        self.0.each.iter().filter_map(|gauge| gauge.read(&self.0.overflows))
    }

    /// Those of one shard; the first one has those from which all accept.
    pub(crate) fn read_those_of(&self, shard: usize) -> impl Iterator<Item = AcceptQueueStats> {
        self.those_of(shard).filter_map(|gauge| gauge.read(&self.0.overflows))
    }

    /// The same for the shard itself, which waits for no other thread and for no file: without
    /// those that another thread reads at this moment, and with the losses that are known without
    /// the count of overflows.
    pub(crate) fn glance_at_those_of(&self, shard: usize) -> impl Iterator<Item = AcceptQueueStats> {
        self.those_of(shard).filter_map(Gauge::glance)
    }

    fn those_of(&self, shard: usize) -> impl Iterator<Item = &Gauge> {
        self.0.each.iter().filter(move |gauge| gauge.shard.unwrap_or(0) == shard)
    }
}

impl Gauge {
    /// Leaves out what an adopted socket dropped before: it is not this server's affair.
    fn new(listener: usize, shard: Option<usize>, gauge: ListenerGauge, overflows: &Overflows) -> Gauge {
        let dropped = gauge.read().and_then(|reading| reading.dropped).unwrap_or(0);
        let tally = Mutex::new(Tally { dropped, overflows: overflows.last(), lost: 0 });
        Gauge { listener, shard, gauge, tally }
    }

    fn read(&self, overflows: &Overflows) -> Option<AcceptQueueStats> {
        // Before the drops are read, so that no later overflow is taken for an earlier one.
        let last = overflows.last();
        let reading = self.gauge.read()?;
        let mut tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = tally.take(&reading, last, || overflows.read());
        Some(self.stats(reading, lost))
    }

    fn glance(&self) -> Option<AcceptQueueStats> {
        let tally = match self.tally.try_lock() {
            Ok(tally) => *tally,
            Err(TryLockError::Poisoned(tally)) => *tally.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let reading = self.gauge.read()?;
        Some(self.stats(reading, tally.sure(&reading)))
    }

    fn stats(&self, reading: QueueReading, lost: Option<u64>) -> AcceptQueueStats {
        let QueueReading { waiting, capacity, dropped } = reading;
        let (waiting, capacity) = (waiting.into(), capacity.into());
        AcceptQueueStats { listener: self.listener, shard: self.shard, waiting, capacity, lost, dropped }
    }
}

impl fmt::Debug for AcceptQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.read()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn reading(waiting: u32, dropped: u64) -> QueueReading {
        QueueReading { waiting, capacity: 100, dropped: Some(dropped) }
    }

    /// The losses after each look, which finds the connections that wait, the drops and the number
    /// of overflows.
    fn lost<const N: usize>(looks: [(u32, u64, Option<u64>); N]) -> [u64; N] {
        let mut tally = Tally { overflows: looks[0].2, ..Tally::default() };
        let mut last = looks[0].2;
        looks.map(|(waiting, dropped, overflows)| {
            let lost = tally.take(&reading(waiting, dropped), last, || overflows).unwrap();
            last = overflows;
            lost
        })
    }

    #[test]
    fn packets_that_are_repeated_are_no_loss() {
        // Two a second, and nothing overflows; here or where the kernel does not tell.
        assert_eq!(lost([(0, 0, Some(7)), (0, 2, Some(7)), (1, 4, Some(7)), (79, 400, Some(7))]), [0; 4]);
        assert_eq!(lost([(0, 0, None), (0, 2, None), (79, 400, None)]), [0; 3]);
    }

    #[test]
    fn drops_at_a_queue_that_is_nearly_full_are_losses() {
        assert_eq!(lost([(0, 0, Some(7)), (80, 3, Some(7)), (101, 5, Some(9))]), [0, 3, 5]);
        assert_eq!(lost([(0, 0, None), (101, 5, None), (0, 6, None)]), [0, 5, 5]);
    }

    #[test]
    fn drops_while_queues_overflow_are_losses() {
        assert_eq!(lost([(0, 0, Some(7)), (0, 30, Some(17)), (0, 31, Some(17))]), [0, 10, 10]);
        assert_eq!(lost([(0, 0, Some(7)), (0, 3, Some(5000))]), [0, 3], "most of them elsewhere");
        // What overflowed before the look without drops is no reason for those behind it.
        assert_eq!(lost([(0, 0, Some(7)), (0, 0, Some(900)), (0, 0, Some(900)), (0, 2, Some(900))]), [0; 4]);
    }

    #[test]
    fn glance_takes_nothing_in() {
        let mut tally = Tally { overflows: Some(7), ..Tally::default() };
        assert_eq!((tally.sure(&reading(0, 3)), tally.sure(&reading(101, 3))), (Some(0), Some(3)));
        assert_eq!(tally.take(&reading(0, 3), Some(7), || Some(9)), Some(2), "a look behind it finds all");
        assert_eq!(tally.sure(&reading(0, 9)), Some(2));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "no shard waits here, but the test, with a bound")]
    fn glance_waits_for_no_look() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = [vec![Listener::own(socket)]];
        let queues = AcceptQueues::of(&sockets);
        assert_eq!(queues.glance_at_those_of(0).count(), 1);
        let look = queues.0.each[0].tally.lock().unwrap();
        let (told, glances) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| told.send(queues.glance_at_those_of(0).count()).unwrap());
            let glance = glances.recv_timeout(Duration::from_secs(10));
            drop(look);
            assert_eq!(glance, Ok(0));
        });
    }

    #[test]
    fn two_looks_at_once_count_a_loss_once() {
        let mut tally = Tally { overflows: Some(0), ..Tally::default() };
        assert_eq!(tally.take(&reading(101, 9), Some(0), || Some(9)), Some(9));
        assert_eq!(
            tally.take(&reading(101, 8), Some(0), || Some(9)),
            Some(9),
            "it was read before the other"
        );
        assert_eq!(tally.take(&QueueReading { dropped: None, ..reading(0, 0) }, None, || None), None);
    }
}
