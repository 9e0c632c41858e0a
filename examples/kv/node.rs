//! One shard's part of the server: its keys, and its way to those of others.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Instant;

use crate::commands::{self, Reach};
use crate::data::{Outcome, Task};
use crate::mesh::{SendError, Shards};
use crate::pending::{Pending, SlotId, Ticket};
use crate::reply::{Out, Protocol, Reply};
use crate::resp::Args;
use crate::route::{self, Place, Plan};
use crate::store::{Keyer, Moment, Store};

/// What shards send each other.
#[derive(Debug)]
pub enum Message {
    /// Work on this request.
    Ask {
        /// In array form.
        request: Vec<u8>,
        /// What the client understands.
        protocol: Protocol,
        /// Where the answer is to go.
        slot: SlotId,
    },
    /// The reply to a request.
    Answer {
        /// Who waits for it.
        slot: SlotId,
        /// The reply.
        bytes: Vec<u8>,
    },
}

/// Takes messages to other shards.
pub trait Post {
    /// Sends a message without waiting.
    ///
    /// # Errors
    /// If it could not be sent, with the message.
    fn send(&self, to: usize, message: Message) -> Result<(), SendError<Message>>;
}

impl Post for Shards<Message> {
    fn send(&self, to: usize, message: Message) -> Result<(), SendError<Message>> {
        Shards::send(self, to, message)
    }
}

/// See the module.
pub struct Node<P> {
    place: Place,
    keyer: Keyer,
    store: RefCell<Store>,
    started: Instant,
    value_bytes_max: usize,
    pending: Rc<Pending>,
    post: P,
    /// Answers that found the way full, to be sent before any other. At most one for each request under way.
    unsent: RefCell<VecDeque<(usize, Message)>>,
    /// Wakes the courier, which sends them.
    courier: Cell<Option<Waker>>,
}

impl<P: Post> Node<P> {
    /// A shard without keys.
    pub fn new(place: Place, keyer: Keyer, value_bytes_max: usize, post: P) -> Node<P> {
        Node {
            place,
            keyer,
            store: RefCell::default(),
            started: Instant::now(),
            value_bytes_max,
            pending: Rc::default(),
            post,
            unsent: RefCell::default(),
            courier: Cell::default(),
        }
    }

    /// Which shard it is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Hashes keys.
    #[inline]
    pub fn keyer(&self) -> &Keyer {
        &self.keyer
    }

    /// Its keys.
    #[inline]
    pub fn store(&self) -> RefMut<'_, Store> {
        self.store.borrow_mut()
    }

    /// Bytes of a value at most.
    pub fn value_bytes_max(&self) -> usize {
        self.value_bytes_max
    }

    /// When it began.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// What a command on `store` works with.
    #[inline]
    pub fn task<'a, O: Out>(&'a self, store: &'a mut Store, reply: Reply<O>) -> Task<'a, O> {
        Task {
            store,
            keyer: &self.keyer,
            place: self.place,
            now: Moment::since(self.started),
            value_bytes_max: self.value_bytes_max,
            reply,
        }
    }

    /// A message came from another shard.
    pub fn receive(&self, from: usize, message: Message) {
        match message {
            Message::Answer { slot, bytes } => self.pending.answer(slot, bytes),
            Message::Ask { request, protocol, slot } => {
                let bytes = self.work(&request, protocol);
                self.unsent.borrow_mut().push_back((from, Message::Answer { slot, bytes }));
            }
        }
        self.send_unsent();
    }

    /// Never ends: sends answers that found the way full as soon as there is room. It asks once in a turn, which lasts
    /// until the other shard has taken something in one of its own.
    pub async fn courier(self: Rc<Self>) {
        poll_fn(|task| {
            self.courier.set(Some(task.waker().clone()));
            self.send_unsent();
            Poll::<()>::Pending
        })
        .await;
    }

    fn send_unsent(&self) {
        let mut unsent = self.unsent.borrow_mut();
        while let Some((to, message)) = unsent.pop_front() {
            match self.post.send(to, message) {
                // Nobody waits there any more if it is gone.
                Ok(()) | Err(SendError::Gone(_)) => {}
                Err(SendError::Full(message)) => {
                    unsent.push_front((to, message));
                    return self.courier.take().into_iter().for_each(Waker::wake);
                }
            }
        }
    }

    /// Asks all that a plan names, and makes one reply of their answers.
    pub async fn ask_all(&self, plan: Plan, protocol: Protocol) -> Vec<u8> {
        // All are asked before the first is waited for.
        let asked: Vec<_> =
            plan.parts.into_iter().map(|part| self.ask(part.shard, part.request, protocol)).collect();
        let mut answers = Vec::with_capacity(asked.len());
        for answer in asked {
            answers.push(match answer {
                Ok(ticket) => ticket.await,
                Err(answer) => answer,
            });
        }
        route::merge(&plan.merge, answers)
    }

    /// Asks one shard. An answer at once if it is this one, or if it cannot be asked.
    fn ask(&self, shard: usize, request: Vec<u8>, protocol: Protocol) -> Result<Ticket, Vec<u8>> {
        if shard == self.place.index {
            return Err(self.work(&request, protocol));
        }
        let ticket = self.pending.ask();
        match self.post.send(shard, Message::Ask { request, protocol, slot: ticket.id() }) {
            Ok(()) => Ok(ticket),
            Err(SendError::Full(_)) => {
                Err(format!("-TRYAGAIN shard {shard}, which owns a key, is behind\r\n").into())
            }
            Err(SendError::Gone(_)) => {
                Err(format!("-ERR shard {shard}, which owns a key, has ended\r\n").into())
            }
        }
    }

    /// Works on a request about keys of this shard.
    fn work(&self, request: &[u8], protocol: Protocol) -> Vec<u8> {
        let mut args = Args::of(request);
        let mut store = self.store();
        let mut task = self.task(&mut store, Reply::new(Vec::new(), protocol));
        let Some(command) = args.next().and_then(commands::find) else {
            return b"-ERR another shard asked for an unknown command\r\n".to_vec();
        };
        let outcome = match command.spec().reach {
            Reach::Key => {
                let key = task.keyer.key(args.next().unwrap_or_default());
                task.run_one(command, key, args);
                Outcome::Done
            }
            _ => task.run_many(command, args, 0),
        };
        match outcome {
            Outcome::Done => task.reply.into_inner(),
            Outcome::Long(text) => text,
            Outcome::Full(_) => b"-ERR the reply is too long to be sent from shard to shard\r\n".to_vec(),
        }
    }
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
