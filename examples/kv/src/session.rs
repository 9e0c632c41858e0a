//! What is kept of a connection, and the commands about it.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ringserve::Cx;

use crate::VERSION;
use crate::number;
use crate::reply::{Out, Protocol, Reply};
use crate::resp::Args;

/// Databases, as SELECT counts them.
pub const DATABASES: i64 = 1;

/// A connection, as the framework keeps it.
#[derive(Default)]
pub struct Session {
    protocol: Cell<Protocol>,
    /// Set when the connection is opened.
    client: OnceCell<Rc<Client>>,
}

/// A connection, as CLIENT LIST tells it.
pub struct Client {
    id: u64,
    addr: String,
    /// When, counted from the start of its shard.
    opened: Duration,
    /// As in the session, which each request looks at.
    protocol: Cell<Protocol>,
    /// Most connections have none.
    names: RefCell<Option<Box<Names>>>,
}

/// The connections of one shard.
#[derive(Default)]
pub struct Clients {
    by_id: RefCell<BTreeMap<u64, Rc<Client>>>,
}

/// What CLIENT LIST tells of one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientLine {
    /// Its number, different from that of any connection there was.
    pub id: u64,
    /// With a line break.
    pub text: String,
}

/// Which connections CLIENT LIST tells.
#[derive(Debug, PartialEq, Eq)]
pub enum Listed {
    /// Each one.
    All,
    /// None: those of a type that this server does not have.
    None,
    /// Those of these numbers.
    Ids(Vec<u64>),
}

/// What a client calls itself.
#[derive(Clone, Default)]
struct Names {
    name: Vec<u8>,
    lib_name: Vec<u8>,
    lib_version: Vec<u8>,
}

impl Clients {
    /// A connection of that number was opened, from `addr`, `now` after the start of the shard.
    pub fn open(&self, session: &Session, id: u64, addr: String, now: Duration) {
        let client = session.client.get_or_init(|| Rc::new(Client::new(id, addr, now)));
        self.by_id.borrow_mut().insert(id, client.clone());
    }

    /// It was closed.
    pub fn close(&self, session: &Session) {
        if let Some(client) = session.client.get() {
            self.by_id.borrow_mut().remove(&client.id);
        }
    }

    /// All that are open, of which `caller` asks.
    pub fn lines(&self, caller: u64, now: Duration) -> Vec<ClientLine> {
        self.by_id.borrow().values().map(|client| client.line(caller == client.id, now)).collect()
    }
}

impl Session {
    /// What the client understands.
    #[inline]
    pub fn protocol(&self) -> Protocol {
        self.protocol.get()
    }

    /// The connection's number, 0 before it is opened.
    pub fn id(&self) -> u64 {
        self.client.get().map_or(0, |client| client.id)
    }

    fn speak(&self, protocol: Protocol) {
        self.protocol.set(protocol);
        if let Some(client) = self.client.get() {
            client.protocol.set(protocol);
        }
    }

    fn names(&self) -> Names {
        self.client.get().map(|client| client.names()).unwrap_or_default()
    }

    fn rename(&self, change: impl FnOnce(&mut Names)) {
        if let Some(client) = self.client.get() {
            change(client.names.borrow_mut().get_or_insert_default());
        }
    }
}

impl Client {
    fn new(id: u64, addr: String, opened: Duration) -> Client {
        Client { id, addr, opened, protocol: Cell::default(), names: RefCell::default() }
    }

    fn names(&self) -> Names {
        self.names.borrow().as_deref().cloned().unwrap_or_default()
    }

    /// The last command is known of the one that asks, and not kept of the others.
    fn line(&self, asks: bool, now: Duration) -> ClientLine {
        let names = self.names();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let text = format!(
            "id={} addr={} name={} age={} flags=N db=0 resp={} lib-name={} lib-ver={}{} user=default\n",
            self.id,
            self.addr,
            text(&names.name),
            now.saturating_sub(self.opened).as_secs(),
            if self.protocol.get() == Protocol::Resp3 { 3 } else { 2 },
            text(&names.lib_name),
            text(&names.lib_version),
            if asks { " cmd=client" } else { "" },
        );
        ClientLine { id: self.id, text }
    }
}

impl Listed {
    /// The arguments behind CLIENT LIST.
    ///
    /// # Errors
    /// What Redis answers to them.
    pub fn parse(mut args: Args<'_>) -> Result<Listed, String> {
        let Some(word) = args.next() else { return Ok(Listed::All) };
        match &word.to_ascii_lowercase()[..] {
            b"type" if args.len() == 1 => {
                let kind = args.next().unwrap_or_default();
                match &kind.to_ascii_lowercase()[..] {
                    b"normal" => Ok(Listed::All),
                    b"master" | b"replica" | b"slave" | b"pubsub" => Ok(Listed::None),
                    _ => Err(format!("ERR Unknown client type '{}'", String::from_utf8_lossy(kind))),
                }
            }
            b"id" if args.len() > 0 => {
                let id = |arg| number::parse(arg).and_then(|id| u64::try_from(id).ok()).filter(|id| *id > 0);
                let ids: Option<Vec<u64>> = args.map(id).collect();
                ids.map(Listed::Ids).ok_or_else(|| "ERR Invalid client ID".to_owned())
            }
            _ => Err("ERR syntax error".to_owned()),
        }
    }

    /// The text of CLIENT LIST.
    pub fn text(&self, lines: &[ClientLine]) -> String {
        let listed = |line: &&ClientLine| match self {
            Listed::All => true,
            Listed::None => false,
            Listed::Ids(ids) => ids.contains(&line.id),
        };
        lines.iter().filter(listed).map(|line| line.text.as_str()).collect()
    }
}

/// PING: PONG, or what it was given.
pub fn ping(reply: &mut Reply<impl Out>, mut args: Args<'_>) {
    match (args.next(), args.next()) {
        (None, _) => reply.simple("PONG"),
        (Some(text), None) => reply.string(text),
        _ => reply.error("ERR wrong number of arguments for 'ping' command"),
    }
}

/// SELECT: there is one database.
pub fn select(reply: &mut Reply<impl Out>, mut args: Args<'_>) {
    match args.next().and_then(number::parse) {
        Some(0..DATABASES) => reply.ok(),
        Some(index) if i32::try_from(index).is_ok() => reply.error("ERR DB index is out of range"),
        Some(_) => {
            reply.error("ERR value is out of range, value must between -2147483648 and 2147483647");
        }
        None => reply.error("ERR value is not an integer or out of range"),
    }
}

/// HELLO: which version of the protocol to speak, who the client is, and who the server.
pub fn hello(cx: &Cx<'_, Session>, mut args: Args<'_>) {
    let session = cx.session();
    let mut reply = Reply::new(cx, session.protocol());
    let protocol = match args.next().map(number::parse) {
        None => session.protocol(),
        Some(Some(2)) => Protocol::Resp2,
        Some(Some(3)) => Protocol::Resp3,
        Some(Some(_)) => return reply.error("NOPROTO unsupported protocol version"),
        Some(None) => return reply.error("ERR Protocol version is not an integer or out of range"),
    };
    let mut name = None;
    while let Some(option) = args.next() {
        if option.eq_ignore_ascii_case(b"auth") && args.len() >= 2 {
            // Without a password set, Redis takes any for the default user.
            if (args.next(), args.next()).0 != Some(b"default") {
                return reply.error("WRONGPASS invalid username-password pair or user is disabled.");
            }
        } else if option.eq_ignore_ascii_case(b"setname") && args.len() >= 1 {
            name = args.next();
            if !name.is_some_and(is_name) {
                return reply.error(BAD_NAME);
            }
        } else {
            return reply.error([b"ERR Syntax error in HELLO option '", option, b"'"].concat());
        }
    }
    if let Some(name) = name {
        session.rename(|names| names.name = name.to_vec());
    }
    session.speak(protocol);
    let mut reply = Reply::new(cx, protocol);
    reply.map(7);
    for (key, value) in [("server", "redis"), ("version", VERSION)] {
        reply.string(key.as_bytes());
        reply.string(value.as_bytes());
    }
    reply.string(b"proto");
    reply.integer(if protocol == Protocol::Resp3 { 3 } else { 2 });
    reply.string(b"id");
    reply.integer(session.id() as i64);
    for (key, value) in [("mode", "standalone"), ("role", "master")] {
        reply.string(key.as_bytes());
        reply.string(value.as_bytes());
    }
    reply.string(b"modules");
    reply.array(0);
}

const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

fn is_name(name: &[u8]) -> bool {
    name.iter().all(|byte| matches!(byte, b'!'..=b'~'))
}

/// CLIENT: names and the number of this connection. What is left to do is CLIENT LIST, which asks all shards.
pub fn client(cx: &Cx<'_, Session>, mut args: Args<'_>, now: Duration) -> Option<Listed> {
    let session = cx.session();
    let mut reply = Reply::new(cx, session.protocol());
    let given = args.next().unwrap_or_default();
    let subcommand = given.to_ascii_lowercase();
    // Arguments after the subcommand.
    let fits = match &subcommand[..] {
        b"id" | b"getname" | b"info" => args.len() == 0,
        b"setname" => args.len() == 1,
        b"setinfo" => args.len() == 2,
        b"list" => true,
        _ => {
            reply.unknown_subcommand("CLIENT", given);
            return None;
        }
    };
    if !fits {
        reply.wrong_arguments("client", &subcommand);
        return None;
    }
    match &subcommand[..] {
        b"id" => reply.integer(session.id() as i64),
        b"info" => {
            reply.text(&session.client.get().map_or(String::new(), |client| client.line(true, now).text))
        }
        b"list" => match Listed::parse(args) {
            Ok(listed) => return Some(listed),
            Err(error) => reply.error(error),
        },
        b"getname" => match session.names().name {
            name if name.is_empty() => reply.null(),
            name => reply.string(&name),
        },
        b"setname" => {
            let name = args.next().unwrap_or_default();
            if is_name(name) {
                session.rename(|names| names.name = name.to_vec());
                reply.ok();
            } else {
                reply.error(BAD_NAME);
            }
        }
        _ => {
            let (which, value) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
            set_info(session, &mut reply, &which.to_ascii_lowercase(), value);
        }
    }
    None
}

/// CLIENT SETINFO: the name or the version of the client's library.
fn set_info(session: &Session, reply: &mut Reply<impl Out>, which: &[u8], value: &[u8]) {
    if !is_name(value) {
        let which = String::from_utf8_lossy(which);
        return reply.error(format!("ERR {which} cannot contain spaces, newlines or special characters."));
    }
    match which {
        b"lib-name" => session.rename(|names| names.lib_name = value.to_vec()),
        b"lib-ver" => session.rename(|names| names.lib_version = value.to_vec()),
        _ => return reply.error([b"ERR Unrecognized option '", which, b"'"].concat()),
    }
    reply.ok();
}
