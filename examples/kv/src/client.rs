//! Connections, the commands about them and about the server, and what clients publish to each other.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ringserve::{Cx, PushError, SharedPayload};

use crate::commands::{self, Command, SPECS, Spec};
use crate::data::{NOT_A_NUMBER, SYNTAX, matches};
use crate::node::{About, Client, Node, Rows, Session, say, wrong_arguments};
use crate::queue::unanswered;
use crate::resp::{self, Args, Out, Part};
use crate::store::Value;

/// The Redis whose commands, errors and replies these are.
const VERSION: &str = "7.0.0";
/// Bytes of messages that wait for a slow subscriber, beyond which it is cut off.
const MAIL_BYTES_MAX: usize = 8 << 20;
const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

impl About {
    pub fn rows(self, node: &Node) -> Rows {
        match self {
            About::Clients(asks) => node
                .clients
                .borrow()
                .values()
                .map(|client| (client.line(asks, node).into(), client.id as i64))
                .collect(),
            About::Listeners(kind) => {
                let listeners = node.listeners[kind].borrow();
                listeners.iter().map(|(name, clients)| (name.clone(), clients.len() as i64)).collect()
            }
            About::Figures => {
                let [keys, ending, expired, bytes] =
                    node.store.borrow().figures().map(|figure| figure as i64);
                let (open, opened) = (node.clients.borrow().len() as i64, node.opened.get() as i64);
                let commands = node.commands.get() as i64;
                let all = [
                    ("keys", keys),
                    ("ending", ending),
                    ("expired", expired),
                    ("bytes", bytes),
                    ("open", open),
                ];
                let all = all.into_iter().chain([("opened", opened), ("commands", commands)]);
                all.map(|(name, figure)| (name.into(), figure)).collect()
            }
        }
    }
}

impl Client {
    /// Sets its name, or that of its library.
    fn rename(&self, n: usize, name: &[u8]) -> Result<Part<'static>, String> {
        if !name.iter().all(|byte| matches!(byte, b'!'..=b'~')) {
            return Err(BAD_NAME.into());
        }
        self.names.borrow_mut()[n] = name.to_vec();
        Ok(Part::Ok)
    }

    fn name(&self, n: usize) -> String {
        String::from_utf8_lossy(&self.names.borrow()[n]).into_owned()
    }

    /// The last command is known of the one that asks, and not kept of the others.
    fn line(&self, asks: u64, node: &Node) -> String {
        let (id, addr, resp) = (self.id, &self.addr, 2 + u8::from(self.resp3.get()));
        let age = (node.shard.now() - self.opened).as_secs();
        let [name, lib, version] = [0, 1, 2].map(|n| self.name(n));
        let command = if asks == id { " cmd=client" } else { "" };
        format!(
            "id={id} addr={addr} name={name} age={age} flags=N db=0 resp={resp} lib-name={lib} lib-ver={version}{command} \
             user=default\n"
        )
    }
}

/// Messages from client to client.
impl Client {
    /// Sends a message, after those that wait until this client has read others.
    fn send(self: &Rc<Self>, message: &Rc<SharedPayload>, node: &Node) {
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
            node.shard.spawn(async move {
                while !client.mail.borrow().is_empty() {
                    client.handle.ready().await;
                    let Some(message) = client.mail.borrow_mut().pop_front() else { return };
                    client.mail_bytes.set(client.mail_bytes.get() - message.payload().len());
                    let _ = client.handle.push_shared(&message);
                }
            });
        }
    }

    /// Listens to nothing any more.
    pub fn leave(&self, node: &Node) {
        for kind in 0..2 {
            for name in std::mem::take(&mut self.listens.borrow_mut()[kind]) {
                node.forget(self, kind, &name);
            }
        }
        self.rest();
    }
}

impl Node {
    fn forget(&self, client: &Client, kind: usize, name: &[u8]) {
        let mut listeners = self.listeners[kind].borrow_mut();
        if let Some(clients) = listeners.get_mut(name) {
            clients.retain(|other| other.id != client.id);
            if clients.is_empty() {
                listeners.remove(name);
            }
        }
    }

    /// Sends a message to who listens on this shard. Each kind is encoded once.
    pub fn publish(&self, channel: &[u8], message: &[u8]) -> i64 {
        let told = Cell::new(0);
        let tell = |clients: &[Rc<Client>], parts: &[&[u8]]| {
            for resp3 in [false, true] {
                let mut listeners = clients.iter().filter(|client| client.resp3.get() == resp3).peekable();
                if listeners.peek().is_none() {
                    continue;
                }
                let mut text = Vec::new();
                text.part(Part::Push(parts.len()), resp3);
                parts.iter().for_each(|part| text.part(Part::Bytes(part), resp3));
                let message = Rc::new(SharedPayload::new(text));
                listeners.for_each(|client| {
                    client.send(&message, self);
                    told.set(told.get() + 1);
                });
            }
        };
        if let Some(clients) = self.listeners[0].borrow().get(channel) {
            tell(clients, &[b"message", channel, message]);
        }
        for (pattern, clients) in self.listeners[1].borrow().iter().filter(|(name, _)| matches(name, channel))
        {
            tell(clients, &[b"pmessage", pattern, channel, message]);
        }
        told.get()
    }

    /// SUBSCRIBE and its like: a message about each channel or pattern.
    fn subscribe(&self, cx: &Cx<'_, Session>, command: Command, args: Args<'_>) {
        let client = &cx.session().client;
        let kind = usize::from(matches!(command, Command::PSubscribe | Command::PUnsubscribe));
        let adds = matches!(command, Command::Subscribe | Command::PSubscribe);
        let mut names: Vec<Option<Vec<u8>>> = args.from(1).map(|name| Some(name.to_vec())).collect();
        if names.is_empty() {
            names.extend(client.listens.borrow()[kind].iter().cloned().map(Some));
        }
        if names.is_empty() {
            names.push(None);
        }
        for name in names {
            if let Some(name) = &name {
                let is_other = match adds {
                    true => client.listens.borrow_mut()[kind].insert(name.clone()),
                    false => client.listens.borrow_mut()[kind].remove(name),
                };
                match adds {
                    true if is_other => {
                        self.listeners[kind]
                            .borrow_mut()
                            .entry(name.clone())
                            .or_default()
                            .push(client.clone());
                    }
                    _ if is_other => self.forget(client, kind, name),
                    _ => {}
                }
            }
            let count = client.listens.borrow().iter().map(BTreeSet::len).sum::<usize>();
            say(cx, Part::Push(3));
            say(cx, Part::Bytes(command.spec().name.as_bytes()));
            say(cx, name.as_deref().map_or(Part::Null, Part::Bytes));
            say(cx, Part::Int(count as i64));
        }
        client.rest();
    }

    /// Runs a command that is not about keys. True if all shards are to be asked for it.
    pub fn about_the_connection(&self, cx: &Cx<'_, Session>, command: Command, args: Args<'_>) -> bool {
        match self.about(cx, command, args) {
            Ok(Some(part)) => say(cx, part),
            Ok(None) => {}
            Err(error) if error.is_empty() => return true,
            Err(error) => say(cx, Part::Error(error)),
        }
        false
    }

    fn about<'a>(
        &self,
        cx: &Cx<'_, Session>,
        command: Command,
        args: Args<'a>,
    ) -> Result<Option<Part<'a>>, String> {
        let (session, count) = (cx.session(), args.spans.len());
        let client = &*session.client;
        let subcommand = args.get(1).to_ascii_lowercase();
        Ok(Some(match command {
            Command::Ping if count > 2 => return Err(wrong_arguments("ping")),
            Command::Ping if client.listens() && !client.resp3.get() => {
                Part::List(vec![Part::Bytes(b"pong"), Part::Bytes(args.get(1))])
            }
            Command::Ping if count == 1 => Part::Word("PONG"),
            Command::Ping | Command::Echo => Part::Bytes(args.get(1)),
            Command::Select => match resp::number(args.get(1)).ok_or(NOT_A_NUMBER)? {
                0 => Part::Ok,
                _ => return Err("ERR DB index is out of range".into()),
            },
            Command::Hello => return self.hello(cx, args),
            Command::Reset => {
                client.resp3.set(false);
                client.names.borrow_mut()[0].clear();
                client.leave(self);
                Part::Word("RESET")
            }
            Command::Quit => {
                say(cx, Part::Ok);
                cx.close();
                return Ok(None);
            }
            Command::Time => {
                let now = self.store.borrow().now() as i64;
                Part::List([now / 1000, now % 1000 * 1000].map(|n| owned(resp::digits(n).to_vec())).into())
            }
            Command::Function if subcommand == b"flush" => Part::Ok,
            Command::Client => match (&subcommand[..], count) {
                (b"id", 2) => Part::Int(client.id as i64),
                (b"getname", 2) if client.names.borrow()[0].is_empty() => Part::Null,
                (b"getname", 2) => owned(client.name(0)),
                (b"info", 2) => Part::Text(client.line(client.id, self)),
                (b"list", _) => return Err(String::new()),
                (b"setname", 3) => return client.rename(0, args.get(2)).map(Some),
                (b"setinfo", 4) => match &args.get(2).to_ascii_lowercase()[..] {
                    b"lib-name" => return client.rename(1, args.get(3)).map(Some),
                    b"lib-ver" => return client.rename(2, args.get(3)).map(Some),
                    _ => return Err(SYNTAX.into()),
                },
                (b"id" | b"getname" | b"info" | b"setname" | b"setinfo", _) => {
                    return Err(unknown(command, args, true));
                }
                _ => return Err(unknown(command, args, false)),
            },
            Command::Config => match &subcommand[..] {
                b"get" if count > 2 => self.config(args),
                b"set" if count > 3 => {
                    let name = String::from_utf8_lossy(args.get(2));
                    return Err(format!(
                        "ERR CONFIG SET failed (possibly related to argument '{name}') - can't set immutable config"
                    ));
                }
                b"get" | b"set" => return Err(unknown(command, args, true)),
                _ => return Err(unknown(command, args, false)),
            },
            Command::Describe => match (&subcommand[..], count) {
                (b"count", 2) => Part::Int(SPECS.len() as i64),
                (b"", _) => Part::List(SPECS.iter().map(info).collect()),
                (b"info", _) => {
                    let specs = args.from(2).map(|name| commands::find(name).map(Command::spec));
                    Part::List(specs.map(|spec| spec.map_or(Part::NullArray, info)).collect())
                }
                (b"docs", _) => {
                    let all = SPECS.iter().filter(|spec| {
                        count == 2 || args.from(2).any(|name| name.eq_ignore_ascii_case(spec.name.as_bytes()))
                    });
                    Part::Pairs(
                        all.map(|spec| (spec.name, Part::Pairs(vec![("summary", word(spec.summary))])))
                            .collect(),
                    )
                }
                (b"count", _) => return Err(unknown(command, args, true)),
                _ => return Err(unknown(command, args, false)),
            },
            Command::PubSub | Command::Info => return Err(String::new()),
            Command::Function => return Err(unknown(command, args, false)),
            _ => {
                self.subscribe(cx, command, args);
                return Ok(None);
            }
        }))
    }
}

impl Node {
    /// HELLO: which version of the protocol to speak, who the client is, and who the server.
    fn hello<'a>(&self, cx: &Cx<'_, Session>, args: Args<'a>) -> Result<Option<Part<'a>>, String> {
        let client = &*cx.session().client;
        let resp3 = match (args.spans.len(), resp::number(args.get(1))) {
            (1, _) => client.resp3.get(),
            (_, Some(version @ 2..=3)) => version == 3,
            (_, Some(_)) => return Err("NOPROTO unsupported protocol version".into()),
            (_, None) => return Err("ERR Protocol version is not an integer or out of range".into()),
        };
        let (mut options, mut name) = (args.from(2), None);
        while let Some(option) = options.next() {
            match &option.to_ascii_lowercase()[..] {
                // Without a password set, Redis takes any for the default user.
                b"auth" if options.len() >= 2 => match (options.next(), options.next()) {
                    (Some(b"default"), _) => {}
                    _ => return Err("WRONGPASS invalid username-password pair or user is disabled.".into()),
                },
                b"setname" if options.len() >= 1 => name = options.next(),
                _ => {
                    let option = String::from_utf8_lossy(option);
                    return Err(format!("ERR Syntax error in HELLO option '{option}'"));
                }
            }
        }
        if let Some(name) = name {
            client.rename(0, name)?;
        }
        client.resp3.set(resp3);
        client.rest();
        let (version, id) = (Part::Int(2 + i64::from(resp3)), Part::Int(client.id as i64));
        Ok(Some(Part::Pairs(vec![
            ("server", word("redis")),
            ("version", word(VERSION)),
            ("proto", version),
            ("id", id),
            ("mode", word("standalone")),
            ("role", word("master")),
            ("modules", Part::List(Vec::new())),
        ])))
    }

    /// CONFIG GET: what clients and redis-benchmark ask about. Nothing can be set.
    fn config<'a>(&self, args: Args<'a>) -> Part<'a> {
        let bulk_max = owned(resp::digits(self.value_bytes_max as i64).to_vec());
        let words =
            [("save", ""), ("appendonly", "no"), ("databases", "1"), ("maxmemory", "0"), ("timeout", "0")];
        let all = words.into_iter().map(|(name, value)| (name, word(value)));
        let asked =
            |name: &str| args.from(2).any(|glob| matches(&glob.to_ascii_lowercase(), name.as_bytes()));
        let all = all.chain([("maxmemory-policy", word("noeviction")), ("proto-max-bulk-len", bulk_max)]);
        Part::Pairs(all.filter(|(name, _)| asked(name)).collect())
    }

    /// Commands that ask all shards about themselves: INFO, CLIENT LIST, PUBSUB.
    pub async fn about_all(&self, cx: &Cx<'_, Session>, command: Command, args: Args<'_>) -> Part<'static> {
        let kind = args.get(1).to_ascii_lowercase();
        let about = match command {
            Command::Info => About::Figures,
            Command::Client => About::Clients(cx.session().client.id),
            _ => match &kind[..] {
                b"channels" | b"numsub" => About::Listeners(0),
                b"numpat" => About::Listeners(1),
                _ => return Part::Error(unknown(command, args, false)),
            },
        };
        let mut rows = BTreeMap::new();
        for (shard, answer) in self.ways.about.on_all(|_| about).await.into_iter().enumerate() {
            match answer {
                Ok(told) => {
                    told.into_iter().for_each(|(name, count)| *rows.entry(name).or_default() += count)
                }
                Err(why) => return Part::Error(unanswered(shard, why)),
            }
        }
        match (about, &kind[..]) {
            (About::Figures, _) => Part::Text(self.info(&rows, args)),
            (About::Clients(_), _) => {
                let mut lines: Vec<(i64, Vec<u8>)> = rows.into_iter().map(|(line, id)| (id, line)).collect();
                lines.sort_unstable();
                let lines = lines.into_iter().map(|(_, line)| String::from_utf8_lossy(&line).into_owned());
                Part::Text(lines.collect())
            }
            (_, b"numpat") => Part::Int(rows.len() as i64),
            (_, b"numsub") => {
                let count = |name: &[u8]| Part::Int(rows.get(name).copied().unwrap_or_default());
                let parts = args.from(2).flat_map(|name| [owned(name), count(name)]);
                Part::List(parts.collect())
            }
            _ => {
                let asked = |name: &Vec<u8>| args.spans.len() < 3 || matches(args.get(2), name);
                Part::List(rows.into_keys().filter(asked).map(owned).collect())
            }
        }
    }

    /// INFO: the figures of all shards together, and the number of the one that the connection is on.
    fn info(&self, rows: &BTreeMap<Vec<u8>, i64>, args: Args<'_>) -> String {
        let figure = |name: &str| rows.get(name.as_bytes()).copied().unwrap_or_default();
        let keys = match figure("keys") {
            0 => String::new(),
            keys => format!("db0:keys={keys},expires={},avg_ttl=0\r\n", figure("ending")),
        };
        let sections = [
            (
                "Server",
                format!(
                    "redis_version:{VERSION}\r\nredis_mode:standalone\r\nos:Linux\r\narch_bits:64\r\nprocess_id:{}\r\n\
                 uptime_in_seconds:{}\r\nshard:{}\r\nshards:{}\r\n",
                    std::process::id(),
                    (self.shard.now() - self.started).as_secs(),
                    self.shard.index(),
                    self.shard.count(),
                ),
            ),
            ("Clients", format!("connected_clients:{}\r\n", figure("open"))),
            ("Memory", format!("used_memory:{}\r\n", figure("bytes"))),
            (
                "Stats",
                format!(
                    "total_connections_received:{}\r\ntotal_commands_processed:{}\r\nexpired_keys:{}\r\n",
                    figure("opened"),
                    figure("commands"),
                    figure("expired"),
                ),
            ),
            ("Replication", "role:master\r\nconnected_slaves:0\r\n".to_owned()),
            ("Cluster", "cluster_enabled:0\r\n".to_owned()),
            ("Keyspace", keys),
        ];
        let asked = |name: &str| {
            let is = |arg: &[u8]| {
                [name, "default", "all", "everything"].iter().any(|n| arg.eq_ignore_ascii_case(n.as_bytes()))
            };
            args.spans.len() < 2 || args.from(1).any(is)
        };
        let sections = sections.into_iter().filter(|(name, _)| asked(name));
        sections.map(|(name, lines)| format!("# {name}\r\n{lines}")).collect::<Vec<_>>().join("\r\n")
    }
}

fn owned(bytes: impl Into<Vec<u8>>) -> Part<'static> {
    Part::Old(Value::Own(bytes.into()))
}

fn word(word: &'static str) -> Part<'static> {
    Part::Bytes(word.as_bytes())
}

/// What COMMAND tells of one: flags, access categories, tips, key specifications and subcommands are left out.
fn info(spec: &'static Spec) -> Part<'static> {
    let [first, last, step] = spec.keys().map(Part::Int);
    let sets = [(); 4].map(|()| Part::Set(0));
    let facts = [word(spec.name), Part::Int(spec.arity), Part::Set(0), first, last, step];
    Part::List(facts.into_iter().chain(sets).collect())
}

/// A command has no such subcommand, or too few or too many arguments.
fn unknown(command: Command, args: Args<'_>, is_known: bool) -> String {
    let (name, given) = (command.spec().name, String::from_utf8_lossy(args.get(1)).into_owned());
    match is_known {
        true => wrong_arguments(&format!("{name}|{}", given.to_ascii_lowercase())),
        false => format!("ERR unknown subcommand '{given}'. Try {} HELP.", name.to_ascii_uppercase()),
    }
}
