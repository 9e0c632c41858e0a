//! The end of a connection while its server drains.
//!
//! ```text
//!   Serves ── order ─▶ Kept ── its moment, nothing under way ──▶ Told ── hyper ends it, or it owes nothing ──▶ over
//!                      answers say `connection: close`           GOAWAY twice with HTTP/2
//! ```
//!
//! It is ordered to leave once all bytes that had arrived before the order were taken in, and has
//! its moment within [`drain_spread`](crate::limits::ServerLimits::drain_spread) as others have.
//! With HTTP/1.1 that is half a second after the order at the earliest: a client that was about to
//! ask learns it from its answer, and one that knows of nothing may be asking.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use super::runtime::{ShardTimer, ShardTimerSleep};
use super::watch::Watch;
use crate::shard::face::handle::Shard;
use crate::shard::tasks::draining::Draining;
use crate::shard::wakes::timers::Sleep;
use crate::stream::fate::Fate;

/// Time between two looks at a connection that is to end, and has something under way; and that a
/// client of HTTP/1.1 has whose last answer did not say that it is the last one.
const LOOK: Duration = Duration::from_millis(500);

/// Time after GOAWAY in which a client that has no stream answers the PING after it, or ends the
/// connection.
const FAREWELL: Duration = Duration::from_secs(2);

/// Waits until the server drains, and then for a moment within its spread.
pub(super) struct Leave {
    drain: Draining,
    shard: Shard,
    /// A request may be on its way.
    is_fresh: bool,
    sleep: Option<Sleep>,
}

impl Leave {
    /// Of one that has said nothing yet, if it `is_fresh`.
    pub(super) fn new(shard: &Shard, is_fresh: bool) -> Leave {
        Leave { drain: shard.stopping(), shard: shard.clone(), is_fresh, sleep: None }
    }

    pub(super) fn poll(&mut self, task: &mut Context<'_>) -> Poll<()> {
        let sleep = match &mut self.sleep {
            Some(sleep) => sleep,
            None => {
                ready!(Pin::new(&mut self.drain).poll(task));
                let (moment, random) = (self.shard.moment(), self.shard.random());
                let time = if self.is_fresh { moment.behind_first(random) } else { moment.of(random) };
                self.sleep.insert(self.shard.sleep(time))
            }
        };
        Pin::new(sleep).poll(task)
    }
}

/// The next step of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It tells its peer, and takes no new request.
    ShutDown,
    /// It ends, since it owes nothing.
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Serves,
    Kept,
    Told,
}

/// The end of one connection in a drain.
pub(super) struct Leaving {
    drain: Draining,
    stage: Stage,
    sleep: Option<ShardTimerSleep>,
}

impl Leaving {
    pub(super) fn new(drain: Draining) -> Leaving {
        Leaving { drain, stage: Stage::Serves, sleep: None }
    }

    /// The next step of a connection that has read all bytes that are there. Without a sleep the
    /// task is woken by the drain alone.
    pub(super) fn poll(
        &mut self,
        task: &mut Context<'_>,
        shard: &Shard,
        timer: &ShardTimer,
        watch: &Watch,
        fate: &Fate,
    ) -> Poll<Step> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                ready!(Pin::new(sleep).poll(task));
                self.sleep = None;
            }
            let again = match self.stage {
                Stage::Serves => {
                    ready!(Pin::new(&mut self.drain).poll(task));
                    self.stage = Stage::Kept;
                    watch.begin_farewell();
                    let moment = shard.moment();
                    if watch.is_http2() {
                        moment.of(shard.random())
                    } else {
                        moment.behind_first(shard.random())
                    }
                }
                Stage::Kept if watch.is_http2() => {
                    self.stage = Stage::Told;
                    self.sleep = Some(timer.after(FAREWELL));
                    return Poll::Ready(Step::ShutDown);
                }
                Stage::Kept if watch.may_leave() => {
                    self.stage = Stage::Told;
                    return Poll::Ready(Step::ShutDown);
                }
                // hyper closes a connection of HTTP/1.1 on which nothing is under way at once.
                Stage::Told if !watch.is_http2() => return Poll::Pending,
                Stage::Told if watch.is_quiet() && fate.outbox_bytes() == 0 => {
                    return Poll::Ready(Step::Close);
                }
                Stage::Kept | Stage::Told => LOOK,
            };
            self.sleep = Some(timer.after(again));
        }
    }
}
