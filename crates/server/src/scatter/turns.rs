//! Calls of one connection, one after the other.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The call that has its turn, and the calls that wait for the next one, in order.
#[derive(Default)]
pub(super) struct Turns {
    /// The first one has its turn. Numbers grow.
    line: RefCell<VecDeque<(u64, Option<Waker>)>>,
    last: Cell<u64>,
    /// Calls in the line that did not begin.
    waiting: Cell<usize>,
}

/// A place in the line. Its drop gives the turn to the next one.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    number: u64,
    has_begun: Cell<bool>,
}

impl Turns {
    /// True if no call has the turn.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.line.borrow().is_empty()
    }

    /// True if a call waits, or has its turn and did not begin.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.get() > 0
    }

    /// The turn, which is free.
    pub(super) fn take(&self) -> Turn<'_> {
        debug_assert!(self.is_free());
        self.line_up(true)
    }

    /// The last place in the line.
    pub(super) fn wait(&self) -> Turn<'_> {
        self.waiting.set(self.waiting.get() + 1);
        self.line_up(false)
    }

    fn line_up(&self, has_begun: bool) -> Turn<'_> {
        let number = self.last.get() + 1;
        self.last.set(number);
        self.line.borrow_mut().push_back((number, None));
        Turn { turns: self, number, has_begun: Cell::new(has_begun) }
    }
}

impl Turn<'_> {
    /// Waits for the turn.
    pub(super) async fn begin(&self) {
        poll_fn(|task| {
            let mut line = self.turns.line.borrow_mut();
            let place =
                line.iter().position(|(number, _)| *number == self.number).expect("it is in the line");
            if place == 0 {
                return Poll::Ready(());
            }
            line[place].1 = Some(task.waker().clone());
            Poll::Pending
        })
        .await;
        self.start();
    }

    fn start(&self) {
        if !self.has_begun.replace(true) {
            self.turns.waiting.set(self.turns.waiting.get() - 1);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.start();
        let mut line = self.turns.line.borrow_mut();
        match line.front() {
            Some((number, _)) if *number == self.number => drop(line.pop_front()),
            _ => line.retain(|(number, _)| *number != self.number),
        }
        let next = line.front_mut().and_then(|(_, waker)| waker.take());
        drop(line);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}
