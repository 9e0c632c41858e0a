//! Waits of a turn, the timer that serves many of them, and the wakes that end them.

mod common;

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::{PATIENCE, Rig, Tested, small, small_epoll};
use ringserve_core::{Budget, Completion, Driver, Wait};
use ringserve_drivers::{Epoll, EpollConfig, SystemKernel, Uring, UringConfig};
use rustix::process::Pid;
use rustix::thread::gettid;

const HOUR: Duration = Duration::from_secs(60 * 60);

fn turn(driver: &mut impl Driver, wait: Duration) {
    driver.turn(Wait::For(wait), Budget { completions: 100, bytes: 1 << 20 }, &mut Vec::new()).unwrap();
}

/// Each wait comes after one that was longer and ended early, and left its timer behind.
fn waits_end_in_time(mut driver: impl Driver) {
    let waker = driver.waker();
    for millis in [100, 30, 1, 60, 25, 10, 80] {
        waker.wake_by_ref();
        turn(&mut driver, HOUR);
        let (start, time) = (Instant::now(), Duration::from_millis(millis));
        let mut turns = 0;
        while let Some(left) = time.checked_sub(start.elapsed()) {
            turn(&mut driver, left);
            turns += 1;
        }
        assert!(start.elapsed() < HOUR / 60, "{:?} instead of {time:?}", start.elapsed());
        // The wake-up is one turn, and the kernel may be a moment early.
        assert!(turns <= 3, "{turns} turns to wait for {time:?}");
    }
}

#[test]
fn a_wait_after_a_longer_one_ends_in_time_on_io_uring() {
    let driver = Uring::new(&UringConfig::default(), Vec::new()).unwrap();
    waits_end_in_time(driver);
}

#[test]
fn a_wait_after_a_longer_one_ends_in_time_on_epoll() {
    let driver = Epoll::new(&EpollConfig::default(), Vec::new()).unwrap();
    waits_end_in_time(driver);
}

/// Much longer than the work done meanwhile.
const COALESCE: Duration = Duration::from_secs(1);

/// True if a thread of this process sleeps.
fn sleeps(thread: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{}/stat", thread.as_raw_nonzero())).unwrap();
    // Its name, in parentheses, may contain parentheses.
    stat.rsplit_once(") ").unwrap().1.starts_with('S')
}

/// Two connections whose bytes come one by one.
struct Pair<D> {
    rig: Rig<D>,
    peers: [TcpStream; 2],
}

impl<D: Tested> Pair<D> {
    fn new(config: &D::Config) -> Pair<D> {
        let mut rig = Rig::<D>::accepting(config);
        let peers = [0, 1].map(|slot| rig.connect_receiving(slot).0);
        rig.calm();
        Pair { rig, peers }
    }

    /// A turn that brings bytes of both.
    fn hear_both(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.write_all(b"x").unwrap());
        assert_eq!(self.rig.turn(Wait::No), 2, "{:?}", self.rig.events);
        self.rig.events.clear();
    }

    /// Takes one turn, in whose wait a byte comes, and 7 more bytes if that does not end it within
    /// `time`. Returns how many of them it brought, and with how many enters.
    fn one_turn(&mut self, time: Duration) -> (usize, u64) {
        let mut peers = self.peers.each_ref().map(|peer| peer.try_clone().unwrap());
        let before = self.rig.driver.stats().enters;
        let (ends, end) = mpsc::channel();
        let driver = gettid();
        let writes = thread::spawn(move || {
            let started = Instant::now();
            while !sleeps(driver) {
                assert!(started.elapsed() < PATIENCE, "the turn does not wait");
                thread::yield_now();
            }
            peers[0].write_all(b"x").unwrap();
            if end.recv_timeout(time).is_err() {
                (1..8).for_each(|n| peers[n % 2].write_all(b"x").unwrap());
            }
        });
        self.rig.driver.defer_sent();
        self.rig.turn_woken();
        let enters = self.rig.driver.stats().enters - before;
        // The writer may be gone, as it wrote all.
        let _ = ends.send(());
        writes.join().unwrap();
        let bytes = self.rig.events.drain(..).map(|event| match event {
            Completion::Received { lease, .. } => lease.len(),
            other => panic!("{other:?}"),
        });
        (bytes.sum(), enters)
    }
}

fn comes_together<D: Tested>(coalescing: &D::Config, plain: &D::Config) {
    let mut pair = Pair::<D>::new(plain);
    pair.hear_both();
    assert_eq!(pair.one_turn(COALESCE / 2), (1, 1), "the first ends the wait");

    let mut pair = Pair::<D>::new(coalescing);
    assert_eq!(pair.one_turn(COALESCE / 2), (1, 1), "nothing came before, so the first ends the wait");
    pair.rig.calm();
    pair.rig.events.clear();
    pair.hear_both();
    assert_eq!(pair.one_turn(Duration::ZERO), (8, 1), "all come in one turn");
    pair.rig.settled();
}

fn wakes_and_times_end_it<D: Tested>(coalescing: &D::Config) {
    let mut pair = Pair::<D>::new(coalescing);
    let waker = pair.rig.driver.waker();
    pair.hear_both();
    waker.wake_by_ref();
    pair.rig.driver.defer_sent();
    assert_eq!(pair.rig.turn_woken(), 0, "a wake before the wait is seen behind it");

    // A timer that goes off in the wait for more is a completion of io_uring, and does not end the
    // wait: its own time does.
    waker.wake_by_ref();
    pair.rig.turn(Wait::For(COALESCE / 5));
    pair.hear_both();
    let start = Instant::now();
    pair.rig.driver.defer_sent();
    assert_eq!(pair.rig.turn(Wait::For(COALESCE / 4)), 0);
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn more_come_in_one_turn_behind_several_connections_on_io_uring() {
    comes_together::<Uring<SystemKernel>>(&UringConfig { coalesce: COALESCE, ..small() }, &small());
}

#[test]
fn more_come_in_one_turn_behind_several_connections_on_epoll() {
    let plain = small_epoll(4096, 128);
    comes_together::<Epoll>(&EpollConfig { coalesce: COALESCE, ..plain.clone() }, &plain);
}

#[test]
fn a_wait_for_more_ends_in_time_on_io_uring() {
    wakes_and_times_end_it::<Uring<SystemKernel>>(&UringConfig { coalesce: COALESCE, ..small() });
}

#[test]
fn a_wait_for_more_ends_in_time_on_epoll() {
    wakes_and_times_end_it::<Epoll>(&EpollConfig { coalesce: COALESCE, ..small_epoll(4096, 128) });
}
