//! Connects requests, keys and replies.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ringserve::framing::FrameError;
use ringserve::sync::Notify;
use ringserve::{Closed, Cx, Frame, Opening, Refusal, Service, Shard};

use crate::commands::{self, Command, Merge, Reach};
use crate::data::Task;
use crate::node::{Client, Node, Pending, Session, Ways, say, wrong_arguments};
use crate::queue::{Batch, Queue};
use crate::resp::{self, Args, Head, Out, Part};
use crate::store::{Keyer, Store, owner};

/// Long replies go out in pieces of this size, and wait for the peer between them.
const PIECE_BYTES: usize = 64 << 10;
/// Keys that are removed at once when their time is over, before others are served.
const EXPIRED_AT_ONCE: usize = 1000;
/// Queues that are kept while no connection needs them.
const SPARE_MAX: usize = 64;
/// Bytes of an unknown command, and of its arguments, that are told back.
const TOLD_BYTES_MAX: usize = 128;

/// What is left to do of a call that is not answered at once.
enum Left {
    /// Carry the queue until it is empty.
    Carry(Rc<Pending>),
    /// Wait until it is, and begin then, unless the request is in the queue.
    Wait(Rc<Pending>, Option<Frame<Head>>),
    /// Ask all shards about themselves.
    Ask(Command, Frame<Head>),
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
        let client = Client::new(id, opening);
        node.clients.borrow_mut().insert(id, client.clone());
        Ok(Session { client, queue: RefCell::default() })
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
        say(cx, Part::Error("ERR Protocol error: invalid bulk length".into()));
    }

    fn close(&self, closed: &Closed<'_, Session>) {
        let client = &closed.session().client;
        self.0.clients.borrow_mut().remove(&client.id);
        client.leave(&self.0);
    }
}

impl Node {
    /// A shard without keys and connections, which the others can ask.
    pub fn new(
        shard: &Shard,
        keyer: Keyer,
        value_bytes_max: usize,
        ways: &Ways,
        epoch: fn() -> Duration,
    ) -> Rc<Node> {
        let clock = shard.clone();
        let started = shard.now();
        // Read behind the clock, and cut to milliseconds once: a key lives as long as the clock of a peer says, and no longer.
        let epoch = epoch();
        let now = move || (epoch + (clock.now() - started)).as_millis() as u64;
        let node = Rc::new(Node {
            shard: shard.clone(),
            store: RefCell::new(Store::new(keyer.clone(), now)),
            keyer,
            clients: RefCell::default(),
            listeners: Default::default(),
            opened: Cell::new(0),
            commands: Cell::new(0),
            started,
            value_bytes_max,
            ways: ways.clone(),
            spare: RefCell::default(),
        });
        let here = node.clone();
        ways.work.register(shard, move |_from, batch| here.answer(batch));
        let here = node.clone();
        ways.about.register(shard, move |_from, about| about.rows(&here));
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

    fn owner(&self, key: &[u8]) -> usize {
        owner(&self.keyer, key, self.shard.count())
    }

    /// Runs a command on the keys of this shard, and returns what the reply counts, -1 if it is an error. Of a part of a reply that is
    /// only counted nothing is written.
    #[inline]
    fn run(&self, command: Command, args: Args<'_>, out: &mut impl Out, resp3: bool, is_part: bool) -> i64 {
        let store = &mut *self.store.borrow_mut();
        let place = (self.shard.index(), self.shard.count());
        let part = match command {
            Command::Publish => Ok(Part::Int(self.publish(args.get(1), args.get(2)))),
            Command::RandomKey => {
                let from = self.shard.random() as usize % store.figures()[0].max(1);
                let found = store.keys(from, usize::MAX).next().or(store.keys(0, from).next());
                Ok(Part::List(found.map(Part::Bytes).into_iter().collect()))
            }
            _ => Task { store, args, place, value_bytes_max: self.value_bytes_max }.run(command),
        };
        match part.unwrap_or_else(Part::Error) {
            Part::Int(count) if is_part => return count,
            Part::Ok if is_part => {}
            Part::List(parts) if is_part => {
                let count = parts.len() as i64;
                parts.into_iter().for_each(|part| out.part(part, resp3));
                return count;
            }
            part @ Part::Error(_) => {
                out.part(part, resp3);
                return -1;
            }
            part => out.part(part, resp3),
        }
        0
    }

    fn answer(&self, mut batch: Batch) -> Batch {
        let resp3 = batch.resp3;
        batch.answer(|command, args, out, is_part| self.run(command, args, out, resp3, is_part));
        batch
    }
}

impl Kv {
    #[inline]
    fn begin(&self, cx: &Cx<'_, Session>, frame: Frame<Head>) -> Option<Left> {
        let (frame, head) = frame.into_parts();
        let args = head.args(&frame);
        if args.spans.is_empty() && head.bad.is_none() {
            return None;
        }
        let (node, client) = (&*self.0, &*cx.session().client);
        node.commands.set(node.commands.get() + 1);
        let command = commands::find(args.get(0));
        if let Some(command) = command
            && command.spec().reach == Reach::Key
            && command.spec().fits(args.spans.len())
            && !client.is_busy.get()
            && node.owner(args.get(1)) == node.shard.index()
        {
            cx.write_with(|out| {
                node.run(command, args, out, client.resp3.get(), false);
            });
            return None;
        }
        self.begin_other(cx, frame.with_head(head), command, false)
    }

    /// `in_turn` says that those before it are answered.
    #[inline(never)]
    fn begin_other(
        &self,
        cx: &Cx<'_, Session>,
        frame: Frame<Head>,
        command: Option<Command>,
        in_turn: bool,
    ) -> Option<Left> {
        let (frame, head) = frame.into_parts();
        let (node, session, args) = (&*self.0, cx.session(), head.args(&frame));
        let pending = session.queue.borrow().clone();
        let spec = command.map(Command::spec).filter(|spec| spec.fits(args.spans.len()));
        let is_queued = spec.is_some_and(|spec| spec.reach != Reach::Nothing);
        match pending {
            Some(pending) if !in_turn && (!is_queued || pending.waiting.get() > 0) => {
                pending.waiting.set(pending.waiting.get() + 1);
                return Some(Left::Wait(pending, Some(frame.with_head(head))));
            }
            _ if spec.is_none() => {
                refuse(cx, command, &head, args);
                return None;
            }
            _ => {}
        }
        let (command, spec) = command.zip(spec)?;
        if session.client.listens()
            && !matches!(
                spec.name,
                "subscribe" | "unsubscribe" | "psubscribe" | "punsubscribe" | "ping" | "quit" | "reset"
            )
            && !session.client.resp3.get()
        {
            say(
                cx,
                Part::Error(format!(
                    "ERR Can't execute '{}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in \
                 this context",
                    spec.name
                )),
            );
            return None;
        }
        if spec.reach == Reach::Nothing {
            return node
                .about_the_connection(cx, command, args)
                .then(|| Left::Ask(command, frame.with_head(head)));
        }
        let pending = session.queue.borrow().clone();
        let is_new = pending.is_none();
        let pending = pending.or_else(|| node.spare.borrow_mut().pop()).unwrap_or_else(|| {
            let queue = RefCell::new(Queue::new(node.shard.count()));
            Rc::new(Pending { queue, waiting: Cell::new(0), next: Notify::new() })
        });
        pending.queue.borrow_mut().resp3 = session.client.resp3.get();
        let asked = node.ask(&mut pending.queue.borrow_mut(), command, args);
        // An error has a place too.
        asked.unwrap_or_else(|error| pending.queue.borrow_mut().error(error));
        if is_new {
            *session.queue.borrow_mut() = Some(pending.clone());
            session.client.is_busy.set(true);
            return Some(Left::Carry(pending));
        }
        if in_turn || !pending.queue.borrow().is_full() {
            return None;
        }
        pending.waiting.set(pending.waiting.get() + 1);
        Some(Left::Wait(pending, None))
    }

    async fn finish(&self, cx: &Cx<'_, Session>, left: Left) {
        match left {
            Left::Carry(pending) => {
                // What else was pipelined goes along.
                yield_now().await;
                self.carry(cx, &pending).await;
            }
            Left::Wait(pending, frame) => {
                pending.next.notified().await;
                pending.waiting.set(pending.waiting.get() - 1);
                if let Some(frame) = frame
                    && let Some(left) = self.begin_in_turn(cx, frame)
                {
                    Box::pin(self.finish(cx, left)).await;
                }
                self.carry(cx, &pending).await;
            }
            Left::Ask(command, frame) => {
                let (frame, head) = frame.into_parts();
                let part = self.0.about_all(cx, command, head.args(&frame)).await;
                say(cx, part);
            }
        }
    }

    fn begin_in_turn(&self, cx: &Cx<'_, Session>, frame: Frame<Head>) -> Option<Left> {
        let (frame, head) = frame.into_parts();
        let command = commands::find(head.args(&frame).get(0));
        self.begin_other(cx, frame.with_head(head), command, true)
    }

    async fn carry(&self, cx: &Cx<'_, Session>, pending: &Pending) {
        let node = &*self.0;
        while !pending.queue.borrow().is_done() {
            let (mut asked, mut own) = (Vec::new(), None);
            for (shard, batch) in pending.queue.borrow_mut().take() {
                match shard == node.shard.index() {
                    true => own = Some(batch),
                    false => asked.push((shard, batch.left(), batch.resp3, node.ways.work.ask(shard, batch))),
                }
            }
            if let Some(own) = own {
                pending.queue.borrow_mut().answered(node.shard.index(), node.answer(own));
            }
            for (shard, left, resp3, answer) in asked {
                let batch = answer.await.unwrap_or_else(|why| Batch::fail(left, resp3, shard, why));
                pending.queue.borrow_mut().answered(shard, batch);
            }
            loop {
                cx.ready().await;
                let mut rest = None;
                let random = node.shard.random();
                cx.write_with(|out| rest = pending.queue.borrow_mut().write(out, random));
                let Some(rest) = rest else { break };
                for piece in rest.chunks(PIECE_BYTES) {
                    cx.ready().await;
                    cx.write(piece);
                }
            }
        }
        match pending.waiting.get() {
            0 => {
                cx.session().client.rest();
                pending.queue.borrow_mut().tidy();
                let mut spare = node.spare.borrow_mut();
                let pending = cx.session().queue.borrow_mut().take();
                let has_room = spare.len() < SPARE_MAX;
                spare.extend(pending.filter(|_| has_room));
            }
            _ => pending.next.notify_one(),
        }
    }
}

impl Node {
    /// Asks the shards that a command is about.
    fn ask(&self, queue: &mut Queue, command: Command, args: Args<'_>) -> Result<(), String> {
        let (name, count, shards) = (command.spec().name, args.spans.len(), self.shard.count());
        match command.spec().reach {
            Reach::Key | Reach::Nothing => {
                let owner = self.owner(args.get(1));
                self.ask_one(queue, owner, command, args, false);
                queue.one(owner);
            }
            Reach::Cursor => {
                let owner = resp::number(args.get(1)).unwrap_or_default() as usize % shards;
                self.ask_one(queue, owner, command, args, false);
                queue.one(owner);
            }
            Reach::Together(step) => {
                let keys = if command == Command::MSetNx { count - 1 } else { 2 };
                if keys % step != 0 {
                    return Err(wrong_arguments(name));
                }
                let owner = self.owner(args.get(1));
                if (1..=keys).step_by(step).any(|n| self.owner(args.get(n)) != owner) {
                    return Err("CROSSSLOT Keys in request don't hash to the same slot".into());
                }
                self.ask_one(queue, owner, command, args, false);
                queue.one(owner);
            }
            Reach::Values => {
                queue.array(count - 1);
                for n in 1..count {
                    let owner = self.owner(args.get(n));
                    self.ask_one(
                        queue,
                        owner,
                        Command::Get,
                        Args { spans: &[(0, 0), args.spans[n]], ..args },
                        false,
                    );
                    queue.one(owner);
                }
            }
            Reach::Sum => {
                let asked = (1..count).map(|n| {
                    let owner = self.owner(args.get(n));
                    self.ask_one(
                        queue,
                        owner,
                        command,
                        Args { spans: &[(0, 0), args.spans[n]], ..args },
                        true,
                    );
                    owner
                });
                let asked = asked.collect();
                queue.merged(Merge::Sum, asked);
            }
            Reach::Pairs if count % 2 == 0 => return Err(wrong_arguments(name)),
            Reach::Pairs => {
                let asked = (1..count).step_by(2).map(|n| {
                    let (owner, spans) =
                        (self.owner(args.get(n)), [(0, 0), args.spans[n], args.spans[n + 1]]);
                    self.ask_one(queue, owner, Command::Set, Args { spans: &spans, ..args }, true);
                    owner
                });
                let asked = asked.collect();
                queue.merged(Merge::Ok, asked);
            }
            Reach::All(merge) => {
                (0..shards).for_each(|shard| self.ask_one(queue, shard, command, args, true));
                queue.merged(merge, (0..shards).collect());
            }
        }
        Ok(())
    }

    /// Asks one shard. This one answers at once, if it can.
    fn ask_one(&self, queue: &mut Queue, shard: usize, command: Command, args: Args<'_>, is_part: bool) {
        let resp3 = queue.resp3;
        match (shard == self.shard.index()).then(|| queue.answers(shard)).flatten() {
            Some(batch) => batch.tell(is_part, |out| self.run(command, args, out, resp3, is_part)),
            None => queue.ask(shard, command, args, is_part),
        }
    }
}

/// Lets others go first.
async fn yield_now() {
    let mut yielded = false;
    poll_fn(|task| match std::mem::replace(&mut yielded, true) {
        true => Poll::Ready(()),
        false => {
            task.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

#[cold]
fn refuse(cx: &Cx<'_, Session>, command: Option<Command>, head: &Head, args: Args<'_>) {
    let name = args.get(0);
    if let Some(bad) = &head.bad {
        say(cx, Part::Error(format!("ERR Protocol error: {bad}")));
        return cx.close();
    }
    if let Some(command) = command {
        return say(cx, Part::Error(wrong_arguments(command.spec().name)));
    }
    // A browser was made to talk to this port: what follows its headers may be requests of an attacker.
    if name.eq_ignore_ascii_case(b"post") || name.eq_ignore_ascii_case(b"host:") {
        return cx.close();
    }
    let text =
        |bytes: &[u8], max: usize| String::from_utf8_lossy(&bytes[..bytes.len().min(max)]).into_owned();
    let mut told = String::new();
    for arg in args.from(1) {
        if told.len() >= TOLD_BYTES_MAX {
            break;
        }
        told += &format!("'{}' ", text(arg, TOLD_BYTES_MAX - told.len()));
    }
    let name = text(name, TOLD_BYTES_MAX);
    say(cx, Part::Error(format!("ERR unknown command '{name}', with args beginning with: {told}")));
}
