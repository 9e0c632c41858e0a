//! Panics of a run: they are kept, with their place, and are no output.

use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::Once;

thread_local! {
    /// True exactly while this thread runs a seed.
    static IN_A_SEED: Cell<bool> = const { Cell::new(false) };
    /// Messages and places of this thread's panics, since the last call for them.
    static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, panics of this thread are kept.
pub(crate) struct PanicRecorder(());

impl PanicRecorder {
    pub(crate) fn begin() -> PanicRecorder {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let others = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                if !IN_A_SEED.get() {
                    return others(info);
                }
                let place = info.location().map_or_else(String::new, |place| format!(" ({place})"));
                let payload = info.payload();
                let said = payload.downcast_ref::<String>().map(String::as_str);
                let said = said.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
                SAID.with_borrow_mut(|all| all.push(format!("{said}{place}")));
            }));
        });
        SAID.take();
        IN_A_SEED.set(true);
        PanicRecorder(())
    }
}

impl Drop for PanicRecorder {
    fn drop(&mut self) {
        IN_A_SEED.set(false);
    }
}

/// The messages since the last call.
pub(crate) fn take() -> Vec<String> {
    SAID.take()
}
