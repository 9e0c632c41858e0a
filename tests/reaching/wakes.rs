//! Waking shards from other threads and from each other, also if the caller blocks or ends.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};

use ringserve::framing::LengthPrefix;
use ringserve::service::CloseCx;
use ringserve::stats::ServerStats;
use ringserve::sync::Mesh;
use ringserve::{Cx, Frame, Server, ServerHandle, Service};
use ringserve_tests::Bounded;
use ringserve_tests::client::{End, frame};
use ringserve_tests::puppet::Gate;
use ringserve_tests::{Client, Lab, On, SOON, eventually, finish, no_time_limits, order};

/// A connection on each of two shards.
fn one_on_each(
    mut client: impl FnMut() -> Client,
    mut shard: impl FnMut(&mut Client) -> usize,
) -> [Client; 2] {
    let mut found = [None, None];
    while found.iter().any(Option::is_none) {
        let mut client = client();
        let shard = shard(&mut client);
        found[shard].get_or_insert(client);
    }
    found.map(|client| client.expect("each shard has one"))
}

fn of_lab(lab: &Lab) -> [Client; 2] {
    one_on_each(|| lab.client(), |client| client.ask_text(order::shard()).parse().unwrap())
}

#[test]
fn shard_that_a_blocked_one_began_to_wake_is_awake() {
    let lab = Lab::on_shards(2, no_time_limits());
    let [mut blocks, mut target] = of_lab(&lab);
    assert_eq!(target.ask(order::reach("target")), b"reached");
    let handle = lab.shared.handles.lock().unwrap()[&b"target"[..]].clone();
    for round in 1..=10 {
        // The other shard has nothing to do, so it sleeps, and this push has to wake it.
        blocks.write(
            &[frame(order::push_through("target", "from the shard that blocks")), frame(order::block())]
                .concat(),
        );
        assert_eq!(target.recv(), b"from the shard that blocks");
        eventually("the shard blocks", SOON, || lab.shared.block.came() == round);
        handle.push(&b"from a third thread"[..]).unwrap();
        assert_eq!(target.recv(), b"from a third thread");
        lab.shared.block.end();
        assert_eq!([blocks.recv(), blocks.recv()], [b"ok".to_vec(), b"|".to_vec()]);
        lab.shared.block.begin_again();
    }
    blocks.write(&[frame(order::push_through("target", "once more")), frame(order::block())].concat());
    eventually("the shard blocks", SOON, || lab.shared.block.came() == 11);
    lab.running.abort();
    assert_eq!(target.end_after_all(), End::Reset);
    lab.shared.block.end();
    lab.ended();
}

/// Asks the other shard by a message and blocks its own until the answer arrives, which a service
/// should not do.
struct Asks {
    shards: Mesh<Sender<usize>>,
}

impl Service for Asks {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let own = cx.shard().index();
        if &*frame == b"ask" {
            let (answer, answered) = channel();
            self.shards.try_send(1 - own, answer).expect("the other shard runs");
            let answer = answered.recv_timeout(SOON).expect("the other shard answers");
            cx.reply(answer.to_string().as_bytes());
        } else {
            cx.reply(own.to_string().as_bytes());
        }
        Ok(())
    }
}

#[test]
fn a_shard_that_blocks_until_another_one_answers_is_answered() {
    let shards = Mesh::new();
    let server = On::default().server(no_time_limits()).shards(2).framing(LengthPrefix::default());
    let running = server.start(move |shard| {
        let own = shard.index();
        shards.register(shard, move |_from, answer: Sender<usize>| _ = answer.send(own));
        Asks { shards: shards.clone() }
    });
    let running = running.unwrap();
    let addr = running.local_addrs()[0];
    let mut clients = one_on_each(|| Client::connect(addr), |client| client.ask_text("who").parse().unwrap());
    for _ in 0..20 {
        for (own, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.ask_text("ask"), (1 - own).to_string());
        }
    }
    drop(clients);
    finish(running);
}

/// Informs shard 1 of each end on shard 0, as late as a service can.
struct LastWords {
    shards: Mesh<u64>,
    gate: Arc<Gate>,
}

impl Service for LastWords {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if &*frame == b"wait" {
            self.gate.pass().await;
        }
        cx.reply(cx.shard().index().to_string().as_bytes());
        Ok(())
    }

    fn close(&self, _closed: &CloseCx<'_, ()>) {
        let _ = self.shards.try_send(1, 1);
    }
}

#[test]
fn wake_up_of_the_turn_of_a_shards_last_end_arrives() {
    for _ in 0..5 {
        let (shards, gate, heard) = (Mesh::new(), Arc::new(Gate::default()), Arc::new(AtomicU64::new(0)));
        let server = On::default().server(no_time_limits()).shards(2).framing(LengthPrefix::default());
        let (for_shards, for_gate, for_heard) = (shards.clone(), gate.clone(), heard.clone());
        let running = server.start(move |shard| {
            let heard = for_heard.clone();
            for_shards.register(shard, move |_from, count: u64| _ = heard.fetch_add(count, SeqCst));
            LastWords { shards: for_shards.clone(), gate: for_gate.clone() }
        });
        let running = running.unwrap();
        let addr = running.local_addrs()[0];
        let [mut first, mut second] =
            one_on_each(|| Client::connect(addr), |client| client.ask_text("who").parse().unwrap());
        second.send("wait");
        eventually("the call waits", SOON, || gate.came() == 1);
        running.shutdown();
        assert_eq!(first.end(), End::Fin);
        drop(first);
        // Shard 0 has no connection left, and shard 1 sleeps during its call.
        eventually("what shard 0 said last is heard", SOON, || heard.load(SeqCst) >= 1);
        running.abort();
        assert_eq!(second.end(), End::Reset);
        running.wait().unwrap();
    }
}

/// Requests a report of the server in which it runs.
struct Reports {
    running: Arc<OnceLock<ServerHandle>>,
    gate: Arc<ringserve_tests::puppet::Block>,
    got: Mutex<Sender<(ServerStats, u64)>>,
}

impl Service for Reports {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match &*frame {
            b"block" => self.gate.wait(),
            b"report" => {
                let before = waits();
                let report = self.running.get().expect("the server runs").stats_now();
                self.got.lock().unwrap().send((report, waits() - before)).unwrap();
            }
            _ => {}
        }
        cx.reply(cx.shard().index().to_string().as_bytes());
        Ok(())
    }
}

/// The number of times that this thread has waited.
fn waits() -> u64 {
    let path = format!("/proc/self/task/{}/status", rustix::thread::gettid().as_raw_nonzero());
    let status = std::fs::read_to_string(path).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn report_is_whole_never_falls_and_names_stale_shards() {
    let (running, block) = (Arc::new(OnceLock::new()), Arc::new(ringserve_tests::puppet::Block::default()));
    let (got, reports) = channel();
    let (for_shards, for_block, got) = (running.clone(), block.clone(), Mutex::new(got));
    let server = Server::bind("127.0.0.1:0").shards(2).pin(false).bounded(no_time_limits());
    let started = server.framing(LengthPrefix::default()).start(move |_| Reports {
        running: for_shards.clone(),
        gate: for_block.clone(),
        got: Mutex::new(got.lock().unwrap().clone()),
    });
    let running = running.get_or_init(|| started.unwrap());
    let addr: SocketAddr = running.local_addrs()[0];
    let [mut blocks, mut asks] =
        one_on_each(|| Client::connect(addr), |client| client.ask_text("who").parse().unwrap());
    ringserve_tests::a_turn_passes(running);
    // A shard that got no CPU for as long as a report waits is stale too, and answers the next
    // time.
    let report_when_stale = |shards: &[usize]| {
        let mut report = ServerStats::default();
        eventually("just these shards do not answer", SOON, || {
            report = running.stats_now();
            report.stale_shards().eq(shards.iter().copied())
        });
        assert_eq!(report.shards.len(), 2);
        report
    };
    let before = report_when_stale(&[]);
    blocks.send("block");
    eventually("the shard is blocked", SOON, || block.came() == 1);
    asks.ask("who");
    let during = report_when_stale(&[0]);
    assert!(during.counters.frames > before.counters.frames, "the other shard answered");
    assert_eq!(during.shards[0].counters.frames, before.shards[0].counters.frames, "what it said last");
    // From a shard: neither its own answer nor that of the blocked one is awaited. The kernel makes
    // a thread wait now and then for unrelated reasons (a page, a lock on the list of mappings); a
    // shard that waited for an answer would wait each time.
    let fewest_waits = (0..20).map(|_| {
        asks.ask("report");
        let (report, waits) = reports.recv_timeout(SOON).unwrap();
        assert_eq!((report.shards.len(), report.stale_shards().collect::<Vec<_>>()), (2, vec![0, 1]));
        assert!(report.counters.frames >= during.counters.frames, "counters never fall");
        waits
    });
    assert_eq!(fewest_waits.min(), Some(0), "the shard waits for no answer");
    block.end();
    blocks.recv();
    ringserve_tests::a_turn_passes(running);
    assert!(running.stats_now().counters.frames > during.counters.frames);
    drop((blocks, asks));
    running.abort();
}
