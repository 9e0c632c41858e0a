//! Messages that a subscription has received and not handed out.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use crate::protocol::message::Message;

/// An event of a [`Subscription`](crate::Subscription).
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A message.
    Message(Message),
    /// The connection was lost here. Messages may be missing, and no server can tell how many.
    Gap,
}

/// The bounds of a queue.
#[derive(Clone, Copy)]
pub(crate) struct QueueLimits {
    pub(crate) messages_max: usize,
    pub(crate) bytes_max: usize,
}

/// A subscription, as the task that receives for it knows it.
pub(crate) struct Queue {
    pub(crate) pattern: String,
    pub(crate) group: Option<String>,
    limits: QueueLimits,
    events: RefCell<VecDeque<Event>>,
    /// Bytes of the messages in `events`.
    bytes: Cell<usize>,
    /// A gap was dropped with older messages: it comes before all that is left.
    has_gap_before: Cell<bool>,
    missed: Cell<u64>,
    received: Cell<u64>,
    /// Those of them that came before this connection, whose server knows nothing of them.
    pub(crate) received_before: Cell<u64>,
    /// The number of messages with which it ends.
    pub(crate) ends_after: Cell<Option<u64>>,
    is_over: Cell<bool>,
    is_refused: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

impl Queue {
    pub(crate) fn new(pattern: &str, group: Option<&str>, limits: QueueLimits) -> Queue {
        Queue {
            pattern: pattern.to_owned(),
            group: group.map(str::to_owned),
            limits,
            events: RefCell::default(),
            bytes: Cell::new(0),
            has_gap_before: Cell::new(false),
            missed: Cell::new(0),
            received: Cell::new(0),
            received_before: Cell::new(0),
            ends_after: Cell::new(None),
            is_over: Cell::new(false),
            is_refused: Cell::new(false),
            waker: Cell::default(),
        }
    }

    /// Adds a message. True if it was the last one.
    pub(crate) fn push(&self, message: Message) -> bool {
        let mut events = self.events.borrow_mut();
        let bytes = self.bytes.get() + message.payload().len();
        self.bytes.set(bytes);
        events.push_back(Event::Message(message));
        while events.len() > self.limits.messages_max
            || (self.bytes.get() > self.limits.bytes_max && events.len() > 1)
        {
            self.drop_oldest(&mut events);
        }
        drop(events);
        self.received.set(self.received.get() + 1);
        let is_last = self.left() == Some(0);
        self.is_over.set(self.is_over.get() || is_last);
        self.wake();
        is_last
    }

    #[cold]
    fn drop_oldest(&self, events: &mut VecDeque<Event>) {
        match events.pop_front() {
            Some(Event::Message(message)) => {
                self.bytes.set(self.bytes.get() - message.payload().len());
                self.missed.set(self.missed.get() + 1);
            }
            Some(Event::Gap) => self.has_gap_before.set(true),
            None => {}
        }
    }

    /// Adds a gap. Two without a message in between are one.
    pub(crate) fn push_gap(&self) {
        let mut events = self.events.borrow_mut();
        let follows_a_gap = match events.back() {
            Some(last) => matches!(last, Event::Gap),
            None => self.has_gap_before.get(),
        };
        if !follows_a_gap {
            events.push_back(Event::Gap);
        }
        drop(events);
        self.wake();
    }

    /// Ends it behind what it has.
    pub(crate) fn end(&self, is_refused: bool) {
        self.is_over.set(true);
        self.is_refused.set(is_refused);
        self.wake();
    }

    /// Messages until it ends, if it does.
    pub(crate) fn left(&self) -> Option<u64> {
        self.ends_after.get().map(|after| after.saturating_sub(self.received.get()))
    }

    pub(crate) fn received(&self) -> u64 {
        self.received.get()
    }

    pub(crate) fn missed(&self) -> u64 {
        self.missed.get()
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused.get()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.events.borrow().len()
    }

    /// Takes the next event that is there, without waiting.
    pub(crate) fn take(&self) -> Option<Event> {
        if self.has_gap_before.take() {
            return Some(Event::Gap);
        }
        let event = self.events.borrow_mut().pop_front()?;
        if let Event::Message(message) = &event {
            self.bytes.set(self.bytes.get() - message.payload().len());
        }
        Some(event)
    }

    pub(crate) fn poll_next(&self, task: &mut Context<'_>) -> Poll<Option<Event>> {
        if let Some(event) = self.take() {
            return Poll::Ready(Some(event));
        }
        if self.is_over.get() {
            return Poll::Ready(None);
        }
        let old = self.waker.replace(Some(task.waker().clone()));
        drop(old);
        Poll::Pending
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use ringserve::testing::frame;

    use super::*;

    fn message(n: usize) -> Message {
        Message::parse(frame(format!("MSG a 1 2\r\n{n:02}").as_bytes())).unwrap().1
    }

    fn queue(messages_max: usize, bytes_max: usize) -> Queue {
        Queue::new("a", None, QueueLimits { messages_max, bytes_max })
    }

    /// The events that it yields: numbers, and `gap`.
    fn taken(queue: &Queue) -> Vec<String> {
        let text = |event| match event {
            Event::Message(message) => String::from_utf8(message.payload().to_vec()).unwrap(),
            Event::Gap => "gap".to_owned(),
        };
        std::iter::from_fn(|| queue.take()).map(text).collect()
    }

    #[test]
    fn oldest_messages_go_and_are_counted() {
        let queue = queue(3, 1000);
        (0..5).for_each(|n| assert!(!queue.push(message(n))));
        assert_eq!((queue.missed(), queue.waiting()), (2, 3));
        assert_eq!(taken(&queue), ["02", "03", "04"]);
        assert_eq!(queue.bytes.get(), 0);
    }

    #[test]
    fn bytes_are_bounded_too() {
        let queue = queue(100, 5);
        (0..5).for_each(|n| assert!(!queue.push(message(n))));
        assert_eq!((queue.missed(), taken(&queue)), (3, vec!["03".to_owned(), "04".to_owned()]));
        let narrow = self::queue(100, 1);
        narrow.push(message(7));
        assert_eq!(taken(&narrow), ["07"], "the newest message stays, however large it is");
    }

    #[test]
    fn gap_stands_where_messages_are_missing() {
        let queue = queue(3, 1000);
        queue.push(message(0));
        queue.push_gap();
        queue.push_gap();
        queue.push(message(1));
        assert_eq!(taken(&queue), ["00", "gap", "01"]);
    }

    #[test]
    fn gap_outlives_the_messages_beside_it() {
        let queue = queue(2, 1000);
        queue.push(message(0));
        queue.push_gap();
        (1..4).for_each(|n| assert!(!queue.push(message(n))));
        assert_eq!((queue.missed(), taken(&queue)), (2, vec!["gap".into(), "02".into(), "03".into()]));
    }

    #[test]
    fn last_message_ends_the_queue() {
        let queue = queue(10, 1000);
        queue.ends_after.set(Some(2));
        assert!(!queue.push(message(0)));
        assert_eq!(queue.left(), Some(1));
        assert!(queue.push(message(1)));
        let mut task = Context::from_waker(Waker::noop());
        assert!(queue.poll_next(&mut task).is_ready() && queue.poll_next(&mut task).is_ready());
        assert!(matches!(queue.poll_next(&mut task), Poll::Ready(None)));
    }
}
