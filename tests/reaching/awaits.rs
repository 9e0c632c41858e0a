//! Waiting for a connection's room and for its end, from threads outside the shards.

use std::collections::HashSet;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ringserve::handle::PushError;
use ringserve::{CloseReason, ConnHandle};
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, SOON, no_time_limits, order, pattern};

/// Runs a future on an executor that has nothing to do with the server's.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

/// A connection to which the test has the handle `it`, and whose peer takes little beyond what it
/// reads.
fn slow(lab: &Lab) -> (Client, ConnHandle) {
    let mut client = Client::with_small_window(lab.addr());
    assert_eq!(client.ask(order::reach("it")), b"reached");
    (client, lab.shared.handle("it"))
}

#[test]
fn thread_that_waits_for_room_pushes_to_a_slow_reader() {
    const PUSHES: usize = 200;
    let lab = Lab::start(no_time_limits());
    let (mut client, handle) = slow(&lab);
    let (full, was_full) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            for n in 0..PUSHES {
                let text = pattern(50_000 + n);
                while handle.push(text.clone()) == Err(PushError::Full) {
                    let _ = full.send(());
                    block_on(handle.ready());
                }
            }
        });
        // It waits for the peer, and for nothing else.
        was_full.recv_timeout(SOON).expect("the outbox comes to be full");
        for n in 0..PUSHES {
            assert!(client.recv() == pattern(50_000 + n), "push {n}");
        }
    });
    drop(client);
    lab.finish();
}

#[test]
fn wait_for_room_ends_with_the_connection_and_with_the_shard() {
    let ends: [fn(&Lab, Client, &ConnHandle); 4] = [
        |_, client, _| client.reset(),
        |_, _client, handle| handle.abort(),
        |_, mut client, handle| {
            handle.close();
            assert_eq!(client.end_after_all(), End::Fin);
        },
        |lab, _client, _| lab.running.abort(),
    ];
    for end in ends {
        let lab = Lab::start(no_time_limits());
        let (client, handle) = slow(&lab);
        while handle.push(pattern(50_000)).is_ok() {}
        thread::scope(|scope| {
            let waits = [scope.spawn(|| block_on(handle.ready())), scope.spawn(|| block_on(handle.closed()))];
            end(&lab, client, &handle);
            waits.into_iter().for_each(|wait| wait.join().unwrap());
        });
        assert_eq!(handle.push("late"), Err(PushError::Gone));
        lab.abort();
        // Nothing waits for a shard that ended.
        block_on(async {
            handle.ready().await;
            handle.closed().await;
        });
    }
}

#[test]
fn wait_for_the_end_is_over_once_the_service_heard_of_it() {
    let lab = Lab::start(no_time_limits());
    for n in 1..=50 {
        let client = lab.reached("it");
        let handle = lab.shared.handle("it");
        let (waits, begins) = mpsc::channel();
        thread::scope(|scope| {
            let seen = scope.spawn(|| {
                block_on(async {
                    // The second one takes the place of one that was given up.
                    let early = tokio::time::timeout(Duration::from_millis(1), handle.closed()).await;
                    assert!(early.is_err(), "the wait is over before the end");
                    waits.send(()).unwrap();
                    handle.closed().await;
                });
                lab.shared.closed.load(SeqCst)
            });
            begins.recv_timeout(SOON).unwrap();
            if n % 2 == 0 {
                client.reset()
            } else {
                drop(client)
            }
            assert_eq!(seen.join().unwrap(), n);
        });
        assert!(handle.is_gone());
    }
    lab.closed_for(CloseReason::PeerReset, 25);
    lab.closed_for(CloseReason::PeerClosed, 25);
    lab.finish();
}

#[test]
fn raw_push_leaves_as_it_is_between_whole_frames() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.reached("it");
    let handle = lab.shared.handle("it");
    for n in 0..100 {
        let whole = frame(pattern(n));
        handle.push(pattern(n)).unwrap();
        handle.push_raw(whole.clone()).unwrap();
        assert!([client.recv(), client.recv()] == [pattern(n), pattern(n)]);
    }
    let mut other = lab.reached("other");
    other.send(order::push_through("it", "text"));
    assert_eq!(client.recv(), b"text");
    assert_eq!(other.recv(), b"ok");
    drop((client, other));
    lab.finish();
}

#[test]
#[allow(clippy::mutable_key_type, reason = "a handle is told from others by what never changes")]
fn handles_are_keys_and_name_their_shard() {
    let lab = Lab::on_shards(2, no_time_limits());
    let mut clients: Vec<Client> = (0..20).map(|n| lab.reached(&n.to_string())).collect();
    let handles: HashSet<ConnHandle> = (0..20).map(|n| lab.shared.handle(&n.to_string())).collect();
    let names: HashSet<_> = handles.iter().map(|handle| (handle.shard(), handle.id())).collect();
    assert_eq!((handles.len(), names.len()), (20, 20));
    for (n, client) in clients.iter_mut().enumerate() {
        let handle = lab.shared.handle(&n.to_string());
        assert!(handles.contains(&handle));
        assert_eq!(client.ask(order::shard()), handle.shard().to_string().as_bytes());
    }
    drop(clients);
    lab.finish();
}
