//! A send that is stopped and made again, on the kernel this runs on, with both drivers.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringserve_buf::PoolConfig;
use ringserve_core::{Batch, Budget, Completion, ConnId, Driver, Op, SendEnd, Wait};
use ringserve_drivers::{Epoll, EpollConfig, Uring, UringConfig};

const PATIENCE: Duration = Duration::from_secs(10);

/// Stops the send in flight. Returns its rest.
fn stopped(driver: &mut impl Driver, id: ConnId) -> Box<Batch> {
    driver.submit(Op::SendStop { id });
    let deadline = Instant::now() + PATIENCE;
    let mut seen = Vec::new();
    while seen.is_empty() {
        assert!(Instant::now() < deadline, "the send does not end");
        driver.turn(Wait::For(Duration::from_millis(50)), Budget::default(), &mut seen).unwrap();
    }
    match seen.pop() {
        Some(Completion::Sent { batch, end: SendEnd::Stopped, .. }) => batch,
        other => panic!("{other:?}"),
    }
}

fn send(driver: &mut impl Driver, id: ConnId, batch: Box<Batch>) {
    driver.submit(Op::Send { id, batch });
    (0..4).for_each(|_| driver.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap());
}

/// A peer takes half of what fits, which no driver learns: a Unix socket reports room once three
/// quarters are free.
fn takes_a_little(mut driver: impl Driver, mut client: UnixStream, id: ConnId) {
    let mut batch = Box::new(Batch::new());
    batch.put(&vec![b'r'; 8 << 20]);
    send(&mut driver, id, batch);
    let mut batch = stopped(&mut driver, id);
    let fits = (8 << 20) - batch.len();
    for round in 0..4 {
        let before = batch.len();
        client.read_exact(&mut vec![0; fits / 2]).unwrap();
        send(&mut driver, id, batch);
        batch = stopped(&mut driver, id);
        assert!(batch.len() < before, "round {round}: a peer that takes some is held to take nothing");
    }
}

fn pool() -> PoolConfig {
    PoolConfig { buffer_bytes: 4096, buffers_max: 16, poison: true }
}

#[test]
fn send_that_is_made_again_finds_room_that_no_event_told_of() {
    let id = ConnId::new(0, 1);
    let config = UringConfig { pool: pool(), connections: 4, ..UringConfig::default() };
    let mut driver = Uring::new(&config, Vec::new()).unwrap();
    let (client, server) = UnixStream::pair().unwrap();
    let socket = driver.take_over(server.into());
    driver.submit(Op::Adopt { id, socket });
    takes_a_little(driver, client, id);

    let config = EpollConfig { pool: pool(), connections: 4, ..EpollConfig::default() };
    let mut driver = Epoll::new(&config, Vec::new()).unwrap();
    let (client, server) = UnixStream::pair().unwrap();
    server.set_nonblocking(true).unwrap();
    let socket = driver.take_over(server.into());
    driver.submit(Op::Adopt { id, socket });
    takes_a_little(driver, client, id);
}
