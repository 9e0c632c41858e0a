//! Connects requests, keys and replies.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::{FrameError, Parts};
use ringserve::resp::{self, Merged, Request, Version, Writer, unknown_command};
use ringserve::scatter::{Answers, Questions, Replies, Rest, Scatter};
use ringserve::sync::AskError;
use ringserve::{Cx, Frame, Opening, Refusal, Service, Shard};

use crate::client::{Client, Topics};
use crate::commands::{self, Command, Run, To};
use crate::keys::Bad;
use crate::store::{Keyer, Store};

/// Keys that are removed at once when their time is over, before others are served.
const EXPIRED_AT_ONCE: usize = 1000;
/// Bytes of messages that wait for a slow subscriber, beyond which it is cut off.
const WAITING_BYTES_MAX: usize = 8 << 20;

/// What shards ask each other: to run a command, for a client that speaks this version.
pub type Question = (&'static Command, Version);

/// One shard: its keys and its subscribers.
pub struct Node {
    shard: Shard,
    pub store: RefCell<Store>,
    topics: Topics,
    opened: Cell<u64>,
}

impl Answers for Node {
    type Question = Question;
    type Merged = Merged;

    fn answer(&self, (command, version): Question, args: Parts<'_>, out: &mut Vec<u8>) {
        self.run(command, args, &mut Writer::to_vec(out, version));
    }

    fn failed(&self, shard: usize, why: AskError, out: &mut Vec<u8>) {
        Writer::to_vec(out, Version::Two).reply(|_| {
            Err(Bad::Owned(match why {
                AskError::Full => format!("TRYAGAIN shard {shard} has too many requests waiting"),
                AskError::Gone => format!("ERR shard {shard} has ended"),
                // The request may have been worked on.
                _ => format!("ERR shard {shard} gave no answer"),
            }))
        });
    }
}

impl Node {
    /// A shard without keys and connections.
    pub fn new(shard: &Shard, keyer: Keyer, value_bytes_max: usize, epoch: fn() -> Duration) -> Rc<Node> {
        let (clock, place, started) = (shard.clone(), (shard.index(), shard.count()), shard.now());
        // Read behind the clock, and cut to milliseconds once: so no key lives longer than the clock of a peer says.
        let epoch = epoch();
        let now = move || (epoch + (clock.now() - started)).as_millis() as u64;
        let store = RefCell::new(Store::new(keyer, now, place, value_bytes_max));
        let topics = Topics::new(shard, WAITING_BYTES_MAX);
        let node = Rc::new(Node { shard: shard.clone(), store, topics, opened: Cell::new(0) });
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
            let _ = self.shard.timeout(left, sooner.notified()).await;
        }
    }

    /// Runs a command on the keys, or the subscribers, of this shard.
    #[inline]
    fn run(&self, command: &Command, args: Parts<'_>, out: &mut Writer<'_, '_>) {
        out.reply(|out| match command.run {
            Run::Store(run) => run(&mut self.store.borrow_mut(), args, out),
            Run::Topics(run) => run(&self.topics, args, out),
            Run::Client(_) => unreachable!("{} is about no shard", command.name),
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

impl ringserve::Session for Session {}

/// The server on one shard.
pub struct Kv {
    node: Rc<Node>,
    scatter: Scatter<Node>,
}

impl Service<Request> for Kv {
    type Session = Session;
    type Error = Infallible;

    async fn open(&self, opening: &Opening<'_>) -> Result<Session, Refusal> {
        let node = &self.node;
        // Different on all shards.
        let id = node.opened.get() * node.shard.count() as u64 + node.shard.index() as u64 + 1;
        node.opened.set(node.opened.get() + 1);
        let listens = node.topics.subscriber(opening.local_handle(), Version::Two);
        let client = Client { id, place: node.store.borrow().place, listens, name: RefCell::default() };
        Ok(Session { client, replies: Replies::default() })
    }

    // Not an async function: what is answered at once is answered before there is a future to carry the frame into.
    fn call(
        &self,
        cx: &Cx<'_, Session>,
        frame: Frame<Request>,
    ) -> impl Future<Output = Result<(), Infallible>> {
        let rest = self.begin(cx, frame);
        async move {
            rest.await;
            Ok(())
        }
    }

    fn malformed(&self, cx: &Cx<'_, Session>, _: &FrameError) {
        // It is too large: Redis knows the length of strings only.
        say(cx, |out| out.reply(|_| Err("ERR Protocol error: invalid bulk length".into())));
    }
}

impl Kv {
    /// Of a shard, which the others can ask from then on.
    pub fn new(node: Rc<Node>, work: &Questions<Question>) -> Kv {
        Kv { scatter: Scatter::new(&node.shard, work, node.clone()), node }
    }

    #[inline]
    fn begin(&self, cx: &Cx<'_, Session>, frame: Frame<Request>) -> Rest<impl Future<Output = ()>> {
        let (frame, request) = frame.into_parts();
        let args = request.args(&frame);
        if args.is_empty() && request.error().is_none() {
            return Rest::none();
        }
        let (node, session) = (&*self.node, cx.session());
        let command = commands::find(args.get(0)).filter(|command| command.fits(args.len()));
        // Most are about one key.
        if let Some(command) = command.filter(|command| command.to == To::Key)
            && !session.client.only_listens()
        {
            let owner = node.store.borrow().owner(args.get(1));
            if owner == node.shard.index() && session.replies.is_idle() {
                say(cx, |out| node.run(command, args, out));
                return Rest::none();
            }
            if let Some(mut asking) = self.scatter.along(&session.replies) {
                asking.ask(owner, (command, session.client.version()), args);
                return Rest::none();
            }
        }
        let asks = command.is_some_and(|command| command.to != To::Client);
        self.scatter.in_turn(cx, &session.replies, asks, move || self.answer(cx, (&frame, &request, command)))
    }

    /// Answers a request whose turn it is, or asks the shards that it is about.
    #[inline(never)]
    fn answer(&self, cx: &Cx<'_, Session>, (frame, request, found): Asked<'_>) {
        let (args, client) = (request.args(frame), &cx.session().client);
        let command = match checked(client, (frame, request, found)) {
            Ok(command) => command,
            Err(error) => {
                // A browser was made to talk to this port: what follows its headers may be requests of an attacker.
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
    fn ask(&self, replies: &Replies<Node>, question: Question, args: Parts<'_>) {
        let (shards, store) = (self.scatter.shards(), &self.node.store);
        let mut asking = self.scatter.asking(replies);
        let owner = |key: &[u8]| store.borrow().owner(key);
        let step = match question.0.to {
            To::Each(step) => step,
            To::Values => 1,
            To::Key => return asking.ask(owner(args.get(1)), question, args),
            To::Cursor => {
                let cursor = resp::number(args.get(1)).unwrap_or_default() as usize;
                return asking.ask(cursor % shards, question, args);
            }
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
