//! An additional server whose limits on peers are reached: no peer is ever admitted above a limit,
//! and none is refused below.
//!
//! Each host tries one connection after another, and holds those that it gets. The limits count the
//! calls of the service's `open` and `close`: both come in the turn in which the count changes.

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::admission::{Admission, IpList, RefusedBy};
use ringserve_server::framing::Lines;
use ringserve_server::testing::{Fault, Net, Sim, SimServer};
use ringserve_server::time::Time;
use ringserve_server::{CloseCx, Cx, Frame, OpenCx, Peer, Refusal, Server, ServerControl, Service, Shard};

use super::cover::Cover;
use super::plan::{Deed, Plan};
use crate::rng::Rng;

/// The address of the server.
const ADDR: ([u8; 4], u16) = ([10, 0, 0, 3], 7100);

const SECOND: u64 = 1_000_000_000;

/// Time of the server within which connections may have come that a shard sees late.
const LATE_MAX: u64 = 10 * SECOND;

/// The longest absence of a shard if the machine does not sleep, with the time in which it catches
/// up.
const AWAY_MAX: u64 = 4 * SECOND;

/// The first line of a connection.
const HELLO: &str = "hello";

/// The server's decision on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Ordinary,
    /// On the deny list.
    Denied,
    /// On the allow list.
    Allowed,
    /// Refused by the program.
    Unwanted,
}

/// The draws of a seed.
struct Drawn {
    shards: usize,
    per_address: Option<u32>,
    /// Connections per second and at once, of an address and of all.
    rate: Option<(u32, u32)>,
    rate_of_all: Option<(u32, u32)>,
    slow_start: Duration,
    hosts: Vec<(Standing, Vec<Attempt>)>,
}

/// One of a host's connections: the pause before it, and how long it is held.
#[derive(Clone, Copy)]
struct Attempt {
    after: Duration,
    held: Duration,
}

impl Drawn {
    fn by(seed: u64) -> Option<Drawn> {
        let rng = &mut Rng::new(seed ^ 0x6C65_745F_696E_2121);
        if !rng.one_in(3) {
            return None;
        }
        let millis = |rng: &mut Rng, most: u64| Duration::from_micros(rng.spread(1, most * 1000));
        let attempt =
            |rng: &mut Rng, most: u64| Attempt { after: millis(rng, most), held: millis(rng, 20_000) };
        let hosts = (0..rng.range(1, 6)).map(|_| {
            let standing = match rng.below(8) {
                0 => Standing::Denied,
                1 => Standing::Allowed,
                2 => Standing::Unwanted,
                _ => Standing::Ordinary,
            };
            let hurry = rng.pick(&[10, 1000, 10_000]);
            (standing, (0..rng.spread(1, 30)).map(|_| attempt(rng, hurry)).collect())
        });
        let hosts = hosts.collect();
        let rate_of_all = rng.one_in(2).then(|| (rng.range(1, 20) as u32, rng.range(1, 8) as u32));
        let most = rate_of_all.map_or(5, |(rate, _)| rate.into());
        Some(Drawn {
            shards: rng.range(1, 4) as usize,
            per_address: (!rng.one_in(4)).then(|| rng.range(1, 8) as u32),
            rate: rng.one_in(2).then(|| (rng.range(1, most.min(5)) as u32, rng.range(1, 6) as u32)),
            rate_of_all,
            slow_start: if rng.one_in(2) { Duration::ZERO } else { millis(rng, 60_000) },
            hosts,
        })
    }

    fn admission(&self, deny: IpList, allow: IpList) -> Admission {
        let mut admission = Admission::default().deny(deny);
        if !allow.is_empty() {
            admission = admission.allow(allow);
        }
        if let Some(count) = self.per_address {
            admission = admission.per_address(count);
        }
        if let Some((rate, burst)) = self.rate {
            admission = admission.address_rate(rate, burst);
        }
        if let Some((rate, burst)) = self.rate_of_all {
            admission = admission.accept_rate(rate, burst).slow_start(self.slow_start);
        }
        admission
    }
}

/// Time by a clock that runs as fast as the rate of all has risen.
pub fn slope(time: u64, whole: u64) -> u64 {
    let on_it = u128::from(time.min(whole));
    let below = on_it / 10 + (9 * on_it * on_it).checked_div(20 * u128::from(whole)).unwrap_or(0);
    below as u64 + time.saturating_sub(whole)
}

/// The longest wait of connections that are judged by the rate of that time.
fn away_max(plan: &Plan, seed: u64) -> u64 {
    match plan.faults.clone().drawn(seed).once_in(Fault::ShardStalls) {
        _ if plan.deeds.iter().any(|(_, deed)| *deed == Deed::Suspend) => LATE_MAX,
        0 => 0,
        _ => AWAY_MAX,
    }
}

/// True if there were more than allowed in some time until now. Times are in nanoseconds, and in
/// order.
fn window_is_over(times: &[u64], now: u64, rate: (u32, u32)) -> bool {
    is_over(times, 0, now, rate)
}

/// Does the same, if there were some more now.
pub fn is_over(times: &[u64], more: usize, now: u64, (rate, burst): (u32, u32)) -> bool {
    let interval = SECOND.div_ceil(rate.into());
    let over = |(n, from): (usize, &u64)| {
        (times.len() - n + more) as u64 > u64::from(burst) + now.saturating_sub(*from) / interval
    };
    times.iter().enumerate().any(over)
}

/// State of a host.
struct Source {
    address: IpAddr,
    standing: Standing,
    live: u32,
    /// Changes of the count: times and new values.
    counts: Vec<(u64, u32)>,
    let_in: Vec<u64>,
    refused: u64,
}

/// Reports of all shards, and of all hosts.
struct Book {
    hosts: Vec<Source>,
    drawn: Drawn,
    /// Start of the server, by its clock and by that of the run.
    began: u64,
    began_at: Duration,
    /// Admissions of all hosts that are not allow-listed, by the clock with a slope.
    let_in: Vec<u64>,
    /// The longest time that one of its shards is away, or late.
    away_max: u64,
    control: Option<ServerControl>,
    cover: Cover,
}

impl Book {
    /// The server's clock at a time of the run.
    fn clock(&self, at: Duration) -> u64 {
        self.began + (at - self.began_at).as_nanos() as u64
    }

    fn host(&mut self, address: IpAddr) -> &mut Source {
        let host = self.hosts.iter_mut().find(|host| host.address == address);
        host.expect("no other peer connects")
    }

    fn opened(&mut self, address: IpAddr, now: Time, is_draining: bool) {
        let (now, away_max) = (now.as_nanos(), self.away_max);
        let (count, rate, of_all) = (self.drawn.per_address, self.drawn.rate, self.drawn.rate_of_all);
        let host = self.host(address);
        let standing = host.standing;
        assert!(
            matches!(standing, Standing::Ordinary | Standing::Allowed),
            "a host is let in that is {standing:?}"
        );
        host.live += 1;
        host.counts.push((now, host.live));
        host.let_in.push(now);
        if standing == Standing::Allowed {
            return self.cover.count("admission", "allowed");
        }
        let (live, is_over) =
            (host.live, rate.is_some_and(|rate| window_is_over(&host.let_in, now + away_max, rate)));
        assert!(
            count.is_none_or(|count| live <= count),
            "a peer has {live} connections, and may have {count:?}"
        );
        assert!(!is_over, "a peer opened more than {rate:?} allows");
        // A drain admits all that wait.
        if let Some(of_all) = of_all.filter(|_| !is_draining) {
            let now = slope(now - self.began, self.drawn.slow_start.as_nanos() as u64);
            self.let_in.push(now);
            assert!(
                !window_is_over(&self.let_in, now, of_all),
                "all of them opened more than {of_all:?} allows"
            );
        }
        self.cover.count("admission", "let in");
    }

    fn ended(&mut self, address: IpAddr, now: Time) {
        let host = self.host(address);
        host.live -= 1;
        host.counts.push((now.as_nanos(), host.live));
    }

    /// Checks that a host was refused rightly between two times, if there are no faults.
    fn refused(&mut self, address: IpAddr, (from, to): (u64, u64)) {
        let (most, rate) = (self.drawn.per_address, self.drawn.rate);
        let host = self.host(address);
        host.refused += 1;
        let why = match host.standing {
            Standing::Denied => "denied",
            Standing::Unwanted => "unwanted",
            Standing::Allowed => panic!("a host is refused that is allowed"),
            Standing::Ordinary => {
                let before = host.counts.iter().take_while(|(at, _)| *at < from).last();
                let then = host.counts.iter().filter(|(at, _)| (from..=to).contains(at));
                let live = before.into_iter().chain(then).map(|(_, live)| *live).max().unwrap_or(0);
                // One more, at any of these times: earlier admissions decide.
                let times = &host.let_in;
                let would_be = |now: u64| {
                    let mut times: Vec<u64> = times.iter().copied().filter(|at| *at <= now).collect();
                    times.push(now);
                    rate.is_some_and(|rate| window_is_over(&times, now, rate))
                };
                let is_slow = times.iter().copied().filter(|at| (from..=to).contains(at)).any(would_be);
                if most.is_some_and(|most| live >= most) {
                    "beyond its count"
                } else if is_slow || would_be(from) {
                    "beyond its rate"
                } else {
                    panic!(
                        "a peer is refused with {live} connections, of {most:?}, and a rate below {rate:?}"
                    )
                }
            }
        };
        self.cover.count("admission", why);
    }
}

struct Greeter {
    book: Rc<RefCell<Book>>,
    shard: Shard,
}

impl Service for Greeter {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        let address = opening.peer().addr().expect("hosts have addresses").ip();
        self.book.borrow_mut().opened(address, self.shard.now(), opening.is_draining());
        opening.reply(HELLO);
        Ok(())
    }

    async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        let address = closed.peer().addr().expect("hosts have addresses").ip();
        self.book.borrow_mut().ended(address, self.shard.now());
    }
}

/// The server with its hosts.
pub struct Admitted {
    book: Rc<RefCell<Book>>,
    server: SimServer,
    /// Nothing is done, and no fault occurs, that ends a connection.
    is_calm: bool,
}

impl Admitted {
    /// Starts it, if the seed includes it.
    pub fn begin(sim: &Sim, plan: &Plan, cover: &Cover) -> Option<Admitted> {
        let drawn = Drawn::by(sim.seed())?;
        let is_calm = plan.keeps_upstreams && plan.waits;
        let book = Rc::new(RefCell::new(Book {
            hosts: Vec::new(),
            drawn,
            began: 0,
            began_at: sim.now(),
            let_in: Vec::new(),
            away_max: away_max(plan, sim.seed()),
            control: None,
            cover: cover.clone(),
        }));
        let count = book.borrow().drawn.hosts.len();
        for number in 0..count {
            let (standing, attempts) = book.borrow().drawn.hosts[number].clone();
            let its = book.clone();
            let address = sim.client(format!("host {number}"), async move |net| {
                run(net, its, attempts, is_calm).await;
                Ok(())
            });
            let (counts, let_in) = (Vec::new(), Vec::new());
            let source = Source { address, standing, live: 0, counts, let_in, refused: 0 };
            book.borrow_mut().hosts.push(source);
        }
        let listed = |of: Standing| -> IpList {
            let book = book.borrow();
            let its = book.hosts.iter().filter(|host| host.standing == of);
            its.map(|host| format!("{}\n", host.address)).collect::<String>().parse().expect("a list")
        };
        let admission = book.borrow().drawn.admission(listed(Standing::Denied), listed(Standing::Allowed));
        let unwanted: Vec<IpAddr> = {
            let book = book.borrow();
            let its = book.hosts.iter().filter(|host| host.standing == Standing::Unwanted);
            its.map(|host| host.address).collect()
        };
        let admits = move |peer: &Peer| peer.addr().is_none_or(|peer| !unwanted.contains(&peer.ip()));
        let server = Server::bind(SocketAddr::from(ADDR)).shards(book.borrow().drawn.shards);
        let server = server.admission(admission).admit(admits).framing(Lines::default());
        let its = book.clone();
        let server = sim.start(server, move |shard| {
            let mut book = its.borrow_mut();
            book.control = Some(shard.server().clone());
            book.began = shard.now().as_nanos();
            Greeter { book: its.clone(), shard: shard.clone() }
        });
        // The ring of a shard may break before it starts.
        Some(Admitted { book, server: server.ok()?, is_calm })
    }

    /// At the end of the run.
    pub fn check(&self) {
        let book = self.book.borrow();
        let control = book.control.as_ref().expect("a factory was called");
        assert_eq!(control.admission_stats().connections, 0, "connections count that ended");
        let counters = self.server.stats().counters;
        book.cover.add("admission", "waited for the rate", counters.accept_held);
        if !self.is_calm {
            return;
        }
        let refused = |of: &[Standing]| -> u64 {
            book.hosts.iter().filter(|host| of.contains(&host.standing)).map(|host| host.refused).sum()
        };
        assert_eq!(
            counters.refused_by(RefusedBy::DenyList),
            refused(&[Standing::Denied]),
            "of the deny list"
        );
        let by_limits = [RefusedBy::AddressCount, RefusedBy::AddressRate, RefusedBy::Admit];
        let by_limits: u64 = by_limits.map(|by| counters.refused_by(by)).iter().sum();
        assert_eq!(by_limits, refused(&[Standing::Ordinary, Standing::Unwanted]), "for counts and rates");
        let let_in: usize = book.hosts.iter().map(|host| host.let_in.len()).sum();
        assert_eq!(counters.opened, let_in as u64, "those that were opened");
    }
}

/// A host.
async fn run(net: Net, book: Rc<RefCell<Book>>, attempts: Vec<Attempt>, is_calm: bool) {
    for Attempt { after, held } in attempts {
        net.sleep(after).await;
        let from = book.borrow().clock(net.now());
        let Ok(mut stream) = net.connect(SocketAddr::from(ADDR)).await else {
            assert!(!is_calm, "the server does not listen");
            continue;
        };
        match stream.line().await {
            Ok(Some(line)) => {
                assert_eq!(line, HELLO);
                let ends = net.clone();
                net.spawn(async move {
                    ends.sleep(held).await;
                    drop(stream);
                });
            }
            _ if is_calm => {
                let to = book.borrow().clock(net.now());
                book.borrow_mut().refused(net.host(), (from, to));
            }
            _ => {}
        }
    }
}
