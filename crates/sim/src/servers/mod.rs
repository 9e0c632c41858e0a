//! Whole servers by seed: the loop that `Server::start` runs, with its services, tasks, timers,
//! messages, upstreams, connections passed between shards, drains and deaths.
//!
//! ```text
//!   plan       the draws of a seed
//!   client     the replies owed to a client, and the check that no others come
//!   service    the behaviour of user code, panics included
//!   admitted   an additional server whose limits on peers are reached, and not exceeded
//!   paused     an additional server of two shards, one of which pauses, and its accept rate
//!   proxied    clients behind proxies, and intruders
//!   layered    clients through the toy transport, and peers that break it
//!   rules      rules of framing that are switched, frames in pieces, codecs: a separate service and client for each
//!   start      the waits of factories
//!   meshes     communication between shards
//!   inspected  inspections, compared with the calls of services
//!   cover      the events that a campaign must cover, and their counts
//!   ───────    ringserve::testing: scheduler, rules that hold for all servers
//!   ───────    simkernel: a ring for each shard, one network, one clock
//! ```

mod admitted;
mod client;
mod cover;
mod inspected;
mod layered;
mod meshes;
mod paused;
mod plan;
mod proxied;
mod rules;
mod service;
mod start;

pub use cover::COVERED;

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringserve_server::framing::{Delimiter, Framing, LengthPrefix, Lines};
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::{endpoints, tcp};
use ringserve_server::testing::{ClientResult, Fault, Net, Sim, SimServer};
use ringserve_server::{CloseReason, Error, MultiService, Peer, Server, Shard, Stream, stream};

use admitted::Admitted;
use cover::{Counts, Cover, QUOTA, expected};
use layered::Way;
use plan::{ClientPlan, Deed, Fate, Frames, Layers, Leave, Plan};
use service::{Common, Model, NAME, NO_UPSTREAM, POOLED, Planted, UPSTREAM};
use start::Start;

/// The address of the server.
const ADDR: ([u8; 4], u16) = ([10, 0, 0, 1], 7000);

/// The address of its second service, if it has one.
const SECOND: ([u8; 4], u16) = ([10, 0, 0, 1], 7001);

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The first seed.
    pub from: u64,
    /// Number of seeds.
    pub seeds: u64,
    /// Threads.
    pub jobs: usize,
    /// Runs each seed twice, and not each hundredth alone.
    pub twice: bool,
    /// Prints every event.
    pub trace: bool,
    /// Makes the service reply twice now and then: a campaign that notices nothing else notices
    /// this.
    pub canary: bool,
}

/// Totals of a campaign in which every seed held.
#[derive(Clone, Debug, Default)]
pub struct Sum {
    /// Rounds of shards and polls of clients.
    pub steps: u64,
    /// Virtual time of all seeds.
    pub time: Duration,
    counts: Counts,
}

/// A seed that broke a rule.
#[derive(Clone, Debug)]
pub struct Broken {
    /// The seed.
    pub seed: u64,
    /// The violated rule, and the last events.
    pub what: String,
}

/// Runs all seeds, or up to the first one that breaks a rule.
///
/// # Errors
/// The first seed that breaks a rule.
pub fn run(options: &Options) -> Result<Sum, Broken> {
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let found: Mutex<Option<Broken>> = Mutex::new(None);
    let sum = Mutex::new(Sum::default());
    let started = Instant::now();
    let work = || {
        let mut here = Sum::default();
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= options.seeds {
                break;
            }
            if index > 0 && index.is_multiple_of(10_000) {
                println!("{index} seeds, {:.0} a second", index as f64 / started.elapsed().as_secs_f64());
            }
            let seed = options.from + index;
            if let Err(what) = run_seed(seed, options, &mut here) {
                stop.store(true, Ordering::Relaxed);
                let mut found = found.lock().unwrap_or_else(|lock| lock.into_inner());
                if found.as_ref().is_none_or(|old| old.seed > seed) {
                    *found = Some(Broken { seed, what });
                }
            }
        }
        sum.lock().unwrap_or_else(|lock| lock.into_inner()).add(here);
    };
    std::thread::scope(|scope| {
        (0..options.jobs.max(1)).for_each(|_| drop(scope.spawn(work)));
    });
    match found.into_inner().unwrap_or_else(|lock| lock.into_inner()) {
        Some(broken) => Err(broken),
        None => Ok(sum.into_inner().unwrap_or_else(|lock| lock.into_inner())),
    }
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.steps += other.steps;
        self.time += other.time;
        for (what, count) in other.counts {
            *self.counts.entry(what).or_default() += count;
        }
    }

    /// The counts of all events, and the possible events that occurred too rarely.
    pub fn table(&self, seeds: u64) -> (String, Vec<String>) {
        let mut text = String::new();
        for ((kind, name), count) in &self.counts {
            let _ = writeln!(text, "{count:>12}  {kind}: {name}");
        }
        let seldom = |(kind, name): &(&'static str, String)| {
            let count = self.counts.get(&(*kind, name.clone())).copied().unwrap_or(0);
            count * QUOTA.1 < QUOTA.0 * seeds
        };
        let layered = layered::expected().map(|name| ("layer", name));
        let missing = expected()
            .into_iter()
            .chain(layered)
            .filter(seldom)
            .map(|(kind, name)| format!("{kind}: {name}"));
        (text, missing.collect())
    }
}

fn run_seed(seed: u64, options: &Options, sum: &mut Sum) -> Result<(), String> {
    let plan = Plan { canary: options.canary, ..Plan::drawn(seed) };
    let cover = Cover::default();
    let seeds = Sim::seeds(1)
        .from(seed)
        .faults(plan.faults.clone())
        .adversary(plan.adversary.clone())
        .allow_panics(|said| said.starts_with("planted"));
    let test = |sim: &Sim| play(sim, &plan, &cover);
    let held =
        |failure: ringserve_server::testing::SeedFailure| format!("{}\n{}", failure.what, failure.chart);
    let outcome = match options.trace {
        true => seeds.trace(seed, &test),
        false => seeds.check(seed, &test),
    };
    let outcome = outcome.map_err(held)?;
    let counts = cover.take();
    if options.twice {
        let again = seeds.check(seed, &test).map_err(held)?;
        if (again.hash, again.steps) != (outcome.hash, outcome.steps) {
            return Err(format!(
                "{} steps, then {}: the seed does not decide what happens",
                outcome.steps, again.steps
            ));
        }
    }
    cover.take();
    for fault in Fault::ALL {
        cover.add("fault", format!("{fault:?}"), outcome.injected.of(*fault));
    }
    for (event, count) in outcome.hostile {
        cover.add("hostile", format!("{event:?}"), count);
    }
    sum.add(Sum { steps: outcome.steps, time: outcome.time, counts });
    sum.add(Sum { counts: cover.take(), ..Sum::default() });
    Ok(())
}

/// Runs one seed.
fn play(sim: &Sim, plan: &Plan, cover: &Cover) {
    cover.count("frames", format!("{:?}", plan.frames));
    let admitted = Admitted::begin(sim, plan, cover);
    paused::begin(sim, plan, cover);
    match plan.frames {
        Frames::Lines => play_framed(sim, plan, cover, Lines::default()),
        Frames::Lengths => play_framed(sim, plan, cover, LengthPrefix::bytes(4)),
        Frames::Delimited => play_framed(sim, plan, cover, Delimiter::new(b"\r\n--\r\n")),
        Frames::Planted => play_framed(sim, plan, cover, Planted(Lines::default())),
        Frames::Stream => play_streams(sim, plan, cover),
        Frames::Switched => rules::play_switching(sim, plan, cover),
        Frames::Codec => rules::play_codec(sim, plan, cover),
    }
    if let Some(admitted) = admitted {
        admitted.check();
    }
}

fn server(plan: &Plan, fate: Option<Fate>) -> Server {
    let server = Server::bind(SocketAddr::from(ADDR));
    let server = if plan.proxied { server.proxy_protocol(proxied::trusted()) } else { server };
    let server = match plan.layers.as_ref().filter(|layers| layers.first) {
        Some(layers) => {
            let server = if layers.has_toy { server.transport(layers.toy()) } else { server };
            if layers.has_websocket { server.websocket() } else { server }
        }
        None => server,
    };
    server
        .shards(plan.shards)
        .limits(plan.limits.clone())
        .admission(plan.admission.clone().unwrap_or_default())
        .server_limits(server_limits(plan, fate))
        .coalesce(plan.coalesce)
}

fn server_limits(plan: &Plan, fate: Option<Fate>) -> ServerLimits {
    let limits = plan.server_limits.clone();
    if fate == Some(Fate::TimesOut) { limits.start_timeout(Fate::LIMIT) } else { limits }
}

/// Creates the same server with two services.
fn two_services(plan: &Plan, fate: Option<Fate>) -> Server<MultiService> {
    Server::new()
        .shards(plan.shards)
        .admission(plan.admission.clone().unwrap_or_default())
        .server_limits(server_limits(plan, fate))
        .coalesce(plan.coalesce)
}

/// A server of the run, and the state that its services share.
struct Started {
    server: SimServer,
    first: Common,
    second: Common,
}

impl Started {
    /// Checks at the end that the connections of each service are counted under its name.
    fn check(&self, plan: &Plan, cover: &Cover) {
        let stats = self.server.stats();
        proxied::check(&stats, plan, self.first.opened.load(Ordering::Relaxed), cover);
        for (common, service) in [&self.first, &self.second].into_iter().zip(&stats.services) {
            let (opened, counters) = (common.opened.load(Ordering::Relaxed), &service.counters);
            // Behind proxies and below transports some end before the service is called.
            assert!(
                counters.opened == opened || plan.ends_before_open(common.is_second),
                "the connections of service {}",
                service.name
            );
            assert_eq!(counters.closed, counters.opened, "those of them that ended");
            assert!(counters.accepted >= opened, "{} are counted that came, of {opened}", counters.accepted);
            common.meshes.check_ended();
            common.check_admission(plan, cover);
        }
        let of_all: u64 = stats.services.iter().map(|service| service.counters.opened).sum();
        assert_eq!(of_all, stats.counters.opened, "the services make up the server");
    }
}

fn play_framed<F: Framing + Clone + Send + Sync>(sim: &Sim, plan: &Plan, cover: &Cover, framing: F) {
    let all = RefCell::new(Vec::new());
    let start = |factory_fails: Option<(usize, bool)>, fate: Option<Fate>| {
        let first = Common::new(false, plan);
        let second = first.beside(plan);
        let start = Start::new(plan, fate, cover);
        let make = |common: &Common| {
            let is_second = common.is_second;
            let (common, cover, plan, start) = (common.clone(), cover.clone(), plan.clone(), start.clone());
            let make = move |shard: &Shard| {
                match factory_fails {
                    Some((failing, true)) if failing == shard.index() => panic!("planted: a factory panics"),
                    Some((failing, false)) if failing == shard.index() => return Err("planted"),
                    _ => {}
                }
                common.controls.lock().unwrap_or_else(PoisonError::into_inner).push(shard.server().clone());
                Ok(Model::new(shard, &common, &cover, &plan))
            };
            move |shard: &Shard| start.begin(shard, usize::from(is_second), make.clone())
        };
        let accepts = {
            let start = start.clone();
            move |_: &Peer| start.accepts()
        };
        start.accompany(sim, ADDR.into());
        let server = match plan.second_limits() {
            None => sim.start(server(plan, fate).admit(accepts).framing(framing.clone()), make(&first)),
            Some(limits) => {
                let layers = plan.layers.as_ref();
                let tcp = |addr: ([u8; 4], u16), has_layer: fn(&&Layers) -> bool| {
                    let endpoint = tcp(SocketAddr::from(addr));
                    match layers.filter(has_layer) {
                        Some(layers) => layers.below(endpoint),
                        None => endpoint,
                    }
                };
                let one = match plan.proxied {
                    false => endpoints(tcp(ADDR, |of| of.first)),
                    true => endpoints((
                        tcp(ADDR, |of| of.first).proxy_protocol(proxied::trusted()),
                        tcp(proxied::UNTRUSTED, |_| false).proxy_protocol(proxied::untrusted()),
                    )),
                };
                let one = one.framing(framing.clone()).limits(plan.limits.clone());
                let two = tcp(SECOND, |of| of.second).limits(limits);
                let server = two_services(plan, fate).admit(accepts).service(one, make(&first));
                sim.start_several(match plan.frames {
                    Frames::Planted => server.service(two.framing(Planted(Lines::default())), make(&second)),
                    _ => server.service(two.framing(second_framing()), make(&second)),
                })
            }
        };
        match &server {
            Ok(_) => start.check(),
            Err(error) => start.check_failed(error),
        }
        server.inspect(|server| all.borrow_mut().push(Started { server: server.clone(), first, second }))
    };
    sim.name(NAME.0, [NO_UPSTREAM, UPSTREAM].map(|(ip, _)| ip.into()));
    sim.background("upstream", async |net| {
        let mut listener = net.listen(SocketAddr::from(UPSTREAM))?;
        loop {
            let mut stream = listener.accept().await;
            net.spawn(async move {
                while let Ok(bytes) = stream.some().await {
                    if bytes.is_empty() || stream.send(&bytes).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    // Until it listens.
    sim.run_for(Duration::from_millis(1));
    if plan.second.is_some() {
        cover.count("did", "two services");
    }
    if let Some(fails) = plan.factory_fails {
        assert!(start(Some(fails), None).is_err(), "a server starts whose factory fails");
        cover.count("did", if fails.1 { "factory panics" } else { "factory fails" });
    }
    if let Some(fate) = plan.start.fate {
        assert!(start(None, Some(fate)).is_err(), "a server starts whose fate is {fate:?}");
    }
    let client = |number: usize, of: &ClientPlan| {
        let (of, framing, cover) = (of.clone(), framing.clone(), cover.clone());
        let (is_second, frames) = (plan.is_second(of.first), plan.frames);
        let way = Way::of(plan, if is_second { SECOND } else { ADDR }, of.first, &cover);
        let limits = if is_second { plan.second_limits() } else { None };
        let in_order = limits.unwrap_or_else(|| plan.limits.clone()).calls_in_flight_max == 1;
        sim.client(format!("c{number}"), async move |net| match (is_second, frames) {
            (false, _) => client::run(net, way, framing, of, in_order, cover).await,
            (true, Frames::Planted) => {
                client::run(net, way, Planted(Lines::default()), of, in_order, cover).await
            }
            (true, _) => client::run(net, way, second_framing(), of, in_order, cover).await,
        })
    };
    // A driver may break while factories wait.
    let serves = || loop {
        match start(None, None) {
            Err(Error::Broken { .. }) => {}
            started => break started.expect("it starts"),
        }
    };
    with_deeds(sim, plan, cover, &serves, &client);
    all.take().iter().for_each(|started: &Started| started.check(plan, cover));
}

/// The framing of the second service, which the first one never has.
fn second_framing() -> LengthPrefix {
    LengthPrefix::bytes(3)
}

fn play_streams(sim: &Sim, plan: &Plan, cover: &Cover) {
    let start = || {
        let server = sim.start(server(plan, None), |_shard| {
            stream(async |mut stream: Stream| {
                while let Some(bytes) = stream.read_frame().await? {
                    stream.queue(bytes);
                    stream.ready().await?;
                }
                std::io::Result::Ok(())
            })
        });
        server.expect("it starts")
    };
    let client = |number: usize, of: &ClientPlan| {
        let (of, cover, cuts_none) = (of.clone(), cover.clone(), plan.cuts_none);
        let way = Way::of(plan, ADDR, of.first, &cover);
        sim.client(format!("c{number}"), async move |net| {
            let is_served = Cell::new(false);
            let talked = talk_to_stream(net, way, &of, &cover, &is_served).await;
            match talked {
                Err(error) if cuts_none && is_served.get() => {
                    panic!("a stream that is served is cut by a drain: {error}")
                }
                talked => talked,
            }
        })
    };
    with_deeds(sim, plan, cover, &start, &client);
}

/// A client of a stream that returns the sent bytes.
async fn talk_to_stream(
    net: Net,
    way: Way,
    of: &ClientPlan,
    cover: &Cover,
    is_served: &Cell<bool>,
) -> ClientResult {
    net.sleep(of.starts).await;
    let mut me = way.connect(&net).await?;
    for round in 0..of.requests.len() {
        let bytes: Vec<u8> = (0..of.padding + 1).map(|at| (at + round) as u8).collect();
        for piece in bytes.chunks(of.piece.unwrap_or(bytes.len())) {
            me.send(piece).await?;
        }
        assert_eq!(me.exactly(bytes.len()).await?, bytes, "a stream brings back what was sent");
        is_served.set(true);
        net.sleep(of.pause).await;
    }
    match of.leave {
        Leave::Reset => me.reset(),
        Leave::Close => {}
        _ => {
            me.finish().await?;
            assert_eq!(me.closed().await?, b"", "nothing else comes");
            cover.count("client", "heard its stream to the end");
        }
    }
    Ok(())
}

/// Starts the server and its clients, and does the deeds of the plan at their times.
fn with_deeds(
    sim: &Sim,
    plan: &Plan,
    cover: &Cover,
    start: &dyn Fn() -> SimServer,
    client: &dyn Fn(usize, &ClientPlan) -> IpAddr,
) {
    if plan.loses() {
        sim.expect_losses();
    }
    let (mut server, mut is_broken) = (start(), false);
    let hosts: Vec<IpAddr> = plan.clients.iter().enumerate().map(|(number, of)| client(number, of)).collect();
    proxied::intrude(sim, plan);
    layered::intrude(sim, plan, cover);
    let pick = |from: usize| (sim.random() % from as u64) as usize;
    for &(at, deed) in &plan.deeds {
        sim.run_for(at.saturating_sub(sim.now()));
        cover.count("deed", format!("{deed:?}"));
        let time = Duration::from_millis(sim.random() % 10_000);
        match deed {
            Deed::Drain => server.drain(),
            Deed::DrainLate => {
                sim.expect_losses();
                // The shard to which most connect.
                server.stall(0, plan.server_limits.drain_delay + time);
                server.drain();
            }
            Deed::Abort => server.abort(),
            Deed::BreakDriver => {
                is_broken = true;
                let shard = pick(plan.shards);
                // It ends with everything that waits for it by then.
                sim.expect_losses();
                server.stall(shard, time);
                sim.run_for(time / 2);
                server.break_driver(shard);
                sim.run_until(Duration::from_secs(3600), || server.is_done());
                assert!(server.is_done(), "the other shards of a dead one end");
            }
            Deed::Stall => {
                sim.expect_losses();
                server.stall(pick(plan.shards), time);
            }
            Deed::Suspend => {
                sim.expect_losses();
                sim.suspend(time * 1000);
            }
            Deed::Partition => {
                let host = hosts[pick(hosts.len())];
                sim.partition(host, ADDR.0.into());
                sim.run_for(time);
                sim.heal(host, ADDR.0.into());
            }
            Deed::ResetHost => sim.reset(hosts[pick(hosts.len())]),
            Deed::Restart => {
                drain(sim, plan, &server);
                check_sockets(&server, plan, is_broken, cover);
                (server, is_broken) = (start(), false);
                cover.count("did", "second server");
            }
        }
    }
    if plan.waits {
        sim.run_until_done();
        if plan.keeps_upstreams {
            sim.run_for(POOLED);
        }
        let are_gone = || {
            let stats = server.stats();
            server.is_done() || stats.connections + stats.upstreams.connections == 0
        };
        sim.run_until(Duration::from_secs(3600), are_gone);
        assert!(are_gone(), "connections stay whose clients and calls have gone");
        if plan.deeds.is_empty() && !server.is_done() {
            let [began, ended] = ["began", "saw the end"].map(|what| cover.of("watch", what));
            let all_saw = || cover.of("watch", "saw the end") == cover.of("watch", "began");
            sim.run_until(Duration::from_secs(10), all_saw);
            assert!(all_saw(), "{began} tasks wait for ends, and {ended} saw one");
        }
    }
    drain(sim, plan, &server);
    sim.finish();
    check_sockets(&server, plan, is_broken, cover);
    layered::check(plan);
}

/// Time that a drain may take in addition to its limits: shards that do not run, new connections,
/// orderly closes.
const DRAIN_TAKES: Duration = Duration::from_secs(30);

/// Shuts down a server, which must end in time, and once no accepted connection is left.
fn drain(sim: &Sim, plan: &Plan, server: &SimServer) {
    server.drain();
    sim.run_until(plan.server_limits.drain_delay + DRAIN_TAKES, || server.is_done());
    sim.run_until(plan.server_limits.drain_timeout, || server.is_done() || server.stats().connections == 0);
    assert!(sim.run_until(DRAIN_TAKES, || server.is_done()), "a drain takes longer than its limits say");
}

/// Checks at the end that each socket which a shard accepted became a connection, there or
/// elsewhere, or was refused; and that only shards that were full passed any on.
fn check_sockets(server: &SimServer, plan: &Plan, is_broken: bool, cover: &Cover) {
    let counters = server.stats().counters;
    cover.add("did", "connection passed on", counters.handed_off);
    let turned_away = counters.refused - counters.closed_for(CloseReason::Refused);
    // The rejection message of a transport is in flight to a refused peer, and may meet a reset.
    let otherwise = plan.layers.as_ref().map_or(0, |_| counters.closed_for(CloseReason::PeerReset));
    let came = counters.opened + turned_away;
    assert!(
        is_broken || (counters.accepted..=counters.accepted + otherwise).contains(&came),
        "a socket was accepted and then lost: {counters:?}"
    );
    let has_room = plan.server_limits.connections_max > plan.clients.len() * plan.shards;
    assert!(!has_room || counters.handed_off == 0, "a connection is passed on by a shard that has room");
}
