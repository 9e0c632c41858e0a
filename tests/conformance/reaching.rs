//! Reaching connections and shards from elsewhere.

use std::thread;
use std::time::Instant;

use ringserve::framing::LengthPrefix;
use ringserve::handle::PushError;
use ringserve::sync::Mesh;
use ringserve::{CloseReason, ConnHandle};

use ringserve_tests::Bounds;
use ringserve_tests::client::End;
use ringserve_tests::{Client, Lab, On, Puppet, SOON, eventually, no_time_limits, order, pattern};

fn on_shards(on: On, shards: usize, limits: Bounds) -> Lab {
    Lab::of(on.site(limits).shards(shards).framing(LengthPrefix::default()))
}

pub fn pushes_from_a_thread(on: On) {
    const CONNECTIONS: usize = 10;
    let lab = on_shards(on, 2, no_time_limits());
    let names: Vec<String> = (0..CONNECTIONS).map(|n| n.to_string()).collect();
    let mut clients: Vec<Client> = names.iter().map(|name| lab.reached(name)).collect();
    let handles: Vec<ConnHandle> = names.iter().map(|name| lab.shared.handle(name)).collect();
    let text = |to: usize, n: usize| pattern((to * 1000 + n * n) % 30_000);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..200 {
                for (to, handle) in handles.iter().enumerate() {
                    let started = Instant::now();
                    while let Err(error) = handle.push(text(to, n)) {
                        assert!(started.elapsed() < 2 * SOON, "no peer reads what was pushed");
                        assert_eq!(error, PushError::Full);
                        thread::yield_now();
                    }
                }
            }
        });
        for n in 0..200 {
            for (to, client) in clients.iter_mut().enumerate() {
                assert!(client.recv() == text(to, n), "push {n} to {to}");
            }
        }
    });
    drop(clients);
    lab.finish();
}

pub fn pushes_from_another_shard(on: On) {
    let lab = on_shards(on, 2, no_time_limits());
    let mut target = lab.reached("target");
    let here = target.ask(order::shard());
    let mut other = lab.client();
    while other.ask(order::shard()) == here {
        other = lab.client();
    }
    for n in 0..100 {
        assert_eq!(other.ask(order::push_through("target", n.to_string())), b"ok");
        assert_eq!(target.recv(), n.to_string().as_bytes());
    }
    drop((target, other));
    lab.finish();
}

pub fn a_push_beyond_the_high_mark(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.reached("it");
    let handle = lab.shared.handle("it");
    let text = pattern(300_000);
    for _ in 0..10 {
        // More than the mark alone, and nothing but its own end wakes the shard after it.
        eventually("there is room", SOON, || handle.push(text.clone()) == Ok(()));
        assert!(client.recv() == text);
    }
    lab.finish();
}

pub fn push_from_a_thread_to_a_peer_that_reads_nothing(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client_with_small_window();
    assert_eq!(client.ask(order::reach("it")), b"reached");
    let handle = lab.shared.handle("it");
    let text = pattern(10_000);
    for _ in 0..3 {
        // Its kernel takes some meanwhile: full is where a few in a row are refused.
        let (mut pushed, mut refused) = (0, 0);
        while refused < 1000 {
            match handle.push(text.clone()) {
                Ok(()) => (pushed, refused) = (pushed + 1, 0),
                Err(error) => {
                    assert_eq!(error, PushError::Full);
                    refused += 1;
                }
            }
            assert!(pushed < 100_000, "never full");
        }
        assert!(pushed >= 20, "full after {pushed} pushes, below the high mark");
        (0..pushed).for_each(|_| assert!(client.recv() == text));
        assert!(client.is_silent(), "what was refused was not queued");
        eventually("there is room again", SOON, || handle.push("more") == Ok(()));
        assert_eq!(client.recv(), b"more");
    }
    lab.finish();
}

pub fn pushes_to_a_slot_that_was_used_again(on: On) {
    let lab = Lab::on(on, no_time_limits().connections_max(1));
    for n in 0..30 {
        let old = lab.reached("it");
        let handle = lab.shared.handle("it");
        if n % 2 == 0 {
            old.reset()
        } else {
            drop(old)
        }
        let mut next = lab.client();
        next.send(order::echo(""));
        // While the old one ends and the new one takes its place.
        while next.is_silent() {
            let _ = handle.push("stray");
        }
        handle.close();
        handle.abort();
        assert_eq!((next.recv(), handle.push("stray")), (order::echo(""), Err(PushError::Gone)));
        next.echoes("still");
    }
    lab.finish();
}

pub fn closed_from_a_thread(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut closed, mut aborted) = (lab.reached("closed"), lab.reached("aborted"));
    closed.send(order::gate(""));
    aborted.send(order::gate(""));
    lab.parked(2);
    lab.shared.handle("closed").push("last").unwrap();
    lab.shared.handle("closed").close();
    assert_eq!((closed.recv(), closed.end()), (b"last".to_vec(), End::Fin));
    lab.shared.handle("aborted").abort();
    assert_eq!(aborted.end(), End::Reset);
    drop((closed, aborted));
    lab.closed_for(CloseReason::Closed, 1);
    lab.closed_for(CloseReason::Aborted, 1);
    lab.finish();
}

pub fn messages_between_shards(on: On) {
    const SHARDS: usize = 3;
    let shards = Mesh::<u32>::new();
    let (arrived, end) = std::sync::mpsc::channel();
    let (joined, arrived) = (shards.clone(), std::sync::Mutex::new(arrived));
    let host = on.site(no_time_limits()).shards(SHARDS).framing(LengthPrefix::default());
    let running = host.start(move |shard| {
        let (shards, next) = (joined.clone(), (shard.index() + 1) % SHARDS);
        let arrived = arrived.lock().unwrap().clone();
        joined.register(shard, move |_from, n| match n {
            0 => arrived.send(()).unwrap(),
            n => shards.try_send(next, n - 1).unwrap(),
        });
        Puppet::new(Default::default())
    });
    let running = running.unwrap();
    shards.try_send(0, 1_000).unwrap();
    end.recv_timeout(SOON).expect("it goes round and comes to its end");
    ringserve_tests::finish(running);
}

pub fn more_than_one_shard_holds(on: On) {
    let lab = on_shards(on, 16, no_time_limits().connections_max(16));
    for _ in 0..3 {
        let mut clients: Vec<Client> = (0..16).map(|_| lab.client()).collect();
        clients.iter_mut().for_each(|client| client.send(order::echo("")));
        clients.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("")));
        let mut waits = lab.client();
        waits.send(order::echo(""));
        clients.iter_mut().for_each(|client| client.echoes(""));
        assert!(waits.is_silent());
        drop(clients.pop());
        assert_eq!(waits.recv(), order::echo(""));
        drop((clients, waits));
        lab.holds(0);
    }
    lab.finish();
}
