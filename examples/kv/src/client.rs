//! Connections, the commands about them, and what clients publish to each other.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::rc::Rc;

use ringserve::framing::FrameFields;
use ringserve::limits::{Capacity, Reservation};
use ringserve::resp::{self, Pattern, PatternTooLong, ReplyResult, Version, Writer, unknown_subcommand};
use ringserve::topics::listeners::{Listeners, LocalSubscriber};

use crate::keys::number;
use crate::walk::too_long;

/// The Redis whose commands, errors and replies these are.
const VERSION: &str = "7.0.0";

/// Bytes of what the clients of a shard, and one of them, listen to: names, compiled patterns, and
/// as much more for each.
pub const LISTENED_BYTES_MAX: (usize, usize) = (64 << 20, 8 << 20);
const TOPIC_BYTES: usize = 256;
/// The same for steps that the patterns cost for each byte of a channel's name.
pub const PATTERN_STEPS_MAX: (usize, usize) = (16_384, 4096);
/// Steps of a message at most, on its way to those who listen to patterns.
const MESSAGE_STEPS_MAX: usize = 4 << 20;

/// A channel or pattern that clients listen to. All that listen to it share it.
#[derive(Clone)]
pub enum Topic {
    Channel(Rc<[u8]>),
    Pattern(Rc<Pattern>),
}

impl Topic {
    fn new(is_pattern: bool, name: &[u8]) -> Result<Topic, PatternTooLong> {
        Ok(match is_pattern {
            true => Topic::Pattern(Pattern::new(name)?.into()),
            false => Topic::Channel(name.into()),
        })
    }

    /// Channels come first. No pattern is less than the empty one.
    pub fn key(&self) -> (bool, &[u8]) {
        match self {
            Topic::Channel(name) => (false, name),
            Topic::Pattern(pattern) => (true, pattern.as_bytes()),
        }
    }

    /// Its cost: bytes, and steps.
    fn cost(&self) -> [usize; 2] {
        match self {
            Topic::Channel(name) => [name.len() + TOPIC_BYTES, 0],
            Topic::Pattern(pattern) => [pattern.held_bytes() + TOPIC_BYTES, pattern.steps_for_a_byte()],
        }
    }
}

impl PartialEq for Topic {
    fn eq(&self, other: &Topic) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Topic {}

impl PartialOrd for Topic {
    fn partial_cmp(&self, other: &Topic) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Topic {
    fn cmp(&self, other: &Topic) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// Room for what the clients of a shard listen to, or one of them: bytes, and steps.
#[derive(Clone)]
pub struct Rooms([Capacity; 2]);

impl Rooms {
    pub fn new() -> Rooms {
        Rooms([Capacity::new(LISTENED_BYTES_MAX.0), Capacity::new(PATTERN_STEPS_MAX.0)])
    }

    /// A client's part, of which nothing is taken.
    pub fn of_client(&self) -> RefCell<[Reservation; 2]> {
        let [bytes, steps] = &self.0;
        let parts = [bytes.within(LISTENED_BYTES_MAX.1), steps.within(PATTERN_STEPS_MAX.1)];
        RefCell::new(parts.map(|part| part.take(0).expect("nothing has room")))
    }
}

/// The subscribers of one shard.
pub struct Topics {
    pub all: Listeners<Topic, Version>,
    pub rooms: Rooms,
}

/// A connection.
pub struct Client {
    pub id: u64,
    /// Its shard, and how many there are.
    pub place: (usize, usize),
    pub listens: LocalSubscriber<Topic, Version>,
    /// The part of the shard's capacity that its subscriptions take.
    pub taken: RefCell<[Reservation; 2]>,
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
pub fn publish(topics: &Topics, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    let (channel, message) = (args.get(1), args.get(2));
    if channel.len() * topics.rooms.0[1].taken() > MESSAGE_STEPS_MAX {
        return Err("ERR the channel's name is too long for the patterns that clients listen to".into());
    }
    let told = |parts: &[&[u8]], version| {
        let mut text = Vec::new();
        Writer::to_vec(&mut text, version).reply(|out| {
            out.push(parts.len())?;
            parts.iter().try_for_each(|part| out.bulk(part))
        });
        text
    };
    let exact = topics
        .all
        .publish(&Topic::Channel(channel.into()), |version| told(&[b"message", channel, message], version));
    let first = Topic::new(true, b"").map_err(too_long)?;
    let patterns = topics.all.publish_where(
        &first..,
        |topic| matches!(topic, Topic::Pattern(pattern) if pattern.matches(channel)),
        |topic, version| told(&[b"pmessage", topic.key().1, channel, message], version),
    );
    out.integer((exact + patterns) as i64)
}

impl Client {
    /// Begins to listen to a channel or a pattern, or ends it.
    pub fn change(&self, ends: bool, is_pattern: bool, name: &[u8]) -> ReplyResult {
        let topic = Topic::new(is_pattern, name).map_err(too_long)?;
        let (cost, mut taken) = (topic.cost(), self.taken.borrow_mut());
        if ends {
            if self.listens.unsubscribe(&topic) {
                taken.iter_mut().zip(cost).for_each(|(taken, cost)| {
                    taken.resize(taken.amount() - cost);
                });
            }
        } else if self.listens.subscribe(topic.clone()) {
            let before = [&taken[0], &taken[1]].map(Reservation::amount);
            let has_room =
                taken.iter_mut().zip(cost).all(|(taken, cost)| taken.resize(taken.amount() + cost));
            if !has_room {
                self.listens.unsubscribe(&topic);
                taken.iter_mut().zip(before).for_each(|(taken, before)| {
                    taken.resize(before);
                });
                return Err("ERR too many channels and patterns, or too long ones".into());
            }
        }
        Ok(())
    }
}

pub fn ping(client: &Client, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
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

pub fn select(_: &Client, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    match number(args, 1)? {
        0 => out.ok(),
        _ => Err("ERR DB index is out of range".into()),
    }
}

pub fn reset(client: &Client, _: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    client.name.borrow_mut().clear();
    client.listens.unsubscribe_all();
    for taken in client.taken.borrow_mut().iter_mut() {
        taken.resize(0);
    }
    client.listens.set_form(Version::Two);
    out.simple("RESET")
}

/// HELLO: which version of the protocol to speak, who the client is, and who the server.
pub fn hello(client: &Client, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
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

fn rename(client: &Client, name: &[u8]) -> ReplyResult {
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err("ERR Client names cannot contain spaces, newlines or special characters.".into());
    }
    *client.name.borrow_mut() = name.to_vec();
    Ok(())
}

pub fn client(client: &Client, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
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
pub fn config(_: &Client, args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    if args.word(1) != "get" || args.len() < 3 {
        return Err(unknown_subcommand(args).into());
    }
    let all = [("save", ""), ("appendonly", "no"), ("databases", "1"), ("maxmemory", "0")];
    let patterns: Result<Vec<_>, _> =
        (2..args.len()).map(|n| Pattern::new(args.word(n).as_bytes())).collect();
    let patterns = patterns.map_err(too_long)?;
    let asked = |name: &str| patterns.iter().any(|pattern| pattern.matches(name.as_bytes()));
    let told: Vec<_> = all.into_iter().filter(|(name, _)| asked(name)).collect();
    out.map(told.len())?;
    told.into_iter().flat_map(|(name, value)| [name, value]).try_for_each(|text| out.bulk(text))
}

/// INFO: what clients look for, and which shard the connection is on.
pub fn info(client: &Client, _: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
    let (shard, shards) = client.place;
    out.bulk(format!(
        "# Server\r\nredis_version:{VERSION}\r\nloading:0\r\nshard:{shard}\r\nshards:{shards}\r\n"
    ))
}
