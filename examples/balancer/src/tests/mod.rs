//! Whole balancers by seed, in virtual time, before upstreams that die, refuse, stall and come
//! back.

mod checks;
mod choosing;
mod options;
mod relaying;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};
use ringserve::upstream::{BackendStats, Health};

use crate::balancer::{Balancer, Names};
use crate::{Args, server};

const SECOND: Duration = Duration::from_secs(1);

/// The address from which the balancer connects, and at which it listens.
const HOST: [u8; 4] = [10, 0, 0, 1];

struct Running {
    balancer: Arc<Balancer>,
    server: SimServer,
}

impl Running {
    /// A balancer with these options on one to four shards.
    fn start(sim: &Sim, options: &[&str]) -> Running {
        let given = ["balancer", "--listen", "10.0.0.1:7000", "--status", "10.0.0.1:9000"];
        let args = Args::try_parse_from(given.iter().chain(options)).unwrap();
        let balancer = Arc::new(Balancer::new(args).unwrap());
        let server = server(&balancer).unwrap().shards(1 + sim.seed() as usize % 4);
        let server = sim.start_several(server).unwrap();
        // The upstreams of the test begin to listen.
        sim.run_for(SECOND);
        Running { balancer, server }
    }

    fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    fn upstream(&self, number: usize) -> BackendStats {
        self.balancer.upstream.stats().backends.swap_remove(number)
    }

    fn is_down(&self, number: usize) -> bool {
        self.upstream(number).health == Health::Down
    }

    fn connections(&self) -> Vec<u64> {
        self.sums(|backend| backend.in_flight)
    }

    fn sums(&self, of: fn(&BackendStats) -> u64) -> Vec<u64> {
        self.balancer.upstream.stats().backends.iter().map(of).collect()
    }
}

/// The behaviour of an upstream towards new connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mode {
    /// It sends back what it received, and ends after its client.
    #[default]
    Echoes,
    /// No port is open.
    Refuses,
    /// It takes connections and says nothing.
    Silent,
}

/// An upstream, as its test sees it.
#[derive(Default)]
struct Echo {
    mode: Cell<Mode>,
    /// Connections that said something, or stay for longer than a check.
    now: Cell<usize>,
    /// The first line of each, where `reads_line` says that there is one.
    lines: RefCell<Vec<String>>,
    reads_line: Cell<bool>,
}

impl Echo {
    fn start(sim: &Sim, addr: &'static str) -> Rc<Echo> {
        let echo = Rc::new(Echo::default());
        let this = echo.clone();
        sim.background(addr, async move |net| {
            loop {
                while this.mode.get() == Mode::Refuses {
                    net.sleep(SECOND / 10).await;
                }
                let mut listener = net.listen(addr)?;
                while this.mode.get() != Mode::Refuses {
                    if let Ok(stream) = net.timeout(SECOND / 10, listener.accept()).await {
                        net.spawn(this.clone().serve(net.clone(), stream));
                    }
                }
            }
        });
        echo
    }

    async fn serve(self: Rc<Echo>, net: Net, mut stream: ClientStream) {
        if self.reads_line.get() {
            match stream.line().await {
                Ok(Some(line)) => self.lines.borrow_mut().push(line),
                _ => return,
            }
        }
        let mut counted = None;
        while let Ok(bytes) = stream.some().await {
            if bytes.is_empty() {
                break;
            }
            counted.get_or_insert_with(|| Counted::new(&self));
            while self.mode.get() == Mode::Silent {
                net.sleep(SECOND).await;
            }
            // Few bytes come back in two pieces.
            let (first, rest) = bytes.split_at(if bytes.len() < 100 { bytes.len() / 2 } else { 0 });
            if !first.is_empty() {
                let _ = stream.send(first).await;
                net.sleep(SECOND / 100).await;
            }
            if stream.send(rest).await.is_err() {
                break;
            }
        }
    }
}

/// A connection of an upstream.
struct Counted(Rc<Echo>);

impl Counted {
    fn new(echo: &Rc<Echo>) -> Counted {
        echo.now.set(echo.now.get() + 1);
        Counted(echo.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.now.set(self.0.now.get() - 1);
    }
}

const ADDRS: [&str; 3] = ["10.0.0.11:80", "10.0.0.12:80", "10.0.0.13:80"];

/// Three upstreams, and a balancer before them with these options.
fn starts(sim: &Sim, options: &[&str]) -> (Vec<Rc<Echo>>, Rc<Running>) {
    let echoes = ADDRS.iter().map(|addr| Echo::start(sim, addr)).collect();
    let upstreams = ADDRS.iter().flat_map(|addr| ["--upstream", *addr]);
    let options: Vec<_> = upstreams.chain(options.iter().copied()).collect();
    (echoes, Rc::new(Running::start(sim, &options)))
}

/// Bytes that are another client's nowhere.
fn pattern(client: u64, len: usize) -> Vec<u8> {
    let mut word = client.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let words = std::iter::repeat_with(|| {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        word.to_be_bytes()
    });
    words.flatten().take(len).collect()
}

/// Sends a byte and waits for it.
async fn echoes(me: &mut ClientStream) -> std::io::Result<()> {
    me.send("x").await?;
    assert_eq!(me.exactly(1).await?, b"x");
    Ok(())
}
