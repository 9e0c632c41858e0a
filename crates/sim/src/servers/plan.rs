//! The draws of a seed for a whole server: its size and bounds, the requests of its clients, and
//! deeds.

use std::time::Duration;

use ringserve_server::Limits;
use ringserve_server::admission::Admission;
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::Endpoint;
use ringserve_server::testing::{Fault, Faults};
use ringserve_simkernel::Adversary;

use crate::rng::Rng;
use crate::toy::{Alive, Permits, Pieces, Toy};

/// The framing of a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    Lines,
    Lengths,
    Delimited,
    /// A framing of the program's own, which panics at a word.
    Planted,
    /// None: a stream of bytes.
    Stream,
    /// A rule that calls and hooks switch.
    Switched,
    /// A codec of tokio-util.
    Codec,
}

/// The action that a client requests before the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Nothing.
    Echo,
    Sleep,
    /// A time limit around a future that never completes.
    Timeout,
    /// A task that pushes later.
    Spawn,
    /// A task of the connection, whose handle is awaited, aborted or dropped.
    Own,
    /// A task that waits for the end of the connection, on this shard or another one.
    Watch,
    /// A message to another shard, which pushes back.
    Mesh,
    /// A connection to an upstream, and a word back from it.
    Upstream,
    /// The same with an address at which nothing listens.
    NoUpstream,
    /// A connection to an upstream that is given up soon.
    GiveUp,
    /// A connection to an upstream that is kept, unused for long, and then still there.
    Pool,
    /// Tasks that are woken together, now and then more than a turn polls.
    Crowd,
    /// A large reply, in pieces, each of which waits for room.
    Big,
    /// A frame that is kept until the next call.
    Keep,
    /// Questions to other shards, some of which they lose, keep or panic at.
    Ask,
    /// A question to all shards.
    AskAll,
    /// Messages to other shards that wait for room.
    Send,
    /// A sleep whose waker panics, which is kept.
    BadWaker,
    // From here on the request ends the connection.
    Close,
    Abort,
    Fail,
    PanicInCall,
    PanicAfterWait,
    PanicInEncode,
    PanicInDecode,
    /// A push from another shard at which the framing panics.
    PanicInPush,
    PanicInClose,
    PanicInDrop,
}

impl Verb {
    pub const GOOD: &[Verb] = &[
        Verb::Echo,
        Verb::Sleep,
        Verb::Timeout,
        Verb::Spawn,
        Verb::Own,
        Verb::Watch,
        Verb::Mesh,
        Verb::Upstream,
        Verb::NoUpstream,
        Verb::GiveUp,
        Verb::Pool,
        Verb::Crowd,
        Verb::Big,
        Verb::Keep,
        Verb::Ask,
        Verb::AskAll,
        Verb::Send,
        Verb::BadWaker,
    ];
    pub const LAST: &[Verb] = &[
        Verb::Close,
        Verb::Abort,
        Verb::Fail,
        Verb::PanicInCall,
        Verb::PanicAfterWait,
        Verb::PanicInEncode,
        Verb::PanicInDecode,
        Verb::PanicInPush,
        Verb::PanicInClose,
        Verb::PanicInDrop,
    ];

    /// The first character of a request.
    pub fn word(self) -> char {
        let at = Verb::GOOD.iter().chain(Verb::LAST).position(|verb| *verb == self);
        (b'a' + at.expect("each verb is in one of the lists") as u8) as char
    }

    /// True if the service reaches its reply.
    pub fn replies(self) -> bool {
        use Verb::*;
        !matches!(self, Fail | PanicInCall | PanicAfterWait | PanicInEncode | PanicInDecode | PanicInPush)
    }

    pub fn of(word: u8) -> Option<Verb> {
        Verb::GOOD.iter().chain(Verb::LAST).find(|verb| verb.word() as u8 == word).copied()
    }
}

/// The way in which a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// FIN, once every reply has arrived, and reading to the end.
    Finish,
    /// FIN right after the last request, and reading to the end.
    FinishEarly,
    /// A close in the middle.
    Close,
    Reset,
    /// A last request that ends the connection.
    With(Verb),
}

impl Leave {
    /// True if the client's last request resets the connection, or may.
    pub fn resets(self) -> bool {
        matches!(self, Leave::With(verb) if !matches!(verb, Verb::Close | Verb::Fail))
    }
}

/// The result of a server's first start. The next one succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Fails,
    Panics,
    /// The server is ordered to shut down while the factory hangs.
    Drains,
    /// The same, at once.
    Aborts,
    /// The factory hangs beyond the limit.
    TimesOut,
}

impl Fate {
    pub const ALL: &[Fate] = &[Fate::Fails, Fate::Panics, Fate::Drains, Fate::Aborts, Fate::TimesOut];

    /// The limit on a start that hangs.
    pub const LIMIT: Duration = Duration::from_secs(20);

    /// Time at which the server is ordered.
    pub const TOLD: Duration = Duration::from_secs(5);
}

/// The draws of a seed for its starts.
#[derive(Clone, Copy, Debug)]
pub struct StartPlan {
    /// Factories wait.
    pub waits: bool,
    pub fate: Option<Fate>,
    pub seed: u64,
}

impl StartPlan {
    pub fn drawn(seed: u64) -> StartPlan {
        let rng = &mut Rng::new(seed ^ 0x7374_6172_7421);
        let waits = rng.one_in(2);
        StartPlan { waits, fate: (waits && rng.one_in(4)).then(|| rng.pick(Fate::ALL)), seed }
    }
}

/// A deed to the servers at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    Drain,
    /// One shard does not run meanwhile, and learns of it when others have ended.
    DrainLate,
    Abort,
    BreakDriver,
    Stall,
    Suspend,
    Partition,
    ResetHost,
    /// The server ends and another one starts at its address.
    Restart,
}

impl Deed {
    pub const ALL: &[Deed] = &[
        Deed::Drain,
        Deed::DrainLate,
        Deed::Abort,
        Deed::BreakDriver,
        Deed::Stall,
        Deed::Suspend,
        Deed::Partition,
        Deed::ResetHost,
        Deed::Restart,
    ];
}

/// One client.
#[derive(Clone, Debug)]
pub struct ClientPlan {
    pub starts: Duration,
    pub requests: Vec<Verb>,
    /// Requests sent before replies are read.
    pub ahead: usize,
    /// Bytes of a piece that is sent at once; `None` for all.
    pub piece: Option<usize>,
    pub pause: Duration,
    pub leave: Leave,
    /// Bytes in addition to verb and number.
    pub padding: usize,
    /// The number of its first request: no other client has these numbers.
    pub first: u32,
}

/// One seed.
#[derive(Clone, Debug)]
pub struct Plan {
    pub faults: Faults,
    pub adversary: Adversary,
    pub frames: Frames,
    pub shards: usize,
    pub limits: Limits,
    /// The most calls at once of a second service, if there is one. Every other client uses it.
    pub second: Option<u16>,
    pub server_limits: ServerLimits,
    /// `limits` may end a connection.
    pub limits_bite: bool,
    /// Nothing is done and no fault occurs that ends an upstream.
    pub keeps_upstreams: bool,
    /// Only drains are done, and those wait as long as a client takes: each stream that is served
    /// continues to its end.
    pub cuts_none: bool,
    pub clients: Vec<ClientPlan>,
    pub deeds: Vec<(Duration, Deed)>,
    /// The shard whose factory fails or panics at the first start.
    pub factory_fails: Option<(usize, bool)>,
    pub start: StartPlan,
    /// One in this many opens panics; 0 for none.
    pub open_panics: u64,
    /// One in this many opens is refused; 0 for none.
    pub refuses: u64,
    /// One in this many opens waits; 0 for none.
    pub open_waits: u64,
    /// Time for which a shard waits for more after several connections.
    pub coalesce: Duration,
    /// Messages that a mailbox has room for.
    pub mailbox: usize,
    /// Clients reach their end before the servers are drained, so that no loss is excused.
    pub waits: bool,
    /// Proxies connect to the first service: each connection begins with a header.
    pub proxied: bool,
    /// The layers between sockets and frames, for the services that have any.
    pub layers: Option<Layers>,
    /// The seed of inspections by its shards, if there are any.
    pub inspects: Option<u64>,
    /// The admission of the server: all clients, but only one after the other at times.
    pub admission: Option<Admission>,
    /// One in many replies comes twice: seeds must find it.
    pub canary: bool,
}

/// Numbers of requests that a client may use.
pub const CLIENT_NUMBERS: u32 = 1000;

/// Longer than anything keeps a shard from its answer: each of three deeds may make a machine sleep
/// for three hours.
pub const OUTCOME_WITHIN: Duration = Duration::from_secs(12 * 3600);

/// A drain timeout longer than all actions of clients.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// The seed of its shards' inspections, if they make any.
fn inspects(seed: u64) -> Option<u64> {
    let rng = &mut Rng::new(seed ^ 0x696E_7370_6563_7421);
    rng.one_in(3).then(|| rng.below(1 << 32))
}

fn millis(rng: &mut Rng, most: u64) -> Duration {
    Duration::from_micros(rng.spread(1, most * 1000))
}

impl Plan {
    pub fn drawn(seed: u64) -> Plan {
        let rng = &mut Rng::new(seed ^ 0x7365_7276_6572_7321);
        let harmless = !rng.one_in(3);
        let faults = if harmless { Faults::harmless() } else { Faults::all() };
        let frames = rng.pick(&[
            Frames::Lines,
            Frames::Lines,
            Frames::Lengths,
            Frames::Delimited,
            Frames::Planted,
            Frames::Stream,
        ]);
        // Eight that share eight connections pass some on: none has room for all of them.
        let crowded = rng.one_in(8);
        let shards = if crowded { 8 } else { rng.range(1, 4) as usize };
        let limits_bite = rng.one_in(4);
        let clients = if crowded { 16 } else { rng.spread(1, 16) };
        let mut clients: Vec<_> = (0..clients).map(|number| client(rng, frames, number as u32)).collect();
        if crowded {
            // They overlap.
            clients.iter_mut().for_each(|client| {
                client.starts /= 3;
                client.pause = client.pause.max(Duration::from_secs(1));
            });
        }
        let deeds = if rng.one_in(2) { 0 } else { rng.range(1, 3) };
        let mut deeds: Vec<_> = (0..deeds).map(|_| (millis(rng, 60_000), rng.pick(Deed::ALL))).collect();
        if crowded && rng.one_in(2) {
            // While others still connect, and go on connecting.
            deeds.push((millis(rng, 10_000), rng.pick(&[Deed::BreakDriver, Deed::DrainLate])));
        }
        deeds.sort_by_key(|(at, _)| *at);
        let (mut server_limits, limits) = limits(rng, limits_bite);
        if crowded {
            server_limits = server_limits.connections_max(8).drain_delay(Duration::from_secs(5));
        }
        let admission = admission(seed, server_limits.connections_max);
        let is_patient = rng.one_in(2);
        if is_patient {
            server_limits = server_limits.drain_timeout(PATIENCE);
        }
        let drains = |deed: &Deed| matches!(deed, Deed::Drain | Deed::Restart);
        let cuts_none = harmless && is_patient && !limits_bite && deeds.iter().all(|(_, deed)| drains(deed));
        Plan {
            faults,
            adversary: Adversary::drawn(seed, !harmless),
            frames,
            shards,
            limits,
            server_limits,
            limits_bite,
            keeps_upstreams: harmless && deeds.is_empty(),
            cuts_none,
            clients,
            deeds,
            factory_fails: rng.one_in(16).then(|| (rng.below(shards as u64) as usize, rng.one_in(2))),
            start: StartPlan::drawn(seed),
            open_panics: if rng.one_in(8) { rng.range(1, 8) } else { 0 },
            refuses: if rng.one_in(8) { rng.range(1, 8) } else { 0 },
            coalesce: coalesce(seed),
            waits: !rng.one_in(4),
            // From a copy, so that other draws of a seed stay the same.
            open_waits: Rng::new(rng.clone().below(1 << 32)).pick(&[0, 0, 1, 3]),
            mailbox: rng.pick(&[1, 4, 65_536]),
            canary: false,
            proxied: Rng::new(seed ^ 0x7072_6F78_7921).one_in(4),
            layers: Layers::drawn(seed),
            inspects: inspects(seed),
            admission,
            second: (frames != Frames::Stream && rng.one_in(3)).then(|| if rng.one_in(2) { 1 } else { 8 }),
        }
        .with_rules(seed)
    }

    /// Half of the plans for streams are for rules that have no verbs otherwise.
    fn with_rules(self, seed: u64) -> Plan {
        let frames = match self.frames {
            Frames::Stream => Rng::new(seed ^ 0x7275_6c65_7321).pick(&[
                Frames::Stream,
                Frames::Stream,
                Frames::Switched,
                Frames::Codec,
            ]),
            frames => frames,
        };
        Plan { frames, ..self }
    }

    /// The limits of the second service.
    pub fn second_limits(&self) -> Option<Limits> {
        self.second.map(|calls| self.limits.clone().calls_in_flight_max(calls))
    }

    /// True if this request's client uses the second service.
    pub fn is_second(&self, number: u32) -> bool {
        self.second.is_some() && (number / CLIENT_NUMBERS) % 2 == 1
    }

    /// True if the driver of a shard may break.
    pub fn shards_may_die(&self) -> bool {
        let breaks = |(_, deed): &(Duration, Deed)| *deed == Deed::BreakDriver;
        self.faults.once_in(Fault::RingBreaks) > 0 || self.deeds.iter().any(breaks)
    }

    /// True if a ring may end with the close of a connection not submitted, so that its peer finds
    /// FIN in the place of a reset: the machine sleeps until the shard gives its driver up.
    pub fn closes_may_be_lost(&self) -> bool {
        self.adversary.holds_back() && self.deeds.iter().any(|(_, deed)| *deed == Deed::Suspend)
    }

    /// True if connections of this service may end before it is called.
    pub fn ends_before_open(&self, is_second: bool) -> bool {
        let is_layered = |of: &Layers| if is_second { of.second } else { of.first };
        (self.proxied && !is_second) || self.layers.as_ref().is_some_and(is_layered)
    }

    /// True if something of the plan may end connections.
    pub fn loses(&self) -> bool {
        self.limits_bite || self.open_panics > 0 || self.refuses > 0
    }
}

fn coalesce(seed: u64) -> Duration {
    let rng = &mut Rng::new(seed ^ 0x636F_616C_6573);
    if rng.one_in(3) { Duration::from_micros(rng.spread(1, 1000)) } else { Duration::ZERO }
}

/// Draws limits that no client reaches, whose charges must be returned for each connection, and a
/// rate for which many wait.
fn admission(seed: u64, connections_max: usize) -> Option<Admission> {
    let rng = &mut Rng::new(seed ^ 0x6164_6D69_7473_2121);
    if !rng.one_in(3) {
        return None;
    }
    let mut admission = Admission::default().per_address(connections_max as u32).tracked_max(1024);
    if rng.one_in(2) {
        admission = admission.accept_rate(rng.range(1, 20) as u32, rng.range(1, 8) as u32);
        if rng.one_in(2) {
            admission = admission.slow_start(millis(rng, 20_000));
        }
    }
    if rng.one_in(4) {
        // Hosts of clients with even addresses.
        admission = admission.allow("10.128.0.2/32 10.128.0.4/32 10.128.0.6/32".parse().expect("a list"));
    }
    Some(admission)
}

fn client(rng: &mut Rng, frames: Frames, number: u32) -> ClientPlan {
    // Only the planted framing panics.
    let needs_planted =
        |verb: &Verb| matches!(verb, Verb::PanicInEncode | Verb::PanicInDecode | Verb::PanicInPush);
    let last = |verb: &Verb| frames == Frames::Planted || !needs_planted(verb);
    let last: Vec<Verb> = Verb::LAST.iter().copied().filter(last).collect();
    let requests =
        (0..rng.spread(0, 40)).map(|_| if rng.one_in(2) { Verb::Echo } else { rng.pick(Verb::GOOD) });
    ClientPlan {
        requests: requests.collect(),
        starts: if rng.one_in(2) { Duration::ZERO } else { millis(rng, 30_000) },
        ahead: rng.spread(1, 32) as usize,
        piece: rng.one_in(2).then(|| rng.spread(1, 100) as usize),
        pause: if rng.one_in(2) { Duration::ZERO } else { millis(rng, 3000) },
        leave: match rng.below(8) {
            0..3 => Leave::Finish,
            3 => Leave::FinishEarly,
            4 => Leave::Close,
            5 => Leave::Reset,
            _ => Leave::With(rng.pick(&last)),
        },
        padding: if rng.one_in(4) { rng.spread(1, 10_000) as usize } else { 0 },
        first: number * CLIENT_NUMBERS,
    }
}

fn limits(rng: &mut Rng, bite: bool) -> (ServerLimits, Limits) {
    let calls_in_flight_max = if rng.one_in(2) { 1 } else { rng.range(2, 8) as u16 };
    let server = ServerLimits::default()
        .drain_timeout(millis(rng, 60_000).max(Duration::from_millis(100)))
        .drain_delay(if rng.one_in(2) { Duration::ZERO } else { millis(rng, 5000) })
        .receive_buffer_bytes(rng.pick(&[512, 4096, 16 << 10]))
        .receive_bytes_max(rng.pick(&[256 << 10, 8 << 20]));
    let inbox_bytes_high = rng.pick(&[1 << 10, 64 << 10]);
    let spread = if rng.one_in(2) { Some(millis(rng, 5000).min(server.drain_timeout)) } else { None };
    let server = server
        .drain_spread(spread)
        .connections_max(if rng.one_in(4) { rng.range(4, 8) as usize } else { 1000 })
        .upstreams_max(rng.pick(&[64, 1024]));
    let mut limits =
        Limits::default().calls_in_flight_max(calls_in_flight_max).inbox_bytes_high(inbox_bytes_high);
    if rng.one_in(4) {
        limits = limits.outbox_bytes_low(1 << 10).outbox_bytes_high(4 << 10);
    }
    limits = limits.connection_tasks_max(rng.pick(&[1, 64]));
    if bite {
        let time = |rng: &mut Rng| Some(millis(rng, 20_000).max(Duration::from_millis(100)));
        let idle = time(rng);
        limits = limits
            .first_frame_timeout(time(rng))
            .idle_timeout(idle)
            .open_timeout(idle.map(|idle| (idle / 8).max(Duration::from_millis(20))))
            .handler_timeout(time(rng))
            .write_stall_timeout(time(rng))
            .heartbeat_interval(idle.map(|idle| idle / rng.range(1, 4) as u32));
    } else {
        limits = limits
            .first_frame_timeout(None)
            .idle_timeout(None)
            .open_timeout(None)
            .handler_timeout(None)
            .write_stall_timeout(None)
            .proxy_header_timeout(None)
            .handshake_timeout(None)
            .heartbeat_interval(None)
            .write_bytes_per_second_min(0)
            .read_bytes_per_second_min(0);
    }
    (server, limits)
}

/// The layers between the sockets and the frames of a seed's server.
#[derive(Clone, Debug)]
pub struct Layers {
    toy: Toy,
    /// The services that have it.
    pub first: bool,
    pub second: bool,
    pub alive: Alive,
    pub pieces: Pieces,
    /// The toy is there.
    pub has_toy: bool,
    /// WebSocket is there, above the toy if both are.
    pub has_websocket: bool,
}

impl Layers {
    pub fn drawn(seed: u64) -> Option<Layers> {
        let rng = &mut Rng::new(seed ^ 0x006C_6179_6572_7321);
        if !rng.one_in(3) {
            return None;
        }
        let alive = Alive::default();
        let toy = Toy::server()
            .permits(rng.pick(Permits::ALL))
            .record_bytes(rng.spread(1, 4096) as usize)
            .updates_every(if rng.one_in(2) { rng.spread(1, 16) } else { 0 })
            .counted(&alive);
        let (first, second) = rng.pick(&[(true, false), (true, true), (false, true)]);
        let pieces = rng.pick(Pieces::ALL);
        let (has_toy, has_websocket) = rng.pick(&[(true, false), (true, false), (true, true), (false, true)]);
        Some(Layers { toy, first, second, alive, pieces, has_toy, has_websocket })
    }

    /// The factory of the toy.
    pub fn toy(&self) -> impl Fn() -> Toy + Send + Sync + use<> {
        let toy = self.toy.clone();
        move || toy.clone()
    }

    /// An endpoint that has them.
    pub fn below(&self, endpoint: Endpoint) -> Endpoint {
        let endpoint = if self.has_toy { endpoint.transport(self.toy()) } else { endpoint };
        if self.has_websocket { endpoint.websocket() } else { endpoint }
    }
}
