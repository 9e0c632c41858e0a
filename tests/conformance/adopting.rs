//! Listeners that several servers adopt, one after the other or at once.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

use ringserve::Server;
use ringserve::framing::LengthPrefix;
use ringserve::listen::adopt;
use ringserve_tests::client::frame;
use ringserve_tests::watch::a_turn_passes;
use ringserve_tests::{Client, EndOf, Lab, Net, On, Puppet, SOON, Shared, eventually, no_time_limits, order};

const SHARDS: usize = 2;

/// A socket that is bound, and the network on which it is adopted. In a simulated one its address
/// is all that is used.
fn socket(on: On) -> (TcpListener, Net) {
    (TcpListener::bind("127.0.0.1:0").unwrap(), on.site(no_time_limits()).net)
}

/// A server that adopts a duplicate of it.
fn adopts(on: On, listener: &TcpListener, net: &Net) -> Lab {
    let bounds = no_time_limits();
    let shared = Arc::new(Shared::default());
    let for_shards = shared.clone();
    let endpoint = adopt(listener.try_clone().unwrap()).framing(LengthPrefix::default());
    let server = Server::new()
        .shards(SHARDS)
        .pin(false)
        .driver(on.driver)
        .server_limits(bounds.server)
        .service(endpoint.limits(bounds.service), move |_| Puppet::new(for_shards.clone()));
    let running = net.start_several(server).expect("the server starts");
    assert_eq!(running.local_addrs(), [listener.local_addr().unwrap()]);
    Lab { running, net: net.clone(), shared }
}

pub fn what_comes_after_the_end_waits_for_the_next_server(on: On) {
    let (listener, net) = socket(on);
    for _ in 0..2 {
        let lab = adopts(on, &listener, &net);
        lab.client().echoes("");
        lab.finish();
        let mut late: Vec<Client> = (0..5).map(|_| newcomer(&net, &listener)).collect();
        late.iter_mut().for_each(|client| client.send(order::echo("late")));
        let next = adopts(on, &listener, &net);
        late.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("late")));
        drop(late);
        assert_eq!(next.finish().counters.opened, 5);
    }
}

fn newcomer(net: &Net, listener: &TcpListener) -> Client {
    Client::of(net.connect(listener.local_addr().unwrap()).expect("it listens"))
}

pub fn another_server_accepts_while_one_drains(on: On) {
    let (listener, net) = socket(on);
    let (old, new) = (adopts(on, &listener, &net), adopts(on, &listener, &net));
    // The old one holds calls, so that its drain lasts.
    let mut held: Vec<Client> = Vec::new();
    while old.shared.gate.came() == 0 {
        let mut client = newcomer(&net, &listener);
        client.send(order::gate(""));
        held.push(client);
        eventually("the call waits", SOON, || {
            old.shared.gate.came() + new.shared.gate.came() == held.len() as u64
        });
    }
    old.running.shutdown();
    a_turn_passes(&old.running);
    // Each of its shards may have had one on its way, which it serves.
    for n in 0..20 {
        newcomer(&net, &listener).echoes(n.to_string());
    }
    let accepted = old.stats().counters.accepted;
    for n in 0..20 {
        newcomer(&net, &listener).echoes(n.to_string());
    }
    assert_eq!(old.stats().counters.accepted, accepted, "a server that drains accepts");
    [&old, &new].iter().for_each(|lab| lab.shared.gate.open());
    held.iter_mut().for_each(|client| assert_eq!(client.recv(), order::gate("")));
    drop(held);
    old.ended();
    newcomer(&net, &listener).echoes("");
    new.finish();
}

pub fn crowd_of_newcomers_loses_none_to_a_drain(on: On) {
    let (listener, net) = socket(on);
    let (old, new) = (adopts(on, &listener, &net), adopts(on, &listener, &net));
    let over = AtomicBool::new(false);
    let (served, unanswered) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let addr = listener.local_addr().unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    let mut client = Client::of(net.connect(addr).expect("the socket listens"));
                    client.send(order::echo("x"));
                    let reply = frame(order::echo("x"));
                    match client.read_whole_or_fin(&mut vec![0; reply.len()]) {
                        Some(bytes) => {
                            assert_eq!(bytes, reply);
                            served.fetch_add(1, SeqCst)
                        }
                        None => unanswered.fetch_add(1, SeqCst),
                    };
                }
            });
        }
        let _end = EndOf(&over);
        let served_more = |count| {
            let then = served.load(SeqCst) + count;
            eventually("clients are served", SOON, || served.load(SeqCst) >= then);
        };
        served_more(100);
        old.running.shutdown();
        old.ended();
        served_more(100);
    });
    // A request that comes more than 30 ms after its connection was accepted by a server that
    // drains has no answer. Each shard accepts one at most then.
    assert!(unanswered.load(SeqCst) <= SHARDS, "{unanswered:?} of {served:?}");
    new.finish();
}
