//! Connects requests, keys and replies.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use ringserve::framing::{FrameError, FrameFields};
use ringserve::resp::{MergedReply, Request, Version, Writer, unknown_command};
use ringserve::scatter::{QuestionHandler, Questions, Remainder, Replies, Scatter};
use ringserve::service::{OpenCx, Refusal};
use ringserve::sync::{AskError, Mesh};
use ringserve::task::yield_now;
use ringserve::topics::listeners::Listeners;
use ringserve::{Cx, Frame, Service, Shard};

use crate::client::{Client, Rooms, Topics};
use crate::commands::{self, Command, Run, To};
use crate::keys::{self, Bad, NO_MEMORY};
use crate::store::{Keyer, LARGE_BYTES, Store};
use crate::walk::{Found, PIECE_BYTES, Query, STEPS, Walk};

/// Keys that are removed at once when their time is over, before others are served.
const EXPIRED_AT_ONCE: usize = 1000;
/// Bytes of messages that wait for a slow subscriber, beyond which it is cut off.
const WAITING_BYTES_MAX: usize = 8 << 20;
/// Names of SUBSCRIBE and its like at once, before others are served.
const NAMES_AT_ONCE: usize = 64;

/// A question to another shard: to run a command, for a client that speaks this version.
pub type Question = (&'static Command, Version);

/// Questions of shards to each other to walk over their keys.
pub type Walks = Mesh<Query, Result<Found, Bad>>;

/// One shard: its keys and its subscribers.
pub struct Node {
    shard: Shard,
    pub store: RefCell<Store>,
    topics: Topics,
    walks: Walks,
    /// Bytes that its walks found, wherever these are.
    found: Arc<AtomicUsize>,
    opened: Cell<u64>,
}

impl QuestionHandler for Node {
    type Question = Question;
    type Merged = MergedReply;

    fn answer(&self, (command, version): Question, args: FrameFields<'_>, out: &mut Vec<u8>) {
        self.run(command, args, &mut Writer::to_vec(out, version));
    }

    fn large_bytes(&self, (command, _): Question, args: FrameFields<'_>) -> usize {
        let mut store = self.store.borrow_mut();
        if store.has_large { keys::answer_bytes(&mut store, command.name, args) } else { 0 }
    }

    fn failed(&self, shard: usize, why: AskError, out: &mut Vec<u8>) {
        Writer::to_vec(out, Version::Two).reply(|_| Err(failure(shard, why)));
    }
}

/// The error reply where a shard gave no answer.
fn failure(shard: usize, why: AskError) -> Bad {
    if why == AskError::NoMemory {
        return NO_MEMORY;
    }
    Bad::Owned(match why {
        AskError::Full => format!("TRYAGAIN shard {shard} has too many requests waiting"),
        AskError::Gone => format!("ERR shard {shard} has ended"),
        // The request may have been worked on.
        _ => format!("ERR shard {shard} gave no answer"),
    })
}

impl Node {
    /// A shard without keys and connections.
    pub fn new(
        shard: &Shard,
        keyer: Keyer,
        value_bytes_max: usize,
        wall: impl Fn(Duration) -> Duration + 'static,
        walks: &Walks,
    ) -> Rc<Node> {
        let (clock, place, started) = (shard.clone(), (shard.index(), shard.count()), shard.now());
        // Read behind the clock, and cut to milliseconds once: so no key lives longer than the
        // clock of a peer says.
        let epoch = wall(Duration::ZERO);
        let age = move || clock.now() - started;
        let (now, wall) = (
            {
                let age = age.clone();
                move || (epoch + age()).as_millis() as u64
            },
            move || wall(age()),
        );
        let store = RefCell::new(Store::new(keyer, now, wall, place, value_bytes_max));
        let topics = Topics { all: Listeners::new(shard, WAITING_BYTES_MAX), rooms: Rooms::new() };
        let (shard, walks) = (shard.clone(), walks.clone());
        let node = Rc::new(Node { shard, store, topics, walks, found: Arc::default(), opened: Cell::new(0) });
        node.shard.spawn(node.clone().expire());
        let here = node.clone();
        node.walks.register_with_reply(&node.shard, move |_from, query, reply| {
            let walk = here.clone().walk(query);
            here.shard.spawn(async move {
                if let Some(found) = walk.await {
                    reply.answer(found);
                }
            });
        });
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
            let _ = self.shard.timeout(left, sooner.notified()).await;
        }
    }

    /// Walks over the keys of this shard, until the client does not wait for what it finds.
    async fn walk(self: Rc<Node>, query: Query) -> Option<Result<Found, Bad>> {
        let asker = query.asker.clone();
        let mut walk = Walk::begin(&mut self.store.borrow_mut(), query, &self.found);
        while asker.strong_count() > 0 {
            let found = walk.go_on(&self.store.borrow(), STEPS);
            if found.is_some() {
                return found;
            }
            yield_now().await;
        }
        None
    }

    /// Runs a command on the keys, or the subscribers, of this shard.
    #[inline]
    fn run(&self, command: &Command, args: FrameFields<'_>, out: &mut Writer<'_, '_>) {
        out.reply(|out| match command.run {
            Run::Store(run) => run(&mut self.store.borrow_mut(), args, out),
            Run::Topics(run) => run(&self.topics, args, out),
            Run::Client(_) | Run::Walk(_) | Run::Listen => unreachable!("{} is about no shard", command.name),
        });
    }
}

/// A request, and its command if its arguments fit.
type Asked<'a> = (&'a Frame, &'a Request, Option<&'static Command>);

/// A connection, as the framework keeps it.
pub struct Session {
    client: Client,
    replies: Replies<Node>,
}

impl ringserve::service::Session for Session {}

/// The server on one shard.
pub struct Kv {
    node: Rc<Node>,
    scatter: Scatter<Node>,
}

impl Service<Request> for Kv {
    type Session = Session;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Session, Refusal> {
        let node = &self.node;
        // Different on all shards.
        let id = node.opened.get() * node.shard.count() as u64 + node.shard.index() as u64 + 1;
        node.opened.set(node.opened.get() + 1);
        let listens = node.topics.all.subscriber(opening.local_handle(), Version::Two);
        let (place, taken) = (node.store.borrow().place, node.topics.rooms.of_client());
        let client = Client { id, place, listens, taken, name: RefCell::default() };
        Ok(Session { client, replies: Replies::default() })
    }

    // Not an async function: what is answered at once is answered before there is a future to carry
    // the frame into.
    fn call(
        &self,
        cx: &Cx<'_, Session>,
        frame: Frame<Request>,
    ) -> impl Future<Output = Result<(), Infallible>> {
        let begun = self.begin(cx, frame);
        async move {
            match begun {
                Begun::Rest(rest) => rest.await,
                Begun::Long(work) => work.await,
            }
            Ok(())
        }
    }

    fn malformed(&self, cx: &Cx<'_, Session>, _: &FrameError) {
        // It is too large: Redis knows the length of strings only.
        say(cx, |out| out.reply(|_| Err("ERR Protocol error: invalid bulk length".into())));
    }
}

/// SUBSCRIBE and its like: a message about each channel or pattern, in parts, between which others
/// are served. An error ends it.
async fn listen(cx: &Cx<'_, Session>, args: FrameFields<'_>) {
    let (client, command) = (&cx.session().client, args.word(0));
    let (is_pattern, ends) = (command.starts_with('p'), command.contains("unsub"));
    let mut all = Vec::new();
    if args.len() == 1 {
        all = client.listens.topics();
        all.retain(|topic| topic.key().0 == is_pattern);
    }
    let names: &mut dyn Iterator<Item = Option<&[u8]>> = match (args.len(), all.is_empty()) {
        (1, true) => &mut std::iter::once(None),
        (1, false) => &mut all.iter().map(|topic| Some(topic.key().1)),
        _ => &mut args.from(1).map(Some),
    };
    let mut left = NAMES_AT_ONCE;
    for name in names {
        if left == 0 {
            yield_now().await;
            cx.ready().await;
            left = NAMES_AT_ONCE;
        }
        let mut is_done = true;
        say(cx, |out| {
            out.reply(|out| {
                let result = name.map_or(Ok(()), |name| client.change(ends, is_pattern, name));
                is_done = result.is_ok();
                result?;
                out.push(3)?;
                out.bulk(&command)?;
                out.bulk_or_null(name)?;
                out.integer(client.listens.count() as i64)
            })
        });
        if !is_done {
            return;
        }
        // Long ones take longer.
        left = left.saturating_sub(1 + name.map_or(0, <[u8]>::len) / 1024);
    }
}

/// The rest of a request: little, or one that takes its time.
enum Begun<R, L> {
    Rest(Remainder<R>),
    Long(Pin<Box<L>>),
}

impl Kv {
    /// Of a shard, which the others can ask from then on.
    pub fn new(node: Rc<Node>, work: &Questions<Question>) -> Kv {
        Kv { scatter: Scatter::new(&node.shard, work, node.clone()), node }
    }

    #[inline]
    fn begin(
        &self,
        cx: &Cx<'_, Session>,
        frame: Frame<Request>,
    ) -> Begun<impl Future<Output = ()>, impl Future<Output = ()>> {
        let (frame, request) = frame.into_parts();
        let args = request.args(&frame);
        if args.is_empty() && request.error().is_none() {
            return Begun::Rest(Remainder::none());
        }
        let (node, session) = (&*self.node, cx.session());
        let command = commands::find(args.get(0)).filter(|command| command.fits(args.len()));
        let mut large = 0;
        // Most are about one key.
        if let Some(command) = command.filter(|command| command.to == To::Key)
            && !session.client.only_listens()
        {
            let owner = node.store.borrow().owner(args.get(1));
            let is_here = owner == node.shard.index();
            if is_here {
                let bytes = node.large_bytes((command, session.client.version()), args);
                large = if bytes >= LARGE_BYTES { bytes } else { 0 };
            }
            if large > 0 {
                // It waits for memory below.
            } else if is_here && session.replies.is_idle() {
                say(cx, |out| node.run(command, args, out));
                return Begun::Rest(Remainder::none());
            } else if let Some(mut asking) = self.scatter.along(&session.replies) {
                asking.ask(owner, (command, session.client.version()), args);
                return Begun::Rest(Remainder::none());
            }
        }
        if large > 0 || command.is_some_and(|command| matches!(command.run, Run::Walk(_) | Run::Listen)) {
            let work = async move { self.take_time(cx, (&frame, &request, command), large).await };
            return Begun::Long(Box::pin(self.scatter.alone(cx, &session.replies, work)));
        }
        let asks = command.is_some_and(|command| command.to != To::Client);
        let answer = move || self.answer(cx, (&frame, &request, command));
        Begun::Rest(self.scatter.in_turn(cx, &session.replies, asks, answer))
    }

    /// Answers a request that takes its time, when its turn has come: one with a `large` value of
    /// the shard's own as soon as there is memory for it.
    async fn take_time(&self, cx: &Cx<'_, Session>, (frame, request, found): Asked<'_>, large: usize) {
        let args = request.args(frame);
        if let Some(command) = found.filter(|_| large > 0) {
            return match cx.reserve(large).await {
                Ok(_reserved) => say(cx, |out| self.node.run(command, args, out)),
                Err(_) => say(cx, |out| out.reply(|_| Err(NO_MEMORY))),
            };
        }
        match checked(&cx.session().client, (frame, request, found)).map(|command| command.run) {
            Ok(Run::Listen) => listen(cx, args).await,
            Ok(Run::Walk(to_query)) => match to_query(args) {
                Ok(query) => {
                    if let Err(error) = self.walk(cx, query).await {
                        say(cx, |out| out.reply(|_| Err(error)));
                    }
                }
                Err(error) => say(cx, |out| out.reply(|_| Err(error))),
            },
            _ => self.answer(cx, (frame, request, found)),
        }
    }

    /// KEYS or SCAN, over the shards that it asks.
    async fn walk(&self, cx: &Cx<'_, Session>, mut query: Query) -> Result<(), Bad> {
        let (walks, asker) = (&self.node.walks, Arc::new(()));
        query.asker = Arc::downgrade(&asker);
        let of_scan = query.shard(walks.count());
        let answers = match of_scan {
            Some(shard) => vec![walks.ask(shard, query).await],
            None => walks.ask_all(|_| query.clone()).await,
        };
        let of_shard = |(shard, answer): (usize, Result<_, AskError>)| {
            answer.map_err(|why| failure(of_scan.unwrap_or(shard), why))?
        };
        let all: Vec<Found> = answers.into_iter().enumerate().map(of_shard).collect::<Result<_, Bad>>()?;
        let bytes: usize = all.iter().map(|found| found.held.bytes()).sum();
        let _reserved = cx.reserve(bytes).await.map_err(|_| NO_MEMORY)?;
        say(cx, |out| {
            out.reply(|out| {
                if of_scan.is_some() {
                    out.array(2)?;
                    out.bulk_integer(all[0].cursor)?;
                }
                out.array(all.iter().map(|found| found.count).sum())
            });
        });
        // From here on the client alone holds them, and the shards may find more.
        let pieces: Vec<Vec<u8>> = all.into_iter().flat_map(|found| found.keys).collect();
        for piece in pieces {
            for part in piece.chunks(PIECE_BYTES) {
                cx.ready().await;
                cx.write(part);
            }
        }
        Ok(())
    }

    /// Answers a request whose turn it is, or asks the shards that it is about.
    #[inline(never)]
    fn answer(&self, cx: &Cx<'_, Session>, (frame, request, found): Asked<'_>) {
        let (args, client) = (request.args(frame), &cx.session().client);
        let command = match checked(client, (frame, request, found)) {
            Ok(command) => command,
            Err(error) => {
                // A browser was made to talk to this port: what follows its headers may be requests
                // of an attacker.
                let is_browser = ["post", "host:"].contains(&&*args.word(0));
                if !is_browser {
                    say(cx, |out| out.reply(|_| Err(error)));
                }
                if is_browser || request.error().is_some() {
                    cx.close();
                }
                return;
            }
        };
        if let Run::Client(run) = command.run {
            say(cx, |out| out.reply(|out| run(client, args, out)));
            if command.name == "quit" {
                cx.close();
            }
            return;
        }
        self.ask(&cx.session().replies, (command, client.version()), args);
    }

    /// Asks the shards that a command is about.
    fn ask(&self, replies: &Replies<Node>, question: Question, args: FrameFields<'_>) {
        let (shards, store) = (self.scatter.shards(), &self.node.store);
        let mut asking = self.scatter.asking(replies);
        let owner = |key: &[u8]| store.borrow().owner(key);
        let step = match question.0.to {
            To::Each(step) => step,
            To::Values => 1,
            To::Key => return asking.ask(owner(args.get(1)), question, args),
            To::Own => return asking.ask(self.node.shard.index(), question, args),
            To::All | To::Client => {
                asking.merge(shards);
                return (0..shards).for_each(|shard| asking.ask(shard, question, args));
            }
        };
        let keys = (args.len() - 1) / step;
        if question.0.to == To::Values {
            let mut text = Vec::new();
            Writer::to_vec(&mut text, question.1).reply(|out| out.array(keys));
            asking.put(&text);
        } else {
            asking.merge(keys);
        }
        for n in (1..args.len()).step_by(step) {
            // Without the name, which no command on keys looks at that reaches several.
            let mut spans = [(0, 0); 3];
            spans[1..=step].copy_from_slice(&args.spans()[n..n + step]);
            asking.ask(owner(args.get(n)), question, args.with_spans(&spans[..=step]));
        }
    }
}

fn say(cx: &Cx<'_, Session>, write: impl FnOnce(&mut Writer<'_, '_>)) {
    let version = cx.session().client.version();
    cx.write_with(|out| write(&mut Writer::new(out, version)));
}

/// The command that a client asks for, if it may.
fn checked(client: &Client, (frame, request, found): Asked<'_>) -> Result<&'static Command, Bad> {
    if let Some(error) = request.error() {
        return Err(format!("ERR Protocol error: {error}").into());
    }
    let Some(command) = found else {
        let args = request.args(frame);
        let Some(Command { name, .. }) = commands::find(args.get(0)) else {
            return Err(unknown_command(args).into());
        };
        return Err(format!("ERR wrong number of arguments for '{name}' command").into());
    };
    let name = command.name;
    if client.only_listens() && !(name.ends_with("subscribe") || ["ping", "quit", "reset"].contains(&name)) {
        return Err(format!(
            "ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in \
             this context"
        )
        .into());
    }
    Ok(command)
}
