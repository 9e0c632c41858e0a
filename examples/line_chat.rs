//! Rooms to chat in, over all shards.
//!
//!     cargo run --release --example line_chat
//!     nc 127.0.0.1 7000          and once more in another terminal
//!
//! | line | what happens |
//! |---|---|
//! | `/name X` | you are called X from now on |
//! | `/join ROOM` | you leave your room for that one; everybody begins in `lobby` |
//! | `/who` | who is in the room, on all shards |
//! | `/quit` | goodbye |
//! | anything else | goes to everybody in the room but you |
//!
//! Each shard keeps the members it serves itself and knows nothing of the others. What is said goes to each shard once,
//! as a message through [`Mesh`], however many listen there, and is handed out there through [`LocalHandle`]s, which
//! costs a copy into each outbox.
//!
//! Who reads too slowly misses lines instead of holding up the room or filling memory: a push to a full outbox is
//! dropped and counted, and when there is room again the first thing to come is how many lines were missed.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::sync::Mesh;
use ringserve::{
    Closed, ConnHandle, ConnId, Cx, Driver, Frame, Limits, LocalHandle, Opening, PushError, Refusal, Server,
    Service, Shard,
};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// A chat server.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
    /// Bytes that may wait for one who does not read, before lines are dropped.
    #[arg(long, default_value_t = 256 << 10, value_name = "BYTES")]
    outbox: usize,
}

/// A line may be as long as that; a name or a room as the other.
const LINE_BYTES_MAX: usize = 4096;
const NAME_BYTES_MAX: usize = 32;

/// What shards tell each other. Texts are shared, not copied, until they are in an outbox.
enum Message {
    /// A line for a room's members, but for the one who said it.
    Said { room: Arc<str>, line: Arc<str>, by: (usize, ConnId) },
    /// Tell the one who asked who is in the room.
    Who { room: Arc<str>, asks: ConnHandle },
}

/// The members of one shard, by room.
#[derive(Default)]
struct Rooms {
    rooms: RefCell<HashMap<Arc<str>, BTreeMap<ConnId, Member>>>,
}

struct Member {
    name: Rc<str>,
    handle: LocalHandle,
    /// Lines that were dropped since the last one that came through.
    missed: Cell<u64>,
}

impl Rooms {
    fn put(&self, room: &Arc<str>, member: Member) {
        self.rooms.borrow_mut().entry(room.clone()).or_default().insert(member.handle.id(), member);
    }

    fn remove(&self, room: &Arc<str>, id: ConnId) -> Option<Member> {
        let mut rooms = self.rooms.borrow_mut();
        let members = rooms.get_mut(room)?;
        let member = members.remove(&id);
        if members.is_empty() {
            rooms.remove(room);
        }
        member
    }

    fn handle(&self, here: usize, message: Message) {
        match message {
            Message::Said { room, line, by } => {
                let rooms = self.rooms.borrow();
                let members = rooms.get(&room).into_iter().flatten();
                members.filter(|(id, _)| (here, **id) != by).for_each(|(_, member)| member.tell(&line));
            }
            Message::Who { room, asks } => {
                let rooms = self.rooms.borrow();
                for member in rooms.get(&room).into_iter().flat_map(BTreeMap::values) {
                    // Who asks and does not read has not much use for the rest either.
                    if asks.push(format!("* {} is in {room}", member.name)).is_err() {
                        break;
                    }
                }
            }
        }
    }
}

impl Member {
    /// Hands a line on, or counts that it was dropped.
    fn tell(&self, line: &str) {
        if self.missed.get() > 0 {
            let notice = format!("* you read too slowly and missed {} lines", self.missed.get());
            if self.handle.push(notice.as_bytes()).is_ok() {
                self.missed.set(0);
            }
        }
        // What was missed is told before the next line, and there may be room for one of them only.
        let pushed =
            if self.missed.get() > 0 { Err(PushError::Full) } else { self.handle.push(line.as_bytes()) };
        // Where it is gone, its close is on the way to us.
        if pushed == Err(PushError::Full) {
            self.missed.set(self.missed.get() + 1);
        }
    }
}

/// One shard's part of the chat.
struct Chat {
    shard: usize,
    shards: Mesh<Message>,
    rooms: Rc<Rooms>,
}

/// Who a connection is.
struct Session {
    who: RefCell<Who>,
}

impl ringserve::Session for Session {}

#[derive(Clone)]
struct Who {
    id: ConnId,
    name: Rc<str>,
    room: Arc<str>,
}

impl Chat {
    /// One message for each shard, also where no client listens.
    fn tell_all(&self, teller: &LocalHandle, message: impl Fn() -> Message) {
        for shard in 0..self.shards.count() {
            if self.shards.try_send(shard, message()).is_err() {
                // Tens of thousands wait there: say so rather than wait with everybody behind us.
                let _ = teller.push(b"* too much is being said, not everybody will hear you");
            }
        }
    }

    fn say(&self, teller: &LocalHandle, who: &Who, line: &str) {
        let (line, by) = (Arc::<str>::from(line), (self.shard, who.id));
        self.tell_all(teller, || Message::Said { room: who.room.clone(), line: line.clone(), by });
    }

    fn obey(&self, cx: &Cx<'_, Session>, mut who: Who, line: &str) {
        let own = cx.local_handle();
        match line.split_once(' ').unwrap_or((line, "")) {
            ("/name", name) if is_name(name) => {
                self.say(&own, &who, &format!("* {} is called {name} now", who.name));
                let missed = self.rooms.remove(&who.room, who.id).map_or(0, |member| member.missed.get());
                who.name = name.into();
                self.enter(own, &who, missed);
                cx.session().who.replace(who);
                cx.reply(format!("* you are called {name} now").as_bytes());
            }
            ("/join", room) if is_name(room) => {
                self.say(&own, &who, &format!("* {} left", who.name));
                let missed = self.rooms.remove(&who.room, who.id).map_or(0, |member| member.missed.get());
                who.room = room.into();
                self.say(&own, &who, &format!("* {} came", who.name));
                self.enter(own, &who, missed);
                cx.session().who.replace(who);
                cx.reply(format!("* you are in {room} now").as_bytes());
            }
            ("/who", "") => {
                let asks = cx.handle();
                self.tell_all(&own, || Message::Who { room: who.room.clone(), asks: asks.clone() });
            }
            ("/quit", "") => {
                cx.reply(b"* goodbye");
                cx.close();
            }
            _ => cx.reply(b"* /name X, /join ROOM, /who, /quit; names are short and have no spaces"),
        }
    }

    /// `missed` lines were dropped for it elsewhere, and it was not told of them.
    fn enter(&self, handle: LocalHandle, who: &Who, missed: u64) {
        self.rooms.put(&who.room, Member { name: who.name.clone(), handle, missed: Cell::new(missed) });
    }
}

fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.chars().all(|c| c.is_alphanumeric() || "-_".contains(c))
}

impl Service for Chat {
    type Session = Session;
    type Error = Infallible;

    async fn open(&self, opening: &Opening<'_>) -> Result<Session, Refusal> {
        let name = format!("guest-{}-{}", self.shard, opening.id().slot());
        opening.reply(format!("* you are {name}, in lobby; /name X, /join ROOM, /who, /quit").as_bytes());
        let who = Who { id: opening.id(), name: name.into(), room: "lobby".into() };
        let handle = opening.local_handle();
        self.say(&handle, &who, &format!("* {} came", who.name));
        self.enter(handle, &who, 0);
        Ok(Session { who: RefCell::new(who) })
    }

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame) -> Result<(), Infallible> {
        let who = cx.session().who.borrow().clone();
        let line = String::from_utf8_lossy(&frame);
        if line.starts_with('/') {
            self.obey(cx, who, line.trim_end());
        } else if !line.is_empty() {
            self.say(&cx.local_handle(), &who, &format!("{}: {line}", who.name));
        }
        Ok(())
    }

    fn close(&self, closed: &Closed<'_, Session>) {
        let who = closed.session().who.borrow();
        self.rooms.remove(&who.room, who.id);
        let (line, by) = (Arc::<str>::from(format!("* {} left", who.name)), (self.shard, who.id));
        for shard in 0..self.shards.count() {
            let _ =
                self.shards.try_send(shard, Message::Said { room: who.room.clone(), line: line.clone(), by });
        }
    }
}

/// Makes the service of each shard.
fn chat() -> impl Fn(&Shard) -> Chat + Send + Sync {
    let shards = Mesh::new();
    move |shard| {
        let (rooms, here) = (Rc::new(Rooms::default()), shard.index());
        let local = rooms.clone();
        shards.register(shard, move |_from, message| local.handle(here, message));
        Chat { shard: here, shards: shards.clone(), rooms }
    }
}

fn limits(outbox_bytes_high: usize) -> Limits {
    Limits::default()
        .frame_bytes_max(LINE_BYTES_MAX)
        .outbox_bytes_high(outbox_bytes_high)
        .outbox_bytes_low(outbox_bytes_high / 4)
        // People listen for longer than they talk.
        .first_frame_timeout(None)
        .idle_timeout(None)
}

fn main() -> Result<(), ringserve::Error> {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    let args = Args::parse();
    let mut server =
        Server::bind(args.listen).driver(args.driver).limits(limits(args.outbox)).framing(Lines::default());
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    server.serve(chat())
}

#[cfg(test)]
#[path = "line_chat/tests.rs"]
mod tests;
