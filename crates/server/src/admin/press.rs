//! Reports as they are written and read: one at a time, for however many requests and listeners
//! there are.
//!
//! ```text
//!   /report.json ─▶ asks ─▶ waits for one that was begun after that ─┐
//!   a second passed, and `/events` has listeners ──▶ a report is begun ─▶ published ─▶ all that wait
//! ```
//!
//! A listener that is slow misses reports, and none is kept for it.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hyper::body::Bytes;
use ringserve_core::Time;

/// A report that is younger is given again: snapshots are up to 100 ms old themselves.
const RECENT: Duration = Duration::from_millis(200);

/// Listeners at once: tabs of browsers, and programs that watch. Each keeps its connection.
pub(super) const LISTENERS_MAX: usize = 16;

const EVENT_BEGIN: &[u8] = b"data: ";
const EVENT_END: &[u8] = b"\n\n";

/// A report that was published.
#[derive(Clone, Debug)]
pub(super) struct Issue {
    /// Reports are numbered in the order in which they were begun, from 1.
    pub(super) number: u64,
    at: Time,
    /// As `/events` sends it, JSON without a line feed inside.
    pub(super) event: Bytes,
}

impl Issue {
    pub(super) fn json(&self) -> Bytes {
        self.event.slice(EVENT_BEGIN.len()..self.event.len() - EVENT_END.len())
    }
}

/// The exchange where reports are asked for and published.
#[derive(Default)]
pub(super) struct Press {
    /// The number of the last report that was begun.
    begun: Cell<u64>,
    asked: Cell<bool>,
    listeners: Cell<usize>,
    issue: RefCell<Option<Issue>>,
    /// Tasks that wait for a report: no more than there are connections.
    readers: RefCell<Vec<Waker>>,
    /// The task that writes them.
    writer: RefCell<Option<Waker>>,
}

/// A connection that wants every report. Its drop is its end.
pub(super) struct Listener {
    press: Rc<Press>,
}

impl Press {
    /// The last report, if it is recent.
    pub(super) fn recent(&self, now: Time) -> Option<Issue> {
        let issue = self.issue.borrow();
        issue.clone().filter(|issue| now - issue.at < RECENT)
    }

    /// Asks for a report. Returns the number of the first one that will be begun after this.
    pub(super) fn ask(&self) -> u64 {
        self.asked.set(true);
        let writer = self.writer.borrow_mut().take();
        if let Some(writer) = writer {
            writer.wake();
        }
        self.begun.get() + 1
    }

    /// Waits for the report with this number, or a later one.
    pub(super) fn poll_issue(&self, number: u64, task: &mut Context<'_>) -> Poll<Issue> {
        if let Some(issue) = self.issue.borrow().as_ref().filter(|issue| issue.number >= number) {
            return Poll::Ready(issue.clone());
        }
        let waker = task.waker().clone();
        let mut readers = self.readers.borrow_mut();
        if !readers.iter().any(|known| known.will_wake(&waker)) {
            readers.push(waker);
        }
        Poll::Pending
    }

    /// The same as a future.
    pub(super) async fn issue(&self, number: u64) -> Issue {
        poll_fn(|task| self.poll_issue(number, task)).await
    }

    /// `None` if there are [`LISTENERS_MAX`].
    pub(super) fn listen(self: &Rc<Self>) -> Option<Listener> {
        let count = self.listeners.get() + 1;
        (count <= LISTENERS_MAX).then(|| {
            self.listeners.set(count);
            Listener { press: self.clone() }
        })
    }

    pub(super) fn has_listeners(&self) -> bool {
        self.listeners.get() > 0
    }

    /// Waits until a report is asked for.
    pub(super) fn poll_asked(&self, task: &mut Context<'_>) -> Poll<()> {
        if self.asked.get() {
            return Poll::Ready(());
        }
        let waker = task.waker().clone();
        *self.writer.borrow_mut() = Some(waker);
        Poll::Pending
    }

    /// A report is begun, for all that asked until now. Returns its number.
    pub(super) fn begin(&self) -> u64 {
        self.asked.set(false);
        self.begun.set(self.begun.get() + 1);
        self.begun.get()
    }

    /// The report with this number is written.
    pub(super) fn publish(&self, number: u64, at: Time, json: &[u8]) {
        let event = Bytes::from([EVENT_BEGIN, json, EVENT_END].concat());
        *self.issue.borrow_mut() = Some(Issue { number, at, event });
        let readers = std::mem::take(&mut *self.readers.borrow_mut());
        readers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.press.listeners.set(self.press.listeners.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    fn poll(press: &Press, number: u64) -> Option<Issue> {
        match press.poll_issue(number, &mut Context::from_waker(Waker::noop())) {
            Poll::Ready(issue) => Some(issue),
            Poll::Pending => None,
        }
    }

    #[test]
    fn request_gets_a_report_that_was_begun_after_it() {
        let press = Press::default();
        let early = press.begin();
        let wanted = press.ask();
        press.publish(early, at(0), b"{}");
        assert!(poll(&press, wanted).is_none(), "it was begun before the request");
        assert!(press.poll_asked(&mut Context::from_waker(Waker::noop())).is_ready(), "so another is due");
        let number = press.begin();
        press.publish(number, at(1), b"{\"a\":1}");
        let issue = poll(&press, wanted).unwrap();
        assert_eq!((issue.number, &issue.json()[..]), (wanted, &b"{\"a\":1}"[..]));
        assert_eq!(&issue.event[..], b"data: {\"a\":1}\n\n");
        assert!(press.poll_asked(&mut Context::from_waker(Waker::noop())).is_pending());
    }

    #[test]
    fn recent_report_is_given_again_and_an_old_one_is_not() {
        let press = Press::default();
        assert!(press.recent(at(0)).is_none());
        press.publish(press.begin(), at(1000), b"{}");
        assert!(press.recent(at(1199)).is_some());
        assert!(press.recent(at(1200)).is_none());
    }

    #[test]
    fn waiting_task_is_kept_once() {
        let press = Press::default();
        (0..100).for_each(|_| assert!(poll(&press, 1).is_none()));
        assert_eq!(press.readers.borrow().len(), 1);
    }

    #[test]
    fn listeners_are_counted_until_they_end() {
        let press = Rc::new(Press::default());
        let (one, other) = (press.listen(), press.listen());
        drop(one);
        assert!(press.has_listeners());
        drop(other);
        assert!(!press.has_listeners());
        let all: Vec<_> = (0..LISTENERS_MAX).map(|_| press.listen().expect("there is room")).collect();
        assert!(press.listen().is_none());
        drop(all);
        assert!(press.listen().is_some());
    }
}
