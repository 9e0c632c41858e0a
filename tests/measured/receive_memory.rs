//! Less receive memory than the peers would use.

use std::cell::Cell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::thread;

use ringserve::framing::LengthPrefix;
use ringserve::service::{OpenCx, Refusal};
use ringserve::{CloseReason, Cx, Frame, Service};
use ringserve_tests::Bounds;
use ringserve_tests::brake::{Brake, brake};
use ringserve_tests::client::frame;
use ringserve_tests::proc_net::unread;
use ringserve_tests::{Client, Lab, On, SOON, alone, eventually, finish, no_time_limits, order, pattern};

const CONNECTIONS: usize = 1000;
const BUFFERS: usize = 8;
const BUFFER_BYTES: usize = 1 << 10;

/// Bytes that each connection sends.
const BYTES: usize = 64 << 10;

/// Frames that fill a buffer each and hold these bytes.
const FRAMES: usize = BYTES / BUFFER_BYTES;

fn eight_buffers() -> Bounds {
    let receive_bytes_max = BUFFERS * BUFFER_BYTES;
    no_time_limits().receive_buffer_bytes(BUFFER_BYTES).receive_bytes_max(receive_bytes_max)
}

#[test]
fn eight_buffers_bring_every_byte_of_a_thousand_connections() {
    if !alone(eight_buffers_bring_every_byte_of_a_thousand_connections) {
        return;
    }
    let lab = Lab::start(eight_buffers());
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|_| lab.client()).collect();
    lab.holds(CONNECTIONS);
    let before = lab.stats().shards[0].driver;
    // Different bytes for each, so that none can be another's.
    let bytes = pattern(BYTES + CONNECTIONS);
    let payload = |n: usize| order::echo(&bytes[n..][..BYTES - 1]);
    thread::scope(|scope| {
        for (part, clients) in clients.chunks_mut(CONNECTIONS / 4).enumerate() {
            scope.spawn(move || {
                let first = part * CONNECTIONS / 4;
                clients.iter_mut().enumerate().for_each(|(n, client)| client.send(payload(first + n)));
                for (n, client) in clients.iter_mut().enumerate() {
                    assert!(client.recv() == payload(first + n), "connection {}", first + n);
                }
            });
        }
    });
    let report = lab.stats();
    let shard = &report.shards[0];
    assert!(shard.buffers.total <= BUFFERS, "{:?}", shard.buffers);
    let parked = shard.driver.receives_parked - before.receives_parked;
    assert!(parked > 0, "the buffers were enough: {:?}", shard.driver);
    // A connection's bytes arrive in at least that many refills; arming twice for each is arming
    // once in vain.
    let refills = CONNECTIONS * (FRAMES + 1);
    let armed = shard.driver.receives_armed - before.receives_armed;
    assert!(armed <= 2 * refills as u64, "{refills} refills: {:?}", shard.driver);
    drop(clients);
    lab.closed_for(CloseReason::PeerClosed, CONNECTIONS as u64);
    lab.finish();
}

/// Notes the connections of its frames, in order.
struct Order {
    brake: Arc<Brake>,
    connections: Cell<usize>,
    noted: Arc<Mutex<Vec<usize>>>,
}

impl Service for Order {
    type Session = Cell<usize>;
    type Error = Infallible;

    async fn open(&self, _opening: &OpenCx<'_>) -> Result<Cell<usize>, Refusal> {
        Ok(Cell::new(self.connections.replace(self.connections.get() + 1)))
    }

    async fn call(&self, cx: &Cx<'_, Cell<usize>>, frame: Frame) -> Result<(), Infallible> {
        match frame.first() {
            Some(b'h') => self.brake.hold(),
            _ => self.noted.lock().unwrap().push(cx.session().get()),
        }
        Ok(())
    }
}

#[test]
fn buffers_come_to_each_peer_before_any_gets_many() {
    if !alone(buffers_come_to_each_peer_before_any_gets_many) {
        return;
    }
    let (brake, lever) = brake();
    let (brake, noted) = (Arc::new(brake), Arc::new(Mutex::new(Vec::new())));
    let for_shard = noted.clone();
    let server = On::default().server(eight_buffers()).framing(LengthPrefix::default());
    let running = server.start(move |_| Order {
        brake: brake.clone(),
        connections: Cell::new(0),
        noted: for_shard.clone(),
    });
    let running = running.unwrap();
    let addr = running.local_addrs()[0];
    let mut holder = Client::connect(addr);
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|_| Client::connect(addr)).collect();
    let peers: Vec<_> = clients.iter().map(Client::local_addr).collect();
    eventually("all are there", SOON, || running.stats_now().connections == CONNECTIONS + 1);
    holder.send("h");
    lever.wait_for_hold();
    let wire = frame([b'x'; BUFFER_BYTES - 4]).repeat(FRAMES);
    clients.iter_mut().for_each(|client| client.write(&wire));
    eventually("much of it is there", SOON, || unread(addr, &peers).iter().all(|bytes| *bytes >= BYTES / 2));
    lever.let_go();
    eventually("everything came", 3 * SOON, || noted.lock().unwrap().len() == FRAMES * CONNECTIONS);

    // When the first one had all its frames, every other one was nearly done.
    let mut served = HashMap::new();
    for connection in noted.lock().unwrap().iter() {
        let count = served.entry(*connection).or_insert(0);
        *count += 1;
        if *count == FRAMES {
            break;
        }
    }
    let fewest = served.values().min();
    assert_eq!(served.len(), CONNECTIONS, "connections that got anything while one got all");
    assert!(fewest.is_some_and(|fewest| *fewest >= FRAMES / 2), "{fewest:?} frames while one got {FRAMES}");
    drop((holder, clients));
    finish(running);
}

#[test]
fn one_buffer_is_enough_for_frames_of_every_size() {
    if !alone(one_buffer_is_enough_for_frames_of_every_size) {
        return;
    }
    let limits = no_time_limits().receive_buffer_bytes(BUFFER_BYTES).receive_bytes_max(BUFFER_BYTES);
    let lab = Lab::start(limits);
    let mut clients = [lab.client(), lab.client()];
    // Below, at and above the end of one buffer, and of many.
    let around = [1, 2, 64].map(|buffers| buffers * BUFFER_BYTES - 4);
    for len in around.iter().flat_map(|len| len - 1..=len + 2) {
        for client in &mut clients {
            let payload = order::echo(pattern(len - 1));
            assert!(client.ask(&payload) == payload, "a frame of {len} bytes");
        }
        assert_eq!(lab.stats().shards[0].buffers.leased, 0, "after a frame of {len} bytes");
    }
    drop(clients);
    lab.closed_for(CloseReason::PeerClosed, 2);
    lab.finish();
}
