//! A thread that writes lines for threads that must not wait for the log: the watchdog's, the admin
//! endpoint's, that of signals, those that look at files.
//!
//! A subscriber of `tracing` may block for ever, at a full pipe for example. A thread that
//! [`hand_over`] was called on queues its lines, and goes on; only the thread here waits. It begins
//! with a line, and ends once there was none for a while. Nothing is handed over where the
//! subscriber is that of `ringserve::log`, which does not block.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ringserve_drivers::guarded;
use tracing::dispatcher::{self, Dispatch};
use tracing::field::{Field, Value, Visit, display};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, Interest, set_default};
use tracing::{Event, Level, Metadata, Span, Subscriber, warn};

use crate::clock::Deadline;
use crate::guard::guard;

/// Lines that wait at most. Watchdog and overload write some ten a minute for a shard.
const LINES_MAX: usize = 1000;

/// The thread ends after this time without a line.
const IDLE: Duration = Duration::from_secs(1);

/// For the line that is written at the end of a server.
const END: Duration = Duration::from_secs(1);

/// For the frames of the program's log.
const STACK_BYTES: usize = 256 << 10;

type Line = Box<dyn FnOnce() + Send>;

struct State {
    lines: VecDeque<Line>,
    /// There is a thread; it writes a line.
    is_running: bool,
    is_writing: bool,
    dropped: u64,
    /// Those of them that the log does not tell yet.
    untold: u64,
}

/// The lines of this process that were handed over.
static LINES: Lines = Lines::new();

struct Lines {
    state: Mutex<State>,
    /// A line came, or was written.
    changed: Condvar,
}

/// This process logs by `ringserve::log`.
static NEVER_BLOCKS: AtomicBool = AtomicBool::new(false);

/// Notes that the subscriber of this process never blocks, from now on.
pub fn set_never_blocks() {
    NEVER_BLOCKS.store(true, Ordering::Release);
}

/// True if this process logs by a subscriber that never blocks.
pub fn never_blocks() -> bool {
    NEVER_BLOCKS.load(Ordering::Acquire)
}

/// Has all that this thread logs from now on, at level INFO and above, written by the thread of the
/// log, within `span`. To be kept as long.
pub fn hand_over(span: Option<Span>) -> Option<DefaultGuard> {
    if never_blocks() {
        return None;
    }
    guard(|| set_default(Handing { span: span.unwrap_or_else(Span::none) })).ok()
}

/// Writes the last line of a server, and waits until it and all before it are written, or for a
/// second.
pub fn write_at_the_end(line: impl FnOnce() + Send + 'static) {
    if never_blocks() {
        return guarded(line);
    }
    // The thread of the caller may have another subscriber.
    let Ok(log) = guard(|| dispatcher::get_default(Dispatch::clone)) else { return };
    LINES.queue(Box::new(move || dispatcher::with_default(&log, line)));
    LINES.flush(END);
}

/// Lines that were dropped so far, as the log blocks.
pub fn dropped() -> u64 {
    LINES.state().dropped
}

impl Lines {
    const fn new() -> Lines {
        let state =
            State { lines: VecDeque::new(), is_running: false, is_writing: false, dropped: 0, untold: 0 };
        Lines { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&'static self, line: Line) {
        let mut state = self.state();
        if state.lines.len() >= LINES_MAX || !self.begin(&mut state) {
            state.dropped += 1;
            state.untold += 1;
            return;
        }
        state.lines.push_back(line);
        drop(state);
        self.changed.notify_all();
    }

    /// Starts the thread, unless it runs. False if there is none.
    fn begin(&'static self, state: &mut State) -> bool {
        if !state.is_running {
            let thread = thread::Builder::new().name("ringserve-log".to_owned()).stack_size(STACK_BYTES);
            state.is_running = thread.spawn(|| self.write()).is_ok();
        }
        state.is_running
    }

    /// On the thread.
    fn write(&self) {
        let mut state = self.state();
        loop {
            state = Deadline::within(IDLE).wait_while(&self.changed, state, |state| state.lines.is_empty());
            let Some(line) = state.lines.pop_front() else {
                state.is_running = false;
                return;
            };
            state.is_writing = true;
            let untold = std::mem::take(&mut state.untold);
            drop(state);
            guarded(line);
            if untold > 0 {
                guarded(|| warn!(lines = untold, "lines were dropped: the subscriber of tracing blocks"));
            }
            state = self.state();
            state.is_writing = false;
            self.changed.notify_all();
        }
    }

    /// Waits until each line is written, for this time at most. True if each is.
    fn flush(&self, within: Duration) -> bool {
        let is_busy = |state: &State| state.is_writing || !state.lines.is_empty();
        let state = Deadline::within(within).wait_while(&self.changed, self.state(), |state| is_busy(state));
        !is_busy(&state)
    }
}

/// The subscriber of a thread that hands its lines over, each as it is, with copies of what it
/// borrows.
struct Handing {
    span: Span,
}

impl Handing {
    fn takes(metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }
}

impl Subscriber for Handing {
    /// Never for lines below, so that those of the shards cost what they cost without this.
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if Handing::takes(metadata) { Interest::sometimes() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        Handing::takes(metadata)
    }

    fn event(&self, event: &Event<'_>) {
        let mut values = Values::default();
        event.record(&mut values);
        let (metadata, span) = (event.metadata(), self.span.clone());
        LINES.queue(Box::new(move || span.in_scope(|| values.log(metadata))));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The most fields that an event of `tracing` has.
const FIELDS_MAX: usize = 32;

/// The values of an event's fields.
#[derive(Default)]
struct Values(Vec<(Field, Box<dyn Value + Send>)>);

impl Values {
    /// Writes the event again, with the subscriber of the process.
    fn log(&self, metadata: &'static Metadata<'static>) {
        let Some((first, _)) = self.0.first() else { return };
        // A field without a value is none of the event.
        let mut values: [(&Field, Option<&dyn Value>); FIELDS_MAX] = [(first, None); FIELDS_MAX];
        for (place, (field, value)) in values.iter_mut().zip(&self.0) {
            *place = (field, Some(&**value));
        }
        let values = metadata.fields().value_set(&values);
        dispatcher::get_default(|log| {
            if log.enabled(metadata) {
                log.event(&Event::new(metadata, &values));
            }
        });
    }

    fn add(&mut self, field: &Field, value: impl Value + Send + 'static) {
        self.0.push((field.clone(), Box::new(value)));
    }
}

impl Visit for Values {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, display(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.to_owned());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn log_that_blocks_holds_up_its_thread_alone() {
        let lines: &'static Lines = Box::leak(Box::new(Lines::new()));
        let ((write, written), (go_on, goes_on)) = (channel(), channel());
        let for_first = write.clone();
        lines.queue(Box::new(move || {
            for_first.send(0).unwrap();
            goes_on.recv().unwrap();
        }));
        assert_eq!(written.recv(), Ok(0));
        for n in 1..=LINES_MAX + 10 {
            let write = write.clone();
            lines.queue(Box::new(move || write.send(n).unwrap()));
        }
        assert!(!lines.flush(Duration::from_millis(1)));
        assert_eq!(lines.state().dropped, 10);
        go_on.send(()).unwrap();
        assert!(lines.flush(Duration::from_secs(60)));
        assert!(written.try_iter().eq(1..=LINES_MAX));
        assert_eq!(lines.state().untold, 0);
    }

    #[test]
    fn line_that_panics_does_not_end_the_thread() {
        let lines: &'static Lines = Box::leak(Box::new(Lines::new()));
        let (write, written) = channel();
        lines.queue(Box::new(|| panic!("planted: the subscriber of tracing panics")));
        lines.queue(Box::new(move || write.send(()).unwrap()));
        assert_eq!(written.recv(), Ok(()));
    }

    /// An event: as text, and copied.
    type Copied = (String, &'static Metadata<'static>, Values);

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<Copied>>>);

    impl Subscriber for Kept {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn event(&self, event: &Event<'_>) {
            let (mut text, mut values, metadata) = (String::new(), Values::default(), event.metadata());
            event.record(&mut |field: &Field, value: &dyn fmt::Debug| text += &format!(" {field}={value:?}"));
            event.record(&mut values);
            let text = format!("{} {}{text}", metadata.target(), metadata.level());
            self.0.lock().unwrap().push((text, metadata, values));
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn line_that_is_handed_over_is_the_same_line() {
        let (first, second) = (Kept::default(), Kept::default());
        dispatcher::with_default(&Dispatch::new(first.clone()), || {
            let (name, none, peer) = (String::from("web"), None::<u8>, Some(display("10.0.0.1:7")));
            warn!(target: "elsewhere", shard = 3, name, none, peer, share = 0.5, is = true, below = -1, at = ?"a", "a {} line", "long");
            tracing::info!("a short one");
        });
        let lines = std::mem::take(&mut *first.0.lock().unwrap());
        dispatcher::with_default(&Dispatch::new(second.clone()), || {
            lines.iter().for_each(|(_, metadata, values)| values.log(metadata));
        });
        let again = second.0.lock().unwrap();
        assert!(again.iter().map(|(text, ..)| text).eq(lines.iter().map(|(text, ..)| text)));
        assert_eq!(again.len(), 2);
        let all = "elsewhere WARN message=a long line shard=3 name=\"web\" peer=10.0.0.1:7 share=0.5 is=true below=-1 at=\"a\"";
        assert_eq!(again[0].0, all);
    }
}
