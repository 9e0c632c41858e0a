//! Rooms to chat in from a browser: a page by HTTPS, and a service of WebSocket on a port beside,
//! over all shards.
//!
//!     cargo run --release -p example-wss-chat
//!     https://localhost:8443 in two windows of a browser, which asks about the certificate
//!
//! A message to a room goes to each shard once, as a question through a [`Mesh`], and is encoded
//! once there for all that are in the room ([`Listeners`]). What a member reads too slowly waits,
//! up to 256 KiB; then it is reset, and its page connects again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::error::Error;
use std::future::ready;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs};

use clap::Parser;
use ringserve::handle::ConnId;
use ringserve::http::hyper::body::Incoming;
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Method, Request, Response, StatusCode};
use ringserve::listen::{Endpoint, tcp};
use ringserve::log::LogOptions;
use ringserve::server::{Driver, MultiService};
use ringserve::service::{CloseCx, OpenCx, Refusal, Session};
use ringserve::sync::{AskAll, Mesh};
use ringserve::tls::{Pem, Tls};
use ringserve::topics::listeners::{Listeners, LocalSubscriber};
use ringserve::websocket::{
    Accept, Message, Messages, Reject, Upgrade, WebSocket, WebSocketOptions, WsCx, close,
};
use ringserve::{Limits, Server, Shard, http, ws};
use serde::{Deserialize, Serialize};

/// A chat server for browsers.
#[derive(Parser)]
struct Args {
    /// Address and port of the page.
    #[arg(long, default_value = "127.0.0.1:8443", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address and port for WebSocket, to which the page connects.
    #[arg(long, default_value = "127.0.0.1:8444", value_name = "ADDR:PORT")]
    websocket: SocketAddr,
    /// Without TLS: http:// and ws://.
    #[arg(long)]
    plain: bool,
    /// The certificate and those between it and its authority, as PEM. Without it the server makes
    /// one, for localhost.
    #[arg(long, requires = "key", value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its private key, as PEM.
    #[arg(long, requires = "cert", value_name = "FILE")]
    key: Option<PathBuf>,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The page, with its style and its script.
const PAGE: &str = include_str!("page.html");
const TEXT_BYTES_MAX: usize = 8000;
/// The most members that are listed for one that joins.
const HERE_MAX: usize = 1000;

/// A request of a page.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Asked {
    Say(String),
    Name(String),
    Join(String),
}

/// An event for a page. An `id` is that of a member.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Event<'a> {
    You { id: &'a str, name: &'a str },
    Joined { room: &'a str },
    Here { members: Vec<(String, String)> },
    Came { id: &'a str, name: &'a str },
    Left { id: &'a str, name: &'a str },
    Renamed { id: &'a str, name: &'a str, before: &'a str },
    Said { id: &'a str, name: &'a str, text: &'a str },
    Refused { why: &'a str },
}

impl Event<'_> {
    fn json(&self) -> String {
        // Maps with keys of text, which are all that is in it, cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

struct Member {
    id: Arc<str>,
    conn: ConnId,
    name: RefCell<Arc<str>>,
    /// Empty until it joins one.
    room: RefCell<Arc<str>>,
    hears: LocalSubscriber<Arc<str>>,
}

struct Seat(Rc<Member>);
impl Session for Seat {}

/// Questions of shards to each other.
#[derive(Clone, Default)]
struct Meshes {
    /// An event for a room.
    happened: Mesh<(Arc<str>, String)>,
    /// Who is in a room: ids and names.
    here: Mesh<Arc<str>, Vec<(String, String)>>,
}

/// The members of one shard, by their rooms.
type Members = RefCell<BTreeMap<(Arc<str>, ConnId), Rc<Member>>>;

/// One shard's part of the chat.
struct Chat {
    shard: Shard,
    meshes: Meshes,
    topics: Listeners<Arc<str>>,
    members: Rc<Members>,
}

impl Chat {
    fn new(shard: &Shard, meshes: &Meshes) -> Chat {
        let (topics, members) = (Listeners::new(shard, 256 << 10), Rc::new(Members::default()));
        let (hear, seated) = (topics.clone(), members.clone());
        meshes.happened.register(shard, move |_from, (room, event)| {
            hear.publish(&room, |()| event.clone());
        });
        meshes.here.register(shard, move |_from, room| {
            let (members, first) = (seated.borrow(), (room.clone(), ConnId::from_bits(0)));
            let here = members.range(first..).take_while(|((of, _), _)| *of == room).take(HERE_MAX);
            here.map(|(_, member)| (member.id.to_string(), member.name.borrow().to_string())).collect()
        });
        Chat { shard: shard.clone(), meshes: meshes.clone(), topics, members }
    }

    /// Tells all in the member's room. It is on its way when this returns, and the answers say that
    /// it was handed out.
    fn tell(&self, member: &Member, event: &Event<'_>) -> AskAll<()> {
        let (room, event) = (member.room.borrow().clone(), event.json());
        self.meshes.happened.ask_all(|_shard| (room.clone(), event.clone()))
    }

    fn enter(&self, member: &Rc<Member>, room: Arc<str>) {
        member.room.replace(room.clone());
        member.hears.subscribe(room.clone());
        self.members.borrow_mut().insert((room, member.conn), member.clone());
        let name = member.name.borrow().clone();
        drop(self.tell(member, &Event::Came { id: &member.id, name: &name }));
    }

    fn leave(&self, member: &Member) {
        let place = (member.room.borrow().clone(), member.conn);
        member.hears.unsubscribe(&place.0);
        let was_there = self.members.borrow_mut().remove(&place).is_some();
        // At the end of the server all leave, without a word.
        if was_there && !self.shard.is_draining() {
            let name = member.name.borrow().clone();
            drop(self.tell(member, &Event::Left { id: &member.id, name: &name }));
        }
    }

    /// The members of this member's room. Those who come meanwhile are among them, or reported
    /// later.
    async fn here(&self, member: &Member) -> Event<'static> {
        let room = member.room.borrow().clone();
        let shards = self.meshes.here.ask_all(|_shard| room.clone()).await;
        Event::Here { members: shards.into_iter().flatten().flatten().take(HERE_MAX).collect() }
    }
}

fn is_name(name: &str) -> bool {
    (1..=32).contains(&name.chars().count()) && name.chars().all(|c| c.is_alphanumeric() || "-_".contains(c))
}

impl WebSocket for Chat {
    type Session = Seat;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Seat, Refusal> {
        let (shard, conn) = (self.shard.index(), opening.id());
        let name: Arc<str> = format!("guest-{shard}-{}", conn.slot()).into();
        let id: Arc<str> = format!("{shard}:{:x}", conn.bits()).into();
        let hears = self.topics.subscriber(opening.local_handle(), ());
        opening.send(Event::You { id: &id, name: &name }.json());
        let (name, room) = (RefCell::new(name), RefCell::new("".into()));
        Ok(Seat(Rc::new(Member { id, conn, name, room, hears })))
    }

    async fn message(&self, cx: &WsCx<'_, Seat>, message: Message) -> Result<(), Infallible> {
        let Seat(member) = cx.session();
        match serde_json::from_slice(message.as_bytes()) {
            Err(_) => cx.close_with(close::POLICY, "no message of the page"),
            Ok(Asked::Say(text)) if text.is_empty() || text.len() > TEXT_BYTES_MAX => {}
            // Each shard has handed it out before the next one is read; one that is asked too much
            // misses it.
            Ok(Asked::Say(text)) => {
                let name = member.name.borrow().clone();
                self.tell(member, &Event::Said { id: &member.id, name: &name, text: &text }).await;
            }
            Ok(Asked::Name(name) | Asked::Join(name)) if !is_name(&name) => {
                let why = "Names have up to 32 letters and digits, - and _";
                cx.send(Event::Refused { why }.json());
            }
            Ok(Asked::Name(name)) => {
                let name: Arc<str> = name.into();
                let before = member.name.replace(name.clone());
                if before != name {
                    let renamed = Event::Renamed { id: &member.id, name: &name, before: &before };
                    self.tell(member, &renamed).await;
                }
                cx.send(Event::You { id: &member.id, name: &name }.json());
            }
            Ok(Asked::Join(room)) => {
                self.leave(member);
                cx.send(Event::Joined { room: &room }.json());
                self.enter(member, room.into());
                cx.send(self.here(member).await.json());
            }
        }
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, Seat>) {
        self.leave(&closed.session().0);
    }
}

/// The page asks, of this host, whatever its port; or what is no browser. Here it protects nothing,
/// since no cookie tells who a member is. Where one does, a page of another host could speak for
/// its reader.
fn let_in(upgrade: &Upgrade<'_>) -> Result<Accept, Reject> {
    let host = |name: &str| name.rsplit_once(':').map_or(name.to_owned(), |(host, _port)| host.to_owned());
    let Some(origin) = upgrade.origin() else { return Ok(Accept::new()) };
    // A page that has no host, as one in a frame with `sandbox`, says `null`.
    let asks = origin.split_once("://").map(|(_scheme, origin)| host(origin));
    let is_own = asks.is_some() && asks == upgrade.host().map(host);
    if is_own { Ok(Accept::new()) } else { Err(Reject::new(403).text("another page")) }
}

fn page(request: &Request<Incoming>, websocket: u16) -> Response<String> {
    let text = |status: StatusCode| {
        let mut answer = Response::new(format!("{status}\n"));
        *answer.status_mut() = status;
        answer
    };
    match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/") => {
            let page = PAGE.replace("WEBSOCKET_PORT", &websocket.to_string());
            let own = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src ws: wss:";
            let answer = Response::builder()
                .header("content-type", "text/html; charset=utf-8")
                .header("content-security-policy", own)
                .header("x-content-type-options", "nosniff");
            answer.body(page).unwrap_or_else(|_| text(StatusCode::INTERNAL_SERVER_ERROR))
        }
        (_, "/") => text(StatusCode::METHOD_NOT_ALLOWED),
        _ => text(StatusCode::NOT_FOUND),
    }
}

/// A certificate for localhost, which no authority has signed.
fn self_signed() -> Result<(Pem, Pem), Box<dyn Error>> {
    let made = rcgen::generate_simple_self_signed(["localhost".into(), "127.0.0.1".into()])?;
    let file = env::temp_dir().join("ringserve-chat.pem");
    fs::write(&file, made.cert.pem())?;
    // Not `println!`, which panics where nothing reads.
    let _ =
        writeln!(stdout(), "made a certificate for localhost; clients believe it with {}", file.display());
    Ok((made.cert.pem().into(), made.signing_key.serialize_pem().into()))
}

fn server(args: &Args) -> Result<Server<MultiService>, Box<dyn Error>> {
    let tls = match (&args.cert, &args.key) {
        _ if args.plain => None,
        (Some(cert), Some(key)) => Some((Pem::file(cert)?, Pem::file(key)?)),
        _ => Some(self_signed()?),
    };
    let tls =
        tls.map(|(cert, key)| Tls::server().certificate(cert, key).watch_files(Duration::from_secs(10)));
    let over_tls = |endpoint: Endpoint| match &tls {
        Some(tls) => endpoint.tls(tls.clone()),
        None => endpoint,
    };
    // A page that vanished answers no ping. Who only listens says nothing.
    let limits = Limits::default().first_frame_timeout(None).idle_timeout(None);
    let limits = limits.heartbeat_interval(Duration::from_secs(30));
    let options = WebSocketOptions::new().message_bytes_max(16 << 10).upgrade(let_in);
    let chat = over_tls(tcp(args.websocket)).websocket_with(options).framing(Messages::text());
    let (meshes, port) = (Meshes::default(), args.websocket.port());
    Ok(Server::new()
        .shards(args.shards)
        .driver(args.driver)
        .service(over_tls(tcp(args.listen)).name("page"), move |_shard| {
            http(service_fn(move |request| ready(Ok::<_, Infallible>(page(&request, port)))))
        })
        .service(chat.limits(limits).name("chat"), move |shard| ws(Chat::new(shard, &meshes))))
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let scheme = if args.plain { "http" } else { "https" };
    let _ = writeln!(stdout(), "the page is {scheme}://{}", args.listen);
    Ok(server(&args)?.serve()?)
}

#[cfg(test)]
mod tests;
