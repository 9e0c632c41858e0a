//! Panics as lines of the log, with their place.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::thread;
use std::time::Duration;

use tracing::error;

/// Takes the place of the hook that writes to stderr, which may block the thread that panicked.
pub(super) fn to_the_log(flush: fn(Duration) -> bool) {
    panic::set_hook(Box::new(move |panic| {
        write(panic);
        // No handler of the exit runs behind that.
        if cfg!(panic = "abort") {
            flush(super::END);
        }
    }));
}

fn write(panic: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let thread = thread.name().unwrap_or("without a name");
    let at = panic.location().map(tracing::field::display);
    let payload = panic.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    // Where `RUST_BACKTRACE` asks for one.
    let backtrace = Backtrace::capture();
    let backtrace =
        (backtrace.status() == BacktraceStatus::Captured).then(|| tracing::field::display(backtrace));
    error!(target: "ringserve::panic", thread, at, backtrace, "panicked: {text}");
}
