//! Clients whose connections have the toy transport between socket and frames, and intruders: peers
//! that break it off or violate its rules.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ringserve_core::{Stack, Transport};
use ringserve_server::testing::{Net, Sim};

use super::ADDR;
use super::cover::Cover;
use super::plan::{CLIENT_NUMBERS, Layers, Plan};
use super::proxied;
use crate::toy::{Facts, HEADER_BYTES, PeerStream, Pieces, Toy};
use crate::websocket::Client;

/// The transport of a client, by its number.
fn toy_of(first: u32, net: &Net) -> Toy {
    let records = 1 + net.random() % 4096;
    let name = first.to_string();
    Toy::client(name, net.random()).record_bytes(records as usize).updates_every(net.random() % 16)
}

/// The path of a client to its service.
#[derive(Clone)]
pub struct Way {
    addr: SocketAddr,
    first: u32,
    is_proxied: bool,
    /// Through the transport, whose bytes arrive in these pieces.
    pieces: Option<Pieces>,
    has_toy: bool,
    has_websocket: bool,
    /// A shard may die.
    may_be_cut: bool,
    cover: Cover,
}

impl Way {
    /// The path of the client whose requests begin with this number.
    pub fn of(plan: &Plan, addr: impl Into<SocketAddr>, first: u32, cover: &Cover) -> Way {
        let is_second = plan.is_second(first);
        let layers = plan.layers.as_ref().filter(|of| if is_second { of.second } else { of.first });
        Way {
            addr: addr.into(),
            first,
            is_proxied: plan.proxied && !is_second,
            pieces: layers.map(|of| of.pieces),
            has_toy: layers.is_some_and(|of| of.has_toy),
            has_websocket: layers.is_some_and(|of| of.has_websocket),
            may_be_cut: plan.shards_may_die() || plan.closes_may_be_lost(),
            cover: cover.clone(),
        }
    }

    /// Connects, and names the client.
    pub async fn connect(&self, net: &Net) -> io::Result<PeerStream> {
        let mut stream = net.connect(self.addr).await?;
        let header = if self.is_proxied { proxied::header(self.first).0 } else { Vec::new() };
        let Some(pieces) = self.pieces else {
            proxied::send_in_pieces(net, &mut stream, &header).await?;
            return Ok(PeerStream::plain(net, stream));
        };
        self.cover.count("layer", format!("{pieces:?}"));
        if self.is_proxied {
            self.cover.count("layer", "behind a PROXY header");
        }
        // The handshake may begin in the segment in which the header ends.
        let mut me = PeerStream::layered(net, stream, &*self.transport(net), pieces);
        me.may_be_cut(self.may_be_cut);
        me.begins_with(&header);
        Ok(me)
    }

    /// True if the server pings silent peers, instead of calling the service's hook.
    pub fn is_pinged(&self) -> bool {
        self.has_websocket
    }

    /// The client's half of the transport.
    fn transport(&self, net: &Net) -> Rc<dyn Transport> {
        let toy = self.has_toy.then(|| Rc::new(toy_of(self.first, net)) as Rc<dyn Transport>);
        if !self.has_websocket {
            return toy.expect("one of them is there");
        }
        self.cover.count("layer", if self.has_toy { "WebSocket above the toy" } else { "WebSocket" });
        let websocket = Rc::new(Client::new(net.random(), self.has_toy));
        match toy {
            Some(toy) => Rc::new(Stack::new(toy, websocket)),
            None => websocket,
        }
    }
}

/// Checks, in a call of request `number`, that the transport reported its client, and no other.
pub fn check_facts(facts: Option<Rc<Facts>>, number: u32, plan: &Plan, cover: &Cover) {
    let is_layered = |of: &&Layers| of.has_toy && if plan.is_second(number) { of.second } else { of.first };
    let first = number / CLIENT_NUMBERS * CLIENT_NUMBERS;
    let name = plan.layers.as_ref().filter(is_layered).map(|_| first.to_string().into_bytes());
    if name.is_some() {
        cover.count("layer", "call");
    }
    assert_eq!(
        facts.map(|facts| facts.name.clone()),
        name,
        "what the transport found out of request {number}"
    );
}

/// The behaviour of an intruder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Intruder {
    Silent,
    HalfHello,
    Garbage,
    FinInHandshake,
    /// Sends FIN between two records, without the mark of the end.
    CutOff,
    CutOffInRecord,
    BadRecord,
    CrawlsInRecord,
}

impl Intruder {
    const ALL: &[Intruder] = &[
        Intruder::Silent,
        Intruder::HalfHello,
        Intruder::Garbage,
        Intruder::FinInHandshake,
        Intruder::CutOff,
        Intruder::CutOffInRecord,
        Intruder::BadRecord,
        Intruder::CrawlsInRecord,
    ];

    /// Connects and ends. Returns the service's bytes.
    async fn run(self, net: &Net, me: &mut PeerStream) -> io::Result<Vec<u8>> {
        let soon = Duration::from_millis(net.random() % 3000);
        match self {
            Intruder::Silent => {}
            Intruder::HalfHello => {
                let half = 1 + (net.random() % (HEADER_BYTES as u64 + 4)) as usize;
                me.send_start(half).await?;
            }
            Intruder::Garbage => me.send_instead(b"GET / HTTP/1.1\r\n\r\n").await?,
            Intruder::FinInHandshake => {
                me.send_start((net.random() % 20) as usize).await?;
                net.sleep(soon).await;
                me.cut_off()?;
            }
            Intruder::CutOff => {
                me.shake_hands().await?;
                me.send_raw(&[]).await?;
                me.cut_off()?;
            }
            Intruder::CutOffInRecord | Intruder::CrawlsInRecord => {
                me.shake_hands().await?;
                let record = me.sealed(&[b'x'; 40]);
                for byte in &record[..record.len() - 1] {
                    me.send_raw(&[*byte]).await?;
                    if self == Intruder::CrawlsInRecord {
                        net.sleep(soon / 4).await;
                    }
                }
                me.cut_off()?;
            }
            Intruder::BadRecord => {
                me.shake_hands().await?;
                let mut record = me.sealed(&[b'x'; 40]);
                let at = net.random() as usize % record.len();
                record[at] ^= 1 << (net.random() % 8);
                me.send_raw(&record).await?;
                // If the length is altered, more bytes have to come.
                me.cut_off()?;
            }
        }
        me.bytes_to_the_end().await
    }
}

/// Makes some intruders connect.
pub fn intrude(sim: &Sim, plan: &Plan, cover: &Cover) {
    let Some(_) = plan.layers.as_ref().filter(|of| of.first && of.has_toy) else { return };
    // Nothing else ends them.
    let is_calm = plan.keeps_upstreams && !plan.loses() && plan.waits;
    for number in 0..sim.random() % 4 {
        let intruder = Intruder::ALL[(sim.random() % Intruder::ALL.len() as u64) as usize];
        // A number of no client.
        let way = Way::of(plan, ADDR, 2 * CLIENT_NUMBERS, cover);
        let way = Way { first: 998 * CLIENT_NUMBERS, pieces: Some(Pieces::Any), ..way };
        let cover = cover.clone();
        sim.client(format!("breaker {number}"), async move |net| {
            net.sleep(Duration::from_micros(net.random() % 20_000_000)).await;
            // Whatever its result: the server may be gone.
            let Ok(mut me) = way.connect(&net).await else { return Ok(()) };
            let ended = net.timeout(Duration::from_secs(60), intruder.run(&net, &mut me)).await;
            let Ok(ended) = ended else { return Ok(()) };
            cover.count("layer", format!("{intruder:?}"));
            match intruder {
                Intruder::Garbage | Intruder::BadRecord if is_calm => {
                    assert!(ended.is_ok(), "{intruder:?} is reset: {ended:?}");
                    assert!(me.was_alerted() || me.saw_mark(), "{intruder:?} is told nothing");
                    if me.was_alerted() {
                        cover.count("layer", "alert");
                    }
                }
                _ => {}
            }
            Ok(())
        });
    }
}

/// The events that a campaign must cover.
pub fn expected() -> impl Iterator<Item = String> {
    let pieces = Pieces::ALL.iter().map(|pieces| format!("{pieces:?}"));
    let intruders = Intruder::ALL.iter().map(|intruder| format!("{intruder:?}"));
    let others = ["alert", "behind a PROXY header", "call", "WebSocket", "WebSocket above the toy"];
    let others = others.map(str::to_owned);
    pieces.chain(intruders).chain(others)
}

/// Checks at the end, once every server is gone.
pub fn check(plan: &Plan) {
    let left = plan.layers.as_ref().map_or(0, |layers| layers.alive.count());
    assert_eq!(left, 0, "channels of connections that are gone");
}
