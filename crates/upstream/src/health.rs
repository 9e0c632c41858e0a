//! The tasks that check backends: on each shard with a client of the upstream, for its part of the
//! backends.

use std::any::Any;
use std::io;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ringserve_server::net::is_local_failure;
use ringserve_server::{Shard, Stream};
use tracing::{info, warn};

use crate::backend::{BackendState, Health};
use crate::check::Check;
use crate::connect::{connect, plain};
use crate::policy::part_of;
use crate::upstream::Upstream;

/// Parts of the time of a check, of which a time in which this process did not run takes one at
/// most.
const CHECK_PARTS: u32 = 8;

/// Bytes of an answer that are looked at.
const ANSWER_BYTES_MAX: usize = 16 << 10;

/// The time after which a shard looks again whether there are backends that no shard checks.
const LOOKS_EACH: Duration = Duration::from_secs(1);

/// Begins to check backends of the upstream on this shard, if it has checks, for as long as
/// `client` is there.
pub(crate) fn begin<T: 'static>(upstream: &Upstream, shard: &Shard, client: &Rc<T>) {
    if upstream.settings().check.is_none() {
        return;
    }
    // Counted from here on, or the first shard that runs would take all backends.
    let (checker, on) = (Checker::new(upstream), shard.clone());
    let client: Weak<dyn Any> = Rc::<T>::downgrade(client);
    shard.spawn_named(format!("checks of {}", upstream.name()), async move {
        share(&checker.0, &on, &client).await;
    });
}

/// A task that takes part in the checks. Its drop, with its shard, leaves its backends to others.
struct Checker(Upstream);

impl Checker {
    fn new(upstream: &Upstream) -> Checker {
        upstream.state().checkers.fetch_add(1, Relaxed);
        Checker(upstream.clone())
    }
}

impl Drop for Checker {
    fn drop(&mut self) {
        self.0.state().checkers.fetch_sub(1, Relaxed);
    }
}

/// Takes backends that no shard checks, up to an equal part of them.
async fn share(upstream: &Upstream, shard: &Shard, client: &Weak<dyn Any>) {
    let mut looks = shard.interval(LOOKS_EACH);
    let mut watches: Vec<Arc<BackendState>> = Vec::new();
    loop {
        looks.tick().await;
        if shard.is_stopping() || client.strong_count() == 0 {
            return;
        }
        let backends = upstream.state().backends();
        // A check whose task panicked, as a transport may, is begun again.
        watches.retain(|state| !state.is_gone.load(Relaxed) && state.is_watched.load(Relaxed));
        let part = backends.len().div_ceil(upstream.state().checkers.load(Relaxed).max(1));
        for state in backends.iter() {
            if watches.len() >= part {
                break;
            }
            if state.is_watched.compare_exchange(false, true, Relaxed, Relaxed).is_ok() {
                watches.push(state.clone());
                let watch = Watch {
                    upstream: upstream.clone(),
                    shard: shard.clone(),
                    client: client.clone(),
                    state: state.clone(),
                };
                shard.spawn_named(format!("check of {}", state.backend), async move { watch.run().await });
            }
        }
    }
}

/// The checks of a backend, one after the other. Its drop lets another shard take them.
struct Watch {
    upstream: Upstream,
    shard: Shard,
    client: Weak<dyn Any>,
    state: Arc<BackendState>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.state.is_watched.store(false, Relaxed);
    }
}

impl Watch {
    async fn run(&self) {
        let Some(check) = &self.upstream.settings().check else { return };
        // The first checks of many backends do not come at once.
        let spread = check.interval.min(LOOKS_EACH).as_nanos() as u64;
        self.shard.sleep(Duration::from_nanos(part_of(spread, self.shard.random()))).await;
        let (mut ticks, mut against) = (self.shard.interval(check.interval), 0);
        loop {
            ticks.tick().await;
            if self.state.is_gone.load(Relaxed) || self.client.strong_count() == 0 {
                return;
            }
            let checked = self.check_in_time(check).await;
            if self.shard.is_stopping() {
                return;
            }
            self.note(check, checked, &mut against);
        }
    }

    fn note(&self, check: &Check, checked: io::Result<()>, against: &mut u32) {
        let (upstream, name) = (self.upstream.name(), self.state.backend.name());
        // What is missing here says nothing of the backend, and is said once.
        let not_looked = checked.as_ref().err().filter(|error| is_local_failure(error));
        let was_unchecked = self.state.is_unchecked.swap(not_looked.is_some(), Relaxed);
        match not_looked {
            Some(error) if !was_unchecked => warn!("upstream {upstream}: {name} cannot be checked: {error}"),
            None if was_unchecked => info!("upstream {upstream}: {name} is checked again"),
            _ => {}
        }
        if not_looked.is_some() {
            return;
        }
        let health = self.state.health();
        let is_down = health == Health::Down;
        let now = self.shard.now().as_nanos();
        *against = if checked.is_err() == is_down { 0 } else { *against + 1 };
        if *against >= if is_down { check.rise } else { check.fall } {
            *against = 0;
            let new = if is_down { Health::Up } else { Health::Down };
            match &checked {
                Ok(()) => self.upstream.state().set_health(&self.state, new, now, &"it works"),
                Err(error) => self.upstream.state().set_health(&self.state, new, now, error),
            }
        } else if health == Health::Unknown && checked.is_ok() {
            self.upstream.state().set_health(&self.state, Health::Up, now, &"it works");
        }
    }

    /// A check, within its time. A time in which this shard was blocked, or the process stopped, is
    /// no time that the backend had.
    async fn check_in_time(&self, check: &Check) -> io::Result<()> {
        let mut checked = pin!(self.check(check));
        for _ in 0..CHECK_PARTS {
            if let Ok(checked) = self.shard.timeout(check.interval / CHECK_PARTS, &mut checked).await {
                return checked;
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    async fn check(&self, check: &Check) -> io::Result<()> {
        let mut stream = connect(&self.shard, self.upstream.settings(), &self.state, None, plain).await?;
        let Some(expected) = &check.expect else { return Ok(()) };
        stream.write_all(&check.send).await?;
        if is_answered(&mut stream, expected).await? {
            return Ok(());
        }
        Err(io::Error::other("the answer is another one"))
    }
}

/// True once the received bytes have these.
async fn is_answered(stream: &mut Stream, expected: &[u8]) -> io::Result<bool> {
    let mut answer = Vec::new();
    while answer.len() < ANSWER_BYTES_MAX
        && let Some(bytes) = stream.read_frame().await?
    {
        // Only where what came may end what is looked for.
        let from = answer.len().saturating_sub(expected.len());
        answer.extend_from_slice(&bytes);
        if expected.is_empty() || answer[from..].windows(expected.len()).any(|bytes| bytes == expected) {
            return Ok(true);
        }
    }
    Ok(false)
}
