//! Connects requests, keys and replies.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;

use ringserve::framing::FrameError;
use ringserve::{Closed, Cx, Frame, Opening, Refusal, Service};

use crate::about;
use crate::commands::{self, Command, Reach};
use crate::data::Outcome;
use crate::node::Node;
use crate::reply::{Out, Protocol, Reply};
use crate::resp;
use crate::resp::Args;
use crate::route::{Owner, Plan};
use crate::session::{self, Listed, Session};

/// Long replies go out in pieces of this size, and wait for the peer between them.
const PIECE_BYTES: usize = 64 << 10;

/// Bytes of an unknown command, and of its arguments, that are told back.
const TOLD_BYTES_MAX: usize = 128;

/// The server on one shard.
pub struct Kv {
    node: Rc<Node>,
}

/// What is left to do of a request that could not be answered in one go.
enum Left {
    Nothing,
    /// Ask other shards.
    Ask(Plan),
    /// Ask the shards for their figures, and tell these sections of INFO.
    Info(Vec<Vec<u8>>),
    /// Ask the shards for their connections, and tell these.
    Clients(Listed),
    /// Write this as there is room.
    Write(Vec<u8>),
    /// Write the values after this number.
    Values(usize),
}

impl Service for Kv {
    type Session = Session;
    type Error = Infallible;

    async fn open(&self, opening: &Opening<'_>) -> Result<Session, Refusal> {
        let place = self.node.place();
        let number = up(&self.node.counts().opened);
        up(&self.node.counts().open);
        // Different on all shards.
        let id = (number - 1) * place.shards as u64 + place.index as u64 + 1;
        let session = Session::default();
        self.node.clients().open(&session, id, opening.peer().to_string(), self.node.elapsed());
        Ok(session)
    }

    // Not an async function: what is answered at once is answered before there is a future to carry the frame into.
    fn call(&self, cx: &Cx<'_, Session>, frame: Frame) -> impl Future<Output = Result<(), Infallible>> {
        let rest = match self.start(cx, &frame) {
            Left::Nothing => None,
            left => Some(Box::pin(self.finish(cx, frame, left))),
        };
        async move {
            if let Some(rest) = rest {
                rest.await;
            }
            Ok(())
        }
    }

    fn malformed(&self, cx: &Cx<'_, Session>, error: &FrameError) {
        let what = match error {
            FrameError::Malformed(what) => what,
            // It is too large: Redis knows the length of strings only.
            _ => "invalid bulk length",
        };
        Reply::new(cx, cx.session().protocol()).error(format!("ERR Protocol error: {what}"));
    }

    fn close(&self, closed: &Closed<'_, Session>) {
        let open = &self.node.counts().open;
        open.set(open.get() - 1);
        self.node.clients().close(closed.session());
    }
}

impl Kv {
    /// The server on the shard of `node`.
    pub fn new(node: Rc<Node>) -> Kv {
        Kv { node }
    }

    #[inline]
    fn start(&self, cx: &Cx<'_, Session>, frame: &Frame) -> Left {
        match frame.first() {
            Some(b'*') => self.answer(cx, frame),
            _ => self.answer(cx, &resp::request_of_line(frame)),
        }
    }

    /// Answers a request in array form, as far as that goes without waiting.
    #[inline]
    fn answer(&self, cx: &Cx<'_, Session>, request: &[u8]) -> Left {
        let mut args = Args::of(request);
        let count = args.len();
        let Some((name, text)) = args.next_with_rest() else { return Left::Nothing };
        up(&self.node.counts().commands);
        let protocol = cx.session().protocol();
        let mut reply = Reply::new(cx, protocol);
        let Some(command) = commands::find_at(text, name.len()) else {
            unknown(cx, reply, name, args);
            return Left::Nothing;
        };
        let spec = command.spec();
        if !spec.fits(count) {
            reply.wrong_arguments(spec.name, b"");
            return Left::Nothing;
        }
        match spec.reach {
            Reach::Key => {
                let key = self.node.keyer().key(args.next().unwrap_or_default());
                match self.node.place().owner(key) {
                    Owner::Here => self.node.task(&mut self.node.store(), reply).run_one(command, key, args),
                    Owner::There(shard) => return Left::Ask(Plan::forward(shard, request)),
                }
                Left::Nothing
            }
            Reach::Nothing => self.about_the_connection(cx, command, args),
            _ => match Plan::of(command, request, self.node.place(), self.node.keyer()) {
                Some(plan) => Left::Ask(plan),
                None => self.answer_many(cx, command, args, 0),
            },
        }
    }

    fn answer_many(&self, cx: &Cx<'_, Session>, command: Command, args: Args<'_>, skip: usize) -> Left {
        let mut store = self.node.store();
        let mut task = self.node.task(&mut store, Reply::new(cx, cx.session().protocol()));
        match task.run_many(command, args, skip) {
            Outcome::Done => Left::Nothing,
            Outcome::Long(text) => Left::Write(text),
            Outcome::Full(done) => Left::Values(done),
        }
    }

    async fn finish(&self, cx: &Cx<'_, Session>, frame: Frame, mut left: Left) {
        let protocol = cx.session().protocol();
        loop {
            left = match left {
                Left::Nothing => return,
                Left::Ask(plan) => {
                    return self.node.ask_all(plan, protocol, async |text| write(cx, text).await).await;
                }
                Left::Info(sections) => Left::Write(self.info(protocol, &sections).await),
                Left::Clients(listed) => Left::Write(self.list_clients(cx.session(), &listed).await),
                Left::Write(text) => return write(cx, &text).await,
                Left::Values(done) => {
                    cx.ready().await;
                    let line;
                    let request = match frame.first() {
                        Some(b'*') => &frame[..],
                        _ => {
                            line = resp::request_of_line(&frame);
                            &line
                        }
                    };
                    let mut args = Args::of(request);
                    args.next();
                    self.answer_many(cx, Command::MGet, args, done)
                }
            };
        }
    }

    async fn info(&self, protocol: Protocol, sections: &[Vec<u8>]) -> Vec<u8> {
        match self.node.all_figures().await {
            Ok(figures) => {
                let mut reply = Reply::new(Vec::new(), protocol);
                let uptime = self.node.elapsed();
                about::info(&mut reply, sections, self.node.place(), uptime, &figures);
                reply.into_inner()
            }
            Err(unanswered) => unanswered,
        }
    }

    async fn list_clients(&self, session: &Session, listed: &Listed) -> Vec<u8> {
        match self.node.all_clients(session.id()).await {
            Ok(lines) => {
                let mut reply = Reply::new(Vec::new(), session.protocol());
                reply.text(&listed.text(&lines));
                reply.into_inner()
            }
            Err(unanswered) => unanswered,
        }
    }

    #[inline(never)]
    fn about_the_connection(&self, cx: &Cx<'_, Session>, command: Command, mut args: Args<'_>) -> Left {
        let mut reply = Reply::new(cx, cx.session().protocol());
        match command {
            Command::Ping => session::ping(&mut reply, args),
            Command::Echo => reply.string(args.next().unwrap_or_default()),
            Command::Select => session::select(&mut reply, args),
            Command::Hello => session::hello(cx, args),
            Command::Client => {
                return session::client(cx, args, self.node.elapsed()).map_or(Left::Nothing, Left::Clients);
            }
            Command::Quit => {
                reply.ok();
                cx.close();
            }
            Command::Describe => about::command(&mut reply, args),
            Command::Config => about::config(&mut reply, args, self.node.value_bytes_max()),
            Command::Info => return Left::Info(about::sections(args)),
            other => unreachable!("{other:?} is about keys"),
        }
        Left::Nothing
    }
}

/// Writes a long text as there is room.
async fn write(cx: &Cx<'_, Session>, text: &[u8]) {
    for piece in text.chunks(PIECE_BYTES) {
        cx.ready().await;
        cx.write(piece);
    }
}

/// Counts one more.
#[inline]
fn up(count: &Cell<u64>) -> u64 {
    count.set(count.get() + 1);
    count.get()
}

#[cold]
fn unknown<S: 'static>(cx: &Cx<'_, S>, mut reply: Reply<&Cx<'_, S>>, name: &[u8], args: Args<'_>) {
    // A browser was made to talk to this port: what follows its headers may be requests of an attacker.
    if name.eq_ignore_ascii_case(b"post") || name.eq_ignore_ascii_case(b"host:") {
        return cx.close();
    }
    let mut told = Vec::new();
    for arg in args {
        let room = TOLD_BYTES_MAX.saturating_sub(told.len());
        if room == 0 {
            break;
        }
        told.push(b'\'');
        told.extend_from_slice(&arg[..arg.len().min(room)]);
        told.extend_from_slice(b"' ");
    }
    let name = &name[..name.len().min(TOLD_BYTES_MAX)];
    reply.error([b"ERR unknown command '", name, b"', with args beginning with: ", &told].concat());
}

impl<O: Out> Reply<O> {
    /// A command has too few or too many arguments.
    #[cold]
    pub fn wrong_arguments(&mut self, command: &str, subcommand: &[u8]) {
        let bar: &[u8] = if subcommand.is_empty() { b"" } else { b"|" };
        let text: [&[u8]; 5] =
            [b"ERR wrong number of arguments for '", command.as_bytes(), bar, subcommand, b"' command"];
        self.error(text.concat());
    }

    /// A command has no such subcommand.
    pub fn unknown_subcommand(&mut self, command: &str, given: &[u8]) {
        let given = &given[..given.len().min(TOLD_BYTES_MAX)];
        let text: [&[u8]; 5] =
            [b"ERR unknown subcommand '", given, b"'. Try ", command.as_bytes(), b" HELP."];
        self.error(text.concat());
    }
}
