//! Messages between shards.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ringserve::framing::LengthPrefix;
use ringserve::sync::{AskError, Mesh, Reply, SendError};
use ringserve::{Cx, Frame, Server, ServerHandle, Service, Shard};
use ringserve_tests::{Client, EndOf, On, SOON, eventually, finish, no_time_limits};

/// Sends the content of a frame to the shard that its first byte names, and answers `ok`, `full` or
/// `gone`.
struct Sends(Mesh<Vec<u8>>);

impl Service for Sends {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let to = usize::from(frame[0] - b'0');
        cx.reply(match self.0.try_send(to, frame[1..].to_vec()) {
            Ok(()) => &b"ok"[..],
            Err(SendError::Full(_)) => b"full",
            Err(SendError::Gone(_)) => b"gone",
        });
        Ok(())
    }
}

fn server(shards: usize) -> Server<LengthPrefix> {
    On::default().server(no_time_limits()).shards(shards).framing(LengthPrefix::default())
}

type Got = (usize, Vec<u8>);

/// A server whose shards report each message, with a handle on it.
fn reporting(count: usize, shards: Mesh<Vec<u8>>) -> (ServerHandle, Receiver<Got>) {
    let (got, reports) = channel::<Got>();
    let got = Mutex::new(got);
    let running = server(count).start(move |shard: &Shard| {
        let (index, got) = (shard.index(), got.lock().unwrap().clone());
        shards.register(shard, move |_from, message: Vec<u8>| got.send((index, message)).unwrap());
        Sends(shards.clone())
    });
    (running.unwrap(), reports)
}

#[track_caller]
fn next(reports: &Receiver<Got>) -> Got {
    reports.recv_timeout(SOON).expect("a message is handled")
}

#[test]
fn a_message_wakes_a_shard_that_sleeps() {
    let shards = Mesh::new();
    let (running, reports) = reporting(2, shards.clone());
    assert_eq!(shards.count(), 2);
    // One after the other: nothing else happens on these shards.
    for n in 0..1000u32 {
        let to = n as usize % 2;
        shards.try_send(to, n.to_be_bytes().to_vec()).unwrap();
        assert_eq!(next(&reports), (to, n.to_be_bytes().to_vec()));
    }
    finish(running);
}

#[test]
fn messages_of_one_sender_to_one_shard_keep_their_order() {
    const MESSAGES: u32 = 50_000;
    let shards = Mesh::<Vec<u8>>::with_capacity(1_000);
    let (running, reports) = reporting(2, shards.clone());
    thread::scope(|scope| {
        for sender in 0..3u8 {
            let shards = &shards;
            scope.spawn(move || {
                for n in 0..MESSAGES {
                    let mut message = [&[sender][..], &n.to_be_bytes()].concat();
                    let started = Instant::now();
                    while let Err(error) = shards.try_send(usize::from(sender) % 2, message) {
                        assert!(started.elapsed() < 2 * SOON, "no shard handles what was sent");
                        assert!(matches!(error, SendError::Full(_)));
                        message = error.into_message();
                        thread::yield_now();
                    }
                }
            });
        }
        let mut expected = [0; 3];
        for _ in 0..3 * MESSAGES {
            let (shard, message) = next(&reports);
            let sender = usize::from(message[0]);
            assert_eq!(shard, sender % 2);
            assert_eq!(message[1..], u32::to_be_bytes(expected[sender]));
            expected[sender] += 1;
        }
    });
    finish(running);
    assert_eq!(reports.try_iter().count(), 0);
}

#[test]
fn a_service_reaches_every_shard_also_its_own() {
    let shards = Mesh::new();
    let (running, reports) = reporting(4, shards);
    let mut client = Client::connect(running.local_addrs()[0]);
    for to in (0..4).cycle().take(400) {
        assert_eq!(client.ask(format!("{to}text")), b"ok");
        assert_eq!(next(&reports), (to, b"text".to_vec()));
    }
    assert_eq!(client.ask("4text"), b"gone", "there is no fifth one");
    drop(client);
    finish(running);
}

#[test]
fn a_mailbox_is_full_at_its_capacity_and_loses_nothing() {
    let shards = Mesh::<u32>::with_capacity(4);
    let handled = Arc::new(Mutex::new(Vec::new()));
    let block = Arc::new(ringserve_tests::puppet::Block::default());
    let (joined, notes, blocks) = (shards.clone(), handled.clone(), block.clone());
    let running = server(1).start(move |shard: &Shard| {
        let (notes, blocks) = (notes.clone(), blocks.clone());
        joined.register(shard, move |_from, message| {
            if message == 0 {
                blocks.wait();
            }
            notes.lock().unwrap().push(message);
        });
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    shards.try_send(0, 0).unwrap();
    eventually("the shard is blocked", SOON, || block.came() == 1);
    (1..=4).for_each(|n| assert_eq!(shards.try_send(0, n), Ok(())));
    assert_eq!(shards.try_send(0, 5), Err(SendError::Full(5)));
    assert_eq!(shards.try_send(0, 6), Err(SendError::Full(6)));
    block.end();
    eventually("all are handled", SOON, || handled.lock().unwrap().len() == 5);
    assert_eq!(shards.try_send(0, 7), Ok(()));
    eventually("that too", SOON, || *handled.lock().unwrap() == [0, 1, 2, 3, 4, 7]);
    finish(running);
}

#[test]
fn mesh_has_no_shard_before_the_start_and_after_the_end() {
    let shards = Mesh::<Vec<u8>>::new();
    assert_eq!(shards.count(), 0);
    assert_eq!(shards.try_send(0, vec![1]), Err(SendError::Gone(vec![1])));
    let (running, reports) = reporting(2, shards.clone());
    assert_eq!(shards.try_send(1, vec![2]), Ok(()));
    assert_eq!(next(&reports), (1, vec![2]));
    assert_eq!(shards.try_send(2, vec![3]), Err(SendError::Gone(vec![3])));
    finish(running);
    for to in 0..3 {
        assert_eq!(shards.try_send(to, vec![4]), Err(SendError::Gone(vec![4])));
    }
    assert_eq!(reports.try_iter().count(), 0);
}

#[test]
fn messages_to_a_stopping_server_are_handled_or_dropped() {
    // A dropped message is dropped once, and was not handled: nothing leaks and nothing doubles.
    struct Counted(Arc<AtomicU64>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let shards = Mesh::<Counted>::new();
    let (dropped, handled) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (joined, count) = (shards.clone(), handled.clone());
    let running = server(2).start(move |shard: &Shard| {
        let count = count.clone();
        joined.register(shard, move |_from, _message| {
            count.fetch_add(1, SeqCst);
        });
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    let given_up = AtomicBool::new(false);
    let sent = thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0;
            while !given_up.load(SeqCst) && shards.try_send(sent % 2, Counted(dropped.clone())).is_ok() {
                sent += 1;
            }
            sent as u64
        });
        let _given_up = EndOf(&given_up);
        eventually("messages are under way", SOON, || handled.load(SeqCst) > 100);
        finish(running);
        sender.join().unwrap()
    });
    assert!(handled.load(SeqCst) <= sent);
    assert_eq!(dropped.load(SeqCst), sent + 1, "with the one that came back");
}

#[test]
fn a_handler_that_panics_loses_only_its_message() {
    let shards = Mesh::<u32>::new();
    let (got, reports) = channel();
    let (joined, got) = (shards.clone(), Mutex::new(got));
    let running = server(1).start(move |shard: &Shard| {
        let got: Sender<u32> = got.lock().unwrap().clone();
        joined.register(shard, move |_from, message| {
            assert!(!message.is_multiple_of(3), "planted: a message handler panics");
            got.send(message).unwrap();
        });
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    (0..100).for_each(|n| shards.try_send(0, n).unwrap());
    for n in (0..100).filter(|n| n % 3 != 0) {
        assert_eq!(reports.recv_timeout(SOON), Ok(n));
    }
    // And one by one, while the shard sleeps.
    for n in [102, 103, 105, 106] {
        shards.try_send(0, n).unwrap();
        if n % 3 != 0 {
            assert_eq!(reports.recv_timeout(SOON), Ok(n));
        }
    }
    let mut client = Client::connect(running.local_addrs()[0]);
    assert_eq!(client.ask("0text"), b"gone", "the shard serves, and that one was never joined");
    drop(client);
    finish(running);
}

#[test]
fn no_message_is_handled_before_every_factory_returned() {
    let shards = Mesh::<()>::new();
    let (returned, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (sent, may_return) = channel::<()>();
    let (sent, may_return) = (Mutex::new(sent), Mutex::new(may_return));
    let (joined, count, notes) = (shards, returned.clone(), seen.clone());
    let running = server(3).start(move |shard: &Shard| {
        let (count_then, notes) = (count.clone(), notes.clone());
        joined.register(shard, move |_from, ()| notes.lock().unwrap().push(count_then.load(SeqCst)));
        if shard.index() == 2 {
            let may_return = may_return.lock().unwrap();
            may_return.recv_timeout(SOON).unwrap();
            may_return.recv_timeout(SOON).unwrap();
            // Time for an event that must not happen: no shard sends a third time.
            assert_eq!(may_return.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
        } else {
            joined.try_send(shard.index(), ()).unwrap();
            sent.lock().unwrap().send(()).unwrap();
        }
        count.fetch_add(1, SeqCst);
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    eventually("both are handled", SOON, || seen.lock().unwrap().len() == 2);
    assert_eq!(*seen.lock().unwrap(), [3, 3]);
    finish(running);
}

#[test]
fn a_message_goes_round_all_shards_and_no_wake_up_is_lost() {
    const SHARDS: usize = 6;
    const ROUNDS: u32 = 2_000;
    let shards = Mesh::<u32>::new();
    let (arrived, end) = channel();
    let (joined, arrived) = (shards.clone(), Mutex::new(arrived));
    let running = server(SHARDS).start(move |shard: &Shard| {
        let (shards, next) = (joined.clone(), (shard.index() + 1) % SHARDS);
        let arrived = arrived.lock().unwrap().clone();
        // Sometimes through the sender's mailbox.
        let own = shard.index();
        joined.register(shard, move |_from, n| match n {
            0 => arrived.send(()).unwrap(),
            n if n % 7 == 0 => shards.try_send(own, n - 1).unwrap(),
            n => shards.try_send(next, n - 1).unwrap(),
        });
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    (0..3).for_each(|start| shards.try_send(start, ROUNDS * SHARDS as u32).unwrap());
    (0..3).for_each(|_| end.recv_timeout(2 * SOON).expect("it comes to its end"));
    finish(running);
}

#[test]
fn shard_may_have_several_mailboxes_that_share_state() {
    /// Messages that a shard received, for its connections to read.
    struct Told(Rc<RefCell<Vec<String>>>);
    impl Service for Told {
        type Session = ();
        type Error = Infallible;
        async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
            cx.reply(self.0.borrow().join(" ").as_bytes());
            Ok(())
        }
    }
    let (numbers, words) = (Mesh::<u32>::new(), Mesh::<&'static str>::new());
    let (some, others) = (numbers.clone(), words.clone());
    let running = server(1).start(move |shard: &Shard| {
        let told: Rc<RefCell<Vec<String>>> = Rc::default();
        let (first, second) = (told.clone(), told.clone());
        some.register(shard, move |_from, n: u32| first.borrow_mut().push(n.to_string()));
        others.register(shard, move |_from, word: &'static str| second.borrow_mut().push(word.to_owned()));
        Told(told)
    });
    let running = running.unwrap();
    let mut client = Client::connect(running.local_addrs()[0]);
    numbers.try_send(0, 1).unwrap();
    eventually("it is told", SOON, || client.ask("?") == b"1");
    words.try_send(0, "two").unwrap();
    eventually("it is told", SOON, || client.ask("?") == b"1 two");
    numbers.try_send(0, 3).unwrap();
    eventually("it is told", SOON, || client.ask("?") == b"1 two 3");
    drop(client);
    finish(running);
}

#[test]
fn a_server_whose_shards_cannot_join_does_not_start() {
    let twice = Mesh::<()>::new();
    let error = server(1).start(move |shard: &Shard| {
        twice.register(shard, |_from, ()| {});
        twice.register(shard, |_from, ()| {});
        Sends(Mesh::new())
    });
    assert!(matches!(error, Err(ringserve::Error::FactoryPanicked { shard: 0, .. })), "{error:?}");
    let shared = Mesh::<Vec<u8>>::new();
    let (running, _reports) = reporting(2, shared.clone());
    let other = server(3).start(move |shard: &Shard| {
        shared.register(shard, |_from, _| {});
        Sends(Mesh::new())
    });
    assert!(matches!(other, Err(ringserve::Error::FactoryPanicked { .. })), "{other:?}");
    finish(running);
}

type Questions = Mesh<u32, u32>;

/// Asks the shard that a frame's first byte names, or all with `*`, as many times as its second
/// byte gives, and replies with the outcomes.
struct Asks(Questions);

impl Service for Asks {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let number = u32::from(frame[1]);
        let outcomes = match frame[0] {
            b'*' => self.0.ask_all(|to| number + to as u32).await,
            to => {
                // All are under way before the first is awaited.
                let asked: Vec<_> = (0..number).map(|n| self.0.ask(usize::from(to - b'0'), n)).collect();
                let mut outcomes = Vec::new();
                for ask in asked {
                    outcomes.push(ask.await);
                }
                outcomes
            }
        };
        cx.reply(format!("{outcomes:?}").as_bytes());
        Ok(())
    }
}

/// A server whose shards answer with a number and their own, as `answer` says.
fn asking(
    count: usize,
    mesh: &Questions,
    answer: impl Fn(&Shard, u32, Reply<u32>) + Clone + Send + Sync + 'static,
) -> ServerHandle {
    let mesh = mesh.clone();
    let running = server(count).start(move |shard: &Shard| {
        let (here, answer) = (shard.clone(), answer.clone());
        mesh.register_with_reply(shard, move |_from, number, reply| answer(&here, number, reply));
        Asks(mesh.clone())
    });
    running.unwrap()
}

fn answered(numbers: impl IntoIterator<Item = u32>) -> String {
    format!("{:?}", numbers.into_iter().map(Ok::<u32, AskError>).collect::<Vec<_>>())
}

/// Waits for an answer on a thread outside the shards.
fn await_here<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = std::pin::pin!(future);
    let started = Instant::now();
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(done) => return done,
            std::task::Poll::Pending => thread::park_timeout(SOON),
        }
        assert!(started.elapsed() < SOON, "no wake-up came");
    }
}

#[test]
fn shards_answer_each_other_themselves_and_other_threads() {
    let mesh = Questions::new();
    let running = asking(3, &mesh, |shard, number, reply| reply.answer(10 * number + shard.index() as u32));
    let mut clients: Vec<Client> = (0..8).map(|_| Client::connect(running.local_addrs()[0])).collect();
    for round in 0..50 {
        for client in &mut clients {
            let to = round % 3;
            let text = client.ask([b'0' + to, 100]);
            let expected = answered((0..100).map(|n| 10 * n + u32::from(to)));
            assert_eq!(String::from_utf8(text).unwrap(), expected);
            assert_eq!(client.ask([b'*', 1]), answered([10, 21, 32]).into_bytes());
            assert_eq!(await_here(mesh.ask(usize::from(to), 5)), Ok(50 + u32::from(to)));
        }
    }
    assert_eq!(await_here(mesh.ask_all(|to| to as u32)), [Ok(0), Ok(11), Ok(22)]);
    assert_eq!(await_here(mesh.ask(3, 1)), Err(AskError::Gone));
    drop(clients);
    finish(running);
    assert_eq!(await_here(mesh.ask(0, 1)), Err(AskError::Gone));
}

#[test]
fn messages_name_the_shard_that_sent_them() {
    let (mesh, sent) = (Mesh::<Option<usize>, bool>::new(), Mesh::<()>::new());
    let (asks, told) = (mesh.clone(), sent.clone());
    let (got, reports) = channel();
    let got = Mutex::new(got);
    let running = server(3).start(move |shard: &Shard| {
        let (asks, got) = (asks.clone(), got.lock().unwrap().clone());
        asks.register(shard, |from, sender| from == sender);
        let here = shard.clone();
        told.register(shard, move |_from, ()| {
            let (asks, own, got) = (asks.clone(), here.index(), got.clone());
            here.spawn(async move { got.send(asks.ask_all(|_| Some(own)).await).unwrap() });
        });
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    for shard in 0..3 {
        sent.try_send(shard, ()).unwrap();
        assert_eq!(reports.recv_timeout(SOON).unwrap(), [Ok(true); 3]);
        assert_eq!(await_here(mesh.ask(shard, None)), Ok(true), "this thread is no shard");
    }
    finish(running);
}

#[test]
fn questions_that_are_lost_end_at_once() {
    let (mesh, kept) = (Questions::new(), Arc::new(Mutex::new(Vec::new())));
    let keeps = kept.clone();
    let running = asking(2, &mesh, move |_, number, reply| match number % 4 {
        0 => reply.answer(number),
        1 => drop(reply),
        2 => panic!("planted: a message handler panics"),
        _ => keeps.lock().unwrap().push(reply),
    });
    let mut client = Client::connect(running.local_addrs()[0]);
    for to in [b'0', b'1'] {
        // None of these waits for a question that is kept.
        let lost = format!("{:?}", Err::<u32, _>(AskError::Unanswered));
        assert_eq!(String::from_utf8(client.ask([to, 3])).unwrap(), format!("[Ok(0), {lost}, {lost}]"));
        // Beyond the life of a call.
        client.send([to, 4]);
        eventually("a reply is kept", SOON, || kept.lock().unwrap().len() == 1);
        let reply: Reply<u32> = kept.lock().unwrap().pop().unwrap();
        thread::spawn(move || reply.answer(33)).join().unwrap();
        let text = String::from_utf8(client.recv()).unwrap();
        assert_eq!(text, format!("[Ok(0), {lost}, {lost}, Ok(33)]"));
    }
    drop(client);
    finish(running);
}

#[test]
fn question_of_a_connection_that_goes_is_given_up() {
    let (mesh, kept) = (Questions::new(), Arc::new(Mutex::new(Vec::new())));
    let keeps = kept.clone();
    let running = asking(1, &mesh, move |_, number, reply| {
        keeps.lock().unwrap().push((number, reply));
    });
    let mut gone = Client::connect(running.local_addrs()[0]);
    gone.send([b'0', 3]);
    eventually("all are asked", SOON, || kept.lock().unwrap().len() == 3);
    gone.reset();
    eventually("the connection is gone", SOON, || running.stats_now().connections == 0);
    let late: Vec<_> = std::mem::take(&mut *kept.lock().unwrap());
    let mut client = Client::connect(running.local_addrs()[0]);
    client.send([b'0', 3]);
    eventually("all are asked", SOON, || kept.lock().unwrap().len() == 3);
    // The slots belong to the questions that were given up, and the late answers reach none of
    // these.
    late.into_iter().for_each(|(_, reply)| reply.answer(99));
    for (number, reply) in std::mem::take(&mut *kept.lock().unwrap()) {
        reply.answer(number);
    }
    assert_eq!(client.recv(), answered([0, 1, 2]).into_bytes());
    drop(client);
    finish(running);
}

#[test]
fn questions_to_a_full_shard_return_and_sends_wait_their_turn() {
    const WAITING: u32 = 600;
    let mesh = Mesh::<u32, u32>::with_capacity(2);
    let (handled, block) =
        (Arc::new(Mutex::new(Vec::new())), Arc::new(ringserve_tests::puppet::Block::default()));
    let (joined, notes, blocks) = (mesh.clone(), handled.clone(), block.clone());
    let running = server(1).start(move |shard: &Shard| {
        let (notes, blocks) = (notes.clone(), blocks.clone());
        joined.register(shard, move |_from, number| {
            if number == 0 {
                blocks.wait();
            }
            notes.lock().unwrap().push(number);
            number
        });
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    mesh.try_send(0, 0).unwrap();
    eventually("the shard is blocked", SOON, || block.came() == 1);
    let asked = mesh.ask(0, 1);
    mesh.try_send(0, 2).unwrap();
    assert_eq!(await_here(mesh.ask(0, 77)), Err(AskError::Full));
    let mut waiting: Vec<_> = (3..3 + WAITING).map(|number| (number, mesh.send(0, number))).collect();
    // Every fifth is taken back, and none overtakes those that wait.
    waiting.retain(|(number, _)| number % 5 != 0);
    // A question that waits for room is no exception.
    let (last, given_up) = (mesh.ask_waiting(0, 3 + WAITING), mesh.ask_waiting(0, 77));
    drop(given_up);
    assert_eq!(mesh.try_send(0, 77), Err(SendError::Full(77)));
    block.end();
    for (_, sending) in waiting {
        assert_eq!(await_here(sending), Ok(()));
    }
    assert_eq!(await_here(asked), Ok(1));
    assert_eq!(await_here(last), Ok(3 + WAITING));
    let expected: Vec<u32> = (0..=3 + WAITING).filter(|number| *number < 3 || number % 5 != 0).collect();
    eventually("all are handled", SOON, || handled.lock().unwrap().len() == expected.len());
    assert_eq!(*handled.lock().unwrap(), expected);
    finish(running);
    assert_eq!(await_here(mesh.send(0, 5)), Err(SendError::Gone(5)));
    assert_eq!(await_here(mesh.ask_waiting(0, 5)), Err(AskError::Gone));
}

#[test]
fn key_falls_to_the_same_shard_everywhere_and_keys_spread() {
    let mesh = Mesh::<Vec<u8>>::new();
    assert_eq!(mesh.shard_of("before the first shard"), 0);
    let (running, _reports) = reporting(4, mesh.clone());
    let mut keys = [0; 4];
    for n in 0..1000 {
        let (key, other) = (format!("key {n}"), mesh.clone());
        let shard = mesh.shard_of(key.as_str());
        assert_eq!(thread::spawn(move || other.shard_of(&key)).join().unwrap(), shard);
        keys[shard] += 1;
    }
    assert!(keys.iter().all(|count| (150..350).contains(count)), "{keys:?}");
    finish(running);
}

#[test]
fn whatever_waits_for_a_shard_that_ends_comes_to_an_end() {
    let mesh = Mesh::<u32, u32>::with_capacity(2);
    let block = Arc::new(ringserve_tests::puppet::Block::default());
    let (joined, blocks) = (mesh.clone(), block.clone());
    let running = server(1).start(move |shard: &Shard| {
        let blocks = blocks.clone();
        joined.register_with_reply(shard, move |_from, number, reply| {
            if number == 0 {
                blocks.wait();
                // Nothing but the end of the shard ends this question.
                std::mem::forget(reply);
                panic!("planted: a message handler panics");
            }
            reply.answer(number);
        });
        Sends(Mesh::new())
    });
    let running = running.unwrap();
    let leaked = mesh.ask(0, 0);
    eventually("the shard is blocked", SOON, || block.came() == 1);
    let (asked, sent) = (mesh.ask(0, 1), mesh.send(0, 2));
    let waiting: Vec<_> = (3..9).map(|number| mesh.send(0, number)).collect();
    let patient = mesh.ask_waiting(0, 9);
    running.abort();
    block.end();
    let outcome = await_here(asked);
    assert!(matches!(outcome, Ok(1) | Err(AskError::Unanswered)), "{outcome:?}");
    assert_eq!(await_here(leaked), Err(AskError::Unanswered));
    let outcome = await_here(patient);
    assert!(matches!(outcome, Ok(9) | Err(AskError::Unanswered | AskError::Gone)), "{outcome:?}");
    assert_eq!(await_here(sent), Ok(()));
    for (number, sending) in (3..9).zip(waiting) {
        let outcome = await_here(sending);
        assert!(outcome.is_ok() || outcome == Err(SendError::Gone(number)), "{outcome:?}");
    }
}

/// Sends the content of a frame to all other shards, and answers once each has room for it.
struct SendsToOthers(Mesh<Vec<u8>>);

impl Service for SendsToOthers {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        self.0.send_to_others(|to| [&frame[..], &[to as u8]].concat()).await;
        cx.reply(format!("{}", cx.shard().index()));
        Ok(())
    }
}

#[test]
fn what_is_sent_to_others_comes_to_each_but_this_one() {
    // Room for one, so that senders wait for more.
    let (mesh, (got, reports)) = (Mesh::<Vec<u8>>::with_capacity(1), channel::<Got>());
    let (of_shards, got) = (mesh.clone(), Mutex::new(got));
    let running = server(3).start(move |shard: &Shard| {
        let (index, got) = (shard.index(), got.lock().unwrap().clone());
        of_shards.register(shard, move |_from, message: Vec<u8>| got.send((index, message)).unwrap());
        SendsToOthers(of_shards.clone())
    });
    let running = running.unwrap();
    let mut client = Client::connect(running.local_addrs()[0]);
    for n in 0..100u8 {
        let here: usize = String::from_utf8(client.ask([n])).unwrap().parse().unwrap();
        let mut told = [next(&reports), next(&reports)];
        told.sort();
        let others: Vec<Got> = (0..3).filter(|to| *to != here).map(|to| (to, vec![n, to as u8])).collect();
        assert_eq!(told[..], others);
    }
    // From a thread outside the shards it goes to all.
    await_here(mesh.send_to_others(|to| vec![to as u8]));
    let mut told = [next(&reports), next(&reports), next(&reports)];
    told.sort();
    assert_eq!(told, [0, 1, 2].map(|to| (to, vec![to as u8])));
    finish(running);
    await_here(mesh.send_to_others(|_| Vec::new()));
    assert!(reports.recv().is_err(), "no shard is left, and nothing was told");
}
