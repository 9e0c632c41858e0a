//! One shard's part of the server: its keys and connections, and its way to those of the other shards.

use std::cell::{RefCell, RefMut};
use std::time::Duration;

use ringserve::sync::SendError;

use crate::about::{Counts, Figures};
use crate::clock::Clock;
use crate::commands::{self, Reach};
use crate::data::{Outcome, Task};
use crate::gather::Gather;
use crate::message::{Answer, Message, Post, Unanswered, Work};
use crate::pending::{Dropped, Ticket, WayBack, question};
use crate::reply::{Out, Protocol, Reply};
use crate::resp::Args;
use crate::route::{self, Merge, Place, Plan};
use crate::session::{ClientLine, Clients};
use crate::store::{Keyer, Moment, Store};

/// A question to one shard.
enum Asked<T> {
    /// It is answered.
    Now(Result<T, Unanswered>),
    /// This shard is to answer.
    Later(usize, Ticket<T>),
}

impl<T> Asked<T> {
    async fn answer(self) -> Result<T, Unanswered> {
        match self {
            Asked::Now(answer) => answer,
            Asked::Later(shard, ticket) => ticket.await.map_err(|Dropped| Unanswered::Lost(shard)),
        }
    }
}

/// One shard. `P` is its way to the others.
pub struct Node<P> {
    place: Place,
    keyer: Keyer,
    store: RefCell<Store>,
    counts: Counts,
    clients: Clients,
    clock: Clock,
    value_bytes_max: usize,
    post: P,
}

impl<P: Post> Node<P> {
    /// A shard without keys and connections.
    pub fn new(place: Place, keyer: Keyer, value_bytes_max: usize, clock: Clock, post: P) -> Node<P> {
        Node {
            place,
            keyer,
            store: RefCell::default(),
            counts: Counts::default(),
            clients: Clients::default(),
            clock,
            value_bytes_max,
            post,
        }
    }

    /// What it counts.
    #[inline]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Its connections.
    pub fn clients(&self) -> &Clients {
        &self.clients
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

    /// The time since it began.
    pub fn elapsed(&self) -> Duration {
        self.clock.elapsed()
    }

    /// What a command on `store` works with.
    #[inline]
    pub fn task<'a, O: Out>(&'a self, store: &'a mut Store, reply: Reply<O>) -> Task<'a, O> {
        Task {
            store,
            keyer: &self.keyer,
            place: self.place,
            now: Moment::now(&self.clock),
            value_bytes_max: self.value_bytes_max,
            reply,
        }
    }

    /// Answers a message of another shard.
    pub fn receive(&self, message: Message) {
        match message {
            Message::Work { work, back } => back.answer(self.work(work)),
            Message::Figures(back) => back.answer(self.figures()),
            Message::Clients(back) => back.answer(self.clients.lines(None, self.elapsed())),
        }
    }

    /// Asks each shard that a plan names, and writes one reply of their answers. `write` may wait for room between pieces.
    pub async fn ask_all(&self, plan: Plan, protocol: Protocol, mut write: impl AsyncFnMut(&[u8])) {
        // Each is asked before the first is waited for.
        let asked = plan.parts.into_iter().map(|part| {
            let work = Work { request: part.request, protocol, skip: 0 };
            (part.shard, self.ask_work(part.shard, work))
        });
        let asked: Vec<_> = asked.collect();
        let mut answers = Vec::with_capacity(asked.len());
        for (shard, asked) in asked {
            answers.push((shard, asked.answer().await.unwrap_or_else(Answer::unanswered)));
        }
        if let Some((_, error)) = answers.iter().find(|(_, answer)| answer.bytes.first() == Some(&b'-')) {
            return write(&error.bytes).await;
        }
        match plan.merge {
            Merge::Order(order) => self.gather(Gather::new(order, answers), &mut write).await,
            other => {
                let answers = answers.into_iter().map(|(_, answer)| answer.bytes).collect();
                write(&route::merge(&other, answers)).await;
            }
        }
    }

    /// Writes the values of MGET in the order of their keys, and asks for more of them meanwhile.
    async fn gather(&self, mut gather: Gather, write: &mut impl AsyncFnMut(&[u8])) {
        loop {
            let (piece, rest) = gather.next_piece();
            write(&piece).await;
            let Some((part, shard, work)) = rest else { return };
            let answer = self.ask_work(shard, work).answer().await;
            gather.more(part, answer.unwrap_or_else(Answer::unanswered));
        }
    }

    /// The figures of all shards, for INFO.
    ///
    /// # Errors
    /// If a shard gave none.
    pub async fn all_figures(&self) -> Result<Figures, Unanswered> {
        let mut sum = Figures::default();
        for figures in self.ask_each(|| self.figures(), Message::Figures).await? {
            sum.add(&figures);
        }
        Ok(sum)
    }

    /// The connections of all shards in the order in which CLIENT LIST tells them. `caller` asks.
    ///
    /// # Errors
    /// If a shard gave none.
    pub async fn all_clients(&self, caller: u64) -> Result<Vec<ClientLine>, Unanswered> {
        let mut all = self
            .ask_each(|| self.clients.lines(Some(caller), self.elapsed()), Message::Clients)
            .await?
            .concat();
        all.sort_unstable_by_key(|line| line.id);
        Ok(all)
    }

    async fn ask_each<T>(
        &self,
        here: impl Fn() -> T,
        message: impl Fn(WayBack<T>) -> Message,
    ) -> Result<Vec<T>, Unanswered> {
        let asked: Vec<_> = (0..self.place.shards)
            .map(|shard| self.ask(shard, (), |()| here(), |(), back| message(back)))
            .collect();
        let mut answers = Vec::with_capacity(asked.len());
        for asked in asked {
            answers.push(asked.answer().await?);
        }
        Ok(answers)
    }

    fn ask_work(&self, shard: usize, work: Work) -> Asked<Answer> {
        self.ask(shard, work, |work| self.work(work), |work, back| Message::Work { work, back })
    }

    /// Asks one shard, by a message if it is not this one.
    fn ask<W, T>(
        &self,
        shard: usize,
        what: W,
        here: impl FnOnce(W) -> T,
        message: impl FnOnce(W, WayBack<T>) -> Message,
    ) -> Asked<T> {
        if shard == self.place.index {
            return Asked::Now(Ok(here(what)));
        }
        let (back, ticket) = question();
        match self.post.send(shard, message(what, back)) {
            Ok(()) => Asked::Later(shard, ticket),
            Err(SendError::Full(_)) => Asked::Now(Err(Unanswered::Full(shard))),
            Err(SendError::Gone(_)) => Asked::Now(Err(Unanswered::Ended(shard))),
        }
    }

    fn figures(&self) -> Figures {
        let store = self.store();
        Figures {
            open: self.counts.open.get(),
            opened: self.counts.opened.get(),
            commands: self.counts.commands.get(),
            keys: store.len() as u64,
            ending: store.ending() as u64,
            expired: store.expired(),
        }
    }

    /// Works on a request about keys of this shard.
    fn work(&self, work: Work) -> Answer {
        let whole = |bytes| Answer { bytes, rest: None };
        let mut args = Args::of(&work.request);
        let mut store = self.store();
        let mut task = self.task(&mut store, Reply::new(Vec::new(), work.protocol));
        let Some(command) = args.next().and_then(commands::find) else {
            return whole(b"-ERR another shard asked for an unknown command\r\n".to_vec());
        };
        let outcome = match command.spec().reach {
            Reach::Key => {
                let key = task.keyer.key(args.next().unwrap_or_default());
                task.run_one(command, key, args);
                Outcome::Done
            }
            _ => task.run_many(command, args, work.skip),
        };
        let bytes = task.reply.into_inner();
        match outcome {
            Outcome::Done => whole(bytes),
            Outcome::Long(text) => whole(text),
            Outcome::Full(done) => Answer { bytes, rest: Some(Work { skip: done, ..work }) },
        }
    }
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
