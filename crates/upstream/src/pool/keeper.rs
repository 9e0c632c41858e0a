//! The task that watches idle connections, closes old ones, and tells what the shard did while no
//! request comes.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use super::{Connection, Kept, Pool, Pools, nanos};
use crate::view::Member;

/// The time after which it looks again for old connections.
const LOOKS_EACH: Duration = Duration::from_secs(1);

/// Begins the task, which ends when the client is dropped.
pub(super) fn begin<C: Connection>(pools: &Rc<Pools<C>>) {
    let (shard, weak) = (pools.view.shard.clone(), Rc::downgrade(pools));
    let name = format!("idle connections to {}", pools.view.upstream.name());
    let on = shard.clone();
    let again = RestartGuard(weak.clone());
    on.spawn_named(name, async move {
        let _again = again;
        let mut ticks = shard.interval(LOOKS_EACH);
        loop {
            let mut tick = pin!(ticks.tick());
            let watched = poll_fn(|task| {
                let Some(pools) = weak.upgrade() else { return Poll::Ready(None) };
                pools.watch(task);
                tick.as_mut().poll(task).map(Some)
            });
            if watched.await.is_none() {
                return;
            }
            let Some(pools) = weak.upgrade() else { return };
            pools.close_old();
            pools.warm();
            pools.view.tell_connections();
        }
    });
}

/// Begins the task again if it panics, as a connection that it looks at may. The other connections
/// are watched on.
struct RestartGuard<C: Connection>(Weak<Pools<C>>);

impl<C: Connection> Drop for RestartGuard<C> {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(pools) = self.0.upgrade()
        {
            begin(&pools);
        }
    }
}

impl<C: Connection> Pools<C> {
    /// Closes idle connections on which something happened, and is woken by the others.
    fn watch(&self, task: &mut Context<'_>) {
        if !self.keeper.borrow().will_wake(task.waker()) {
            let waker = task.waker().clone();
            let old = self.keeper.replace(waker);
            drop(old);
        }
        let now = self.view.now();
        for member in self.view.members() {
            self.retain(&member, |kept| match kept.connection.poll_idle(task) {
                Poll::Pending => true,
                Poll::Ready(happened) => {
                    self.note_end(&member, happened, now.saturating_sub(kept.idle_since));
                    false
                }
            });
        }
    }

    fn close_old(&self) {
        let now = self.view.now();
        self.view.look(now);
        self.view.tell(now);
        let idle_timeout = nanos(self.limits().idle_timeout);
        for member in self.view.members() {
            let keeps_none = self.keeps_none(&member);
            let mut left = member.part.idle.borrow().len();
            self.retain(&member, |kept| {
                let idle = now.saturating_sub(kept.idle_since);
                member.part.learned.borrow_mut().is_kept_for(idle);
                let is_kept = idle < idle_timeout || left <= self.limits().warm;
                let keeps = !keeps_none && now < kept.old_at && is_kept;
                left -= usize::from(!keeps);
                keeps
            });
        }
    }

    /// Keeps the idle connections for which `keeps` is true. A framing is user code: nothing is
    /// borrowed while it runs.
    fn retain(&self, member: &Rc<Member<Pool<C>>>, keeps: impl FnMut(&mut Kept<C>) -> bool) {
        let pool = &member.part;
        if pool.idle.borrow().is_empty() {
            return;
        }
        let mut idle = pool.idle.take();
        idle.retain_mut(keeps);
        let mut new = pool.idle.borrow_mut();
        idle.append(&mut new);
        *new = idle;
    }
}
