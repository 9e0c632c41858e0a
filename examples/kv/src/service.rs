//! Connects requests, keys and replies.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::FrameError;
use ringserve::sync::{Mesh, Mutex};
use ringserve::{Closed, Cx, Frame, Opening, Refusal, Service, Shard};

use crate::client::{Client, Topics};
use crate::commands::{self, Command, Run, To};
use crate::queue::{Batch, Queue};
use crate::resp::{self, Args, Bad, Head, Out};
use crate::store::{Keyer, Store};

/// Long replies go out in pieces of this size, and wait for the peer between them.
const PIECE_BYTES: usize = 64 << 10;
/// Keys that are removed at once when their time is over, before others are served.
const EXPIRED_AT_ONCE: usize = 1000;
/// Queues that are kept while no connection needs them.
const SPARE_MAX: usize = 64;
/// Letters of an unknown command, and of its arguments, that are told back.
const TOLD_MAX: usize = 128;

/// One shard: its keys, its subscribers, and its way to the others.
pub struct Node {
    shard: Shard,
    pub store: RefCell<Store>,
    topics: Rc<Topics>,
    opened: Cell<u64>,
    work: Mesh<Batch, Batch>,
    spare: RefCell<Vec<Queue>>,
}

/// A connection, as the framework keeps it.
pub struct Session {
    client: Rc<Client>,
    queue: RefCell<Queue>,
    /// Taken by calls that wait, one after the other: the first one carries the queue.
    turn: Mutex<()>,
    /// Calls that have no turn yet.
    waiting: Cell<usize>,
}

impl ringserve::Session for Session {}

/// What is left to do of a call that is not answered at once.
enum Left {
    /// Carry the queue until it is empty.
    Carry,
    /// Begin when those before are answered.
    Wait(Frame<Head>),
}

/// The server on one shard.
pub struct Kv(pub Rc<Node>);

impl Service<Head> for Kv {
    type Session = Session;
    type Error = Infallible;

    async fn open(&self, opening: &Opening<'_>) -> Result<Session, Refusal> {
        let node = &self.0;
        // Different on all shards.
        let id = node.opened.get() * node.shard.count() as u64 + node.shard.index() as u64 + 1;
        node.opened.set(node.opened.get() + 1);
        let client = Client::new(id, opening.local_handle(), &node.shard, &node.topics);
        Ok(Session { client, queue: RefCell::default(), turn: Mutex::default(), waiting: Cell::default() })
    }

    // Not an async function: what is answered at once is answered before there is a future to carry the frame into.
    fn call(&self, cx: &Cx<'_, Session>, frame: Frame<Head>) -> impl Future<Output = Result<(), Infallible>> {
        let left = self.begin(cx, frame).map(|left| Box::pin(self.finish(cx, left)));
        async move {
            if let Some(left) = left {
                left.await;
            }
            Ok(())
        }
    }

    fn malformed(&self, cx: &Cx<'_, Session>, _: &FrameError) {
        // It is too large: Redis knows the length of strings only.
        say(cx, |out| drop(out.error("ERR Protocol error: invalid bulk length")));
    }

    fn close(&self, closed: &Closed<'_, Session>) {
        closed.session().client.leave();
    }
}

impl Node {
    /// A shard without keys and connections, which the others can ask.
    pub fn new(
        shard: &Shard,
        keyer: Keyer,
        value_bytes_max: usize,
        work: &Mesh<Batch, Batch>,
        epoch: fn() -> Duration,
    ) -> Rc<Node> {
        let (clock, place, started) = (shard.clone(), (shard.index(), shard.count()), shard.now());
        // Read behind the clock, and cut to milliseconds once: so no key lives longer than the clock of a peer says.
        let epoch = epoch();
        let now = move || (epoch + (clock.now() - started)).as_millis() as u64;
        let node = Rc::new(Node {
            shard: shard.clone(),
            store: RefCell::new(Store::new(keyer, now, place, value_bytes_max)),
            topics: Rc::default(),
            opened: Cell::new(0),
            work: work.clone(),
            spare: RefCell::default(),
        });
        let here = node.clone();
        work.register(shard, move |_from, batch| here.answer(batch));
        shard.spawn(node.clone().expire());
        node
    }

    /// Removes keys as their time comes.
    async fn expire(self: Rc<Node>) {
        let sooner = self.store.borrow().sooner.clone();
        loop {
            let next = self.store.borrow_mut().expire(EXPIRED_AT_ONCE);
            let left = next.map_or(u64::MAX, |end| end.saturating_sub(self.store.borrow().now()));
            // No timer lasts longer than a day.
            let left = Duration::from_millis(left.clamp(1, 86_400_000));
            match next {
                Some(_) => drop(self.shard.timeout(left, sooner.notified()).await),
                None => sooner.notified().await,
            }
        }
    }

    fn answer(&self, mut batch: Batch) -> Batch {
        batch.answer(|command, args, out| self.run(command, args, out));
        batch
    }

    /// Runs a command on the keys, or the subscribers, of this shard.
    #[inline]
    fn run(&self, command: &Command, args: Args<'_>, out: &mut Out<'_, '_>) {
        let done = match command.run {
            Run::Store(run) => run(&mut self.store.borrow_mut(), args, out),
            Run::Topics(run) => run(&self.topics, args, out),
            Run::Client(_) => unreachable!("{} is about no shard", command.name),
        };
        done.or_else(|error| out.error(&error)).unwrap_or_default();
    }
}

impl Kv {
    #[inline]
    fn begin(&self, cx: &Cx<'_, Session>, frame: Frame<Head>) -> Option<Left> {
        let (frame, head) = frame.into_parts();
        let args = head.args(&frame);
        if args.len() == 0 && head.bad.is_none() {
            return None;
        }
        let (node, session) = (&*self.0, cx.session());
        let command = commands::find(args.get(0)).filter(|command| command.fits(args.len()));
        let is_idle = session.waiting.get() == 0 && !session.queue.borrow().is_carried();
        if is_idle
            && let Some(command) = command
            && command.to == To::Key
            && !session.client.only_listens.get()
            && node.store.borrow().owner(args.get(1)) == node.shard.index()
        {
            say(cx, |out| node.run(command, args, out));
            return None;
        }
        let is_queued = command.is_some_and(|command| command.to != To::Client);
        if !is_idle && (!is_queued || session.waiting.get() > 0 || !session.queue.borrow().has_room()) {
            session.waiting.set(session.waiting.get() + 1);
            return Some(Left::Wait(frame.with_head(head)));
        }
        self.answer(cx, &head, args);
        (is_idle && session.queue.borrow().is_carried()).then_some(Left::Carry)
    }

    /// Answers a request whose turn it is, or asks the shards that it is about.
    #[inline(never)]
    fn answer(&self, cx: &Cx<'_, Session>, head: &Head, args: Args<'_>) {
        let (node, client) = (&*self.0, &cx.session().client);
        let command = match checked(client, head, args) {
            Ok(command) => command,
            Err(error) => {
                // A browser was made to talk to this port: what follows its headers may be requests of an attacker.
                let is_browser = ["post", "host:"].contains(&&*args.word(0));
                if !is_browser {
                    say(cx, |out| drop(out.error(&error)));
                }
                if is_browser || head.bad.is_some() {
                    cx.close();
                }
                return;
            }
        };
        if let Run::Client(run) = command.run {
            say(cx, |out| {
                run(client, args, out).or_else(|error| out.error(&error)).unwrap_or_default();
            });
            if command.name == "quit" {
                cx.close();
            }
            return;
        }
        let mut queue = cx.session().queue.borrow_mut();
        if !queue.is_carried() {
            *queue = node.spare.borrow_mut().pop().unwrap_or_else(|| Queue::new(node.shard.count()));
        }
        let (here, owner) = (node.shard.index(), |key: &[u8]| node.store.borrow().owner(key));
        let run =
            |command: &'static Command, args: Args<'_>, out: &mut Out<'_, '_>| node.run(command, args, out);
        queue.ask(command, args, client.resp3.get(), owner, here, run);
    }

    async fn finish(&self, cx: &Cx<'_, Session>, left: Left) {
        let session = cx.session();
        let _turn = session.turn.lock().await;
        match left {
            // Other calls go first, so that what else was pipelined goes along.
            Left::Carry => drop(cx.spawn(async {}).await),
            Left::Wait(frame) => {
                session.waiting.set(session.waiting.get() - 1);
                let (frame, head) = frame.into_parts();
                self.answer(cx, &head, head.args(&frame));
            }
        }
        if session.queue.borrow().is_carried() {
            self.carry(cx).await;
        }
    }

    async fn carry(&self, cx: &Cx<'_, Session>) {
        let (node, queue) = (&*self.0, &cx.session().queue);
        while !queue.borrow().is_done() {
            let (mut asked, mut own) = (Vec::new(), None);
            for (shard, batch) in queue.borrow_mut().take() {
                match shard == node.shard.index() {
                    true => own = Some(batch),
                    false => asked.push((shard, batch.left(), node.work.ask(shard, batch))),
                }
            }
            if let Some(own) = own {
                queue.borrow_mut().answered(node.shard.index(), node.answer(own));
            }
            for (shard, left, answer) in asked {
                let batch = answer.await.unwrap_or_else(|why| Batch::failed(left, shard, why));
                queue.borrow_mut().answered(shard, batch);
            }
            loop {
                let text = queue.borrow_mut().write();
                if text.is_empty() {
                    break;
                }
                for piece in text.chunks(PIECE_BYTES) {
                    cx.ready().await;
                    cx.write(piece);
                }
            }
        }
        let queue = queue.take().rest();
        let mut spare = node.spare.borrow_mut();
        if spare.len() < SPARE_MAX {
            spare.push(queue);
        }
    }
}

fn say(cx: &Cx<'_, Session>, write: impl FnOnce(&mut Out<'_, '_>)) {
    let resp3 = cx.session().client.resp3.get();
    cx.write_with(|out| write(&mut Out { to: resp::To::Peer(out), resp3 }));
}

/// The command that a client asks for, if it may.
fn checked(client: &Client, head: &Head, args: Args<'_>) -> Result<&'static Command, Bad> {
    if let Some(bad) = &head.bad {
        return Err(format!("ERR Protocol error: {bad}").into());
    }
    let Some(command) = commands::find(args.get(0)) else {
        let text = |n| String::from_utf8_lossy(args.get(n)).chars().take(TOLD_MAX).collect::<String>();
        let (name, all) = (text(0), (1..args.len().min(TOLD_MAX)).map(|n| format!("'{}' ", text(n))));
        let told: String = all.collect::<String>().chars().take(TOLD_MAX).collect();
        return Err(format!("ERR unknown command '{name}', with args beginning with: {told}").into());
    };
    let name = command.name;
    if !command.fits(args.len()) {
        return Err(format!("ERR wrong number of arguments for '{name}' command").into());
    }
    if client.only_listens.get()
        && !(name.ends_with("subscribe") || ["ping", "quit", "reset"].contains(&name))
    {
        return Err(format!(
            "ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in \
             this context"
        )
        .into());
    }
    Ok(command)
}
