//! Connections, the commands about them, and what clients publish to each other.

use std::cell::RefCell;

use ringserve::framing::Parts;
use ringserve::resp::{self, Replied, Version, Writer, matches, unknown_subcommand};
use ringserve::topics::{self, Subscriber};

use crate::keys::number;

/// The Redis whose commands, errors and replies these are.
const VERSION: &str = "7.0.0";

/// A pattern, if it is true, or a channel.
type Topic = (bool, Vec<u8>);

/// The subscribers of one shard.
pub type Topics = topics::Topics<Topic, Version>;

/// A connection.
pub struct Client {
    pub id: u64,
    /// Its shard, and how many there are.
    pub place: (usize, usize),
    pub listens: Subscriber<Topic, Version>,
    pub name: RefCell<Vec<u8>>,
}

impl Client {
    /// The version of the protocol that it speaks.
    #[inline]
    pub fn version(&self) -> Version {
        self.listens.form()
    }

    /// True while it listens and may not do everything, as in version 2 of the protocol.
    #[inline]
    pub fn only_listens(&self) -> bool {
        self.version() == Version::Two && self.listens.count() > 0
    }
}

/// Sends a message to the subscribers of this shard, and tells how many there are.
pub fn publish(topics: &Topics, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let (channel, message) = (args.get(1), args.get(2));
    let told = |parts: &[&[u8]], version| {
        let mut text = Vec::new();
        Writer::to_vec(&mut text, version).reply(|out| {
            out.push(parts.len())?;
            parts.iter().try_for_each(|part| out.bulk(part))
        });
        text
    };
    let exact =
        topics.publish(&(false, channel.to_vec()), |version| told(&[b"message", channel, message], version));
    let patterns = topics.publish_where(
        &(true, Vec::new())..,
        |(_, pattern)| matches(pattern, channel),
        |(_, pattern), version| told(&[b"pmessage", pattern, channel, message], version),
    );
    out.integer((exact + patterns) as i64)
}

/// SUBSCRIBE and its like: a message about each channel or pattern.
pub fn subscribe(client: &Client, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let command = args.word(0);
    let is_pattern = command.starts_with('p');
    let mut names: Vec<_> = args.from(1).map(<[u8]>::to_vec).collect();
    if names.is_empty() {
        let all = client.listens.topics().into_iter();
        names.extend(all.filter(|topic| topic.0 == is_pattern).map(|topic| topic.1));
    }
    let no_name = names.is_empty().then_some(None);
    for name in names.into_iter().map(Some).chain(no_name) {
        out.push(3)?;
        out.bulk(&command)?;
        out.bulk_or_null(name.as_ref())?;
        match name {
            Some(name) if command.contains("unsub") => client.listens.unsubscribe(&(is_pattern, name)),
            Some(name) => client.listens.subscribe((is_pattern, name)),
            None => false,
        };
        out.integer(client.listens.count() as i64)?;
    }
    Ok(())
}

pub fn ping(client: &Client, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    match args.len() {
        3.. => Err("ERR wrong number of arguments for 'ping' command".into()),
        _ if client.only_listens() => {
            out.array(2)?;
            out.bulk(b"pong")?;
            out.bulk(args.get(1))
        }
        1 => out.simple("PONG"),
        _ => out.bulk(args.get(1)),
    }
}

pub fn select(_: &Client, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    match number(args, 1)? {
        0 => out.ok(),
        _ => Err("ERR DB index is out of range".into()),
    }
}

pub fn reset(client: &Client, _: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    client.name.borrow_mut().clear();
    client.listens.unsubscribe_all();
    client.listens.set_form(Version::Two);
    out.simple("RESET")
}

/// HELLO: which version of the protocol to speak, who the client is, and who the server.
pub fn hello(client: &Client, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let version = match (args.len(), resp::number(args.get(1))) {
        (1, _) => client.version(),
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
    client.listens.set_form(version);
    out.set_version(version);
    out.map(5)?;
    let about = ["server", "redis", "version", VERSION, "mode", "standalone"];
    about.into_iter().try_for_each(|text| out.bulk(text))?;
    out.bulk(b"proto")?;
    out.integer(2 + version as i64)?;
    out.bulk(b"id")?;
    out.integer(client.id as i64)
}

fn rename(client: &Client, name: &[u8]) -> Replied {
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err("ERR Client names cannot contain spaces, newlines or special characters.".into());
    }
    *client.name.borrow_mut() = name.to_vec();
    Ok(())
}

pub fn client(client: &Client, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    match (&*args.word(1), args.len()) {
        ("id", 2) => out.integer(client.id as i64),
        ("getname", 2) if client.name.borrow().is_empty() => out.null(),
        ("getname", 2) => out.bulk(&*client.name.borrow()),
        ("setname", 3) => rename(client, args.get(2)).and_then(|()| out.ok()),
        // What library it uses is no matter here.
        ("setinfo", 4) => out.ok(),
        _ => Err(unknown_subcommand(args).into()),
    }
}

/// CONFIG GET: what clients and redis-benchmark ask about. Nothing can be set.
pub fn config(_: &Client, args: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    if args.word(1) != "get" || args.len() < 3 {
        return Err(unknown_subcommand(args).into());
    }
    let all = [("save", ""), ("appendonly", "no"), ("databases", "1"), ("maxmemory", "0")];
    let asked = |name: &str| (2..args.len()).any(|n| matches(args.word(n).as_bytes(), name.as_bytes()));
    let told: Vec<_> = all.into_iter().filter(|(name, _)| asked(name)).collect();
    out.map(told.len())?;
    told.into_iter().flat_map(|(name, value)| [name, value]).try_for_each(|text| out.bulk(text))
}

/// INFO: what clients look for, and which shard the connection is on.
pub fn info(client: &Client, _: Parts<'_>, out: &mut Writer<'_, '_>) -> Replied {
    let (shard, shards) = client.place;
    out.bulk(format!(
        "# Server\r\nredis_version:{VERSION}\r\nloading:0\r\nshard:{shard}\r\nshards:{shards}\r\n"
    ))
}
