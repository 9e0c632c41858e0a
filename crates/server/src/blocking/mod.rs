//! Blocking functions beside the shards: the futures that wait for them, and the pool that runs
//! them.
//!
//! ```text
//!   Shard::spawn_blocking ──▶ Work ──▶ Pool: queue ──▶ a thread of its, or a simulation's clock
//!                                                         │ the function returns, or panics
//!   Blocking (the future) ◀── wakes its task ◀── Slot ◀───┘
//! ```

pub(crate) mod threads;

use std::any::type_name;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{discard, guard, wake};

use crate::stats::BlockingStats;

/// Hands a function to a pool. The function resolves `name`, if there is one.
pub(crate) fn submit<T: Send + 'static>(
    pool: &dyn Pool,
    function: impl FnOnce() -> T + Send + 'static,
    name: Option<&str>,
) -> Blocking<T> {
    let slot = Arc::new(Slot { state: Mutex::new(State::Waits(None)) });
    pool.submit(Box::new(Call { function, slot: slot.clone() }), name);
    Blocking { slot }
}

/// Resolves a name.
pub(crate) fn resolve(pool: &Arc<dyn Pool>, host: &str, port: u16) -> Blocking<io::Result<Vec<SocketAddr>>> {
    let (resolver, of) = (pool.clone(), host.to_owned());
    submit(&**pool, move || resolver.look_up(&of, port), Some(host))
}

/// The reason why a [blocking call](crate::Shard::spawn_blocking) has no result.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockingError {
    /// All threads are busy, and
    /// [`ServerLimits::blocking_queue_max`](crate::limits::ServerLimits::blocking_queue_max)
    /// functions wait already. The function was dropped.
    Full,
    /// The function panicked, with this message.
    Panicked(String),
    /// The server ended before a thread was free. The function was dropped.
    ServerEnded,
    /// There is no thread, and the system starts none. The function was dropped.
    NoThread(io::ErrorKind),
}

impl fmt::Display for BlockingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockingError::Full => f.write_str(
                "as many blocking calls wait for a thread as ServerLimits::blocking_queue_max allows",
            ),
            BlockingError::Panicked(message) => write!(f, "the blocking call panicked: {message}"),
            BlockingError::ServerEnded => f.write_str("the server ended before the blocking call began"),
            BlockingError::NoThread(kind) => {
                write!(f, "no thread could be started for blocking calls: {kind}")
            }
        }
    }
}

ringserve_buf::debug_is_display!(BlockingError);

impl std::error::Error for BlockingError {}

/// Waits for the result of a [blocking call](crate::Shard::spawn_blocking). Its drop stops nothing.
#[must_use = "the result, and whether there is one, shows when it is awaited"]
pub struct Blocking<T> {
    slot: Arc<Slot<T>>,
}

impl<T> Future for Blocking<T> {
    type Output = Result<T, BlockingError>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        // Cloning and dropping a waker is user code: nothing is locked meanwhile.
        let waker = task.waker().clone();
        let mut state = self.slot.lock();
        match std::mem::replace(&mut *state, State::Over) {
            State::Waits(old) => {
                *state = State::Waits(Some(waker));
                drop(state);
                drop(old);
                Poll::Pending
            }
            State::Done(result) => Poll::Ready(result),
            State::Over => panic!("a blocking call was polled after its end"),
        }
    }
}

impl<T> Drop for Blocking<T> {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.slot.lock(), State::Over);
        match state {
            State::Waits(waker) => discard(waker),
            State::Done(result) => drop(result),
            State::Over => {}
        }
    }
}

impl<T> fmt::Debug for Blocking<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blocking<{}>", type_name::<T>())
    }
}

/// State shared by a future and its function.
struct Slot<T> {
    state: Mutex<State<T>>,
}

enum State<T> {
    /// The function has not ended; with the waker of its future.
    Waits(Option<Waker>),
    Done(Result<T, BlockingError>),
    /// The future has the result, or is gone.
    Over,
}

impl<T> Slot<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the result, or drops it if the future is gone.
    fn put(&self, result: Result<T, BlockingError>) {
        let mut state = self.lock();
        let State::Waits(waker) = &mut *state else {
            drop(state);
            let _ = guard(move || drop(result));
            return;
        };
        let waker = waker.take();
        *state = State::Done(result);
        drop(state);
        if let Some(waker) = waker {
            // If the waker panics, its task is not woken; the result is dropped with the future.
            let _ = wake(waker);
        }
    }
}

/// A function on its way to a thread, of any result. It is run or refused.
pub(crate) trait Work: Send {
    /// Runs it, and delivers its result after `ended` was called with whether it panicked.
    fn run(self: Box<Self>, ended: &mut dyn FnMut(bool));

    /// Drops it, and reports the reason.
    fn refuse(self: Box<Self>, why: BlockingError);
}

struct Call<F, T> {
    function: F,
    slot: Arc<Slot<T>>,
}

impl<T: Send + 'static, F: FnOnce() -> T + Send> Work for Call<F, T> {
    fn run(self: Box<Self>, ended: &mut dyn FnMut(bool)) {
        let Call { function, slot } = *self;
        let result = guard(function).map_err(|panicked| BlockingError::Panicked(panicked.to_string()));
        ended(result.is_err());
        slot.put(result);
    }

    fn refuse(self: Box<Self>, why: BlockingError) {
        let Call { function, slot } = *self;
        let _ = guard(move || drop(function));
        slot.put(Err(why));
    }
}

/// Runs blocking functions for all shards of a server.
pub(crate) trait Pool: Send + Sync {
    /// Takes a function, or refuses it. The function resolves `name`, if there is one.
    fn submit(&self, work: Box<dyn Work>, name: Option<&str>);

    /// Resolves a name; it may block.
    ///
    /// # Errors
    /// If the name has no address, or the look-up fails.
    fn look_up(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>>;

    /// Its figures so far.
    fn stats(&self) -> BlockingStats;

    /// Ends the pool with the server. Waiting and later functions are refused; running ones are
    /// waited for, within a bound.
    fn end(&self);
}
