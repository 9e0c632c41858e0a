//! User code may panic; the shard may not.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs user code; `None` if it panicked. What the code shares with the shard is written only through `Cell`s and
/// short `RefCell` borrows that hold no user code, so a panic leaves it whole; the connection it came from is
/// ended by the caller.
#[inline]
pub(crate) fn guard<T>(code: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(code)).ok()
}
