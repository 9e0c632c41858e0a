//! Requests that another shard works on.
//!
//! ```text
//!   handler ── asks ──▶ slot, with its waker  ◀── answers ── owner
//!      ▲                        │
//!      └── woken, takes it ─────┘
//! ```

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The slots of one shard.
#[derive(Default)]
pub struct Pending {
    table: RefCell<Table>,
}

#[derive(Default)]
struct Table {
    slots: Vec<Slot>,
    /// Slots without a request.
    free: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    /// Goes up when the slot is freed, so that an answer nobody waits for any more finds nobody.
    generation: u32,
    state: State,
}

#[derive(Default)]
enum State {
    #[default]
    Free,
    Asked(Option<Waker>),
    Answered(Vec<u8>),
}

/// Names a request on the shard that sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotId {
    index: u32,
    generation: u32,
}

/// Waits for the answer. Dropping it gives the slot back.
pub struct Ticket {
    pending: Rc<Pending>,
    id: SlotId,
}

impl Pending {
    /// A slot for a request that is about to be sent.
    pub fn ask(self: &Rc<Self>) -> Ticket {
        let mut table = self.table.borrow_mut();
        let index = match table.free.pop() {
            Some(index) => index,
            None => {
                table.slots.push(Slot::default());
                table.slots.len() as u32 - 1
            }
        };
        let slot = &mut table.slots[index as usize];
        slot.state = State::Asked(None);
        Ticket { pending: self.clone(), id: SlotId { index, generation: slot.generation } }
    }

    /// Hands over an answer. It is dropped if nobody waits for it any more.
    pub fn answer(&self, id: SlotId, bytes: Vec<u8>) {
        let waker = match self.table.borrow_mut().slots.get_mut(id.index as usize) {
            Some(slot) if slot.generation == id.generation && matches!(slot.state, State::Asked(_)) => {
                match std::mem::replace(&mut slot.state, State::Answered(bytes)) {
                    State::Asked(waker) => waker,
                    State::Free | State::Answered(_) => None,
                }
            }
            _ => None,
        };
        // Called when nothing is borrowed any more.
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Ticket {
    /// Where the answer is to go.
    pub fn id(&self) -> SlotId {
        self.id
    }
}

impl Future for Ticket {
    type Output = Vec<u8>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Vec<u8>> {
        let slot = &mut self.pending.table.borrow_mut().slots[self.id.index as usize];
        match &mut slot.state {
            State::Answered(bytes) => Poll::Ready(std::mem::take(bytes)),
            waiting => {
                *waiting = State::Asked(Some(task.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut table = self.pending.table.borrow_mut();
        let slot = &mut table.slots[self.id.index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.state = State::Free;
        table.free.push(self.id.index);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll(ticket: &mut Ticket, wakes: &Arc<Wakes>) -> Option<Vec<u8>> {
        match Pin::new(ticket).poll(&mut Context::from_waker(&wakes.clone().into())) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        }
    }

    #[test]
    fn an_answer_wakes_the_one_who_waits_and_no_other() {
        let pending = Rc::<Pending>::default();
        let wakes = [Arc::<Wakes>::default(), Arc::<Wakes>::default()];
        let mut tickets = [pending.ask(), pending.ask()];
        for (ticket, wakes) in tickets.iter_mut().zip(&wakes) {
            assert_eq!(poll(ticket, wakes), None);
        }
        pending.answer(tickets[1].id(), b"yes".to_vec());
        assert_eq!(wakes.each_ref().map(|wakes| wakes.0.load(Ordering::Relaxed)), [0, 1]);
        assert_eq!(poll(&mut tickets[1], &wakes[1]).as_deref(), Some(&b"yes"[..]));
        assert_eq!(poll(&mut tickets[0], &wakes[0]), None);
    }

    #[test]
    fn an_answer_may_come_before_anybody_waits() {
        let pending = Rc::<Pending>::default();
        let mut ticket = pending.ask();
        pending.answer(ticket.id(), b"early".to_vec());
        assert_eq!(poll(&mut ticket, &Arc::default()).as_deref(), Some(&b"early"[..]));
    }

    #[test]
    fn a_late_answer_does_not_reach_the_next_one_in_the_slot() {
        let pending = Rc::<Pending>::default();
        let left = pending.ask().id();
        let mut next = pending.ask();
        assert_eq!(next.id().index, left.index, "the slot is used again");
        pending.answer(left, b"late".to_vec());
        pending.answer(SlotId { index: 99, generation: 0 }, b"nowhere".to_vec());
        assert_eq!(poll(&mut next, &Arc::default()), None);
        pending.answer(next.id(), b"first".to_vec());
        pending.answer(next.id(), b"again".to_vec());
        assert_eq!(poll(&mut next, &Arc::default()).as_deref(), Some(&b"first"[..]));
    }
}
