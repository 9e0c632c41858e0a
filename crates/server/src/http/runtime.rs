//! Tasks and sleeps for hyper.
//!
//! hyper wants timers that are `Send`, and a shard's are not. So these are a separate wheel behind
//! a lock, which only the shard's thread takes as long as no code carries a sleep away, and a task
//! of the shard sleeps for all of them:
//!
//! ```text
//!   sleep, polled ──▶ sets its timer in the wheel ──▶ wakes the task, if it goes off earlier than that knew
//!   task ──▶ sleeps until the first timer ──▶ wakes whose timers went off ──▶ sleeps until the next one
//! ```
//!
//! After a time in which the shard was away the task waits until it has looked at what came
//! meanwhile: else hyper would take peers for silent whose bytes are there.
//!
//! hyper makes a sleep for each request of HTTP/1.1 and drops it when the head is there. With the
//! same time for all, the task's next look is then never too late, and it is woken about once in
//! that time, not for each request.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use hyper::rt::{Executor, Sleep, Timer};
use ringserve_base::clock::Clock;
use ringserve_base::guard::{discard, wake};
use ringserve_core::Time;

use crate::shard::face::handle::Shard;
use crate::shard::wakes::timers::Alarms;

/// Looks at the timers in a row: a second one where a timer's time came while those of others went
/// off.
const LOOKS: usize = 2;

/// Time for which timers are put off while the shard has not looked at what came. Arbitrary: a turn
/// or two.
pub(super) const PUT_OFF: Duration = Duration::from_millis(10);

/// Runs hyper's futures on a shard. They need not be `Send`, and end with the shard.
#[derive(Clone, Debug)]
pub struct ShardExecutor {
    shard: Shard,
}

impl ShardExecutor {
    /// An executor on `shard`.
    pub fn new(shard: &Shard) -> ShardExecutor {
        ShardExecutor { shard: shard.clone() }
    }
}

impl<F: Future<Output = ()> + 'static> Executor<F> for ShardExecutor {
    fn execute(&self, future: F) {
        self.shard.spawn(future);
    }
}

/// Timers of a shard for hyper. A timer goes off up to about a millisecond late and never early.
/// Clones are handles on the same ones.
#[derive(Clone)]
pub struct ShardTimer {
    inner: Arc<Inner>,
}

struct Inner {
    clock: Clock,
    state: Mutex<State>,
}

struct State {
    alarms: Alarms,
    /// The time of the task's next look; `None` if it waits for a timer to be set.
    looks_at: Option<Time>,
    task: Option<Waker>,
}

impl ShardTimer {
    /// Timers on `shard`, where a task looks after them from now on.
    pub fn new(shard: &Shard) -> ShardTimer {
        let state = State { alarms: Alarms::new(), looks_at: None, task: None };
        let inner = Arc::new(Inner { clock: shard.timers().clock().clone(), state: Mutex::new(state) });
        shard.spawn(look_after(inner.clone(), shard.clone()));
        ShardTimer { inner }
    }

    /// True in a simulation.
    pub(super) fn is_simulated(&self) -> bool {
        self.inner.clock.is_simulated()
    }

    /// Waits for `time`. While it waits no poll reads the clock.
    pub(super) fn after(&self, time: Duration) -> ShardTimerSleep {
        self.until(self.time() + time)
    }

    pub(super) fn until(&self, until: Time) -> ShardTimerSleep {
        ShardTimerSleep { inner: self.inner.clone(), until, number: None }
    }

    pub(super) fn time(&self) -> Time {
        self.inner.now()
    }
}

impl Inner {
    fn time(&self, instant: Instant) -> Time {
        // The clock is read last, so that the time is never early.
        let left = instant.saturating_duration_since(self.clock.instant());
        self.now() + left
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task: wakes whose timers went off, and sleeps until the next one does.
async fn look_after(inner: Arc<Inner>, shard: Shard) {
    let mut sleep = None;
    let (mut fired, mut wakers) = (Vec::new(), Vec::new());
    poll_fn(|task| {
        if shard.is_behind() {
            // What hyper waits for may be there.
            let sleep = sleep.insert(shard.sleep(PUT_OFF));
            if Pin::new(sleep).poll(task).is_pending() {
                return Poll::<()>::Pending;
            }
        }
        // A time that is over already is rare; the shard has its turn between two looks, whatever
        // the clock does.
        for _ in 0..LOOKS {
            let now = inner.now();
            let mut state = inner.state();
            state.alarms.advance(now, &mut fired);
            wakers.extend(fired.drain(..).filter_map(|number| state.alarms.take(number)));
            let next = state.alarms.next();
            state.looks_at = next;
            if !state.task.as_ref().is_some_and(|known| known.will_wake(task.waker())) {
                state.task = Some(task.waker().clone());
            }
            drop(state);
            // One that panics loses its own task alone.
            wakers.drain(..).for_each(|waker| _ = wake(waker));
            let Some(next) = next else {
                sleep = None;
                return Poll::<()>::Pending;
            };
            let sleep = sleep.insert(shard.sleep(next - now));
            if Pin::new(sleep).poll(task).is_pending() {
                return Poll::Pending;
            }
        }
        task.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

impl Timer for ShardTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(self.after(duration))
    }

    fn now(&self) -> Instant {
        self.inner.clock.instant()
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        let until = self.inner.time(deadline);
        Box::pin(ShardTimerSleep { inner: self.inner.clone(), until, number: None })
    }

    fn reset(&self, sleep: &mut Pin<Box<dyn Sleep>>, new_deadline: Instant) {
        match sleep.as_mut().downcast_mut_pin::<ShardTimerSleep>() {
            Some(mut sleep) => {
                sleep.clear();
                sleep.until = sleep.inner.time(new_deadline);
            }
            None => *sleep = self.sleep_until(new_deadline),
        }
    }
}

impl fmt::Debug for ShardTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardTimer").finish_non_exhaustive()
    }
}

/// Waits for a point in time. What [`ShardTimer`] makes.
#[must_use = "a future does nothing until it is awaited"]
pub struct ShardTimerSleep {
    inner: Arc<Inner>,
    until: Time,
    /// Its number in the wheel, once it had to wait.
    number: Option<u32>,
}

impl ShardTimerSleep {
    fn clear(&mut self) {
        let Some(number) = self.number.take() else { return };
        let waker = self.inner.state().alarms.clear(number);
        discard(waker);
    }
}

impl Future for ShardTimerSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        // As long as its timer has not gone off, there is no need to look at the clock.
        if let Some(number) = this.number
            && this.inner.state().alarms.is_set_for(number, task.waker())
        {
            return Poll::Pending;
        }
        if this.inner.now() >= this.until {
            return Poll::Ready(());
        }
        // Cloning a waker is user code, and done while the lock is free.
        let waker = task.waker().clone();
        let mut state = this.inner.state();
        let setting = state.alarms.set(&mut this.number, this.until, waker);
        let early = state.looks_at.is_none_or(|looks_at| this.until < looks_at);
        let looker = if early { state.task.clone() } else { None };
        if early {
            state.looks_at = Some(this.until);
        }
        drop(state);
        setting.finish(task.waker());
        if let Some(looker) = looker {
            looker.wake();
        }
        Poll::Pending
    }
}

impl Drop for ShardTimerSleep {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Sleep for ShardTimerSleep {}

impl fmt::Debug for ShardTimerSleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardTimerSleep(until {} ms)", self.until.as_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Wake;

    struct Other;

    impl Wake for Other {
        fn wake(self: Arc<Self>) {}
    }

    fn sleep(time: Duration) -> ShardTimerSleep {
        let state = State { alarms: Alarms::new(), looks_at: None, task: None };
        let inner = Arc::new(Inner { clock: Clock::start(), state: Mutex::new(state) });
        ShardTimerSleep { until: inner.now() + time, inner, number: None }
    }

    #[test]
    fn a_sleep_that_is_dropped_leaves_no_timer() {
        let mut sleep = sleep(Duration::from_secs(3600));
        let inner = sleep.inner.clone();
        assert!(Pin::new(&mut sleep).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(inner.state().alarms.next().is_some());
        drop(sleep);
        assert_eq!(inner.state().alarms.next(), None);
    }

    #[test]
    fn a_sleep_that_is_polled_by_another_task_still_waits() {
        let mut sleep = sleep(Duration::from_secs(3600));
        assert!(Pin::new(&mut sleep).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let other = Waker::from(Arc::new(Other));
        assert!(Pin::new(&mut sleep).poll(&mut Context::from_waker(&other)).is_pending());
        let number = sleep.number.unwrap();
        assert!(sleep.inner.state().alarms.is_set_for(number, &other));
    }
}
