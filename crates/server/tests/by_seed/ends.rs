//! The order in which the services of a server end, by seed.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::{Endpoints, tcp};
use ringserve_server::sync::Mesh;
use ringserve_server::testing::{Faults, Sim, SimServer};
use ringserve_server::{CloseCx, Cx, Frame, MultiService, OpenCx, Refusal, Server, Service, Shard};

const SECOND: Duration = Duration::from_secs(1);

/// For how long a client's call waits.
const HOLD: Duration = Duration::from_secs(3);

/// The record of what happens to the services of all shards.
#[derive(Default)]
struct Told {
    /// Connections of each service.
    alive: BTreeMap<&'static str, usize>,
    /// The services whose connections learned of the drain, in their order, with the connections
    /// that there were.
    draining: Vec<(&'static str, BTreeMap<&'static str, usize>)>,
    /// Calls of the replica while clients were there in a drain.
    answered: usize,
}

#[derive(Clone, Default)]
struct Story(Arc<Mutex<Told>>);

impl Story {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap()
    }

    fn alive(&self, name: &str) -> usize {
        self.told().alive.get(name).copied().unwrap_or_default()
    }

    fn service(&self, name: &'static str) -> impl Fn(&Shard) -> Of + Send + Sync + 'static {
        let story = self.clone();
        move |_shard| Of { name, story: story.clone() }
    }

    /// Each heard of the drain when those before it had ended.
    fn check(&self) {
        for (name, alive) in &self.told().draining {
            let left = |of: &str| alive.get(of).copied().unwrap_or_default();
            match *name {
                "replica" => assert_eq!(left("clients"), 0),
                "last" => assert_eq!((left("clients"), left("replica")), (0, 0)),
                _ => {}
            }
        }
    }
}

struct Of {
    name: &'static str,
    story: Story,
}

impl Service for Of {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, _opening: &OpenCx<'_>) -> Result<(), Refusal> {
        *self.story.told().alive.entry(self.name).or_default() += 1;
        Ok(())
    }

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if &frame[..] == b"hold" {
            cx.sleep(HOLD).await;
        }
        if self.name == "replica" && cx.is_draining() && self.story.alive("clients") > 0 {
            self.story.told().answered += 1;
        }
        cx.reply(frame);
        Ok(())
    }

    fn draining(&self, _cx: &Cx<'_, ()>) {
        let mut told = self.story.told();
        let alive = told.alive.clone();
        told.draining.push((self.name, alive));
    }

    fn close(&self, _closed: &CloseCx<'_, ()>) {
        *self.story.told().alive.entry(self.name).or_default() -= 1;
    }
}

fn lines(port: u16, name: &str) -> Endpoints<Lines> {
    tcp(("10.0.0.1", port)).framing(Lines::default()).name(name)
}

fn server(story: &Story, drain: Duration) -> Server<MultiService> {
    Server::new()
        .shards(3)
        .server_limits(ServerLimits::default().drain_timeout(drain))
        .service(lines(7002, "last").drains_after("replica"), story.service("last"))
        .service(lines(7000, "clients"), story.service("clients"))
        .service(lines(7001, "replica").drains_after("clients"), story.service("replica"))
}

/// Clients whose calls wait, and connections of the other services that ask again and again until
/// they are closed.
fn come(sim: &Sim, server: &SimServer) {
    for n in 0..4 {
        let addr = server.addr_of("clients");
        sim.client(format!("client {n}"), async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("hold\n").await?;
            // A shard that dies, and a drain that is over, reset it.
            let Some(answer) = me.line().await? else { return Err("it is cut off".into()) };
            assert_eq!(answer, "hold");
            assert_eq!(me.line().await?, None);
            Ok(())
        });
    }
    let addr = server.addr_of("clients");
    sim.client("guest", async move |net| {
        let mut me = net.connect(addr).await?;
        me.send("x\n").await?;
        assert_eq!(me.line().await?.as_deref(), Some("x"));
        Ok(())
    });
    for (n, name) in ["replica", "replica", "last"].into_iter().enumerate() {
        let addr = server.addr_of(name);
        sim.client(format!("{name} {n}"), async move |net| {
            let mut me = net.connect(addr).await?;
            loop {
                me.send("x\n").await?;
                if me.line().await?.is_none() {
                    return Ok(());
                }
                net.sleep(Duration::from_millis(200)).await;
            }
        });
    }
    sim.run_for(SECOND);
}

#[test]
fn service_is_served_until_the_one_before_it_has_ended() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let story = Story::default();
        let server = sim.start_several(server(&story, 60 * SECOND)).expect("it starts");
        come(sim, &server);
        // What is queued at a listener, and what its last line leaves unread, may end by a reset.
        sim.expect_losses();
        sim.drain();
        assert!(sim.run_until(30 * SECOND, || server.is_done()), "long before the end of the drain's time");
        story.check();
        let told = story.told();
        assert!(told.answered > 0, "the replica is served while the clients are there");
        let heard = |name| told.draining.iter().filter(|(of, _)| *of == name).count();
        assert_eq!((heard("clients"), heard("replica"), heard("last")), (4, 2, 1));
    });
}

#[test]
fn order_of_the_ends_holds_whatever_the_network_does() {
    Sim::seeds(200).faults(Faults::all()).run(|sim| {
        let story = Story::default();
        let server = sim.start_several(server(&story, 60 * SECOND)).expect("it starts");
        come(sim, &server);
        sim.expect_losses();
        sim.finish();
        story.check();
    });
}

#[test]
fn time_of_the_drain_bounds_all_services() {
    Sim::seeds(50).run(|sim| {
        let story = Story::default();
        let server = sim.start_several(server(&story, SECOND)).expect("it starts");
        come(sim, &server);
        sim.expect_losses();
        sim.drain();
        assert!(sim.run_until(HOLD - SECOND, || server.is_done()), "no call is waited for");
    });
}

#[test]
fn dead_shard_holds_up_no_service_that_waits() {
    Sim::seeds(50).run(|sim| {
        let story = Story::default();
        let server = sim.start_several(server(&story, 60 * SECOND)).expect("it starts");
        come(sim, &server);
        sim.expect_losses();
        server.break_driver(1);
        assert!(sim.run_until(30 * SECOND, || server.is_done()));
        story.check();
    });
}

/// The time at which each of them learned of it, since the start.
type Moments = Arc<Mutex<Vec<(Duration, usize)>>>;

/// A server whose shards say when no client is left, and how many there are then.
fn says_when(sim: &Sim, story: &Story) -> (SimServer, Moments) {
    let (said, of_all, seen) = (Arc::new(Mutex::new(Vec::new())), story.clone(), story.service("clients"));
    let says = said.clone();
    let server = Server::new().shards(3).service(lines(7000, "clients"), move |shard| {
        let ended = shard.service_ended("clients").expect("it is there");
        let (waits, of_all, says) = (shard.clone(), of_all.clone(), says.clone());
        shard.spawn(async move {
            ended.await;
            let now = Duration::from_nanos(waits.now().as_nanos());
            says.lock().unwrap().push((now, of_all.alive("clients")));
        });
        seen(shard)
    });
    // Without it a shard that has no connection would end before the others.
    let server = server.service(lines(7001, "replica").drains_after("clients"), story.service("replica"));
    (sim.start_several(server).expect("it starts"), said)
}

#[test]
fn task_hears_that_no_shard_has_a_connection_of_a_service() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let story = Story::default();
        let (server, said) = says_when(sim, &story);
        let (clients, replica) = (server.addr_of("clients"), server.addr_of("replica"));
        sim.client("client", async move |net| {
            let mut me = net.connect(clients).await?;
            me.send("hold\n").await?;
            while me.line().await?.is_some() {}
            Ok(())
        });
        for n in 0..12 {
            sim.client(format!("replica {n}"), async move |net| {
                let mut me = net.connect(replica).await?;
                assert_eq!(me.line().await?, None);
                Ok(())
            });
        }
        sim.run_for(SECOND);
        assert!(said.lock().unwrap().is_empty(), "it does not drain");
        sim.drain();
        sim.run_for(SECOND);
        assert!(said.lock().unwrap().is_empty(), "a client is there");
        sim.finish();
        let said = said.lock().unwrap();
        assert!(!said.is_empty() && said.iter().all(|(_, left)| *left == 0), "{said:?}");
    });
}

#[test]
fn order_that_cannot_be_is_refused_with_both_names() {
    Sim::seeds(1).run(|sim| {
        let story = Story::default();
        let of = |after: [&[&'static str]; 3]| {
            let names = ["a", "b", "c"].into_iter().zip(after).zip(7000..);
            let server = names.fold(Server::new(), |server, ((name, after), port)| {
                let endpoints = after.iter().fold(lines(port, name), |of, after| of.drains_after(*after));
                server.service(endpoints, story.service(name))
            });
            sim.start_several(server).map(drop).map_err(|error| error.to_string())
        };
        let ends = |after, text: &str| {
            let said = of(after).unwrap_err();
            assert!(said.ends_with(text), "{said}");
        };
        ends([&["d"], &[], &[]], "a drains after d, and no service has that name");
        ends([&["a"], &[], &[]], "a drains after a, which in the end drains after a");
        ends([&["b"], &["a"], &[]], "a drains after b, which in the end drains after a");
        ends([&[], &["a", "c"], &["b"]], "b drains after c, which in the end drains after b");
        assert_eq!(of([&["b", "c"], &["c"], &[]]), Ok(()));
        let unknown = sim.start_several(
            Server::new()
                .service(lines(7010, "a"), |shard: &Shard| shard.service_ended("b").map(|_| crate::Echo)),
        );
        let said = unknown.unwrap_err().to_string();
        assert!(said.ends_with("no service has the name b; there are a"), "{said}");
    });
}

/// Asks all shards, some time after a line has come.
struct AsksLater(Mesh<(), usize>);

impl Service for AsksLater {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        cx.sleep(HOLD).await;
        let answers = self.0.ask_all(|_shard| ()).await;
        cx.reply(format!("{}", answers.into_iter().filter(Result::is_ok).count()));
        Ok(())
    }
}

#[test]
fn call_in_a_drain_reaches_the_shards_without_connections() {
    Sim::seeds(20).run(|sim| {
        let mesh = Mesh::new();
        let server = Server::bind("10.0.0.1:7000").shards(3).framing(Lines::default());
        let server = sim.start(server, move |shard| {
            let index = shard.index();
            mesh.register(shard, move |_from, ()| index);
            AsksLater(mesh.clone())
        });
        let server = server.unwrap();
        sim.client("asks", async |net| {
            let mut asks = net.connect("10.0.0.1:7000").await?;
            asks.send("anything\n").await?;
            assert_eq!(asks.line().await?.as_deref(), Some("3"));
            Ok(())
        });
        sim.run_for(SECOND);
        server.drain();
        sim.run_until_done();
        // No shard waits for the time of the drain.
        assert!(sim.now() < 3 * HOLD, "{:?}", sim.now());
    });
}
