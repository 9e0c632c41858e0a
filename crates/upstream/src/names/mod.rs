//! Sources of backends: names, DNS, files, and the task that runs one.
//!
//! One shard runs the source of an upstream, and the others look each second whether it still does.

#[cfg(feature = "dns")]
mod dns;
mod file;
mod system;

use std::any::Any;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ringserve_server::Shard;
use ringserve_server::task::JoinHandle;

use crate::discover::{Backends, Source};
use crate::policy::{SECOND, part_of};
use crate::upstream::Upstream;

#[cfg(feature = "dns")]
pub use dns::Dns;
pub use file::BackendFile;
pub use system::Names;

/// The time after which a shard looks again whether a source has to be run, and whether its client
/// is still there.
const LOOKS_EACH: Duration = Duration::from_secs(1);

/// The longest time until a source is begun again, in seconds.
const AGAIN_AFTER_MAX: u64 = 30;

/// Takes part in running the source of an upstream, if it has one, for as long as `client` is
/// there.
pub(crate) fn begin<T: 'static>(upstream: &Upstream, shard: &Shard, client: &Rc<T>) {
    if upstream.settings().source.is_none() {
        return;
    }
    let client: Weak<dyn Any> = Rc::<T>::downgrade(client);
    let (upstream, on) = (upstream.clone(), shard.clone());
    shard.spawn_named(format!("names of {}", upstream.name()), async move {
        let mut looks = on.interval(LOOKS_EACH);
        while !is_over(&on, &client) {
            if let Some(mut run) = Run::begin(&upstream) {
                run.goes_on(&on, &client).await;
            }
            looks.tick().await;
        }
    });
}

fn is_over(shard: &Shard, client: &Weak<dyn Any>) -> bool {
    shard.is_stopping() || client.strong_count() == 0
}

/// A source that runs, in a separate task: it is user code, and may panic. Its drop ends it.
struct SourceTask(JoinHandle<io::Result<()>>);

impl SourceTask {
    fn begin(source: &Arc<dyn Source>, shard: &Shard, backends: &Backends) -> SourceTask {
        let (source, on, backends) = (source.clone(), shard.clone(), backends.clone());
        SourceTask(shard.spawn(async move { source.begin(&on, &backends).await }))
    }
}

impl Drop for SourceTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The one run of a source in the process. Its drop lets another shard run it.
struct Run {
    upstream: Upstream,
    /// Seconds until it is begun again.
    again_after: u64,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.upstream.state().is_discovering.store(false, Relaxed);
    }
}

impl Run {
    /// `None` if another shard runs it.
    fn begin(upstream: &Upstream) -> Option<Run> {
        let is_free = !upstream.state().is_discovering.swap(true, Relaxed);
        is_free.then(|| Run { upstream: upstream.clone(), again_after: 1 })
    }

    /// Runs the source, again and again, until the shard or the client ends.
    async fn goes_on(&mut self, shard: &Shard, client: &Weak<dyn Any>) {
        let Some(source) = self.upstream.settings().source.clone() else { return };
        let upstream = self.upstream.clone();
        let backends = Backends::new(move |backends| upstream.found(backends));
        loop {
            let answers = self.answers();
            let mut run = SourceTask::begin(&source, shard, &backends);
            let ended = loop {
                match shard.timeout(LOOKS_EACH, &mut run.0).await {
                    Ok(ended) => break ended.unwrap_or_else(|error| Err(io::Error::other(error))),
                    Err(_) if is_over(shard, client) => return,
                    Err(_) => {}
                }
            };
            drop(run);
            if self.answers() != answers {
                self.again_after = 1;
            }
            if let Err(error) = ended {
                self.upstream.found(Err(error));
            }
            let nanos = self.again_after * SECOND;
            let mut wait = nanos / 10 * 9 + part_of(nanos / 5, shard.random());
            while wait > 0 {
                let part = wait.min(LOOKS_EACH.as_nanos() as u64);
                shard.sleep(Duration::from_nanos(part)).await;
                if is_over(shard, client) {
                    return;
                }
                wait -= part;
            }
            self.again_after = (self.again_after * 2).min(AGAIN_AFTER_MAX);
        }
    }

    fn answers(&self) -> u64 {
        self.upstream.state().lookups.load(Relaxed)
    }
}
