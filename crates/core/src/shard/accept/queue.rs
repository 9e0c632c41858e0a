//! Sockets that were accepted at one listener and wait for a place, first in, first out, and those
//! for which the services are asked.
//!
//! ```text
//!   accepted ──▶ asked ──▶ admitted, refused, handed off
//!      │           │ ▲
//!      │ no place  │ │ a place, and its turn
//!      ▼  postponed▼ │
//!      waiting ──────┘
//! ```

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::SocketAddr;

use crate::{Socket, Time};

/// The reason why a socket waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// No place is left for it.
    Limit,
    /// The server's rate has no token.
    Rate,
    /// It was postponed before, and the services are asked again.
    Retry,
    /// The services postponed it.
    Postponed,
    /// Others came before it, or its listener postpones new connections.
    Others,
}

/// Accepted connections that wait, by the reason why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitCounts {
    /// No place is left: a limit on connections or on those that have not begun is reached, or the
    /// process has no descriptor.
    pub limit: usize,
    /// The rate of all listeners together has no token.
    pub rate: usize,
    /// The code that admits connections postponed them, or is asked for them again.
    pub postponed: usize,
    /// They are behind others of their listener.
    pub behind: usize,
}

impl WaitCounts {
    /// The number of all.
    pub fn total(self) -> usize {
        self.named().map(|(_, count)| count).iter().sum()
    }

    /// Each count with the name of its reason, as metrics and reports have it.
    pub fn named(self) -> [(&'static str, usize); 4] {
        let WaitCounts { limit, rate, postponed, behind } = self;
        [("limit", limit), ("rate", rate), ("postponed", postponed), ("behind", behind)]
    }

    /// Visits each count, in the order of [`named`](WaitCounts::named).
    pub fn each_count(&mut self, visit: impl FnMut(&mut usize)) {
        let WaitCounts { limit, rate, postponed, behind } = self;
        [limit, rate, postponed, behind].into_iter().for_each(visit);
    }

    fn add(&mut self, why: Why) {
        let count = match why {
            Why::Limit => &mut self.limit,
            Why::Rate => &mut self.rate,
            Why::Retry | Why::Postponed => &mut self.postponed,
            Why::Others => &mut self.behind,
        };
        *count += 1;
    }
}

/// A socket that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) socket: Socket,
    pub(super) peer: Option<SocketAddr>,
    pub(super) why: Why,
}

/// The number of connections for which the services are asked before they answered the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// All for which there is a place.
    All,
    /// One: an earlier one was postponed, and none was let in or refused since.
    OneByOne,
}

/// The sockets of a listener. Each has a separate queue: a reason to wait at one of them holds no
/// other back.
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// Sockets handed out as [`Event::Accepted`](crate::shard::turn::Event::Accepted) and not
    /// answered yet.
    asked: usize,
    /// Those of them that waited before, and are counted; some may be answered while others are
    /// not.
    waited: Vec<Socket>,
    /// The time before which the services are not asked, by their order.
    rests_until: Option<Time>,
    pace: Pace,
}

impl Queue {
    pub(super) fn new() -> Queue {
        Queue { waiting: VecDeque::new(), asked: 0, waited: Vec::new(), rests_until: None, pace: Pace::All }
    }

    /// The number of waiting sockets.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Counts each waiting socket by the reason why.
    pub(super) fn count(&self, counts: &mut WaitCounts) {
        self.waiting.iter().for_each(|waiting| counts.add(waiting.why));
    }

    /// The number of sockets for which the services are asked.
    pub(super) fn asked(&self) -> usize {
        self.asked
    }

    /// True if a new socket would not have to wait for another one.
    pub(super) fn is_free(&self) -> bool {
        self.waiting.is_empty() && !self.is_put_off()
    }

    /// True while new connections are postponed, or the services are asked again for the postponed
    /// one.
    pub(super) fn is_put_off(&self) -> bool {
        self.rests_until.is_some() || self.pace == Pace::OneByOne && self.asked > 0
    }

    /// The time until which new connections are postponed.
    pub(super) fn rests_until(&self) -> Option<Time> {
        self.rests_until
    }

    /// Ends the time for which new connections are postponed.
    pub(super) fn end_rest(&mut self) {
        if self.rests_until.take().is_some() {
            let postponed = self.waiting.iter_mut().take_while(|waiting| waiting.why == Why::Postponed);
            postponed.for_each(|waiting| waiting.why = Why::Retry);
        }
    }

    /// Ends that time, if it is over.
    pub(super) fn go_on(&mut self, now: Time) {
        if self.rests_until.is_some_and(|until| until <= now) {
            self.end_rest();
        }
    }

    /// Adds one after all others.
    pub(super) fn push(&mut self, waiting: Waiting) {
        self.waiting.push_back(waiting);
    }

    /// Takes the first one, to ask for it.
    pub(super) fn pop(&mut self) -> Option<Waiting> {
        self.waiting.pop_front()
    }

    /// Puts the first one back, because there is no place for it.
    pub(super) fn unpop(&mut self, waiting: Waiting) {
        self.waiting.push_front(waiting);
    }

    /// Puts one back that was asked for, until then: before all but those that were put back
    /// earlier. True if it waits for the first time.
    pub(super) fn postpone(&mut self, socket: Socket, peer: Option<SocketAddr>, until: Time) -> bool {
        let is_first = !self.waited.contains(&socket);
        self.one_answered();
        let place = self.waiting.iter().take_while(|waiting| waiting.why == Why::Postponed).count();
        self.waiting.insert(place, Waiting { socket, peer, why: Why::Postponed });
        self.rests_until = Some(self.rests_until.map_or(until, |before| before.max(until)));
        self.pace = Pace::OneByOne;
        is_first
    }

    /// Notes that the services are asked for one.
    pub(super) fn ask(&mut self) {
        self.asked += 1;
    }

    /// Notes that one of those asked for waited before.
    pub(super) fn note_waited(&mut self, socket: Socket) {
        self.waited.push(socket);
    }

    /// Notes that the services answered at `now` for one that is not postponed.
    pub(super) fn answered(&mut self, now: Time) {
        self.one_answered();
        // The services are asked for those after it in the next turn: this one may begin a
        // handshake before, and those have a limit.
        if core::mem::replace(&mut self.pace, Pace::All) == Pace::OneByOne && !self.waiting.is_empty() {
            self.rests_until = self.rests_until.or(Some(now));
        }
    }

    fn one_answered(&mut self) {
        self.asked -= 1;
        if self.asked == 0 {
            self.waited.clear();
        }
    }

    /// Panics if anything contradicts itself.
    pub(super) fn invariants(&self) {
        let postponed = |waiting: &&Waiting| waiting.why == Why::Postponed;
        let at_front = self.waiting.iter().take_while(postponed).count();
        assert_eq!(at_front, self.waiting.iter().filter(postponed).count(), "those put off are not in front");
        assert!(at_front == 0 || self.rests_until.is_some(), "newcomers are put off for ever");
        assert!(self.rests_until.is_none() || !self.waiting.is_empty(), "none is put off");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    /// A queue whose services are asked for all of these.
    fn asked(numbers: impl Iterator<Item = u64>) -> Queue {
        let mut queue = Queue::new();
        numbers.for_each(|_| queue.ask());
        queue
    }

    fn come(queue: &mut Queue, number: u64) {
        queue.push(Waiting { socket: Socket(number), peer: None, why: Why::Others });
    }

    fn waiting(queue: &Queue) -> Vec<(u64, Why)> {
        queue.waiting.iter().map(|waiting| (waiting.socket.0, waiting.why)).collect()
    }

    fn counts(queue: &Queue) -> [(&'static str, usize); 4] {
        let mut counts = WaitCounts::default();
        queue.count(&mut counts);
        counts.named()
    }

    #[test]
    fn sockets_are_counted_by_what_they_wait_for() {
        let mut queue = Queue::new();
        for (number, why) in (1..).zip([Why::Limit, Why::Rate, Why::Rate, Why::Retry, Why::Others]) {
            queue.push(Waiting { socket: Socket(number), peer: None, why });
        }
        assert_eq!(counts(&queue), [("limit", 1), ("rate", 2), ("postponed", 1), ("behind", 1)]);
    }

    #[test]
    fn those_put_back_keep_their_order_in_front_of_who_came_later() {
        let mut queue = asked(1..=3);
        come(&mut queue, 4);
        for number in 1..=3 {
            assert!(queue.postpone(Socket(number), None, at(number)));
        }
        let all = [(1, Why::Postponed), (2, Why::Postponed), (3, Why::Postponed), (4, Why::Others)];
        assert_eq!((waiting(&queue), queue.rests_until()), (all.into(), Some(at(3))));
        assert_eq!(counts(&queue), [("limit", 0), ("rate", 0), ("postponed", 3), ("behind", 1)]);
        queue.invariants();
        queue.go_on(at(2));
        assert!(queue.is_put_off(), "the last one sets the time");
        queue.go_on(at(3));
        assert_eq!(waiting(&queue)[0], (1, Why::Retry));
        // It is put back in front of those that were postponed with it.
        let first = queue.pop().expect("it waits");
        queue.ask();
        queue.note_waited(first.socket);
        assert!(queue.is_put_off(), "one is asked for at a time");
        assert!(!queue.postpone(first.socket, None, at(4)), "it waited before");
        assert_eq!(waiting(&queue)[..2], [(1, Why::Postponed), (2, Why::Retry)]);
        queue.invariants();
    }

    #[test]
    fn those_behind_one_that_is_let_in_have_the_next_turn() {
        let mut queue = asked(1..=1);
        queue.postpone(Socket(1), None, at(1));
        come(&mut queue, 2);
        queue.go_on(at(1));
        queue.pop();
        queue.ask();
        queue.answered(at(1));
        assert_eq!((queue.is_put_off(), queue.rests_until()), (true, Some(at(1))));
        queue.go_on(at(1));
        queue.pop();
        queue.ask();
        assert!(queue.is_free(), "all are asked for that come");
    }
}
