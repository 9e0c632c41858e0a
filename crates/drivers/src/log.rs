//! Lines for the log that cannot end a shard.
//!
//! A subscriber may panic, as `tracing_subscriber` does when stdout and stderr are closed. A driver writes a line in the
//! middle of its bookkeeping, so what the subscriber does must not unwind from there.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Writes a line, and catches what the subscriber panics with.
///
/// ```
/// ringserve_drivers::guarded(|| tracing::info!("a shard goes on whatever becomes of this line"));
/// ```
pub fn guarded(write: impl FnOnce()) {
    // The line is lost, and so is what could be said about it.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(write)) {
        // What a panic carries may panic when it is dropped.
        std::mem::forget(panic);
    }
}

// Named apart from the levels, since `warn` is an attribute too.
macro_rules! lines {
    ($dollar:tt $($name:ident $level:ident)*) => {$(
        macro_rules! $name {
            ($dollar($dollar line:tt)*) => { $crate::log::guarded(|| tracing::$level!($dollar($dollar line)*)) };
        }
        pub(crate) use $name as $level;
    )*};
}

lines!($ error_line error warn_line warn debug_line debug trace_line trace);
