//! Calls of one connection, one after the other.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The call that has its turn, and the calls that wait for the next one, in order.
#[derive(Default)]
pub(super) struct Turns {
    /// The first one has its turn. Numbers grow.
    line: RefCell<VecDeque<Place>>,
    last: Cell<u64>,
    /// Calls in the line that did not begin.
    waiting: Cell<usize>,
}

struct Place {
    number: u64,
    waker: Option<Waker>,
    /// Its questions may go along with those of the call before it.
    asks: bool,
    has_begun: bool,
}

/// A place in the line. Its drop gives the turn to the next one.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    number: u64,
}

impl Turns {
    /// True if no call has the turn.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.line.borrow().is_empty()
    }

    /// The number of calls that wait, or have their turn and did not begin.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.get()
    }

    /// True if there is one.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting() > 0
    }

    /// The turn, which is free.
    pub(super) fn take(&self) -> Turn<'_> {
        debug_assert!(self.is_free());
        self.line_up(true, true)
    }

    /// The last place in the line.
    pub(super) fn wait(&self, asks: bool) -> Turn<'_> {
        self.waiting.set(self.waiting.get() + 1);
        self.line_up(asks, false)
    }

    fn line_up(&self, asks: bool, has_begun: bool) -> Turn<'_> {
        let number = self.last.get() + 1;
        self.last.set(number);
        self.line.borrow_mut().push_back(Place { number, waker: None, asks, has_begun });
        Turn { turns: self, number }
    }

    fn begins(&self, place: &mut Place) {
        if !std::mem::replace(&mut place.has_begun, true) {
            self.waiting.set(self.waiting.get() - 1);
        }
    }

    /// True if the call behind the one that has its turn asks.
    pub(super) fn next_asks(&self) -> bool {
        self.line.borrow().get(1).is_some_and(|place| place.asks)
    }

    /// Wakes the next call, which looks again.
    pub(super) fn wake_next(&self) {
        let waker = self.line.borrow_mut().get_mut(1).and_then(|place| place.waker.take());
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Turn<'_> {
    /// Waits for the turn; or, if this call asks, until it is the next one and may go along with
    /// the call that has it. True if it has the turn. Does not begin.
    pub(super) async fn wait(&self, may_go_along: impl Fn() -> bool) -> bool {
        poll_fn(|task| {
            let mut line = self.turns.line.borrow_mut();
            let place = line.iter().position(|place| place.number == self.number).expect("it is in the line");
            line[place].waker = None;
            if place == 0 {
                return Poll::Ready(true);
            }
            if place == 1 && line[0].has_begun && line[1].asks && may_go_along() {
                return Poll::Ready(false);
            }
            line[place].waker = Some(task.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// True if this call has the turn, and did not begin.
    pub(super) fn is_unbegun(&self) -> bool {
        let line = self.turns.line.borrow();
        line.front().is_some_and(|place| place.number == self.number && !place.has_begun)
    }

    /// Begins: from now on later ones may go along.
    pub(super) fn begin(&self) {
        let mut line = self.turns.line.borrow_mut();
        if let Some(place) = line.iter_mut().find(|place| place.number == self.number) {
            self.turns.begins(place);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut line = self.turns.line.borrow_mut();
        if let Some(place) = line.iter().position(|place| place.number == self.number)
            && let Some(mut place) = line.remove(place)
        {
            self.turns.begins(&mut place);
        }
        // The next one has the turn, or may go along now that this one has begun.
        let next = line.iter_mut().take(2).find_map(|place| place.waker.take());
        drop(line);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}
