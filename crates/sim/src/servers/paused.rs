//! An additional server of two shards, whose rate of new connections rises after its start, and
//! again once all of it was full. A shard that pauses alone, for lack of a descriptor, leaves the
//! rate unchanged: new connections find the other one.
//!
//! They arrive more slowly than the whole rate admits, and faster than the tenth of it with which
//! it begins. So if it began again, many would soon wait for which the whole rate has a place.

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::admission::Admission;
use ringserve_server::framing::Lines;
use ringserve_server::overload::Load;
use ringserve_server::testing::{Fault, Net, Sim, SimServer};
use ringserve_server::{Cx, Frame, OpenCx, Refusal, Server, ServerControl, Service};

use super::admitted::{is_over, slope};
use super::cover::Cover;
use super::plan::Plan;
use crate::rng::Rng;

/// The address of the server.
const ADDR: ([u8; 4], u16) = ([10, 0, 0, 4], 7200);

/// Connections per second.
const RATE: u32 = 10;

/// Pause between two new connections.
const GAP: Duration = Duration::from_millis(160);

const NEWCOMERS: u32 = 300;

/// Interval of checks: more often than its loads change.
const LOOKS: Duration = Duration::from_millis(20);

/// New connections that wait at once: the network delays fewer of them.
const MANY: u32 = 8;

/// Checks in a row in which [`MANY`] wait, 2.5 s: a shard that does not run continues within 2 s,
/// and one that finds no descriptor sooner.
const LONG: u32 = 125;

struct Greeter;

impl Service for Greeter {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        opening.reply("hello");
        Ok(())
    }

    async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Observations of the server.
struct Seen {
    burst: u32,
    slow_start: Duration,
    began_at: Duration,
    control: Option<ServerControl>,
    /// Times at which connections were seen to have arrived, by the clock with a slope.
    came: Vec<u64>,
    waiting: u32,
    /// Checks in which many waited, since the last one in which few did, or the rate had no place.
    stuck: u32,
    one_is_full: bool,
    all_were_full: bool,
    cover: Cover,
}

impl Seen {
    /// The time by the clock with a slope.
    fn on_slope(&self, at: Duration) -> u64 {
        slope((at - self.began_at).as_nanos() as u64, self.slow_start.as_nanos() as u64)
    }

    fn look(&mut self, server: &SimServer, now: Duration) {
        let counters = server.stats().counters;
        while (self.came.len() as u64) < counters.accepted {
            self.came.push(self.on_slope(now));
        }
        let loads = self.control.as_ref().expect("a factory was called").shard_loads();
        let full = loads.iter().filter(|of| of.load == Load::Full).count();
        if full == loads.len() && !self.all_were_full {
            self.all_were_full = true;
            self.cover.count("pause", "of all shards");
        }
        if full == 0 && std::mem::take(&mut self.one_is_full) && !self.all_were_full {
            self.cover.count("pause", "of one shard");
        }
        self.one_is_full |= full > 0;
        let has_place = !is_over(&self.came, 1, self.on_slope(now), (RATE, self.burst));
        let is_stuck = has_place && self.waiting >= MANY && !self.all_were_full;
        self.stuck = if is_stuck { self.stuck + 1 } else { 0 };
        assert!(self.stuck < LONG, "newcomers wait that the rate has a place for: it rises again");
    }
}

/// Starts it, if the seed includes it and shards may find no descriptor.
pub fn begin(sim: &Sim, plan: &Plan, cover: &Cover) {
    let rng = &mut Rng::new(sim.seed() ^ 0x7061_7573_6564_2121);
    if plan.faults.once_in(Fault::AcceptNoDescriptor) == 0 || !rng.one_in(4) {
        return;
    }
    let burst = rng.range(1, 4) as u32;
    let slow_start = Duration::from_millis(rng.range(10_000, 14_000));
    let seen = Rc::new(RefCell::new(Seen {
        burst,
        slow_start,
        began_at: sim.now(),
        control: None,
        came: Vec::new(),
        waiting: 0,
        stuck: 0,
        one_is_full: false,
        all_were_full: false,
        cover: cover.clone(),
    }));
    let admission = Admission::default().accept_rate(RATE, burst).slow_start(slow_start);
    let server = Server::bind(SocketAddr::from(ADDR)).shards(2).admission(admission);
    let its = seen.clone();
    let server = sim.start(server.framing(Lines::default()), move |shard| {
        its.borrow_mut().control = Some(shard.server().clone());
        Greeter
    });
    // The ring of a shard may break before it starts.
    let Ok(server) = server else { return };
    server.follow_load();
    let until = sim.now() + GAP * (NEWCOMERS + 10);
    let its = seen.clone();
    sim.background("looks at pauses", async move |net: Net| {
        while net.now() < until && !server.is_done() {
            net.sleep(LOOKS).await;
            its.borrow_mut().look(&server, net.now());
        }
        Ok(())
    });
    sim.client("newcomers", async move |net: Net| {
        for _ in 0..NEWCOMERS {
            net.sleep(GAP).await;
            let (one, seen) = (net.clone(), seen.clone());
            net.spawn(async move {
                // Faults may break it.
                if let Ok(mut me) = one.connect(SocketAddr::from(ADDR)).await {
                    seen.borrow_mut().waiting += 1;
                    _ = me.line().await;
                    seen.borrow_mut().waiting -= 1;
                }
            });
        }
        Ok(())
    });
}
