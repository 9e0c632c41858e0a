//! Questions under way on a connection, and which of them an answer is for.

use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;

/// The question that an answer is for.
pub(crate) enum Matcher {
    /// The one that was asked first.
    InOrder(VecDeque<u32>),
    /// The one with its id. Ids go up from 1 and begin again behind `max`; those in use are passed
    /// over.
    ById { last: u64, max: u64, places: BTreeMap<u64, u32> },
}

impl Matcher {
    pub(crate) fn by_id(max: u64) -> Matcher {
        Matcher::ById { last: 0, max: max.max(1), places: BTreeMap::new() }
    }

    /// Those that have no answer yet. A new one has its place in order, or an id.
    fn add(&mut self, place: u32) -> u64 {
        match self {
            Matcher::InOrder(order) => {
                order.push_back(place);
                0
            }
            Matcher::ById { last, max, places } => {
                loop {
                    *last = if *last >= *max { 1 } else { *last + 1 };
                    if !places.contains_key(last) {
                        break;
                    }
                }
                places.insert(*last, place);
                *last
            }
        }
    }

    /// The question of an answer. None if there is no such question.
    fn peek(&self, id: Option<u64>) -> Option<u32> {
        match self {
            Matcher::InOrder(order) => order.front().copied(),
            Matcher::ById { places, .. } => places.get(&id?).copied(),
        }
    }

    /// The same, which has its answer then.
    fn take(&mut self, id: Option<u64>) -> Option<u32> {
        match self {
            Matcher::InOrder(order) => order.pop_front(),
            Matcher::ById { places, .. } => places.remove(&id?),
        }
    }

    /// Forgets a question that was not asked, with its place or its id.
    fn forget(&mut self, place: u32) {
        match self {
            Matcher::InOrder(order) => order.retain(|other| *other != place),
            Matcher::ById { places, .. } => places.retain(|_, other| *other != place),
        }
    }

    fn has_id_left(&self) -> bool {
        match self {
            Matcher::InOrder(_) => true,
            Matcher::ById { max, places, .. } => (places.len() as u64) < *max,
        }
    }
}

/// The state of a question. `A` is an answer.
pub(crate) enum Fate<A> {
    Awaited(Option<Waker>),
    Answered(A),
    Ended(End),
}

/// Why a question has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Nothing of it left.
    Unsent,
    Lost,
    /// This process ended the connection.
    Aborted,
    /// Bytes came that are no answer.
    Malformed,
}

struct Slot<A> {
    fate: Fate<A>,
    /// Its call was dropped: the answer goes nowhere, and has its place until then.
    is_abandoned: bool,
    asked_at: u64,
    /// The place of its first byte in all that was queued, as far as that is known.
    begins: Option<u64>,
}

/// The questions under way on a connection.
pub(crate) struct Slots<A> {
    all: Vec<Option<Slot<A>>>,
    free: Vec<u32>,
    matching: Matcher,
    /// Without an answer: awaited, and abandoned.
    awaited: usize,
    abandoned: usize,
}

impl<A> Slots<A> {
    pub(crate) fn new(matching: Matcher) -> Slots<A> {
        Slots { all: Vec::new(), free: Vec::new(), matching, awaited: 0, abandoned: 0 }
    }

    /// Questions without an answer whose call waits, and those whose call was dropped.
    pub(crate) fn awaited(&self) -> usize {
        self.awaited
    }

    pub(crate) fn abandoned(&self) -> usize {
        self.abandoned
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.awaited + self.abandoned == 0
    }

    pub(crate) fn has_room(&self, in_flight_max: usize) -> bool {
        self.awaited + self.abandoned < in_flight_max && self.matching.has_id_left()
    }

    /// Adds a question. Returns its place and its id.
    pub(crate) fn add(&mut self, asked_at: u64) -> (u32, u64) {
        let slot = Slot { fate: Fate::Awaited(None), is_abandoned: false, asked_at, begins: None };
        let place = match self.free.pop() {
            Some(place) => {
                self.all[place as usize] = Some(slot);
                place
            }
            None => {
                self.all.push(Some(slot));
                u32::try_from(self.all.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.awaited += 1;
        (place, self.matching.add(place))
    }

    /// Notes where the bytes of a question begin.
    pub(crate) fn begins_at(&mut self, place: u32, begins: u64) {
        if let Some(slot) = self.all[place as usize].as_mut() {
            slot.begins = Some(begins);
        }
    }

    /// Takes an answer, and returns who waits for it. `left` is how much of all that was queued has
    /// left.
    ///
    /// # Errors
    /// If it is the answer to no question, or comes before anything of its question left. Nothing
    /// is to be trusted then.
    pub(crate) fn answer(&mut self, id: Option<u64>, answer: A, left: u64) -> Result<Option<Waker>, Stray> {
        let place = self.matching.peek(id).ok_or(Stray)?;
        if self.is_unsent(place, left) {
            return Err(Stray);
        }
        self.matching.take(id);
        Ok(self.settle(place, Fate::Answered(answer)))
    }

    fn is_unsent(&self, place: u32, left: u64) -> bool {
        let slot = self.all[place as usize].as_ref();
        slot.and_then(|slot| slot.begins).is_some_and(|begins| begins >= left)
    }

    /// Ends all that have no answer: those of which nothing left as unsent, the others so.
    pub(crate) fn end(&mut self, otherwise: End, left: u64) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for place in 0..u32::try_from(self.all.len()).unwrap_or(u32::MAX) {
            if let Some(Slot { fate: Fate::Awaited(_), .. }) = &self.all[place as usize] {
                let end = if self.is_unsent(place, left) { End::Unsent } else { otherwise };
                wakers.extend(self.settle(place, Fate::Ended(end)));
            }
        }
        wakers
    }

    fn settle(&mut self, place: u32, fate: Fate<A>) -> Option<Waker> {
        let slot = self.all[place as usize].as_mut()?;
        if slot.is_abandoned {
            self.abandoned -= 1;
            self.remove(place);
            return None;
        }
        self.awaited -= 1;
        match std::mem::replace(&mut slot.fate, fate) {
            Fate::Awaited(waker) => waker,
            Fate::Answered(_) | Fate::Ended(_) => None,
        }
    }

    /// Takes the outcome of a question, which is over then. None while it has no answer: `waker` is
    /// woken for it.
    pub(crate) fn poll(&mut self, place: u32, waker: &Waker) -> Option<Fate<A>> {
        match &mut self.all[place as usize].as_mut()?.fate {
            Fate::Awaited(old) => {
                if !old.as_ref().is_some_and(|old| old.will_wake(waker)) {
                    *old = Some(waker.clone());
                }
                None
            }
            Fate::Answered(_) | Fate::Ended(_) => {
                let slot = self.all[place as usize].take()?;
                self.free.push(place);
                Some(slot.fate)
            }
        }
    }

    /// Gives a question up whose answer may still come.
    pub(crate) fn abandon(&mut self, place: u32) {
        let Some(slot) = self.all[place as usize].as_mut() else { return };
        if let Fate::Awaited(waker) = &mut slot.fate {
            *waker = None;
            slot.is_abandoned = true;
            self.awaited -= 1;
            self.abandoned += 1;
        } else {
            self.remove(place);
        }
    }

    /// Takes a question out that was not asked: no answer comes to it.
    pub(crate) fn cancel(&mut self, place: u32) {
        if let Some(Slot { fate: Fate::Awaited(_), is_abandoned: false, .. }) = self.all[place as usize] {
            self.awaited -= 1;
            self.matching.forget(place);
            self.remove(place);
        }
    }

    fn remove(&mut self, place: u32) {
        self.all[place as usize] = None;
        self.free.push(place);
    }

    /// When the oldest question was asked that was given up and has no answer.
    pub(crate) fn oldest_abandoned(&self) -> Option<u64> {
        self.all.iter().flatten().filter(|slot| slot.is_abandoned).map(|slot| slot.asked_at).min()
    }
}

/// An answer to no question.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stray;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Whether an answer has a question.
    fn answers(slots: &mut Slots<u32>, id: Option<u64>, answer: u32) -> bool {
        slots.answer(id, answer, u64::MAX).is_ok()
    }

    fn taken(slots: &mut Slots<u32>, place: u32) -> Option<u32> {
        match slots.poll(place, Waker::noop()) {
            Some(Fate::Answered(answer)) => Some(answer),
            _ => None,
        }
    }

    #[test]
    fn answer_of_a_dropped_call_goes_nowhere() {
        let mut slots = Slots::new(Matcher::InOrder(VecDeque::new()));
        let ((first, _), (second, _)) = (slots.add(5), slots.add(6));
        slots.abandon(first);
        assert_eq!((slots.awaited(), slots.abandoned(), slots.oldest_abandoned()), (1, 1, Some(5)));
        assert!(answers(&mut slots, None, 10));
        assert_eq!(taken(&mut slots, second), None);
        assert!(answers(&mut slots, None, 11));
        assert_eq!(taken(&mut slots, second), Some(11));
        assert!(!answers(&mut slots, None, 12));
        assert!(slots.is_empty());
    }

    #[test]
    fn question_that_was_not_asked_has_no_place() {
        for matching in [Matcher::InOrder(VecDeque::new()), Matcher::by_id(2)] {
            let mut slots: Slots<u32> = Slots::new(matching);
            let (first, first_id) = slots.add(0);
            let (second, _) = slots.add(0);
            slots.cancel(second);
            assert_eq!((slots.awaited(), slots.has_room(10)), (1, true));
            let (third, third_id) = slots.add(0);
            assert!(answers(&mut slots, Some(first_id), 1) && answers(&mut slots, Some(third_id), 3));
            assert_eq!((taken(&mut slots, first), taken(&mut slots, third)), (Some(1), Some(3)));
            assert!(slots.is_empty());
        }
    }

    #[test]
    fn id_is_used_again_once_its_answer_came() {
        let mut slots: Slots<u32> = Slots::new(Matcher::by_id(3));
        let ids: Vec<u64> = (0..3).map(|_| slots.add(0).1).collect();
        assert_eq!((ids, slots.has_room(10)), (vec![1, 2, 3], false));
        slots.abandon(1);
        assert!(!slots.has_room(10), "its answer may still come");
        assert!(answers(&mut slots, Some(2), 7));
        assert_eq!(slots.add(0).1, 2);
        assert!(!answers(&mut slots, Some(9), 7));
        assert!(!answers(&mut slots, None, 7));
    }

    #[test]
    fn question_that_did_not_leave_has_no_answer() {
        let mut slots: Slots<u32> = Slots::new(Matcher::InOrder(VecDeque::new()));
        let ((first, _), (second, _)) = (slots.add(0), slots.add(0));
        slots.begins_at(first, 0);
        slots.begins_at(second, 10);
        assert!(slots.answer(None, 7, 0).is_err(), "nothing left");
        assert!(slots.answer(None, 7, 1).is_ok(), "a part of it left");
        assert!(slots.answer(None, 8, 10).is_err());
        slots.end(End::Lost, 10);
        assert!(matches!(slots.poll(second, Waker::noop()), Some(Fate::Ended(End::Unsent))));
        assert_eq!(taken(&mut slots, first), Some(7));
    }

    proptest! {
        /// Each answer is for its question, whatever is dropped, however ids begin again.
        #[test]
        fn answers_meet_their_questions(steps in prop::collection::vec((0u8..4, any::<u16>()), 1..200), in_order in any::<bool>()) {
            let matching = if in_order { Matcher::InOrder(VecDeque::new()) } else { Matcher::by_id(20) };
            let mut slots = Slots::new(matching);
            // What a backend has not answered: the number of a question and its id; and what calls
            // wait for.
            let (mut owed, mut waiting, mut number) = (VecDeque::new(), Vec::new(), 0u32);
            for (step, choice) in steps {
                let choice = usize::from(choice);
                match step {
                    0 if slots.has_room(16) => {
                        let (place, id) = slots.add(0);
                        number += 1;
                        owed.push_back((number, id));
                        waiting.push((number, place));
                    }
                    1 if !owed.is_empty() => {
                        let at = if in_order { 0 } else { choice % owed.len() };
                        let (number, id) = owed.remove(at).unwrap();
                        prop_assert!(answers(&mut slots, Some(id), number));
                    }
                    2 if !waiting.is_empty() => {
                        let (number, place) = waiting[choice % waiting.len()];
                        if let Some(answer) = taken(&mut slots, place) {
                            prop_assert_eq!(answer, number);
                            waiting.retain(|(other, _)| *other != number);
                        }
                    }
                    3 if !waiting.is_empty() => {
                        let (_, place) = waiting.swap_remove(choice % waiting.len());
                        slots.abandon(place);
                    }
                    _ => {}
                }
                prop_assert_eq!(slots.awaited() + slots.abandoned(), owed.len());
            }
            slots.end(End::Lost, u64::MAX);
            for (_, place) in waiting {
                prop_assert!(slots.poll(place, Waker::noop()).is_some());
            }
            prop_assert!(slots.is_empty() && slots.all.iter().all(Option::is_none));
        }
    }
}
