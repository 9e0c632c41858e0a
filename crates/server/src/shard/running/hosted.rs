//! A shard as a future, for runtimes of tokio's.
//!
//! ```text
//!   descriptor readable ──▶ driver.turn (without waiting) ──▶ turn ──▶ driver.begin ──▶ something? again
//!   woken, or time to   ──────────────────────────────────▶                │ no
//!                                                                          └──▶ sleep
//! ```
//!
//! Clear readiness *before* polling the driver; the other order can lose an edge.
//!
//! User code may run outside of turns here, in tasks of tokio's. If it changes connections, timers
//! or tasks of a sleeping shard, the shard wakes up.

use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use ringserve_core::{Budget, Completion, Driver, Time, Wait};
use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, Sleep};

use super::beginning::{End, StartingShard};
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::ShardLoop;
use crate::stats::ShardStats;

/// Turns in a row, until others of the runtime have theirs: as many as a busy server's replies need
/// to leave, and no more than a few thousand frames.
const TURNS: usize = 4;

/// One timer serves all waits that end behind it by no more than this.
const SLACK: Duration = Duration::from_millis(1);

/// The descriptors at which a shard waits.
struct Waits {
    readiness: AsyncFd<OwnedFd>,
    sleep: Pin<Box<Sleep>>,
    /// When that ends.
    ends: Option<Time>,
    /// The driver may have something.
    look: bool,
    /// Made readable by the shard itself: waiting for that lets the runtime look at its own events,
    /// and its hooks run, before the next turn. tokio-uring submits in such a hook, which waking
    /// the future at once would skip.
    breath: AsyncFd<OwnedFd>,
    completions: Vec<Completion>,
}

impl Waits {
    fn breathe(&mut self, task: &mut Context<'_>) -> io::Result<()> {
        while let Poll::Ready(readable) = self.breath.poll_read_ready(task) {
            readable?.clear_ready();
        }
        // Each write is an edge; the counter is far from its end.
        rustix::io::write(self.breath.get_ref(), &1u64.to_ne_bytes())?;
        Ok(())
    }
}

impl<D: Driver<Descriptor = OwnedFd>, V: Services> ShardLoop<D, V> {
    /// As [`run`](ShardLoop::run), on a runtime of tokio's.
    pub(crate) async fn run_hosted(mut self) -> Result<ShardStats, i32> {
        match self.waits() {
            Ok(waits) => self.run_at(waits).await,
            Err(error) => Err(errno(&error)),
        }
    }

    async fn run_at(mut self, mut waits: Waits) -> Result<ShardStats, i32> {
        // What a handler may do in its turn is bounded already, and all share this one's budget
        // otherwise.
        let end = tokio::task::coop::unconstrained(poll_fn(|task| self.poll_turns(&mut waits, task))).await;
        end.inspect_err(|_| self.broken())
    }

    fn waits(&mut self) -> io::Result<Waits> {
        self.lane.parts.remote.set_hosted();
        let outside = self.lane.parts.remote.outside();
        self.core.all_share().wake_when_dirty(outside.clone());
        self.lane.common.shard.timers().wake_when_set(outside.clone());
        self.lane.parts.driver.pool().wake_when_freed(outside);
        let breath = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waits {
            readiness: watch(self.lane.parts.driver.readiness().map_err(io::Error::from_raw_os_error)?)?,
            sleep: Box::pin(tokio::time::sleep(Duration::ZERO)),
            ends: None,
            look: true,
            breath: watch(breath)?,
            completions: Vec::new(),
        })
    }

    fn poll_turns(&mut self, waits: &mut Waits, task: &mut Context<'_>) -> Poll<Result<ShardStats, i32>> {
        self.lane.parts.remote.set_host(task.waker());
        while let Poll::Ready(readable) = waits.readiness.poll_read_ready(task) {
            match readable {
                Ok(mut readable) => readable.clear_ready(),
                Err(error) => return Poll::Ready(Err(errno(&error))),
            }
            waits.look = true;
        }
        if waits.ends.is_some() && waits.sleep.as_mut().poll(task).is_ready() {
            waits.ends = None;
        }
        for _ in 0..TURNS {
            if std::mem::take(&mut waits.look) {
                self.lane.parts.driver.turn(Wait::No, Budget::default(), &mut waits.completions)?;
            }
            self.lane.common.now = self.lane.common.shard.timers().now();
            self.turn(&mut waits.completions);
            if self.is_done() {
                return Poll::Ready(Ok(self.ended()));
            }
            let wait = self.wait();
            let something = self.lane.parts.driver.begin()?;
            waits.look = something || wait == Wait::No;
            if !waits.look && self.sleeps(waits, wait, task) {
                return Poll::Pending;
            }
        }
        self.lane.common.meter.pauses();
        match waits.breathe(task) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(errno(&error))),
        }
    }

    /// False if the time is over.
    fn sleeps(&self, waits: &mut Waits, wait: Wait, task: &mut Context<'_>) -> bool {
        let Wait::For(time) = wait else { return true };
        let ends = self.lane.common.now + time;
        if waits.ends.is_some_and(|set| set <= ends + SLACK) {
            return true;
        }
        waits.sleep.as_mut().reset(Instant::now() + time);
        let over = waits.sleep.as_mut().poll(task).is_ready();
        waits.ends = (!over).then_some(ends);
        !over
    }
}

impl<D: Driver<Descriptor = OwnedFd>, V: Services> StartingShard<D, V> {
    /// As [`run`](StartingShard::run), on a runtime of tokio's.
    pub(crate) async fn run_hosted(mut self) -> End {
        let mut waits = self.shard.waits().map_err(|error| errno(&error))?;
        let ended = poll_fn(|task| {
            if self.serves() {
                return Poll::Ready(None);
            }
            let end = self.shard.poll_turns(&mut waits, task);
            self.apply_command();
            // A turn may have taken the call that says so; one that comes now wakes the shard.
            if end.is_pending() && self.serves() {
                return Poll::Ready(None);
            }
            end.map(Some)
        });
        match tokio::task::coop::unconstrained(ended).await {
            Some(end) => end.inspect_err(|_| self.shard.broken()),
            None => {
                // What the driver brought is taken in the first turn.
                waits.look = true;
                match self.serve() {
                    Some(shard) => shard.run_at(waits).await,
                    None => Ok(ShardStats::default()),
                }
            }
        }
    }
}

/// Deprecated since a type may lie about its descriptor, which this one does not; what replaces it
/// is unsafe.
#[allow(deprecated)]
fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error())
}
