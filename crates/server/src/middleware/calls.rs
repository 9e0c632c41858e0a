//! Counting and logging calls.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringserve_base::lines::{LineLimit, debug, trace, warn};
use ringserve_core::{Frame, Time};
use tracing::{Level, enabled};

use super::observe::{CallEnd, CallObserver};
use crate::shard::face::cx::Cx;
use crate::shard::face::service::Service;
use crate::stats::CallStats;

/// Counts and logs the calls of a server, for [`Observe`](super::Observe). Clones share the counts:
/// keep one to read, from any thread at any time, and move one into the factory.
///
/// Each shard counts for itself, so counting costs a few stores to memory that no other core
/// writes. The clock is read only for slow calls, if [`slower_than`](Calls::slower_than) asks for
/// them, and for one call in `n`, if [`time_one_in`](Calls::time_one_in) does.
///
/// The log gets each end of a call at level trace; failures and drops at level debug (the server
/// logs a failure as a warning anyway, since it closes the connection); slow calls as warnings, at
/// most ten a second for each shard.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    shards: Arc<Mutex<Vec<Arc<Counters>>>>,
    slower_than: Option<Duration>,
    one_in: u32,
}

impl Calls {
    /// Counts and logs calls that wait longer than `time`, measured from the moment at which they
    /// begin to wait: a call that finishes at once costs no clock read. Call this before
    /// [`on_shard`](Calls::on_shard).
    pub fn slower_than(self, time: Duration) -> Calls {
        Calls { slower_than: Some(time), ..self }
    }

    /// Times one call in `calls` of each shard, beginning with the first: every call with 1, none
    /// with 0, which is the default. Each costs two clock reads. Call this before
    /// [`on_shard`](Calls::on_shard).
    pub fn time_one_in(self, calls: u32) -> Calls {
        Calls { one_in: calls, ..self }
    }

    /// The observer for one shard; made in the factory.
    pub fn on_shard(&self) -> ShardCalls {
        let counters = Arc::new(Counters::default());
        self.shards.lock().unwrap_or_else(PoisonError::into_inner).push(counters.clone());
        ShardCalls {
            counters,
            slower_than: self.slower_than,
            one_in: self.one_in,
            until_timed: Cell::new(1),
            lines: RefCell::default(),
        }
    }

    /// The sum of all shards' counts.
    pub fn counts(&self) -> CallStats {
        let mut sum = CallStats::default();
        for counts in self.each() {
            sum.begun += counts.begun;
            sum.done += counts.done;
            sum.failed += counts.failed;
            sum.dropped += counts.dropped;
            sum.waited += counts.waited;
            sum.slow += counts.slow;
            sum.timed += counts.timed;
            sum.timed_sum += counts.timed_sum;
        }
        sum
    }

    /// The counts of each [`on_shard`](Calls::on_shard), in the order in which they were made.
    pub fn each(&self) -> Vec<CallStats> {
        let shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        shards.iter().map(|counters| counters.read()).collect()
    }
}

/// Counts the calls of one shard. See [`Calls::on_shard`].
pub struct ShardCalls {
    counters: Arc<Counters>,
    slower_than: Option<Duration>,
    one_in: u32,
    until_timed: Cell<u32>,
    lines: RefCell<LineLimit>,
}

/// Written by one thread, read by any. On separate cache lines, so that writes of other shards do
/// not slow it down: 128 bytes, since processors fetch lines of 64 in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters {
    begun: AtomicU64,
    done: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
    waited: AtomicU64,
    slow: AtomicU64,
    timed: AtomicU64,
    timed_nanos: AtomicU64,
}

impl Counters {
    /// Ends are read before beginnings, so that no call seems to end which did not begin.
    fn read(&self) -> CallStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        let (done, failed, dropped) = (read(&self.done), read(&self.failed), read(&self.dropped));
        CallStats {
            done,
            failed,
            dropped,
            waited: read(&self.waited),
            slow: read(&self.slow),
            timed: read(&self.timed),
            timed_sum: Duration::from_nanos(read(&self.timed_nanos)),
            begun: read(&self.begun),
        }
    }
}

/// A load and a store, which cost less than an atomic addition: no other thread writes.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Release);
}

/// The times of a call in progress.
#[derive(Debug)]
pub struct Times {
    begun: Option<Time>,
    waits_since: Option<Time>,
}

impl<S: Service<H>, H> CallObserver<S, H> for ShardCalls {
    type Call = Times;

    #[inline]
    fn begins(&self, cx: &Cx<'_, S::Session>, _frame: &Frame<H>) -> Times {
        add(&self.counters.begun, 1);
        let mut begun = None;
        if self.one_in > 0 {
            let left = self.until_timed.get() - 1;
            self.until_timed.set(if left == 0 { self.one_in } else { left });
            begun = (left == 0).then(|| cx.shard().now());
        }
        Times { begun, waits_since: None }
    }

    fn waits(&self, cx: &Cx<'_, S::Session>, call: &mut Times) {
        add(&self.counters.waited, 1);
        if self.slower_than.is_some() {
            call.waits_since = Some(cx.shard().now());
        }
    }

    #[inline]
    fn ends(&self, cx: &Cx<'_, S::Session>, call: Times, end: CallEnd<'_, S::Error>) {
        add(
            match end {
                CallEnd::Done => &self.counters.done,
                CallEnd::Failed(_) => &self.counters.failed,
                CallEnd::Dropped => &self.counters.dropped,
            },
            1,
        );
        if call.begun.is_some() || call.waits_since.is_some() {
            self.took_time(cx, &call);
        }
        if enabled!(Level::DEBUG) {
            self.log(cx, end);
        }
    }
}

impl ShardCalls {
    #[cold]
    fn took_time<T: 'static>(&self, cx: &Cx<'_, T>, call: &Times) {
        let now = cx.shard().now();
        if let Some(begun) = call.begun {
            let nanos = u64::try_from((now - begun).as_nanos()).unwrap_or(u64::MAX);
            add(&self.counters.timed_nanos, nanos);
            add(&self.counters.timed, 1);
        }
        let Some(waited) = call.waits_since.map(|since| now - since) else { return };
        if self.slower_than.is_some_and(|slower_than| waited > slower_than) {
            add(&self.counters.slow, 1);
            if self.lines.borrow_mut().allows(now) {
                warn!(shard = cx.shard().index(), id = %cx.id(), ?waited, "slow call");
            }
        }
    }

    #[cold]
    fn log<T: 'static, E: fmt::Display>(&self, cx: &Cx<'_, T>, end: CallEnd<'_, E>) {
        let (shard, id) = (cx.shard().index(), cx.id());
        match end {
            CallEnd::Done => trace!(shard, %id, "call done"),
            CallEnd::Failed(_) | CallEnd::Dropped => debug!(shard, %id, "call {end}"),
        }
    }
}

impl fmt::Debug for ShardCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardCalls").field("counts", &self.counters.read()).finish_non_exhaustive()
    }
}
