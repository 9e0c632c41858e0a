//! What the server tells about itself: COMMAND, CONFIG and INFO.
//!
//! INFO adds up what the shards tell one after the other, so its figures are not of one instant.

use std::cell::Cell;
use std::fmt::Write;
use std::time::Duration;

use crate::VERSION;
use crate::commands::{self, SPECS, Spec};
use crate::glob;
use crate::number::Digits;
use crate::reply::{Out, Reply};
use crate::resp::Args;
use crate::route::Place;
use crate::session::DATABASES;

/// What a shard counts.
#[derive(Default)]
pub struct Counts {
    /// Connections that are open.
    pub open: Cell<u64>,
    /// Connections there were.
    pub opened: Cell<u64>,
    /// Requests that were not empty.
    pub commands: Cell<u64>,
}

/// COMMAND: the table of commands.
pub fn command(reply: &mut Reply<impl Out>, mut args: Args<'_>) {
    let Some(given) = args.next() else { return infos(reply, SPECS.iter().map(Some)) };
    let subcommand = given.to_ascii_lowercase();
    match &subcommand[..] {
        b"count" if args.len() == 0 => reply.integer(SPECS.len() as i64),
        b"info" if args.len() == 0 => infos(reply, SPECS.iter().map(Some)),
        b"info" => infos(reply, args.map(|name| commands::find(name).map(|command| command.spec()))),
        b"docs" if args.len() == 0 => docs(reply, &SPECS.iter().collect::<Vec<_>>()),
        b"docs" => docs(reply, &args.filter_map(commands::find).map(|c| c.spec()).collect::<Vec<_>>()),
        b"list" if args.len() == 0 => {
            reply.array(SPECS.len());
            SPECS.iter().for_each(|spec| reply.string(spec.name.as_bytes()));
        }
        b"count" | b"list" => reply.wrong_arguments("command", &subcommand),
        _ => reply.unknown_subcommand("COMMAND", given),
    }
}

fn infos<'a>(reply: &mut Reply<impl Out>, specs: impl ExactSizeIterator<Item = Option<&'a Spec>>) {
    reply.array(specs.len());
    for spec in specs {
        let Some(spec) = spec else {
            reply.null_array();
            continue;
        };
        reply.array(10);
        reply.string(spec.name.as_bytes());
        reply.integer(spec.arity);
        reply.set(spec.flags.len());
        spec.flags.iter().for_each(|flag| reply.simple(flag));
        let (first, last, step) = spec.keys();
        [first, last, step].into_iter().for_each(|key| reply.integer(key));
        // Access categories, tips, key specifications and subcommands.
        (0..4).for_each(|_| reply.set(0));
    }
}

fn docs(reply: &mut Reply<impl Out>, specs: &[&Spec]) {
    reply.map(specs.len());
    for spec in specs {
        reply.string(spec.name.as_bytes());
        let facts = [("summary", spec.summary), ("since", spec.since), ("group", spec.group)];
        reply.map(facts.len());
        for fact in facts {
            reply.string(fact.0.as_bytes());
            reply.string(fact.1.as_bytes());
        }
    }
}

/// CONFIG: what clients and redis-benchmark ask about. Nothing can be set.
pub fn config(reply: &mut Reply<impl Out>, mut args: Args<'_>, value_bytes_max: usize) {
    let given = args.next().unwrap_or_default();
    let subcommand = given.to_ascii_lowercase();
    match &subcommand[..] {
        b"get" if args.len() > 0 => config_get(reply, args, value_bytes_max),
        b"set" if args.len() > 1 => {
            let name = String::from_utf8_lossy(args.next().unwrap_or_default()).into_owned();
            reply.error(format!(
                "ERR CONFIG SET failed (possibly related to argument '{name}') - can't set immutable config"
            ));
        }
        b"get" | b"set" => reply.wrong_arguments("config", &subcommand),
        _ => reply.unknown_subcommand("CONFIG", given),
    }
}

fn config_get(reply: &mut Reply<impl Out>, patterns: Args<'_>, value_bytes_max: usize) {
    let (databases, bulk_max) = (Digits::of(DATABASES), Digits::of(value_bytes_max as i64));
    let all: [(&str, &[u8]); 7] = [
        ("save", b""),
        ("appendonly", b"no"),
        ("databases", databases.bytes()),
        ("maxmemory", b"0"),
        ("maxmemory-policy", b"noeviction"),
        ("proto-max-bulk-len", bulk_max.bytes()),
        ("timeout", b"0"),
    ];
    let patterns: Vec<Vec<u8>> = patterns.map(<[u8]>::to_ascii_lowercase).collect();
    let asked = |name: &str| patterns.iter().any(|pattern| glob::matches(pattern, name.as_bytes()));
    let found: Vec<_> = all.into_iter().filter(|(name, _)| asked(name)).collect();
    reply.map(found.len());
    for (name, value) in found {
        reply.string(name.as_bytes());
        reply.string(value);
    }
}

/// What INFO tells, of one shard or of all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Connections that are open.
    pub open: u64,
    /// Connections there were.
    pub opened: u64,
    /// Requests that were not empty, counted by the shard of their connection.
    pub commands: u64,
    /// Keys.
    pub keys: u64,
    /// Keys that have an end.
    pub ending: u64,
    /// Keys that came to it.
    pub expired: u64,
}

impl Figures {
    /// Adds those of another shard.
    pub fn add(&mut self, other: &Figures) {
        self.open += other.open;
        self.opened += other.opened;
        self.commands += other.commands;
        self.keys += other.keys;
        self.ending += other.ending;
        self.expired += other.expired;
    }
}

/// The sections that INFO is asked for.
pub fn sections(args: Args<'_>) -> Vec<Vec<u8>> {
    args.map(<[u8]>::to_ascii_lowercase).collect()
}

/// INFO: the figures of all shards together, and the number of the one that the connection is on.
pub fn info(
    reply: &mut Reply<impl Out>,
    wanted: &[Vec<u8>],
    place: Place,
    uptime: Duration,
    figures: &Figures,
) {
    let everything = wanted.is_empty()
        || wanted.iter().any(|section| matches!(&section[..], b"default" | b"all" | b"everything"));
    let server = format!(
        "redis_version:{VERSION}\r\nredis_mode:standalone\r\nserver_name:ringserve-kv\r\nos:Linux\r\n\
         arch_bits:64\r\nprocess_id:{}\r\nuptime_in_seconds:{}\r\nshard:{}\r\nshards:{}\r\n",
        std::process::id(),
        uptime.as_secs(),
        place.index,
        place.shards,
    );
    let clients = format!("connected_clients:{}\r\n", figures.open);
    let stats = format!(
        "total_connections_received:{}\r\ntotal_commands_processed:{}\r\nexpired_keys:{}\r\n",
        figures.opened, figures.commands, figures.expired,
    );
    let keys = match figures.keys {
        0 => String::new(),
        keys => format!("db0:keys={keys},expires={},avg_ttl=0\r\n", figures.ending),
    };
    let sections = [
        ("Server", server),
        ("Clients", clients),
        ("Stats", stats),
        ("Replication", "role:master\r\nconnected_slaves:0\r\n".to_owned()),
        ("Cluster", "cluster_enabled:0\r\n".to_owned()),
        ("Keyspace", keys),
    ];
    let mut text = String::new();
    for (name, lines) in sections {
        if everything || wanted.iter().any(|section| section.eq_ignore_ascii_case(name.as_bytes())) {
            let gap = if text.is_empty() { "" } else { "\r\n" };
            let _ = write!(text, "{gap}# {name}\r\n{lines}");
        }
    }
    reply.text(&text);
}
