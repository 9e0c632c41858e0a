//! One peer that sends without end among others that ask now and then: the others must not starve.
//!
//! Counted and not timed: the shard is held until every ping is in its socket, and the measure is
//! the number of frames of the firehose that are answered from then on until each ping is.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;

use ringserve::framing::LengthPrefix;
use ringserve::limits::ServerLimits;
use ringserve::{Cx, Frame, Service};
use ringserve_tests::brake::{Brake, brake};
use ringserve_tests::client::frame;
use ringserve_tests::proc_net::unread;
use ringserve_tests::{Client, On, SOON, alone, eventually, finish, no_time_limits};

const PINGERS: usize = 50;
const ROUNDS: usize = 10;

/// Bytes of a frame of the firehose, and of a receive buffer.
const BYTES: usize = 16 << 10;

/// Frames of the firehose that one turn answers: it takes 1 MiB from the driver, and the buffer
/// that exceeds it.
const TURN: u64 = (1 << 20) / BYTES as u64 + 1;

/// Frames that may be answered before a ping: the rest of the turn in which it arrives, as many
/// again that the kernel had put into buffers by then, and those before it in the turn that brings
/// it.
const BEFORE_A_PING: u64 = 3 * TURN;

/// Counts the frames of the firehose, and reports the number to every other connection.
struct Counting {
    brake: Arc<Brake>,
    answered: Arc<AtomicU64>,
}

impl Service for Counting {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match frame.first() {
            Some(b'f') => {
                self.answered.fetch_add(1, SeqCst);
                cx.reply(b"f");
                return Ok(());
            }
            Some(b'h') => self.brake.hold(),
            _ => {}
        }
        cx.reply(&self.answered.load(SeqCst).to_be_bytes());
        Ok(())
    }
}

#[track_caller]
fn told(client: &mut Client) -> u64 {
    u64::from_be_bytes(client.recv().try_into().expect("a number"))
}

fn pings_beside_a_firehose(receive_bytes_max: usize) {
    let (brake, lever) = brake();
    let (brake, answered) = (Arc::new(brake), Arc::new(AtomicU64::new(0)));
    let for_shard = answered.clone();
    let server = On::default().server(no_time_limits().receive_bytes_max(receive_bytes_max));
    let running = server
        .framing(LengthPrefix::default())
        .start(move |_| Counting { brake: brake.clone(), answered: for_shard.clone() })
        .unwrap();
    let addr = running.local_addrs()[0];
    let mut holder = Client::connect(addr);
    let mut pingers: Vec<Client> = (0..PINGERS).map(|_| Client::connect(addr)).collect();
    let peers: Vec<_> = pingers.iter().map(Client::local_addr).collect();
    let ping = frame(b"p");
    let mut firehose = Client::connect(addr);
    let mut answers = Client::of(firehose.stream.try_clone().unwrap());
    let done = AtomicBool::new(false);
    let mut rounds = || {
        let _done = Done(&done);
        for round in 0..ROUNDS {
            let before = answered.load(SeqCst);
            eventually("the firehose flows", SOON, || answered.load(SeqCst) > before + BEFORE_A_PING);
            holder.send("h");
            lever.wait_for_hold();
            pingers.iter_mut().for_each(|pinger| pinger.write(&ping));
            eventually("all pings are there", SOON, || {
                unread(addr, &peers).iter().all(|bytes| *bytes == ping.len())
            });
            lever.let_go();
            let let_go = told(&mut holder);
            for (n, pinger) in pingers.iter_mut().enumerate() {
                let before = told(pinger) - let_go;
                assert!(before <= BEFORE_A_PING, "round {round}: {before} frames before the ping of {n}");
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let wire = frame([b'f'; BYTES]);
            while !done.load(SeqCst) {
                firehose.write(&wire);
            }
            firehose.finish_writing();
        });
        scope.spawn(|| answers.read_to_end());
        rounds();
    });
    drop((holder, pingers, firehose, answers));
    finish(running);
}

/// Lets the firehose end, even if the test fails.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn ping_beside_a_firehose_waits_few_turns() {
    if !alone(ping_beside_a_firehose_waits_few_turns) {
        return;
    }
    pings_beside_a_firehose(ServerLimits::default().receive_bytes_max);
}

#[test]
fn ping_beside_a_firehose_for_every_buffer_waits_few_turns() {
    if !alone(ping_beside_a_firehose_for_every_buffer_waits_few_turns) {
        return;
    }
    pings_beside_a_firehose(8 * BYTES);
}
