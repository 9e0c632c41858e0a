//! One shard's part of the server: its keys and connections, and what it asks the other shards.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;
use std::time::Duration;

use ringserve::Shard;
use ringserve::sync::AskError;

use crate::about::{Counts, Figures};
use crate::clock::Clock;
use crate::commands::{self, Reach};
use crate::data::{Outcome, Task};
use crate::gather::Gather;
use crate::message::{Answer, Ways, Work, unanswered};
use crate::reply::{Out, Protocol, Reply};
use crate::resp::Args;
use crate::route::{self, Merge, Place, Plan};
use crate::session::{ClientLine, Clients};
use crate::store::{Keyer, Moment, Store};

/// One shard.
pub struct Node {
    place: Place,
    keyer: Keyer,
    store: RefCell<Store>,
    counts: Counts,
    clients: Clients,
    clock: Clock,
    value_bytes_max: usize,
    ways: Ways,
}

impl Node {
    /// A shard without keys and connections, which the others can ask.
    pub fn new(shard: &Shard, keyer: Keyer, value_bytes_max: usize, ways: &Ways) -> Rc<Node> {
        let node = Rc::new(Node {
            place: Place { index: shard.index(), shards: shard.count() },
            keyer,
            store: RefCell::default(),
            counts: Counts::default(),
            clients: Clients::default(),
            clock: Clock::of(shard),
            value_bytes_max,
            ways: ways.clone(),
        });
        let here = node.clone();
        ways.work.register(shard, move |_from, work| here.work(work));
        let here = node.clone();
        ways.figures.register(shard, move |_from, ()| here.figures());
        let here = node.clone();
        ways.clients.register(shard, move |_from, caller| here.clients.lines(caller, here.elapsed()));
        node
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

    /// Asks each shard that a plan names, and writes one reply of their answers. `write` may wait for room between pieces.
    pub async fn ask_all(&self, plan: Plan, protocol: Protocol, mut write: impl AsyncFnMut(&[u8])) {
        // Each is asked before the first is waited for.
        let asked = plan.parts.into_iter().map(|part| {
            let work = Work { request: part.request, protocol, skip: 0 };
            (part.shard, self.ways.work.ask(part.shard, work))
        });
        let asked: Vec<_> = asked.collect();
        let mut answers = Vec::with_capacity(asked.len());
        for (shard, asked) in asked {
            answers.push((shard, asked.await.unwrap_or_else(|why| no_answer(shard, why))));
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
            let answer = self.ways.work.ask(shard, work).await;
            gather.more(part, answer.unwrap_or_else(|why| no_answer(shard, why)));
        }
    }

    /// The figures of all shards, for INFO.
    ///
    /// # Errors
    /// The reply to the client if a shard gave none.
    pub async fn all_figures(&self) -> Result<Figures, Vec<u8>> {
        let mut sum = Figures::default();
        for figures in whole(self.ways.figures.on_all(|_| ()).await)? {
            sum.add(&figures);
        }
        Ok(sum)
    }

    /// The connections of all shards in the order in which CLIENT LIST tells them. `caller` asks.
    ///
    /// # Errors
    /// The reply to the client if a shard gave none.
    pub async fn all_clients(&self, caller: u64) -> Result<Vec<ClientLine>, Vec<u8>> {
        let mut all = whole(self.ways.clients.on_all(|_| caller).await)?.concat();
        all.sort_unstable_by_key(|line| line.id);
        Ok(all)
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

fn no_answer(shard: usize, why: AskError) -> Answer {
    Answer { bytes: unanswered(shard, why), rest: None }
}

/// The answers of all shards, or the reply about the first one that gave none.
fn whole<T>(answers: Vec<Result<T, AskError>>) -> Result<Vec<T>, Vec<u8>> {
    let numbered = answers.into_iter().enumerate();
    numbered.map(|(shard, answer)| answer.map_err(|why| unanswered(shard, why))).collect()
}
