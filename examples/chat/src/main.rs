//! Rooms to chat in, over all shards, with metrics on a port beside.
//!
//!     cargo run --release -p example-chat
//!     nc 127.0.0.1 7000                      and once more in another terminal
//!     curl http://127.0.0.1:9000/metrics
//!
//! A line is a command, or goes to each other member of the room. Commands are `/name X`, `/join ROOM`, `/leave` (back to the
//! lobby, where a member begins), `/who` and `/quit`. However a connection ends, its room hears that the member left.
//!
//! Each shard keeps the members that it serves and knows nothing of the others. A line goes to each shard once, as a question
//! through a [`Mesh`], is copied there into each member's outbox, and then its speaker may say the next one. A member whose
//! outbox is full misses lines, and is told how many once it reads again. It is reset after 1000, or if it takes no byte in 30 s.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::http::HttpOptions;
use ringserve::http::hyper::{Request, Response, StatusCode, body::Incoming, header, service::service_fn};
use ringserve::listen::tcp;
use ringserve::sync::{AskError, Mesh, OnAll};
use ringserve::{Closed, ConnId, Cx, Frame, Limits, LocalHandle, Opening, PushError, Refusal};
use ringserve::{Server, Service, Session, Several, Shard, http};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// A chat server.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Where /metrics and /healthz are.
    #[arg(long, default_value = "127.0.0.1:9000", value_name = "ADDR:PORT")]
    http: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
}

const NAME_BYTES_MAX: usize = 32;
const MISSED_MAX: u64 = 1000;
/// A member that neither says nor hears anything for this time is out.
const IDLE_TIME: Duration = Duration::from_secs(4 * 3600);
const HELP: &str = "/name X, /join ROOM, /leave, /who, /quit";

struct Member {
    handle: LocalHandle,
    name: RefCell<Arc<str>>,
    room: RefCell<Arc<str>>,
    /// Lines that were dropped, and of which it was not told.
    missed: Cell<u64>,
}

impl Member {
    /// Waits until the member reads again, and tells it what it missed. Until then it misses each further line.
    async fn catch_up(self: Rc<Member>) {
        loop {
            self.handle.ready().await;
            let notice = format!("* you read too slowly and missed {} lines", self.missed.get());
            // A reply may have filled the outbox again.
            if self.handle.push(&notice) != Err(PushError::Full) {
                break self.missed.set(0);
            }
        }
    }
}

type Room = BTreeMap<ConnId, Rc<Member>>;

/// What one shard keeps, and what its members heard and missed.
#[derive(Default)]
struct Rooms {
    members: RefCell<HashMap<Arc<str>, Room>>,
    heard: Cell<u64>,
    missed: Cell<u64>,
}

impl Rooms {
    fn insert(&self, member: &Rc<Member>) {
        let (mut rooms, room) = (self.members.borrow_mut(), member.room.borrow().clone());
        rooms.entry(room).or_default().insert(member.handle.id(), member.clone());
    }

    fn remove(&self, member: &Member) {
        let (mut rooms, room) = (self.members.borrow_mut(), member.room.borrow());
        let Some(members) = rooms.get_mut(&*room) else { return };
        members.remove(&member.handle.id());
        if members.is_empty() {
            rooms.remove(&*room);
        }
    }

    fn names(&self, room: &str) -> Vec<Arc<str>> {
        let rooms = self.members.borrow();
        rooms.get(room).into_iter().flatten().map(|(_, member)| member.name.borrow().clone()).collect()
    }

    fn tell(&self, shard: &Shard, member: &Rc<Member>, line: &str) {
        let missed = member.missed.get();
        if missed == 0 && member.handle.push(line) != Err(PushError::Full) {
            return self.heard.set(self.heard.get() + 1);
        }
        self.missed.set(self.missed.get() + 1);
        member.missed.set(missed + 1);
        if missed == 0 {
            shard.spawn(member.clone().catch_up());
        } else if missed == MISSED_MAX {
            member.handle.abort();
        }
    }

    fn figures(&self) -> Figures {
        let rooms = self.members.borrow();
        let members = rooms.values().map(BTreeMap::len).sum::<usize>();
        (rooms.keys().cloned().collect(), [members as u64, self.heard.get(), self.missed.get()])
    }
}

/// A shard's rooms, how many members are in them, and the lines that these heard and missed.
type Figures = (Vec<Arc<str>>, [u64; 3]);

/// What shards ask each other.
#[derive(Clone, Default)]
struct Meshes {
    /// A line for a room: hand it to each member but the one of the asking shard that said it.
    said: Mesh<(Arc<str>, Arc<str>, ConnId)>,
    names: Mesh<Arc<str>, Vec<Arc<str>>>,
    figures: Mesh<(), Figures>,
}

/// One shard's part of the chat.
struct Chat {
    shard: Shard,
    meshes: Meshes,
    rooms: Rc<Rooms>,
}

struct Seat(Rc<Member>);

impl Session for Seat {}

impl Chat {
    fn new(shard: &Shard, meshes: Meshes) -> Chat {
        let (rooms, here) = (Rc::new(Rooms::default()), shard.clone());
        let [heard, named, counted] = [rooms.clone(), rooms.clone(), rooms.clone()];
        meshes.said.register(shard, move |from, (room, line, by)| {
            for (id, member) in heard.members.borrow().get(&room).into_iter().flatten() {
                if (from, *id) != (Some(here.index()), by) {
                    heard.tell(&here, member, &line);
                }
            }
        });
        meshes.names.register(shard, move |_from, room| named.names(&room));
        meshes.figures.register(shard, move |_from, ()| counted.figures());
        Chat { shard: shard.clone(), meshes, rooms }
    }

    /// Brings a line to each shard. It is on its way when this returns, and the answers say that it was handed out.
    fn say(&self, member: &Member, line: String) -> OnAll<()> {
        let (room, line, by) = (member.room.borrow().clone(), Arc::<str>::from(line), member.handle.id());
        self.meshes.said.on_all(|_shard| (room.clone(), line.clone(), by))
    }

    /// At the end of the server all leave, without a word.
    fn announce(&self, member: &Member, what: &str) {
        if !self.shard.is_draining() {
            drop(self.say(member, format!("* {} {what}", member.name.borrow())));
        }
    }

    async fn obey(&self, cx: &Cx<'_, Seat>, line: &str) {
        let Seat(member) = cx.session();
        match line.split_once(' ').unwrap_or((line, "")) {
            ("/name", name) if is_name(name) => {
                self.announce(member, &format!("is called {name} now"));
                member.name.replace(name.into());
                cx.reply(format!("* you are called {name} now"));
            }
            ("/join", room) if is_name(room) => self.move_to(cx, room),
            ("/leave", "") => self.move_to(cx, "lobby"),
            ("/who", "") => {
                let room = member.room.borrow().clone();
                let shards = self.meshes.names.on_all(|_shard| room.clone()).await;
                for name in shards.into_iter().flatten().flatten() {
                    cx.ready().await;
                    cx.reply(format!("* {name} is in {room}"));
                }
            }
            ("/quit", "") => {
                cx.reply("* goodbye");
                cx.close();
            }
            _ => cx.reply(format!("* {HELP}; names are short and have no spaces")),
        }
    }

    fn move_to(&self, cx: &Cx<'_, Seat>, room: &str) {
        let Seat(member) = cx.session();
        self.announce(member, "left");
        self.rooms.remove(member);
        member.room.replace(room.into());
        self.announce(member, "came");
        self.rooms.insert(member);
        cx.reply(format!("* you are in {room} now"));
    }
}

fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.chars().all(|c| c.is_alphanumeric() || "-_".contains(c))
}

impl Service for Chat {
    type Session = Seat;
    type Error = Infallible;

    async fn open(&self, opening: &Opening<'_>) -> Result<Seat, Refusal> {
        let name = format!("guest-{}-{}", self.shard.index(), opening.id().slot());
        opening.reply(format!("* you are {name}, in lobby; {HELP}"));
        let (name, room) = (RefCell::new(name.into()), RefCell::new("lobby".into()));
        let member = Rc::new(Member { handle: opening.local_handle(), name, room, missed: Cell::new(0) });
        self.announce(&member, "came");
        self.rooms.insert(&member);
        Ok(Seat(member))
    }

    async fn call(&self, cx: &Cx<'_, Seat>, frame: Frame) -> Result<(), Infallible> {
        let (line, Seat(member)) = (String::from_utf8_lossy(&frame), cx.session());
        if line.starts_with('/') {
            self.obey(cx, line.trim_end()).await;
        } else if !line.is_empty() {
            let line = format!("{}: {line}", member.name.borrow());
            if self.say(member, line).await.contains(&Err(AskError::Full)) {
                cx.reply("* too much is being said, not all heard you");
            }
        }
        Ok(())
    }

    fn draining(&self, cx: &Cx<'_, Seat>) {
        cx.reply("* the server ends; goodbye");
    }

    fn close(&self, closed: &Closed<'_, Seat>) {
        let Seat(member) = closed.session();
        self.rooms.remove(member);
        self.announce(member, "left");
    }
}

/// The HTTP service, for Prometheus and a load balancer.
async fn page(
    shard: Shard,
    meshes: Meshes,
    request: Request<Incoming>,
) -> Result<Response<String>, Infallible> {
    let (status, text) = match request.uri().path() {
        "/healthz" => (StatusCode::OK, "ok\n".to_owned()),
        "/metrics" => (StatusCode::OK, metrics(&shard, &meshes).await),
        _ => (StatusCode::NOT_FOUND, "/metrics or /healthz\n".to_owned()),
    };
    let page = Response::builder().status(status).header(header::CONTENT_TYPE, "text/plain; version=0.0.4");
    Ok(page.body(text).expect("a good head"))
}

async fn metrics(shard: &Shard, meshes: &Meshes) -> String {
    // Asks for the server's figures, which are there once the shards answered: a shard is never made to wait for them.
    shard.server().stats();
    let shards: Vec<Figures> = meshes.figures.on_all(|_shard| ()).await.into_iter().flatten().collect();
    let sum = |n: usize| shards.iter().map(|(_, counts)| counts[n]).sum::<u64>();
    let rooms: HashSet<_> = shards.iter().flat_map(|(rooms, _)| rooms).collect();
    let stats = shard.server().stats();
    let values = [
        ("chat_rooms", rooms.len() as u64),
        ("chat_members", sum(0)),
        ("chat_lines_in_total", stats.service("chat").map_or(0, |of| of.counters.frames)),
        ("chat_lines_out_total", sum(1)),
        ("chat_lines_missed_total", sum(2)),
        ("server_connections", stats.connections as u64),
        ("server_connections_total", stats.counters.opened),
    ];
    let kind = |name: &str| if name.ends_with("_total") { "counter" } else { "gauge" };
    values.map(|(name, value)| format!("# TYPE {name} {}\n{name} {value}\n", kind(name))).concat()
}

fn server(args: &Args) -> Server<Several> {
    let limits = Limits::default().frame_bytes_max(4096).first_frame_timeout(None).idle_timeout(IDLE_TIME);
    let chat = tcp(args.listen).framing(Lines::default()).limits(limits).name("chat");
    let meshes = Meshes::default();
    let asked = meshes.clone();
    let server = Server::new().service(chat, move |shard| Chat::new(shard, meshes.clone()));
    let server = server.service(tcp(args.http).name("http"), move |shard| {
        let (shard, meshes) = (shard.clone(), asked.clone());
        let pages = service_fn(move |request| page(shard.clone(), meshes.clone(), request));
        // hyper's date is the system's, which no seed decides.
        http(pages).options(HttpOptions::default().date(false))
    });
    match args.shards {
        Some(shards) => server.shards(shards),
        None => server,
    }
}

fn main() -> Result<(), ringserve::Error> {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    server(&Args::parse()).serve()
}

#[cfg(test)]
mod tests;
