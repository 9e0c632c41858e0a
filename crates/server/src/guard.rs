//! User code may panic; the shard may not.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

/// Runs user code; `None` if it panicked. What the code shares with the shard is written only through `Cell`s and
/// short `RefCell` borrows that hold no user code, so a panic leaves it whole; the connection it came from is
/// ended by the caller.
#[inline]
pub(crate) fn guard<T>(code: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(code)) {
        Ok(done) => Some(done),
        Err(panic) => {
            discard_panic(panic);
            None
        }
    }
}

/// Drops what a panic carried, which is user code too.
#[cold]
pub(crate) fn discard_panic(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(panic))) {
        std::mem::forget(again);
    }
}

/// Wakes a task. A waker is user code; false if it panicked, and the task may not have been woken.
#[inline]
pub(crate) fn wake(waker: Waker) -> bool {
    guard(move || waker.wake()).is_some()
}

/// Drops a waker, which is user code too, where a panic would meet another one or leave something half done.
#[inline]
pub(crate) fn discard(waker: Option<Waker>) {
    if waker.is_some() {
        let _ = guard(move || drop(waker));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::task::{Wake, Waker};

    struct Bomb;

    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("planted: a waker panics");
        }
    }

    /// A waker that panics instead of waking.
    pub(crate) fn bomb() -> Waker {
        Waker::from(Arc::new(Bomb))
    }
}
