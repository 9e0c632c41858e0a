//! The events that a campaign must cover, and their counts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringserve_server::testing::Fault;
use ringserve_simkernel::HostileEvent;

use super::plan::{Deed, Fate, Frames, Leave, Verb};

/// Counts of events, by kind and name.
pub type Counts = BTreeMap<(&'static str, String), u64>;

/// Counts of events, by name.
#[derive(Clone, Default)]
pub struct Cover(Arc<Mutex<Counts>>);

impl Cover {
    pub fn count(&self, kind: &'static str, name: impl ToString) {
        self.add(kind, name, 1);
    }

    pub fn add(&self, kind: &'static str, name: impl ToString, count: u64) {
        *self.counts().entry((kind, name.to_string())).or_default() += count;
    }

    pub fn of(&self, kind: &'static str, name: &str) -> u64 {
        self.counts().get(&(kind, name.to_owned())).copied().unwrap_or(0)
    }

    pub fn take(&self) -> Counts {
        std::mem::take(&mut self.counts())
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run of this many seeds has to show every possible event.
pub const COVERED: u64 = 2000;

/// Each possible event must have occurred this often in a run of this size.
pub const QUOTA: (u64, u64) = (50, 10_000);

/// All possible events.
pub fn expected() -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    let verbs = Verb::GOOD.iter().chain(Verb::LAST);
    all.extend(verbs.clone().filter(|verb| verb.replies()).map(|verb| ("call", format!("{verb:?}"))));
    all.extend(Verb::LAST.iter().map(|verb| ("leave", format!("{:?}", Leave::With(*verb)))));
    for leave in [Leave::Finish, Leave::FinishEarly, Leave::Close, Leave::Reset] {
        all.push(("leave", format!("{leave:?}")));
    }
    all.extend(Deed::ALL.iter().map(|deed| ("deed", format!("{deed:?}"))));
    for frames in [
        Frames::Lines,
        Frames::Lengths,
        Frames::Delimited,
        Frames::Planted,
        Frames::Stream,
        Frames::Switched,
        Frames::Codec,
    ] {
        all.push(("frames", format!("{frames:?}")));
    }
    let kernel = Fault::ALL.iter().filter(|fault| !matches!(fault, Fault::RingBreaks | Fault::ShardStalls));
    all.extend(kernel.map(|fault| ("fault", format!("{fault:?}"))));
    all.extend(HostileEvent::ALL.iter().map(|event| ("hostile", format!("{event:?}"))));
    for close in [
        "peer_closed",
        "peer_reset",
        "first_frame_timeout",
        "idle_timeout",
        "handler_timeout",
        "heartbeat_lost",
        "handler_error",
        "handler_panicked",
        "closed",
        "aborted",
        "shutdown",
        "server_aborted",
        "proxy_untrusted",
        "proxy_bad_header",
        "proxy_timeout",
        "proxy_no_header",
    ] {
        all.push(("close", close.to_owned()));
    }
    for did in [
        "message to another shard",
        "push by a task",
        "push by a call",
        "word from an upstream",
        "upstream by its name",
        "call that blocks",
        "refusal",
        "open that waits",
        "open that is dropped",
        "word of a drain",
        "limits of one connection",
        "heartbeat",
        "factory fails",
        "factory panics",
        "connection passed on",
        "second server",
        "one of many messages",
        "two services",
        "client behind a proxy",
        "admission of a whole server",
        "proxy itself",
        "the connection has as many tasks as connection_tasks_max allows",
    ] {
        all.push(("did", did.to_owned()));
    }
    all.extend(["Timer", "Upstream", "Blocking", "Question"].map(|wait| ("start", wait.to_owned())));
    all.extend(Fate::ALL.iter().map(|fate| ("start", format!("{fate:?}"))));
    all.extend(["error", "time limit", "panic"].map(|kind| ("failed", kind.to_owned())));
    for ask in ["answered", "given up", "no room", "Gone after Answer", "Unanswered after Answer"] {
        all.push(("ask", ask.to_owned()));
    }
    for lost in ["Lose", "Panic", "AnswerLater", "Keep"] {
        all.push(("ask", format!("Unanswered after {lost}")));
    }
    for send in ["had room", "to a shard that ended", "given up"] {
        all.push(("send", send.to_owned()));
    }
    for rule in [
        "switch to a body",
        "switch to lengths",
        "switch to lines",
        "switch in a hook",
        "switch after a wait",
        "piece",
        "client heard all",
    ] {
        all.push(("rule", rule.to_owned()));
    }
    all.extend(["last line without its end", "client heard all"].map(|name| ("codec", name.to_owned())));
    all.extend(["given up", "kept"].map(|name| ("upstream", name.to_owned())));
    for admitted in [
        "let in",
        "denied",
        "allowed",
        "unwanted",
        "beyond its count",
        "beyond its rate",
        "waited for the rate",
    ] {
        all.push(("admission", admitted.to_owned()));
    }
    for paused in ["of one shard", "of all shards"] {
        all.push(("pause", paused.to_owned()));
    }
    all.push(("crowd", "beyond a turn".to_owned()));
    for seen in ["open", "calling", "silent shard", "given up"] {
        all.push(("inspect", seen.to_owned()));
    }
    all.push(("watch", "saw the end".to_owned()));
    for heard in ["heard every reply", "heard its stream to the end"] {
        all.push(("client", heard.to_owned()));
    }
    all
}
