//! Communication between the shards of a server: pushes, questions, numbered messages.

use std::cell::RefCell;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ringserve_server::sync::{AskError, Mesh, Reply, SendError};
use ringserve_server::{ConnHandle, PushError, Shard};

use super::cover::Cover;

/// A message to another shard about a connection.
#[derive(Default)]
pub enum Order {
    /// One of many that only take time.
    #[default]
    Nothing,
    Panic,
    /// A frame for a connection.
    Push(ConnHandle, String),
    /// Wait for the connection's end.
    Watch(ConnHandle),
}

/// The fate of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deal {
    Answer,
    AnswerLater,
    Lose,
    Panic,
    /// The reply is kept until the next one is, or the shard ends.
    Keep,
}

impl Deal {
    pub const ALL: &[Deal] = &[Deal::Answer, Deal::AnswerLater, Deal::Lose, Deal::Panic, Deal::Keep];

    pub fn answers(self) -> bool {
        matches!(self, Deal::Answer | Deal::AnswerLater)
    }
}

/// Asks another shard to double a number.
#[derive(Clone, Copy)]
pub struct Question {
    pub number: u64,
    pub from: usize,
    pub deal: Deal,
    pub time: Duration,
}

/// The channels between the shards of one server.
#[derive(Clone)]
pub struct Meshes {
    pub orders: Mesh<Order>,
    pub questions: Mesh<Question, u64>,
    /// Numbers that grow, from each shard to each.
    pub numbers: Mesh<u64>,
}

impl Meshes {
    pub fn new(mailbox: usize) -> Meshes {
        Meshes {
            orders: Mesh::new(),
            questions: Mesh::with_capacity(mailbox),
            numbers: Mesh::with_capacity(mailbox),
        }
    }

    /// Checks that all shards ended, and accept nothing.
    pub fn check_ended(&self) {
        for shard in 0..self.orders.count() {
            let sent = self.orders.try_send(shard, Order::default());
            assert!(matches!(sent, Err(SendError::Gone(_))), "shard {shard} ended and takes a message");
            let question = Question { number: 0, from: 0, deal: Deal::Answer, time: Duration::ZERO };
            let mut asked = std::pin::pin!(self.questions.ask(shard, question));
            let answer = asked.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(answer, Poll::Ready(Err(AskError::Gone)), "shard {shard} ended and is asked");
        }
    }

    pub fn register(&self, shard: &Shard, cover: &Cover) {
        let (of, here) = (cover.clone(), shard.clone());
        self.orders.register(shard, move |_from, order: Order| {
            of.count("did", "message to another shard");
            let time = match here.random() % 2 {
                0 => Duration::ZERO,
                _ => Duration::from_micros(here.random() % 2_000_000),
            };
            match order {
                Order::Nothing => of.count("did", "one of many messages"),
                Order::Panic => panic!("planted: a message panics"),
                Order::Push(handle, text) => {
                    if !time.is_zero() || handle.push(text.clone()) == Err(PushError::Full) {
                        let shard = here.clone();
                        here.spawn(async move {
                            shard.sleep(time).await;
                            push_on(|| handle.push(text.clone()), || handle.ready()).await;
                        });
                    }
                }
                Order::Watch(handle) => watch(&here, handle, time, of.clone()),
            }
        });
        let here = shard.clone();
        let kept = RefCell::<Option<Reply<u64>>>::default();
        self.questions.register_with_reply(shard, move |from, question: Question, reply| {
            assert_eq!(from, Some(question.from), "a question names the shard that asks");
            match question.deal {
                Deal::Answer => reply.answer(2 * question.number),
                Deal::AnswerLater => {
                    let shard = here.clone();
                    here.spawn(async move {
                        shard.sleep(question.time).await;
                        reply.answer(2 * question.number);
                    });
                }
                Deal::Lose => drop(reply),
                Deal::Panic => panic!("planted: a question panics"),
                Deal::Keep => drop(kept.replace(Some(reply))),
            }
        });
        let mut last = vec![0; shard.count()];
        self.numbers.register(shard, move |from, number| {
            let last = &mut last[from.expect("a shard sends it")];
            assert!(*last < number, "message {number} comes after {last}");
            *last = number;
        });
    }
}

/// Pushes once there is room, unless the connection ended.
pub async fn push_on(push: impl Fn() -> Result<(), PushError>, ready: impl AsyncFn()) {
    while push() == Err(PushError::Full) {
        ready().await;
    }
}

/// Waits for the end of a connection, which the client brings about.
fn watch(shard: &Shard, handle: ConnHandle, time: Duration, cover: Cover) {
    let own = shard.clone();
    cover.count("watch", "began");
    shard.spawn(async move {
        // A wait that is given up is replaced by another one.
        let _ = own.timeout(time, handle.closed()).await;
        handle.closed().await;
        assert!(handle.is_gone(), "a connection that ended is gone");
        cover.count("watch", "saw the end");
    });
}
