//! Transports that panic for one connection, by seed: that one ends, and all others are unaffected.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ringserve_server::net::copy_bidirectional;
use ringserve_server::testing::{Faults, Net, Sim};
use ringserve_server::transport::{
    Batch, LeaseMut, Transport, TransportConn, TransportError, TransportEvent,
};
use ringserve_server::{CloseReason, Cx, Frame, Server, Service, Stream, framing::Lines, stream};
use ringserve_sim::toy::{Alive, PeerStream, Pieces, Toy};

const SECOND: Duration = Duration::from_secs(1);

fn plain() -> SocketAddr {
    ([10, 0, 0, 1], 7000).into()
}

fn layered() -> SocketAddr {
    ([10, 0, 0, 1], 7001).into()
}

/// The call at which a transport panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Begin,
    Open,
    Work,
    Wrap,
    Seal,
    Ends,
    Finish,
    HeldBytes,
    IsMidRecord,
    WantsMore,
    CutOff,
    Facts,
    Drop,
}

impl At {
    const ALL: [At; 13] = [
        At::Begin,
        At::Open,
        At::Work,
        At::Wrap,
        At::Seal,
        At::Ends,
        At::Finish,
        At::HeldBytes,
        At::IsMidRecord,
        At::WantsMore,
        At::CutOff,
        At::Facts,
        At::Drop,
    ];

    /// True if the connection may still end well, since it is at its end.
    fn is_late(self) -> bool {
        matches!(self, At::Ends | At::Finish | At::CutOff | At::Drop)
    }
}

/// The toy, of which one connection's channel panics at one of its calls.
#[derive(Clone)]
struct Planted {
    toy: Toy,
    at: At,
    /// The connection, by its order among all that begin.
    connection: usize,
    /// The call, by its order among those of that connection.
    call: usize,
    begun: Arc<AtomicUsize>,
    panics: Arc<AtomicUsize>,
}

impl Planted {
    fn new(toy: Toy, at: At, connection: usize, call: usize) -> Planted {
        Planted { toy, at, connection, call, begun: Arc::default(), panics: Arc::default() }
    }

    fn panics(&self) -> usize {
        self.panics.load(Ordering::Relaxed)
    }

    fn panic(&self) -> ! {
        self.panics.fetch_add(1, Ordering::Relaxed);
        panic!("planted: the transport panics at {:?}", self.at);
    }
}

impl Transport for Planted {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        let is_planted = self.begun.fetch_add(1, Ordering::Relaxed) == self.connection;
        if is_planted && self.at == At::Begin {
            self.panic();
        }
        let left = Cell::new(if is_planted { self.call } else { usize::MAX });
        Some(Box::new(PlantedChannel { channel: self.toy.begin(out)?, planted: self.clone(), left }))
    }
}

struct PlantedChannel {
    channel: Box<dyn TransportConn>,
    planted: Planted,
    /// Calls before the one that panics.
    left: Cell<usize>,
}

impl PlantedChannel {
    fn at(&self, at: At) {
        if at == self.planted.at {
            match self.left.get() {
                0 => self.planted.panic(),
                left => self.left.set(left - 1),
            }
        }
    }

    /// Writes half of the output before it panics.
    fn at_out(&self, at: At, out: &mut Vec<u8>) {
        let len = out.len();
        out.extend_from_slice(b"half a record");
        self.at(at);
        out.truncate(len);
    }
}

impl TransportConn for PlantedChannel {
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        self.at_out(At::Open, out);
        self.channel.decode(wire, out)
    }

    fn work(&mut self, out: &mut Vec<u8>) -> TransportEvent {
        self.at_out(At::Work, out);
        self.channel.work(out)
    }

    fn encode_in_place(&mut self, plain: &mut Batch) -> bool {
        self.at(At::Wrap);
        self.channel.encode_in_place(plain)
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        self.at_out(At::Seal, out);
        self.channel.encode(plain, out)
    }

    fn on_close(&mut self, reason: CloseReason) {
        self.at(At::Ends);
        self.channel.on_close(reason);
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        self.at_out(At::Finish, out);
        self.channel.finish(out);
    }

    fn held_bytes(&self) -> usize {
        self.at(At::HeldBytes);
        self.channel.held_bytes()
    }

    fn is_mid_record(&self) -> bool {
        self.at(At::IsMidRecord);
        self.channel.is_mid_record()
    }

    fn wants_more(&self) -> bool {
        self.at(At::WantsMore);
        self.channel.wants_more()
    }

    fn eof_error(&self) -> Option<CloseReason> {
        self.at(At::CutOff);
        self.channel.eof_error()
    }

    fn info(&self) -> Option<Rc<dyn Any>> {
        self.at(At::Facts);
        self.channel.info()
    }
}

impl Drop for PlantedChannel {
    fn drop(&mut self) {
        self.at(At::Drop);
    }
}

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}

/// Runs `test` for each call, usually with a panic at its first occurrence.
fn for_each(seeds: u64, test: impl Fn(&Sim, At, usize) + Clone + 'static) {
    for at in At::ALL {
        let test = test.clone();
        let seeds = Sim::seeds(seeds).faults(Faults::harmless());
        let seeds = seeds.allow_panics(|said| said.starts_with("planted"));
        seeds.run(move |sim| {
            sim.expect_losses();
            let call = if sim.random().is_multiple_of(2) { 0 } else { sim.random() as usize % 4 };
            test(sim, at, if at == At::Drop { 0 } else { call });
        });
    }
}

async fn connect(net: &Net) -> std::io::Result<PeerStream> {
    let toy = Toy::client("peer", net.random());
    Ok(PeerStream::layered(net, net.connect(layered()).await?, &toy, Pieces::ALL[0]))
}

#[test]
fn panic_of_a_transport_ends_one_connection() {
    for_each(20, |sim, at, call| {
        let alive = Alive::default();
        let planted = Planted::new(Toy::server().counted(&alive), at, 1, call);
        let make = planted.clone();
        let server = Server::bind(layered()).transport(move || make.clone()).framing(Lines::default());
        let server = sim.start(server, |_shard| Echo).unwrap();
        sim.client("peers", async move |net| {
            let mut before = connect(&net).await?;
            before.send("one\n").await?;
            assert_eq!(before.line().await?.as_deref(), Some("one"));
            let mut it = connect(&net).await?;
            it.may_be_cut(true);
            let began = net.now();
            let _ = it.send("one\ntwo\n").await;
            if it.line().await.is_ok_and(|line| line.is_some()) {
                let _ = match at {
                    At::CutOff => it.cut_off(),
                    _ => it.finish().await,
                };
            }
            // To the end of the connection, even if that is a reset.
            let _ = it.bytes_to_the_end().await;
            assert!(net.now() - began < SECOND, "it ended at once");
            drop(it);
            let mut behind = connect(&net).await?;
            for peer in [&mut before, &mut behind] {
                peer.send("two\n").await?;
                assert_eq!(peer.line().await?.as_deref(), Some("two"));
                peer.finish().await?;
                assert_eq!(peer.closed().await?, b"");
            }
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(SECOND);
        let ended = server.stats().counters.closed_for(CloseReason::HandlerPanicked);
        let panics = planted.panics();
        // It is asked whether it wants more only after a record that came alone.
        let may_not = call > 0 || at == At::WantsMore;
        assert!(panics == 1 || (may_not && panics == 0), "{panics} panics");
        assert!(ended == panics as u64 || at.is_late(), "{ended} ended");
        assert_eq!(alive.count(), 0);
    });
}

#[test]
fn panic_of_a_transport_ends_one_upstream() {
    for_each(20, |sim, at, call| {
        let alive = Alive::default();
        let upstream = Server::bind(layered()).transport(Toy::server).framing(Lines::default());
        sim.serve(upstream, |_shard| Echo);
        let planted = Planted::new(Toy::client("proxy", 7).counted(&alive), at, 1, call);
        let errors = Rc::new(RefCell::new(Vec::new()));
        let (make, tell) = (planted.clone(), errors.clone());
        sim.serve(Server::bind(plain()), move |_shard| {
            let (make, tell) = (make.clone(), tell.clone());
            stream(async move |mut client: Stream| {
                let connecting = client.shard().connect(layered()).transport(Rc::new(make.clone()));
                match connecting.await {
                    Ok(mut upstream) => {
                        let _ = copy_bidirectional(&mut client, &mut upstream).await;
                    }
                    Err(error) => tell.borrow_mut().push(error.to_string()),
                }
            })
        });
        sim.client("peers", async move |net| {
            for number in 0..3 {
                let mut me = net.connect(plain()).await?;
                let _ = me.send("one\n").await;
                let said = me.line().await;
                let _ = me.finish();
                let rest = me.closed().await;
                if number != 1 {
                    assert_eq!((said?.as_deref(), rest?.len()), (Some("one"), 0));
                }
            }
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(SECOND);
        let panics = planted.panics();
        assert!(panics <= 1, "{panics} panics");
        assert!(
            panics == 1 || call > 0 || matches!(at, At::CutOff | At::Ends | At::WantsMore | At::Work),
            "none panics"
        );
        let errors = errors.borrow();
        assert!(errors.iter().all(|error| error == "handler_panicked"), "{errors:?}");
        assert!(!errors.is_empty() || at != At::Begin, "the task is told");
        assert_eq!(alive.count(), 0);
    });
}
