//! Guards against panics of user code, which must not end a shard.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

/// The message of a panic. One word, so that code which does not panic pays nothing for it.
#[derive(Debug)]
pub struct Panicked(Box<Message>);

#[derive(Debug)]
struct Message(String);

impl Panicked {
    #[cold]
    fn new(panic: Box<dyn Any + Send>) -> Panicked {
        Panicked(Box::new(Message(message_of(panic))))
    }
}

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.0)
    }
}

impl Panicked {
    pub fn message(&self) -> &str {
        &self.0.0
    }
}

/// The message that a panic carried.
pub fn message_of(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    discard_panic(panic);
    text.unwrap_or_else(|| "no message".to_owned())
}

/// Runs user code, and returns its message if it panicked. State that the code shares with the
/// shard is written only through `Cell`s and short `RefCell` borrows that hold no user code, so a
/// panic leaves it whole; the caller ends the connection.
#[inline]
pub fn guard<T>(code: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(code)).map_err(Panicked::new)
}

/// Drops the value that a panic carried, which is user code too.
#[cold]
fn discard_panic(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(panic))) {
        std::mem::forget(again);
    }
}

/// Wakes a task. A waker is user code: if it panicked, the task may not have been woken.
#[inline]
pub fn wake(waker: Waker) -> Result<(), Panicked> {
    guard(move || waker.wake())
}

/// Drops a waker, which is user code too, where a panic would meet another panic or leave something
/// half done.
#[inline]
pub fn discard(waker: Option<Waker>) {
    if waker.is_some() {
        let _ = guard(move || drop(waker));
    }
}

/// Wakers for tests.
#[cfg(feature = "testing")]
pub mod wakers {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Wake, Waker};

    /// A waker that counts how often it woke.
    #[derive(Default)]
    pub struct Woken(AtomicU32);

    impl Woken {
        /// The number of wake-ups.
        pub fn count(&self) -> u32 {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    struct Bomb;

    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("planted: a waker panics");
        }
    }

    /// A waker that panics instead of waking.
    pub fn bomb() -> Waker {
        Waker::from(Arc::new(Bomb))
    }
}
