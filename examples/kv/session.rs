//! What is kept of a connection, and the commands about it.

use std::cell::{Cell, RefCell};

use ringserve::Cx;

use crate::VERSION;
use crate::number;
use crate::reply::{Out, Protocol, Reply};
use crate::resp::Args;

/// Databases, as SELECT counts them.
pub const DATABASES: i64 = 1;

/// See the module.
#[derive(Default)]
pub struct Session {
    id: Cell<u64>,
    protocol: Cell<Protocol>,
    /// Most connections have none.
    names: RefCell<Option<Box<Names>>>,
}

/// What a client calls itself.
#[derive(Clone, Default)]
struct Names {
    name: Vec<u8>,
    lib_name: Vec<u8>,
    lib_version: Vec<u8>,
}

impl Session {
    /// The connection was opened and is the server's `id`th.
    pub fn open(&self, id: u64) {
        self.id.set(id);
    }

    /// What the client understands.
    #[inline]
    pub fn protocol(&self) -> Protocol {
        self.protocol.get()
    }

    fn names(&self) -> Names {
        self.names.borrow().as_deref().cloned().unwrap_or_default()
    }

    fn rename(&self, change: impl FnOnce(&mut Names)) {
        change(self.names.borrow_mut().get_or_insert_default());
    }

    /// The line of CLIENT LIST.
    fn describe(&self, cx: &Cx<'_, Session>) -> String {
        let names = self.names();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        format!(
            "id={} addr={} name={} flags=N db=0 resp={} lib-name={} lib-ver={} cmd=client user=default\n",
            self.id.get(),
            cx.peer(),
            text(&names.name),
            if self.protocol() == Protocol::Resp3 { 3 } else { 2 },
            text(&names.lib_name),
            text(&names.lib_version),
        )
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
    session.protocol.set(protocol);
    let mut reply = Reply::new(cx, protocol);
    reply.map(7);
    for (key, value) in [("server", "redis"), ("version", VERSION)] {
        reply.string(key.as_bytes());
        reply.string(value.as_bytes());
    }
    reply.string(b"proto");
    reply.integer(if protocol == Protocol::Resp3 { 3 } else { 2 });
    reply.string(b"id");
    reply.integer(session.id.get() as i64);
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

/// CLIENT: names and the number of this connection.
pub fn client(cx: &Cx<'_, Session>, mut args: Args<'_>) {
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
        _ => return reply.unknown_subcommand("CLIENT", given),
    };
    if !fits {
        return reply.wrong_arguments("client", &subcommand);
    }
    match &subcommand[..] {
        b"id" => reply.integer(session.id.get() as i64),
        b"info" | b"list" => reply.text(&session.describe(cx)),
        b"getname" => match session.names().name {
            name if name.is_empty() => reply.null(),
            name => reply.string(&name),
        },
        b"setname" => {
            let name = args.next().unwrap_or_default();
            if !is_name(name) {
                return reply.error(BAD_NAME);
            }
            session.rename(|names| names.name = name.to_vec());
            reply.ok();
        }
        _ => {
            let (which, value) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
            let which = which.to_ascii_lowercase();
            if !is_name(value) {
                let which = String::from_utf8_lossy(&which);
                return reply
                    .error(format!("ERR {which} cannot contain spaces, newlines or special characters."));
            }
            match &which[..] {
                b"lib-name" => session.rename(|names| names.lib_name = value.to_vec()),
                b"lib-ver" => session.rename(|names| names.lib_version = value.to_vec()),
                _ => return reply.error([b"ERR Unrecognized option '", &which[..], b"'"].concat()),
            }
            reply.ok();
        }
    }
}
