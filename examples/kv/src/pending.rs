//! The way back of a question that one shard asks another.
//!
//! ```text
//!   call ──▶ Ticket ┐           ┌ WayBack ──▶ in the message, to the other shard
//!    ▲              └── State ──┘                         │
//!    └──────────────── woken ◀──── answer, or drop ────────┘
//! ```
//!
//! The answer goes into memory that both sides share, and not into a mailbox: no mailbox can be too full for it. A
//! message that is dropped, because its shard ended or panicked, drops its way back, and that wakes the call as well.
//! So every question gets one of the two, and no call waits for ever.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The question was dropped without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped;

enum State<T> {
    Asked(Option<Waker>),
    Answered(T),
    Dropped,
}

type Shared<T> = Arc<Mutex<State<T>>>;

/// Both ends of a question.
pub fn question<T>() -> (WayBack<T>, Ticket<T>) {
    let state = Arc::new(Mutex::new(State::Asked(None)));
    (WayBack { state: Some(state.clone()) }, Ticket { state })
}

/// Where the answer goes.
pub struct WayBack<T> {
    /// `None` once it is answered.
    state: Option<Shared<T>>,
}

/// Waits for the answer. Dropping it is no loss: the answer goes nowhere then.
pub struct Ticket<T> {
    state: Shared<T>,
}

impl<T> WayBack<T> {
    /// Hands over the answer, and wakes the call that waits for it.
    pub fn answer(mut self, answer: T) {
        self.end(State::Answered(answer));
    }

    fn end(&mut self, state: State<T>) {
        let Some(shared) = self.state.take() else { return };
        let before = std::mem::replace(&mut *lock(&shared), state);
        // Nothing is locked any more.
        if let State::Asked(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Drop for WayBack<T> {
    fn drop(&mut self) {
        self.end(State::Dropped);
    }
}

impl<T> Future for Ticket<T> {
    type Output = Result<T, Dropped>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<T, Dropped>> {
        let mut state = lock(&self.state);
        match &mut *state {
            State::Asked(Some(waker)) if waker.will_wake(task.waker()) => Poll::Pending,
            State::Asked(waker) => {
                let before = waker.replace(task.waker().clone());
                drop(state);
                drop(before);
                Poll::Pending
            }
            State::Answered(_) | State::Dropped => match std::mem::replace(&mut *state, State::Dropped) {
                State::Answered(answer) => Poll::Ready(Ok(answer)),
                _ => Poll::Ready(Err(Dropped)),
            },
        }
    }
}

fn lock<T>(shared: &Shared<T>) -> MutexGuard<'_, State<T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// The bound of a wait for another thread.
    const SOON: Duration = Duration::from_secs(20);

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn poll<T>(ticket: &mut Ticket<T>, wakes: &Arc<Wakes>) -> Poll<Result<T, Dropped>> {
        Pin::new(ticket).poll(&mut Context::from_waker(&wakes.clone().into()))
    }

    #[test]
    fn answer_wakes_its_own_call_and_no_other() {
        let wakes = [Arc::<Wakes>::default(), Arc::<Wakes>::default()];
        let ((_first, mut unanswered), (second, mut ticket)) = (question::<u8>(), question::<u8>());
        assert_eq!(poll(&mut unanswered, &wakes[0]), Poll::Pending);
        assert_eq!(poll(&mut ticket, &wakes[1]), Poll::Pending);
        assert_eq!(poll(&mut ticket, &wakes[1]), Poll::Pending);
        second.answer(7);
        assert_eq!(wakes.each_ref().map(|wakes| wakes.0.load(Ordering::SeqCst)), [0, 1]);
        assert_eq!(poll(&mut ticket, &wakes[1]), Poll::Ready(Ok(7)));
        assert_eq!(poll(&mut unanswered, &wakes[0]), Poll::Pending);
    }

    #[test]
    fn answer_may_come_before_the_first_poll() {
        let (back, mut ticket) = question();
        back.answer("early");
        assert_eq!(poll(&mut ticket, &Arc::default()), Poll::Ready(Ok("early")));
    }

    #[test]
    fn dropped_question_wakes_its_call() {
        let wakes = Arc::<Wakes>::default();
        let (back, mut ticket) = question::<u8>();
        assert_eq!(poll(&mut ticket, &wakes), Poll::Pending);
        drop(back);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        assert_eq!(poll(&mut ticket, &wakes), Poll::Ready(Err(Dropped)));
    }

    #[test]
    fn answer_to_a_dropped_ticket_is_freed() {
        let (back, ticket) = question();
        let answer = Arc::new(());
        drop(ticket);
        back.answer(answer.clone());
        assert_eq!(Arc::strong_count(&answer), 1);
    }

    #[test]
    fn answers_cross_threads() {
        let (questions, asked) = std::sync::mpsc::channel::<(u64, WayBack<u64>)>();
        let other = thread::spawn(move || {
            for (number, back) in asked {
                if number % 3 > 0 {
                    back.answer(2 * number);
                }
            }
        });
        struct Unpark(thread::Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        for number in 0..10_000 {
            let (back, mut ticket) = question();
            questions.send((number, back)).unwrap();
            let answer = loop {
                match Pin::new(&mut ticket).poll(&mut Context::from_waker(&waker)) {
                    Poll::Ready(answer) => break answer,
                    Poll::Pending => {
                        let waits = Instant::now();
                        thread::park_timeout(SOON);
                        assert!(waits.elapsed() < SOON, "the wake-up for {number} is lost");
                    }
                }
            };
            assert_eq!(answer, if number % 3 > 0 { Ok(2 * number) } else { Err(Dropped) });
        }
        drop(questions);
        other.join().unwrap();
    }
}
