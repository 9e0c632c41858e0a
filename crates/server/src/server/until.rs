//! Serving until a future is done.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread::{self, Thread};

use ringserve_base::guard::message_of;

use super::running::ServerHandle;
use crate::error::Error;
use crate::shard::remote::control::ServerControl;
use crate::stats::ServerStats;

/// Wakes the thread that polls the future.
struct Caller(Thread);

impl Wake for Caller {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Shuts the server down at its drop, even if the future panics: the threads of the server are
/// waited for then.
struct ShutsDown(ServerControl);

impl Drop for ShutsDown {
    fn drop(&mut self) {
        match thread::panicking() {
            true => self.0.abort(),
            false => self.0.shutdown(),
        }
    }
}

/// Polls `future` on this thread until it is done or the server ended by itself, then drains the
/// server.
///
/// # Errors
/// Those of [`ServerHandle::wait`].
pub(super) fn serve_until(running: ServerHandle, future: impl Future) -> Result<ServerStats, Error> {
    let control = running.control();
    let waker = Waker::from(Arc::new(Caller(thread::current())));
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        // Set before the thread is made: if that fails, the drop of `running` stops the server.
        let shuts_down = ShutsDown(control);
        let (ended, woken) = (&has_ended, &waker);
        let waits = thread::Builder::new().name("ringserve-waits".into()).spawn_scoped(scope, move || {
            let end = running.wait();
            ended.store(true, Ordering::Release);
            woken.wake_by_ref();
            end
        });
        let waits = waits.map_err(Error::Thread)?;
        let mut future = pin!(future);
        while !has_ended.load(Ordering::Acquire)
            && future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending()
        {
            thread::park();
        }
        drop(shuts_down);
        waits
            .join()
            .unwrap_or_else(|panic| Err(Error::ShardPanicked { shard: 0, message: message_of(panic) }))
    })
}
