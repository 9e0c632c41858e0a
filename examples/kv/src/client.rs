//! Connections, the commands about them, and what clients publish to each other.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use ringserve::framing::Parts;
use ringserve::resp::{self, Replied, Version, Writer, matches};
use ringserve::{LocalHandle, PushError, Shard, SharedPayload};

use crate::keys::{Bad, number};

/// The Redis whose commands, errors and replies these are.
const VERSION: &str = "7.0.0";
/// Bytes of messages that wait for a slow subscriber, beyond which it is cut off.
const MAIL_BYTES_MAX: usize = 8 << 20;
const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

/// A pattern, if it is true, or a channel.
type Topic = (bool, Vec<u8>);

/// The subscribers of one shard.
pub type Topics = RefCell<BTreeMap<Topic, Vec<Rc<Client>>>>;

/// A connection.
pub struct Client {
    pub id: u64,
    handle: LocalHandle,
    shard: Shard,
    topics: Rc<Topics>,
    pub version: Cell<Version>,
    name: RefCell<Vec<u8>>,
    listens: RefCell<BTreeSet<Topic>>,
    /// True while it listens and may not do everything, as in version 2 of the protocol.
    pub only_listens: Cell<bool>,
    /// Messages that wait until it has read others.
    mail: RefCell<VecDeque<Rc<SharedPayload>>>,
    mail_bytes: Cell<usize>,
}

impl Client {
    pub fn new(id: u64, handle: LocalHandle, shard: &Shard, topics: &Rc<Topics>) -> Rc<Client> {
        let (version, name, listens, only_listens, mail, mail_bytes) = Default::default();
        let (shard, topics) = (shard.clone(), topics.clone());
        Rc::new(Client { id, handle, shard, topics, version, name, listens, only_listens, mail, mail_bytes })
    }

    /// Sends a message, after those that wait until this client has read others.
    fn send(self: &Rc<Self>, message: &Rc<SharedPayload>) {
        let mut mail = self.mail.borrow_mut();
        if mail.is_empty() && self.handle.push_shared(message) != Err(PushError::Full) {
            return;
        }
        self.mail_bytes.set(self.mail_bytes.get() + message.payload().len());
        if self.mail_bytes.get() > MAIL_BYTES_MAX {
            mail.clear();
            return self.handle.abort();
        }
        mail.push_back(message.clone());
        if mail.len() == 1 {
            let client = self.clone();
            self.shard.spawn(async move {
                while !client.mail.borrow().is_empty() {
                    client.handle.ready().await;
                    let Some(message) = client.mail.borrow_mut().pop_front() else { return };
                    client.mail_bytes.set(client.mail_bytes.get() - message.payload().len());
                    let _ = client.handle.push_shared(&message);
                }
            });
        }
    }

    fn listen(self: &Rc<Self>, topic: Topic) {
        if self.listens.borrow_mut().insert(topic.clone()) {
            self.topics.borrow_mut().entry(topic).or_default().push(self.clone());
        }
    }

    fn forget(&self, topic: &Topic) {
        self.listens.borrow_mut().remove(topic);
        let mut topics = self.topics.borrow_mut();
        if let Some(clients) = topics.get_mut(topic) {
            clients.retain(|other| other.id != self.id);
            if clients.is_empty() {
                topics.remove(topic);
            }
        }
    }

    /// Listens to nothing any more.
    pub fn leave(&self) {
        let all = self.listens.borrow().clone();
        all.iter().for_each(|topic| self.forget(topic));
        self.only_listens.set(false);
    }
}

/// Sends a message to the subscribers of this shard, and tells how many there are. It is encoded once for each version.
pub fn publish(topics: &Topics, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let (channel, message, topics, mut told) = (args.get(1), args.get(2), topics.borrow(), 0);
    let exact = topics.get_key_value(&(false, channel.to_vec()));
    let patterns = topics.range((true, Vec::new())..).filter(|((_, name), _)| matches(name, channel));
    for ((is_pattern, name), clients) in exact.into_iter().chain(patterns) {
        let texts = [const { OnceCell::new() }; 2];
        for client in clients {
            let version = client.version.get();
            client.send(texts[version as usize].get_or_init(|| {
                let mut text = Vec::new();
                let parts: &[&[u8]] = match is_pattern {
                    true => &[b"pmessage", name, channel, message],
                    false => &[b"message", channel, message],
                };
                Writer::to_vec(&mut text, version).reply(|out| {
                    out.push(parts.len())?;
                    parts.iter().try_for_each(|part| out.bulk(part))
                });
                Rc::new(SharedPayload::new(text))
            }));
            told += 1;
        }
    }
    out.integer(told)
}

/// SUBSCRIBE and its like: a message about each channel or pattern.
pub fn subscribe(client: &Rc<Client>, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let command = args.word(0);
    let is_pattern = command.starts_with('p');
    let mut names: Vec<Option<Vec<u8>>> = args.from(1).map(|name| Some(name.to_vec())).collect();
    if names.is_empty() {
        let all = client.listens.borrow();
        names.extend(all.iter().filter(|topic| topic.0 == is_pattern).map(|topic| Some(topic.1.clone())));
    }
    if names.is_empty() {
        names.push(None);
    }
    for name in names {
        out.push(3)?;
        out.bulk(command.as_bytes())?;
        match &name {
            Some(name) => out.bulk(name)?,
            None => out.null()?,
        }
        match name {
            Some(name) if command.contains("unsub") => client.forget(&(is_pattern, name)),
            Some(name) => client.listen((is_pattern, name)),
            None => {}
        }
        out.integer(client.listens.borrow().len() as i64)?;
    }
    client.only_listens.set(client.version.get() == Version::Two && !client.listens.borrow().is_empty());
    Ok(())
}

pub fn ping(client: &Rc<Client>, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    match args.len() {
        3.. => Err("ERR wrong number of arguments for 'ping' command".into()),
        _ if client.only_listens.get() => {
            out.array(2)?;
            out.bulk(b"pong")?;
            out.bulk(args.get(1))
        }
        1 => out.simple("PONG"),
        _ => out.bulk(args.get(1)),
    }
}

pub fn select(_: &Rc<Client>, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    match number(args, 1)? {
        0 => out.ok(),
        _ => Err("ERR DB index is out of range".into()),
    }
}

pub fn reset(client: &Rc<Client>, _: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    client.version.set(Version::Two);
    client.name.borrow_mut().clear();
    client.leave();
    out.simple("RESET")
}

/// HELLO: which version of the protocol to speak, who the client is, and who the server.
pub fn hello(client: &Rc<Client>, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let version = match (args.len(), resp::number(args.get(1))) {
        (1, _) => client.version.get(),
        (_, Some(2)) => Version::Two,
        (_, Some(3)) => Version::Three,
        (_, Some(_)) => return Err("NOPROTO unsupported protocol version".into()),
        (_, None) => return Err("ERR Protocol version is not an integer or out of range".into()),
    };
    let mut at = 2;
    while at < args.len() {
        match &*args.word(at) {
            // Without a password set, Redis takes any for the default user.
            "auth" if at + 2 < args.len() && args.get(at + 1) == b"default" => at += 3,
            "setname" if at + 1 < args.len() => {
                rename(client, args.get(at + 1))?;
                at += 2;
            }
            option => return Err(format!("ERR Syntax error in HELLO option '{option}'").into()),
        }
    }
    client.version.set(version);
    client.only_listens.set(version == Version::Two && !client.listens.borrow().is_empty());
    out.set_version(version);
    out.map(5)?;
    for (name, text) in [("server", "redis"), ("version", VERSION), ("mode", "standalone")] {
        out.bulk(name.as_bytes())?;
        out.bulk(text.as_bytes())?;
    }
    out.bulk(b"proto")?;
    out.integer(2 + version as i64)?;
    out.bulk(b"id")?;
    out.integer(client.id as i64)
}

fn rename(client: &Client, name: &[u8]) -> Replied {
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err(BAD_NAME.into());
    }
    *client.name.borrow_mut() = name.to_vec();
    Ok(())
}

pub fn client(client: &Rc<Client>, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    match (&*args.word(1), args.len()) {
        ("id", 2) => out.integer(client.id as i64),
        ("getname", 2) if client.name.borrow().is_empty() => out.null(),
        ("getname", 2) => out.bulk(&*client.name.borrow()),
        ("setname", 3) => rename(client, args.get(2)).and_then(|()| out.ok()),
        // What library it uses is no matter here.
        ("setinfo", 4) => out.ok(),
        _ => Err(unknown(args)),
    }
}

/// CONFIG GET: what clients and redis-benchmark ask about. Nothing can be set.
pub fn config(_: &Rc<Client>, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    if args.word(1) != "get" || args.len() < 3 {
        return Err(unknown(args));
    }
    let all = [("save", ""), ("appendonly", "no"), ("databases", "1"), ("maxmemory", "0")];
    let asked = |name: &str| (2..args.len()).any(|n| matches(args.word(n).as_bytes(), name.as_bytes()));
    let told: Vec<_> = all.into_iter().filter(|(name, _)| asked(name)).collect();
    out.map(told.len())?;
    told.into_iter().flat_map(|(name, value)| [name, value]).try_for_each(|text| out.bulk(text.as_bytes()))
}

/// INFO: what clients look for, and which shard the connection is on.
pub fn info(client: &Rc<Client>, _: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let (shard, shards) = (client.shard.index(), client.shard.count());
    out.bulk(
        format!("# Server\r\nredis_version:{VERSION}\r\nloading:0\r\nshard:{shard}\r\nshards:{shards}\r\n")
            .as_bytes(),
    )
}

/// A command has no such subcommand, or not with that many arguments.
pub fn unknown(args: Parts<'_>) -> Bad {
    let (name, given) = (args.word(0).to_uppercase(), String::from_utf8_lossy(args.get(1)));
    format!("ERR unknown subcommand '{given}'. Try {name} HELP.").into()
}
