//! Reaching a connection from any thread.

use std::cell::RefCell;
use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

use ringserve::handle::PushError;
use ringserve::{CloseReason, ConnHandle};
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, EndOf, Lab, Random, SOON, eventually, no_time_limits, order, pattern};

/// Pushes until it succeeds. False if the connection ended.
#[track_caller]
fn push_all(handle: &ConnHandle, payload: &[u8]) -> bool {
    let started = Instant::now();
    loop {
        assert!(started.elapsed() < 2 * SOON, "no peer reads what was pushed");
        match handle.push(payload.to_vec()) {
            Ok(()) => return true,
            Err(PushError::Gone) => return false,
            Err(PushError::Full) => thread::yield_now(),
            Err(PushError::Unframed) => panic!("each payload has a frame"),
        }
    }
}

#[test]
fn a_push_from_a_plain_thread_arrives() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.reached("it");
    let handle = lab.shared.handle("it");
    assert!(!handle.is_gone());
    // One after the other, so that the shard sleeps in between.
    for n in 0..300 {
        handle.push(pattern(n * 7)).unwrap();
        assert!(client.recv() == pattern(n * 7));
    }
    client.echoes("");
    lab.finish();
}

/// A connection on another shard than `than`.
fn elsewhere(lab: &Lab, than: &mut Client) -> Client {
    let here = than.ask(order::shard());
    loop {
        let mut client = lab.client();
        if client.ask(order::shard()) != here {
            return client;
        }
    }
}

/// Pushes when its thread ends.
struct PushesLast(ConnHandle);

impl Drop for PushesLast {
    fn drop(&mut self) {
        self.0.push(&b"last"[..]).unwrap();
    }
}

thread_local! {
    static LAST: RefCell<Option<PushesLast>> = const { RefCell::new(None) };
}

#[test]
fn a_push_of_a_thread_locals_destructor_arrives() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.reached("it");
    for early in [false, true] {
        let handle = lab.shared.handle("it");
        let thread = thread::spawn(move || {
            // Thread-locals are destroyed in an order that depends on which one was used first.
            if early {
                handle.push(&b"first"[..]).unwrap();
            }
            LAST.set(Some(PushesLast(handle.clone())));
            if !early {
                handle.push(&b"first"[..]).unwrap();
            }
        });
        assert_eq!([client.recv(), client.recv()], [b"first".to_vec(), b"last".to_vec()]);
        thread.join().unwrap();
    }
    lab.finish();
}

#[test]
fn a_push_from_another_shard_arrives() {
    let lab = Lab::on_shards(4, no_time_limits());
    let mut target = lab.reached("target");
    let mut other = elsewhere(&lab, &mut target);
    for n in 0..300 {
        assert_eq!(other.ask(order::push_through("target", n.to_string())), b"ok");
        assert_eq!(target.recv(), n.to_string().as_bytes());
    }
    let burst: Vec<u8> =
        (0..1000).flat_map(|n| frame(order::push_through("target", n.to_string()))).collect();
    other.write(&burst);
    (0..1000).for_each(|_| assert_eq!(other.recv(), b"ok"));
    (0..1000).for_each(|n| assert_eq!(target.recv(), n.to_string().as_bytes()));
    drop((target, other));
    lab.finish();
}

#[test]
fn each_senders_pushes_keep_their_order_among_those_of_others() {
    const SENDERS: u64 = 4;
    const PUSHES: u64 = 5_000;
    let lab = Lab::start(no_time_limits());
    let mut client = lab.reached("it");
    let handle = lab.shared.handle("it");
    thread::scope(|scope| {
        for sender in 0..SENDERS {
            let handle = handle.clone();
            scope.spawn(move || {
                (0..PUSHES).for_each(|n| assert!(push_all(&handle, format!("{sender} {n}").as_bytes())))
            });
        }
        // Its own replies come in between.
        client.write(&frame(order::echo("own")).repeat(500));
        let (mut next, mut own) = ([0; SENDERS as usize], 0);
        for _ in 0..SENDERS * PUSHES + 500 {
            let got = String::from_utf8(client.recv()).unwrap();
            if got == "eown" {
                own += 1;
                continue;
            }
            let (sender, n) = got.split_once(' ').unwrap();
            let next = &mut next[sender.parse::<usize>().unwrap()];
            assert_eq!(n.parse::<u64>().unwrap(), *next, "sender {sender}");
            *next += 1;
        }
        assert_eq!((next, own), ([PUSHES; SENDERS as usize], 500));
    });
    lab.finish();
}

#[test]
fn pushes_on_the_way_count_before_the_shard_looks() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.reached("it");
    let mut blocks = lab.client();
    blocks.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    let handle = lab.shared.handle("it");
    let pushed = (0..).take_while(|n: &usize| handle.push(pattern(1_000 + n)).is_ok()).count();
    assert!((200..=264).contains(&pushed), "{pushed} pushes of about 1000 bytes fit below 256 KiB");
    assert_eq!(handle.push("more"), Err(PushError::Full));
    lab.shared.block.end();
    (0..pushed).for_each(|n| assert!(client.recv() == pattern(1_000 + n)));
    eventually("there is room again", SOON, || handle.push("more") == Ok(()));
    assert_eq!(client.recv(), b"more");
    drop(blocks);
    lab.finish();
}

#[test]
fn a_handle_closes_and_aborts_even_while_a_call_waits() {
    let lab = Lab::start(no_time_limits());
    for n in 1..=20 {
        let mut client = lab.reached("it");
        let handle = lab.shared.handle("it");
        client.send(order::gate(""));
        lab.parked(n);
        handle.push("last").unwrap();
        if n % 2 == 0 {
            handle.close();
            handle.close();
            assert_eq!((client.recv(), client.end()), (b"last".to_vec(), End::Fin));
        } else {
            handle.abort();
            assert_eq!(client.end_after_all(), End::Reset);
        }
        eventually("the call is dropped", SOON, || lab.shared.dropped.load(SeqCst) == n);
        assert_eq!((handle.is_gone(), handle.push("more")), (true, Err(PushError::Gone)));
    }
    lab.closed_for(CloseReason::Closed, 10);
    lab.closed_for(CloseReason::Aborted, 10);
    lab.finish();
}

#[test]
fn a_handle_says_gone_before_the_shard_hears_of_the_end() {
    let lab = Lab::start(no_time_limits());
    let close_then_abort = |handle: &ConnHandle| {
        handle.close();
        handle.abort();
    };
    let ends: [fn(&ConnHandle); 3] = [ConnHandle::close, ConnHandle::abort, close_then_abort];
    for (end, seen) in ends.into_iter().zip([End::Fin, End::Reset, End::Reset]) {
        let (mut client, mut blocks) = (lab.reached("it"), lab.client());
        let handle = lab.shared.handle("it");
        let before = lab.shared.block.came();
        blocks.send(order::block());
        eventually("the shard is blocked", SOON, || lab.shared.block.came() > before);
        while handle.push(pattern(1_000)).is_ok() {}
        end(&handle);
        assert_eq!((handle.is_gone(), handle.push("late")), (true, Err(PushError::Gone)));
        lab.shared.block.end();
        assert_eq!(client.end_after_all(), seen);
        lab.shared.block.begin_again();
        blocks.reset();
    }
    lab.finish();
}

#[test]
fn a_handle_of_a_connection_that_ended_is_gone_however_it_ended() {
    let lab = Lab::start(no_time_limits());
    let ends: [fn(Client); 4] = [
        drop,
        Client::reset,
        |mut client| client.send(order::panics()),
        |mut client| {
            client.send(order::close());
            assert_eq!((client.recv(), client.end()), (b"bye".to_vec(), End::Fin));
        },
    ];
    for end in ends {
        end(lab.reached("it"));
        let handle = lab.shared.handle("it");
        eventually("it is gone", SOON, || handle.is_gone());
        assert_eq!(handle.push("text"), Err(PushError::Gone));
        handle.close();
        handle.abort();
    }
    lab.client().echoes("");
    lab.finish();
}

#[test]
fn handles_are_the_same_exactly_if_their_connection_is() {
    let lab = Lab::start(no_time_limits());
    let (mut one, _two) = (lab.reached("one"), lab.reached("two"));
    let (first, other) = (lab.shared.handle("one"), lab.shared.handle("two"));
    assert_eq!(one.ask(order::reach("again")), b"reached");
    let again = lab.shared.handle("again");
    assert!(first == again && first == first.clone() && first != other);
    assert_eq!((first.id(), first.id() == other.id()), (again.id(), false));
    lab.abort();
}

#[test]
fn handles_outlive_their_server() {
    let lab = Lab::on_shards(2, no_time_limits());
    let clients: Vec<Client> = (0..10).map(|n| lab.reached(&n.to_string())).collect();
    let handles: Vec<ConnHandle> = (0..10).map(|n| lab.shared.handle(&n.to_string())).collect();
    let (stopped, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let (pushed, gone) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        // It pushes all the time, also while the server stops.
        scope.spawn(|| {
            while !done.load(SeqCst) {
                for handle in &handles {
                    match handle.push("text") {
                        Ok(()) => pushed.fetch_add(1, SeqCst),
                        Err(PushError::Gone) => gone.fetch_add(u64::from(stopped.load(SeqCst)), SeqCst),
                        Err(PushError::Full | PushError::Unframed) => 0,
                    };
                }
            }
        });
        let _done = EndOf(&done);
        eventually("pushes are under way", SOON, || pushed.load(SeqCst) > 100);
        lab.abort();
        stopped.store(true, SeqCst);
        eventually("all of them are gone", SOON, || gone.load(SeqCst) >= 100);
    });
    for handle in handles {
        assert_eq!((handle.is_gone(), handle.push("late")), (true, Err(PushError::Gone)));
        handle.close();
        handle.abort();
    }
    drop(clients);
}

#[test]
fn an_old_handle_never_reaches_the_next_connection_in_its_slot() {
    const ROUNDS: u64 = 3_000;
    // Four slots, so each is reused at once, while pushes to the one before are still on their way.
    let lab = Lab::start(no_time_limits().connections_max(4));
    let handles: Mutex<Vec<(u64, ConnHandle)>> = Mutex::default();
    let (done, pushes) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 1..=2 {
            let (handles, done, pushes) = (&handles, &done, &pushes);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !done.load(SeqCst) {
                    let all = handles.lock().unwrap().clone();
                    for (tag, handle) in all {
                        let pushed = handle.push(tag.to_be_bytes().to_vec());
                        pushes.fetch_add(u64::from(pushed.is_ok()), SeqCst);
                        // An order for a connection that is gone must not meet the next one in its
                        // slot. Not an abort: the former connection may still be sending its last
                        // replies, and would end by it.
                        if handle.is_gone() && random.below(4) == 0 {
                            handle.close();
                        }
                    }
                }
            });
        }
        let _done = EndOf(&done);
        for tag in 0..ROUNDS {
            let mut client = lab.reached("it");
            let mut handles = handles.lock().unwrap();
            handles.push((tag, lab.shared.handle("it")));
            if handles.len() > 16 {
                handles.remove(0);
            }
            drop(handles);
            // As many as come until it is answered, all of them its own.
            client.send(order::echo("last"));
            loop {
                let got = client.recv();
                if got == order::echo("last") {
                    break;
                }
                assert_eq!(got, tag.to_be_bytes(), "a push for another peer came to {tag}");
            }
            if tag % 2 == 0 { client.reset() } else { drop(client) }
        }
    });
    assert!(pushes.load(SeqCst) > 1_000, "{pushes:?} pushes are no storm");
    lab.holds(0);
    let counters = lab.finish().counters;
    assert_eq!(counters.closed_for(CloseReason::Closed), 0, "an order for another connection ended this one");
}

#[test]
fn storm_of_pushes_from_four_threads_loses_no_byte() {
    const CONNECTIONS: usize = 100;
    const PUSHES: usize = 120;
    const THREADS: usize = 4;
    let lab = Lab::on_shards(2, no_time_limits());
    let names: Vec<String> = (0..CONNECTIONS).map(|n| n.to_string()).collect();
    let mut clients: Vec<Client> = names.iter().map(|name| lab.reached(name)).collect();
    let handles: Vec<ConnHandle> = names.iter().map(|name| lab.shared.handle(name)).collect();
    let base = pattern(20_000);
    // The n-th push of a thread to a connection has this text, after its own number.
    let text = |thread: usize, to: usize, n: usize| {
        let mut text = vec![thread as u8];
        text.extend_from_slice(&base[(to * 31 + n * 17) % 9_000..][..(thread + n * to) % 9_000]);
        text
    };
    thread::scope(|scope| {
        let text = &text;
        for thread in 0..THREADS {
            let handles = &handles;
            scope.spawn(move || {
                for n in 0..PUSHES {
                    for (to, handle) in handles.iter().enumerate() {
                        assert!(push_all(handle, &text(thread, to, n)));
                    }
                }
            });
        }
        for part in clients.chunks_mut(CONNECTIONS / 2).enumerate() {
            scope.spawn(move || {
                let (half, part) = part;
                let mut next = vec![[0; THREADS]; part.len()];
                for _ in 0..THREADS * PUSHES {
                    for (at, client) in part.iter_mut().enumerate() {
                        let got = client.recv();
                        let thread = usize::from(got[0]);
                        let expected = text(thread, half * CONNECTIONS / 2 + at, next[at][thread]);
                        assert!(got == expected, "from thread {thread} to {at}");
                        next[at][thread] += 1;
                    }
                }
            });
        }
    });
    assert!(clients.iter().all(Client::is_silent));
    drop(clients);
    lab.finish();
}

#[test]
fn pushes_to_peers_that_come_and_go_do_no_harm() {
    let lab = Lab::on_shards(2, no_time_limits());
    let handles: Mutex<Vec<ConnHandle>> = Mutex::default();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                let all = handles.lock().unwrap().clone();
                all.iter().for_each(|handle| {
                    let _ = handle.push(vec![7; 3_000]);
                });
                handles.lock().unwrap().retain(|handle| !handle.is_gone());
            }
        });
        let _done = EndOf(&done);
        for n in 0..1_000 {
            let mut client = lab.reached("it");
            handles.lock().unwrap().push(lab.shared.handle("it"));
            match n % 4 {
                0 => client.reset(),
                1 => drop(client.stream.read(&mut [0; 100])),
                2 => client.finish_writing(),
                _ => client.send(order::close()),
            }
        }
        eventually("all have ended", SOON, || handles.lock().unwrap().is_empty());
    });
    lab.holds(0);
    assert_eq!(lab.finish().counters.opened, 1_000);
}
