//! Rooms to chat in, over all shards, with metrics on a port beside.
//!
//!     cargo run --release -p example-chat -- --websocket 127.0.0.1:7080
//!     nc 127.0.0.1 7000                      and once more in another terminal
//!     curl http://127.0.0.1:9000
//!
//! A line is a command, or goes to each other member of the room. A message of WebSocket is such a
//! line too. However a connection ends, its room receives a line that the member left.
//!
//! Each shard keeps the members that it serves and knows nothing of the others. A line goes to each
//! shard once, as a question through a [`Mesh`], is encoded once there for all its members, and
//! then its speaker may say the next one. A member whose outbox is full misses lines, and receives
//! their number once it reads again. It is reset after 1000, or if it takes no byte in 30 s.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashSet};
use std::{convert::Infallible, net::SocketAddr, rc::Rc, sync::Arc, time::Duration};

use clap::Parser;
use ringserve::framing::{Lines, SharedPayload};
use ringserve::handle::{ConnId, LocalHandle, PushError};
use ringserve::http::hyper::{Response, http::Error, service::service_fn};
use ringserve::listen::tcp;
use ringserve::log::LogOptions;
use ringserve::metrics::Metrics;
use ringserve::metrics::prometheus_client::encoding::text::encode;
use ringserve::metrics::prometheus_client::metrics::{counter::ConstCounter, gauge::ConstGauge};
use ringserve::metrics::prometheus_client::registry::Registry;
use ringserve::server::MultiService;
use ringserve::service::{CloseCx, OpenCx, Refusal, Session};
use ringserve::sync::{AskAll, Mesh};
use ringserve::websocket::TextLines;
use ringserve::{Cx, Frame, Limits, Server};
use ringserve::{ServerControl, Service, Shard, http};

/// A chat server.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address and port for WebSocket, of which each message of text is a line.
    #[arg(long, value_name = "ADDR:PORT")]
    websocket: Option<SocketAddr>,
    /// Address of the metrics.
    #[arg(long, default_value = "127.0.0.1:9000", value_name = "ADDR:PORT")]
    http: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
}

const MISSED_MAX: u64 = 1000;
const HELP: &str = "/name X, /join ROOM, /leave, /who, /quit";

type Place = (Arc<str>, ConnId);

struct Member {
    handle: LocalHandle,
    name: RefCell<Arc<str>>,
    place: RefCell<Place>,
    /// Lines that were dropped, and not yet reported to it.
    missed: Cell<u64>,
}

impl Member {
    /// Tells the member what it missed, once it reads again. Until then it misses each further
    /// line.
    async fn catch_up(self: Rc<Member>) {
        let mut told = Err(PushError::Full);
        while told == Err(PushError::Full) {
            self.handle.ready().await;
            told = self.handle.push(format!("* you read too slowly and missed {} lines", self.missed.get()));
        }
        self.missed.set(0);
    }
}

struct Seat(Rc<Member>);
impl Session for Seat {}

/// Questions of shards to each other.
#[derive(Clone, Default)]
struct Meshes {
    /// A line for a room: hand it to each member but the one of the asking shard that said it.
    said: Mesh<(Arc<str>, Arc<str>, ConnId)>,
    names: Mesh<Arc<str>, Vec<Arc<str>>>,
    /// The room of each member, and how many lines members missed.
    figures: Mesh<(), (Vec<Arc<str>>, u64)>,
}

/// One shard's part of the chat, for all its services: its members, and how many lines they missed.
struct Hub {
    shard: Shard,
    meshes: Meshes,
    members: RefCell<BTreeMap<Place, Rc<Member>>>,
    missed: Cell<u64>,
}

impl Hub {
    fn new(shard: &Shard, meshes: &Meshes) -> Rc<Hub> {
        let (members, missed) = (RefCell::default(), Cell::default());
        let hub = Rc::new(Hub { shard: shard.clone(), meshes: meshes.clone(), members, missed });
        let [heard, named, counted] = [hub.clone(), hub.clone(), hub.clone()];
        meshes.said.register(shard, move |from, (room, line, by)| {
            let line = SharedPayload::new(line.to_string());
            for member in heard.members_of(&room) {
                if (from, member.handle.id()) != (Some(heard.shard.index()), by) {
                    heard.tell(&member, &line);
                }
            }
        });
        let name = |member: Rc<Member>| member.name.borrow().clone();
        meshes.names.register(shard, move |_, room| named.members_of(&room).into_iter().map(name).collect());
        meshes.figures.register(shard, move |_from, ()| {
            (counted.members.borrow().keys().map(|(room, _)| room.clone()).collect(), counted.missed.get())
        });
        hub
    }

    fn members_of(&self, room: &Arc<str>) -> Vec<Rc<Member>> {
        let (members, first) = (self.members.borrow(), (room.clone(), ConnId::from_bits(0)));
        let here = members.range(first..).take_while(|((of, _), _)| of == room);
        here.map(|(_, member)| member.clone()).collect()
    }

    fn tell(&self, member: &Rc<Member>, line: &SharedPayload) {
        let missed = member.missed.get();
        if missed == 0 && member.handle.push_shared(line) != Err(PushError::Full) {
            return;
        }
        self.missed.update(|missed| missed + 1);
        member.missed.set(missed + 1);
        match missed {
            0 => drop(self.shard.spawn(member.clone().catch_up())),
            MISSED_MAX => member.handle.abort(),
            _ => {}
        }
    }

    /// Brings a line to each shard. It is on its way when this returns, and the answers say that it
    /// was handed out.
    fn say(&self, member: &Member, line: String) -> AskAll<()> {
        let ((room, by), line) = (member.place.borrow().clone(), Arc::<str>::from(line));
        self.meshes.said.ask_all(|_shard| (room.clone(), line.clone(), by))
    }

    /// At the end of the server all leave, without a word.
    fn announce(&self, member: &Member, what: &str) {
        if !self.shard.is_draining() {
            drop(self.say(member, format!("* {} {what}", member.name.borrow())));
        }
    }

    fn enter(&self, member: &Rc<Member>) {
        self.announce(member, "came");
        self.members.borrow_mut().insert(member.place.borrow().clone(), member.clone());
    }

    fn leave(&self, member: &Member) {
        self.announce(member, "left");
        self.members.borrow_mut().remove(&*member.place.borrow());
    }
}

fn is_name(name: &str) -> bool {
    matches!(name.len(), 1..=32) && name.chars().all(|c| c.is_alphanumeric() || "-_".contains(c))
}

/// Lines and messages alike.
struct Chat(Rc<Hub>);

impl Service for Chat {
    type Session = Seat;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Seat, Refusal> {
        let name = format!("guest-{}-{}", self.0.shard.index(), opening.id().slot());
        opening.reply(format!("* you are {name}, in lobby; {HELP}"));
        let (name, place) = (RefCell::new(name.into()), RefCell::new(("lobby".into(), opening.id())));
        let member = Rc::new(Member { handle: opening.local_handle(), name, place, missed: Cell::new(0) });
        self.0.enter(&member);
        Ok(Seat(member))
    }

    async fn call(&self, cx: &Cx<'_, Seat>, frame: Frame) -> Result<(), Infallible> {
        let (line, Seat(member)) = (String::from_utf8_lossy(&frame), cx.session());
        let command = if line.trim_end() == "/leave" { "/join lobby" } else { line.trim_end() };
        match command.split_once(' ').unwrap_or((command, "")) {
            _ if line.is_empty() => {}
            // A shard that is asked too much misses the line.
            _ if !line.starts_with('/') => {
                drop(self.0.say(member, format!("{}: {line}", member.name.borrow())).await);
            }
            ("/name", name) if is_name(name) => {
                self.0.announce(member, &format!("is called {name} now"));
                member.name.replace(name.into());
                cx.reply(format!("* you are called {name} now"));
            }
            ("/join", room) if is_name(room) => {
                self.0.leave(member);
                member.place.borrow_mut().0 = room.into();
                self.0.enter(member);
                cx.reply(format!("* you are in {room} now"));
            }
            ("/who", "") => {
                let (room, _) = member.place.borrow().clone();
                let shards = self.0.meshes.names.ask_all(|_shard| room.clone()).await;
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
        Ok(())
    }

    fn draining(&self, cx: &Cx<'_, Seat>) {
        cx.reply("* the server ends; goodbye");
    }

    fn close(&self, closed: &CloseCx<'_, Seat>) {
        self.0.leave(&closed.session().0);
    }
}

/// The HTTP service: what all shards count, and the server, for Prometheus.
async fn metrics(server: ServerControl, meshes: Meshes) -> Result<Response<String>, Error> {
    let answers = meshes.figures.ask_all(|_shard| ()).await.into_iter().flatten();
    let (places, missed): (Vec<_>, Vec<u64>) = answers.unzip();
    let (places, missed) = (places.concat(), missed.iter().sum::<u64>());
    let (members, rooms) = (places.len(), places.into_iter().collect::<HashSet<_>>().len());
    let mut registry = Registry::default();
    registry.register_collector(Box::new(server.collector()));
    registry.register("chat_rooms", "Rooms with a member", ConstGauge::new(rooms));
    registry.register("chat_members", "Members in rooms", ConstGauge::new(members));
    registry.register("chat_lines_missed", "Lines that were dropped", ConstCounter::new(missed));
    let mut text = String::new();
    // A string takes everything.
    let _ = encode(&mut text, &registry);
    Response::builder().header("content-type", Metrics::CONTENT_TYPE).body(text)
}

fn server(args: &Args) -> Server<MultiService> {
    // A member that neither sends nor receives anything for four hours is out.
    let limits = Limits::default().first_frame_timeout(None).idle_timeout(Duration::from_secs(4 * 3600));
    let limits = limits.frame_bytes_max(4096);
    let lines = tcp(args.listen).framing(Lines::default()).limits(limits.clone()).name("chat");
    let meshes = Meshes::default();
    let asked = meshes.clone();
    let chat = move |shard: &Shard| Chat(shard.shared_rc(|| Hub::new(shard, &meshes)));
    let mut server = Server::new().shards(args.shards).service(lines, chat.clone());
    if let Some(websocket) = args.websocket {
        let messages = tcp(websocket).websocket().framing(TextLines).limits(limits);
        server = server.service(messages.name("chat by websocket"), chat);
    }
    server.service(tcp(args.http).name("http"), move |shard| {
        let (server, meshes) = (shard.server().clone(), asked.clone());
        http(service_fn(move |_request| metrics(server.clone(), meshes.clone())))
    })
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    server(&Args::parse()).serve()
}

#[cfg(test)]
mod tests;
