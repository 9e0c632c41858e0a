//! Answers of ringserve's admin endpoint, as types: `/report.json` and each event of `/events` is a
//! [`Report`], `/connections` is [`Connections`], `/stalls` a list of [`Stall`]s, `/doctor` a list
//! of [`Finding`]s.
//!
//! Times are seconds, as `f64`; sizes are bytes. Names in JSON are those of the fields, and values
//! of enums are in snake case.
//!
//! A program may be older or newer than the server that it asks: a missing field is read as its
//! default, an unknown field is ignored, and an unknown value of an enum is read as `Unknown`.
//! Structs are created with `..Default::default()`, since a later version may have more fields.
//!
//! ```
//! use ringserve_report::{Report, Stage, StageName, State};
//!
//! let stage = Stage { name: StageName::Table, state: State::Lost, why: "the table is full".into(), ..Stage::default() };
//! let report = Report { funnel: vec![stage], ..Report::default() };
//! assert_eq!(report.cause().map(|stage| stage.name), Some(StageName::Table));
//! ```

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Everything that a server reports at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The server itself.
    pub server: ServerFacts,
    /// The path of a connection through the server, from its first packet to its peer's reading;
    /// the machine is last.
    pub funnel: Vec<Stage>,
    /// Overload control of the server; `None` if it has none.
    pub overload: Option<Overload>,
    /// The limits on admission, with the last changes; `None` from servers that do not report them.
    pub admission: Option<Admission>,
    /// Events of the last second.
    pub rates: Rates,
    /// Each shard.
    pub shards: Vec<ShardReport>,
    /// Each service, in the order in which the server was given them.
    pub services: Vec<ServiceReport>,
    /// Groups of other servers that this one asks, in the order in which the server was given them.
    pub upstreams: Vec<UpstreamReport>,
    /// The kernel's queue of each listener and shard.
    pub accept_queues: Vec<AcceptQueue>,
    /// Reasons for which connections ended; reasons that never occurred are left out.
    pub closes: Vec<Close>,
    /// Durations of turns, calls and waits.
    pub times: Times,
    /// The ten connections that hold most bytes for sending.
    pub outboxes: Vec<Connection>,
    /// The twenty connections whose calls wait longest.
    pub waiting_calls: Vec<Connection>,
    /// Shards that did not answer for the two lists above: a handler blocks them.
    pub silent_shards: Vec<usize>,
    /// The last stalls, including those that last; oldest first.
    pub stalls: Vec<Stall>,
    /// Findings of the doctor.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The stage that causes the trouble: the first at which something is lost, else the first with
    /// a warning.
    pub fn cause(&self) -> Option<&Stage> {
        let first = |state| self.funnel.iter().find(|stage| stage.state == state);
        first(State::Lost).or_else(|| first(State::Warn))
    }
}

/// Facts of the server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerFacts {
    /// The version of ringserve.
    pub version: String,
    /// `io_uring` or `epoll`.
    pub driver: String,
    /// The number of its process.
    pub pid: u32,
    /// The file name of its program.
    pub program: String,
    /// Seconds since its start.
    pub uptime_seconds: f64,
    /// The phase of its life.
    pub phase: Phase,
    /// Connections now, of all shards and services.
    pub connections: u64,
    /// The most connections that it accepts at once.
    pub connections_max: u64,
    /// Connections that it opened to other servers.
    pub upstreams: u64,
    /// Resident memory of the process, if `/proc` reports it.
    pub memory_bytes: Option<u64>,
    /// Seconds that all recent figures of this report cover: ten, or less after the start.
    pub window_seconds: f64,
}

/// The phase of a server's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// Factories are still pending.
    Starting,
    /// All shards serve.
    Serving,
    /// The server is stopping: listeners are closed, or will be after the drain delay.
    Draining,
    /// A phase that this version does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

/// One stage of the path of a connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stage {
    /// Name of the stage.
    pub name: StageName,
    /// State of the stage.
    pub state: State,
    /// Load of the stage: packets, connections, calls or bytes, as [`unit`](Stage::unit) says.
    pub now: u64,
    /// Capacity of the stage, if it is bounded.
    pub capacity: Option<u64>,
    /// Unit of `now` and `capacity`: `connections`, `calls`, `bytes`, `descriptors`; or that of
    /// another figure which [`why`](Stage::why) is about: `ms blocked`, `% starved`.
    pub unit: String,
    /// Losses here since the start: packets, connections, or peers that were closed.
    pub lost_total: u64,
    /// Losses here in the last [`ServerFacts::window_seconds`].
    pub lost_recently: u64,
    /// A sentence that names the figure, the cause and the fix; empty while the stage is calm.
    pub why: String,
}

/// The stages of the path of a connection, in its order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StageName {
    /// TCP handshakes that began.
    SynQueue,
    /// Connections that the kernel established and no shard has accepted yet. Lost here: a backlog
    /// that is too small for the rate at which connections arrive. Losses because shards do not
    /// accept belong to the stage that keeps them from it.
    AcceptQueue,
    /// Room for connections: [`connections_max`](ServerFacts::connections_max), and descriptors.
    Table,
    /// Bytes of connections before their first frame is complete, and receive memory.
    FirstFrame,
    /// Calls of services: handlers that block their shard, and calls that wait.
    Handler,
    /// Bytes that services wrote and that wait to be sent.
    Outbox,
    /// Peers that do not read.
    Peer,
    /// The machine: connection tracking, CPU quotas, memory. No part of the path, and below all of
    /// it.
    #[serde(rename = "host")]
    Machine,
    /// A stage that this version does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

impl StageName {
    /// All known stages, in their order.
    pub const ALL: [StageName; 8] = [
        StageName::SynQueue,
        StageName::AcceptQueue,
        StageName::Table,
        StageName::FirstFrame,
        StageName::Handler,
        StageName::Outbox,
        StageName::Peer,
        StageName::Machine,
    ];

    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            StageName::SynQueue => "syn_queue",
            StageName::AcceptQueue => "accept_queue",
            StageName::Table => "table",
            StageName::FirstFrame => "first_frame",
            StageName::Handler => "handler",
            StageName::Outbox => "outbox",
            StageName::Peer => "peer",
            StageName::Machine => "host",
            StageName::Unknown => "unknown",
        }
    }
}

impl fmt::Display for StageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The state of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum State {
    /// Nothing is lost, and there is room.
    Calm,
    /// Little room is left, or the fault here has its cause at another stage.
    Warn,
    /// The cause is here, and peers notice it: connections, packets or time are lost.
    Lost,
    /// A state that this version does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Overload control of the server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overload {
    /// 0 calm, 1 busy, 2 shedding requests, 3 shedding connections, 4 accepting is paused.
    pub stage: u8,
    /// Name of the stage.
    pub name: String,
    /// Cause of the stage; empty while it is calm.
    pub cause: String,
    /// Requests that services shed since the start.
    pub shed_total: u64,
}

/// Events of the last second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// Connections that the kernel accepted.
    pub accepts_per_second: f64,
    /// Connections that ended.
    pub closes_per_second: f64,
    /// Frames handed to the services.
    pub frames_per_second: f64,
    /// Bytes received.
    pub received_bytes_per_second: f64,
    /// Bytes that the kernel accepted for sending.
    pub sent_bytes_per_second: f64,
    /// Turns of all shards' loops.
    pub turns_per_second: f64,
    /// System calls of all drivers.
    pub system_calls_per_second: f64,
}

/// One shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ShardReport {
    /// Its number.
    pub shard: usize,
    /// The share of the last second in which its thread ran, 0 to 1.
    pub busy: f64,
    /// The share in which it could have run, but others had the CPU, or the quota of its control
    /// group was used up.
    pub starved: f64,
    /// The rest: it waited for its peers.
    pub asleep: f64,
    /// Seconds that it has been in the same turn, if that is longer than 25 ms.
    pub stalled_seconds: Option<f64>,
    /// True if its figures are older: a handler blocks it.
    pub stale: bool,
    /// Connections now. `None`, like the figures that follow, for a shard that has published
    /// nothing yet: it has just started, or was blocked before it could.
    pub connections: Option<u64>,
    /// Turns of its loop since the start.
    pub turns: Option<u64>,
    /// Frames handed to the services since the start.
    pub frames: Option<u64>,
    /// Receive buffers with bytes that are not consumed yet: frames that handlers keep, or that
    /// wait.
    pub buffers_used: Option<u64>,
    /// Receive buffers taken from the system.
    pub buffers: Option<u64>,
    /// Connections that wait to be accepted by it.
    pub accept_queue: u64,
    /// Connections that it accepted and that wait for a place, by the reason why: `limit`, `rate`,
    /// `postponed` and `behind`. Reasons for which none waits are left out.
    pub accepted_waiting: BTreeMap<String, u64>,
}

/// One service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServiceReport {
    /// Its name.
    pub name: String,
    /// Connections now.
    pub connections: u64,
    /// Frames handed to it since the start.
    pub frames: u64,
    /// Frames handed to it in the last second.
    pub frames_per_second: f64,
}

/// A group of other servers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpstreamReport {
    /// Its name.
    pub name: String,
    /// Its servers, without those beyond a bound on all groups.
    pub backends: Vec<BackendReport>,
    /// Servers that are left out.
    pub left_out: u64,
    /// Tries beyond the first one of a request or a connection.
    pub retries: u64,
    /// Requests and connections for which there was no server.
    pub refused: u64,
    /// Choices among all servers, since too few were left.
    pub panics: u64,
    /// Times that the look-up of its servers failed.
    pub lookups_failed: u64,
}

/// One server of a group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackendReport {
    /// Its address or name.
    pub name: String,
    /// `unknown` before its first check, `up`, `down`, `ejected` or `drained`.
    pub condition: String,
    /// Its part of the requests.
    pub weight: u32,
    /// Requests, or connections of relays, that it has now.
    pub in_flight: u64,
    /// Connections to it now, idle ones included.
    pub connections: u64,
    /// Those that no request uses.
    pub idle: u64,
    /// All requests that it was given.
    pub requests: u64,
    /// Failures that count for its ejection.
    pub failures: u64,
    /// Seconds that an answer took on average, since the start.
    pub mean_seconds: f64,
    /// Attempts to connect that failed.
    pub connects_failed: u64,
    /// Requests that left, and had no answer when their connection ended.
    pub lost: u64,
}

/// The kernel's queue of one listener and one shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AcceptQueue {
    /// The address.
    pub listener: String,
    /// The shard; `None` if all shards accept from it.
    pub shard: Option<usize>,
    /// Connections that wait now.
    pub waiting: u64,
    /// The most connections that may wait.
    pub capacity: u64,
    /// Packets dropped since it listens, where the kernel reports them.
    pub lost: Option<u64>,
}

/// Connections that ended for one reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Close {
    /// The reason, as in metrics: `peer_closed`, `idle_timeout`.
    pub reason: String,
    /// The side: `peer`, `service`, `server`, `upstream`, `system`.
    pub closed_by: String,
    /// Ends since the start.
    pub total: u64,
    /// Ends in the last [`ServerFacts::window_seconds`].
    pub recently: u64,
}

/// Durations since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    /// Turns of the shards' loops.
    pub turn: Quantiles,
    /// Calls that waited.
    pub call: Quantiles,
    /// Time from when a connection could send its first frame to that frame.
    pub first_frame: Quantiles,
    /// Time for which sends waited for their peers.
    pub send_stall: Quantiles,
}

/// Quantiles in seconds, each accurate to an eighth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quantiles {
    /// Number of values; the others are 0 if there is none.
    pub count: u64,
    /// Half of them are at most this.
    pub p50: f64,
    /// Nine of ten are at most this.
    pub p90: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// 999 of 1000 are at most this.
    pub p999: f64,
    /// The largest of them.
    pub max: f64,
}

/// The requested connections, and shards that did not answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Connections {
    /// Connections in the requested order.
    pub connections: Vec<Connection>,
    /// Shards that did not answer in time: a handler blocks them, they are overloaded, or they
    /// ended.
    pub silent_shards: Vec<usize>,
    /// The silent shards as a sentence; empty if all answered.
    pub note: String,
}

/// One connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Connection {
    /// Its name for `POST /connections/ID/close`: shard, slot and the number of the slot's earlier
    /// uses, as in `0.17.3`.
    pub id: String,
    /// Its shard.
    pub shard: usize,
    /// Its service.
    pub service: String,
    /// The address of its peer.
    pub peer: String,
    /// Seconds since it was accepted.
    pub age_seconds: f64,
    /// Seconds since bytes arrived or a call ended.
    pub idle_seconds: f64,
    /// Bytes that wait to be sent.
    pub outbox_bytes: u64,
    /// Bytes received so far, if accounts of connections are kept.
    pub bytes_in: Option<u64>,
    /// Bytes that the kernel accepted for sending, likewise.
    pub bytes_out: Option<u64>,
    /// Frames that were passed to the service, likewise.
    pub frames_in: Option<u64>,
    /// Frames that were queued, likewise.
    pub frames_out: Option<u64>,
    /// Its activity, or what it waits for: `open`, `calling`, `held_back` (its peer does not read)
    /// and others.
    pub state: String,
    /// Calls that wait.
    pub calls: u64,
    /// Seconds that its oldest pending call has waited.
    pub oldest_call_seconds: Option<f64>,
}

/// One period in which a shard made no progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stall {
    /// The shard.
    pub shard: usize,
    /// Seconds since it began.
    pub ago_seconds: f64,
    /// Seconds that it lasted, or has lasted so far.
    pub lasted_seconds: f64,
    /// True while it lasts.
    pub ongoing: bool,
    /// The shard's work: `call`, `open`, `task` and others.
    pub work: String,
    /// True for much work in one turn, of which `work` is the last.
    pub several: bool,
    /// The peer for which it worked.
    pub peer: Option<String>,
    /// Its connection, as [`Connection::id`].
    pub connection: Option<String>,
    /// Bytes of the frame on which it worked.
    pub frame_bytes: Option<u64>,
    /// Cause of the stall: `cpu`, `lock`, `read`, `sleep`, `starved`, `other`.
    pub cause: String,
    /// The stall as a sentence.
    pub text: String,
    /// The function of the kernel in which the thread waited.
    pub waits_in: Option<String>,
    /// Connections that waited in its accept queue.
    pub queue_waiting: Option<u64>,
    /// Packets that its accept queue lost while the stall lasted.
    pub queue_lost: Option<u64>,
}

/// The current limits on admission.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Admission {
    /// The limits of each `Admission` that a listener has; empty if none has any.
    pub limits: Vec<AdmissionLimits>,
    /// The rate of the whole server; `None` if it has none.
    pub accept_rate: Option<Rate>,
    /// The last changes while the server ran, the oldest first.
    pub changes: Vec<AdmissionChange>,
}

/// The limits of one `Admission`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdmissionLimits {
    /// Connections of an address or prefix at once.
    pub per_address: Option<u32>,
    /// The rate of an address or prefix.
    pub address_rate: Option<Rate>,
    /// Connections of all peers at once.
    pub connections_max: Option<u32>,
    /// The rate of all peers.
    pub connection_rate: Option<Rate>,
    /// Connections of all peers, where they are counted.
    pub connections: Option<u32>,
    /// Number of networks that are temporarily denied or allowed.
    pub networks_total: u64,
    /// The temporarily denied or allowed networks; in a report the first 20.
    pub networks: Vec<TimedNetwork>,
}

/// Connections per second, and at once after a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rate {
    /// Connections per second.
    pub per_second: u32,
    /// Connections at once after a pause.
    pub burst: u32,
}

/// A network that is temporarily denied or allowed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimedNetwork {
    /// The network, such as `192.0.2.0/24`.
    pub network: String,
    /// True if its peers are admitted, false if they are not.
    pub allows: bool,
    /// Seconds until that ends.
    pub left_seconds: f64,
}

/// A change of the limits while the server ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdmissionChange {
    /// Seconds since then.
    pub ago_seconds: f64,
    /// The setting that changed, with the old and the new value.
    pub what: String,
}

/// A finding of the doctor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// The name of the check.
    pub check: String,
    /// Severity of the finding.
    pub severity: Severity,
    /// Subject of the finding.
    pub what: String,
    /// Current value.
    pub value: String,
    /// Required value, with the formula.
    pub needed: String,
    /// Consequence if it is not changed.
    pub otherwise: String,
    /// The command that changes it.
    pub fix: String,
    /// Certainty of the finding: `seen`, `computed`, `estimated`.
    pub certainty: String,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Severity {
    /// Good to know.
    Info,
    /// The check could not be made, so it is no pass: [`value`](Finding::value) has the reason.
    NotChecked,
    /// It will cost performance under load.
    Warn,
    /// Something will not work.
    Error,
    /// A severity that this version does not know, which is treated as the worst.
    #[default]
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_another_version_is_read() {
        let text = r#"{"server": {"pid": 7, "phase": "hibernating", "moon": 3}, "funnel": [{"name": "wormhole", "state": "lost"}]}"#;
        let report: Report = serde_json::from_str(text).unwrap();
        assert_eq!((report.server.pid, report.server.phase), (7, Phase::Unknown));
        assert_eq!(report.cause().unwrap().name, StageName::Unknown);
        assert_eq!(serde_json::from_str::<Report>("{}").unwrap(), Report::default());
    }

    #[test]
    fn report_comes_back_as_it_went() {
        let report = Report {
            funnel: StageName::ALL.map(|name| Stage { name, state: State::Calm, ..Stage::default() }).into(),
            findings: vec![Finding { severity: Severity::Warn, ..Finding::default() }],
            stalls: vec![Stall { queue_waiting: Some(3), ..Stall::default() }],
            ..Report::default()
        };
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
        for name in StageName::ALL {
            assert!(text.contains(&format!("\"name\":\"{name}\"")), "{name}");
        }
    }

    #[test]
    fn cause_is_the_first_loss_and_else_the_first_warning() {
        let report = |states: [State; 3]| {
            let names = [StageName::AcceptQueue, StageName::Table, StageName::Machine].into_iter();
            let stage = |(name, state)| Stage { name, state, ..Stage::default() };
            Report { funnel: names.zip(states).map(stage).collect(), ..Report::default() }
        };
        let cause = |states| report(states).cause().map(|stage| stage.name);
        assert_eq!(cause([State::Calm; 3]), None);
        assert_eq!(cause([State::Warn, State::Lost, State::Lost]), Some(StageName::Table));
        assert_eq!(cause([State::Calm, State::Warn, State::Warn]), Some(StageName::Table));
    }
}
