//! Probes of silent receives, and receives that end with their input, on the kernel this runs on.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringserve_buf::PoolConfig;
use ringserve_core::{Budget, CloseHow, Completion, ConnId, Driver, DriverStats, Op, ReceiveEnd, Wait};
use ringserve_drivers::{Epoll, EpollConfig, Uring, UringConfig};
use socket2::SockRef;

const PATIENCE: Duration = Duration::from_secs(10);

type AnyDriver = Box<dyn Driver<Descriptor = OwnedFd>>;

fn pool() -> PoolConfig {
    PoolConfig { buffer_bytes: 4096, buffers_max: 16, poison: true }
}

fn uring(plain_descriptors: bool) -> AnyDriver {
    let config = UringConfig { pool: pool(), connections: 1000, plain_descriptors, ..UringConfig::default() };
    Box::new(Uring::new(&config, Vec::new()).unwrap())
}

fn drivers() -> [AnyDriver; 3] {
    let config = EpollConfig { pool: pool(), connections: 1000, ..EpollConfig::default() };
    [uring(false), uring(true), Box::new(Epoll::new(&config, Vec::new()).unwrap())]
}

/// The client's end, and the server's.
enum Client {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Client {
    fn tcp() -> (Client, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        (Client::Tcp(client), listener.accept().unwrap().0.into())
    }

    fn unix() -> (Client, OwnedFd) {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        (Client::Unix(client), server.into())
    }

    fn send(&mut self, bytes: &[u8]) {
        match self {
            Client::Tcp(stream) => stream.write_all(bytes),
            Client::Unix(stream) => stream.write_all(bytes),
        }
        .unwrap();
    }

    fn read_end(&mut self) -> Result<usize, ErrorKind> {
        match self {
            Client::Tcp(stream) => stream.read(&mut [0]),
            Client::Unix(stream) => stream.read(&mut [0]),
        }
        .map_err(|error| error.kind())
    }

    fn end_writing(&mut self) {
        match self {
            Client::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Client::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
        .unwrap();
    }
}

struct Rig {
    driver: AnyDriver,
    seen: Vec<String>,
}

impl Rig {
    fn new(driver: AnyDriver) -> Rig {
        Rig { driver, seen: Vec::new() }
    }

    /// A connection with a receive in flight.
    fn receiving(&mut self, slot: u32, socket: OwnedFd) -> ConnId {
        let id = ConnId::new(slot, 1);
        let socket = self.driver.take_over(socket);
        self.driver.submit(Op::Adopt { id, socket });
        self.driver.submit(Op::Receive { id });
        self.turn(Wait::No);
        id
    }

    fn turn(&mut self, wait: Wait) {
        let mut out = Vec::new();
        self.driver.turn(wait, Budget::default(), &mut out).unwrap();
        self.seen.extend(out.into_iter().map(|completion| match completion {
            Completion::Received { lease, .. } => String::from_utf8(lease.to_vec()).unwrap(),
            Completion::ReceiveEnded { end: ReceiveEnd::Stopped | ReceiveEnd::Eof, .. } => "end".to_owned(),
            Completion::ReceiveEnded { end: ReceiveEnd::Error(errno), .. } => format!("error {errno}"),
            Completion::Closed { .. } => "closed".to_owned(),
            other => panic!("{other:?}"),
        }));
    }

    /// Takes turns until this is what was seen since the last call.
    #[track_caller]
    fn sees(&mut self, wanted: &[&str]) {
        let deadline = Instant::now() + PATIENCE;
        while self.seen.len() < wanted.len() {
            assert!(Instant::now() < deadline, "{wanted:?} is wanted, {:?} was seen", self.seen);
            self.turn(Wait::For(Duration::from_millis(50)));
        }
        assert_eq!(std::mem::take(&mut self.seen), wanted);
    }

    /// Takes turns for longer than a receive may take to report what a probe found.
    fn rest(&mut self) -> DriverStats {
        let deadline = Instant::now() + Duration::from_millis(30);
        while Instant::now() < deadline {
            self.turn(Wait::For(Duration::from_millis(5)));
        }
        self.driver.stats()
    }
}

#[test]
fn probe_beside_a_receive_takes_nothing_and_stops_nothing() {
    for driver in drivers() {
        let mut rig = Rig::new(driver);
        for (slot, (mut client, server)) in [Client::tcp(), Client::unix()].into_iter().enumerate() {
            let id = rig.receiving(slot as u32, server);
            for bytes in ["before", "between", "behind"] {
                client.send(bytes.as_bytes());
                rig.sees(&[bytes]);
                rig.driver.submit(Op::Probe { id });
                let stats = rig.rest();
                assert_eq!((stats.cancels, stats.receives_armed), (0, slot as u64 + 1));
            }
            client.end_writing();
            rig.sees(&["end"]);
        }
    }
}

#[test]
fn bytes_that_a_probe_meets_are_received_once() {
    for driver in drivers() {
        let mut rig = Rig::new(driver);
        for (slot, (mut client, server)) in [Client::tcp(), Client::unix()].into_iter().enumerate() {
            let id = rig.receiving(slot as u32, server);
            // The bytes are in the socket when the probe is carried out, and the receive reports
            // them after it.
            rig.driver.submit(Op::Probe { id });
            client.send(b"bytes");
            rig.sees(&["bytes"]);
            let stats = rig.rest();
            assert_eq!((stats.cancels, stats.receives_armed), (0, slot as u64 + 1));
            // The end too.
            rig.driver.submit(Op::Probe { id });
            client.end_writing();
            rig.sees(&["end"]);
            assert_eq!(rig.rest().cancels, 0);
        }
    }
}

#[test]
fn reset_that_a_probe_meets_is_told_as_one() {
    for driver in drivers() {
        let mut rig = Rig::new(driver);
        let (client, server) = Client::tcp();
        let id = rig.receiving(1, server);
        let Client::Tcp(client) = client else { unreachable!() };
        rig.driver.submit(Op::Probe { id });
        SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
        drop(client);
        rig.sees(&["error 104"]);
    }
}

#[test]
fn receive_ends_with_its_input_and_the_close_still_resets() {
    for driver in drivers() {
        let mut rig = Rig::new(driver);
        for (slot, (mut client, server)) in [Client::tcp(), Client::unix()].into_iter().enumerate() {
            let id = rig.receiving(slot as u32, server);
            client.send(b"bytes");
            rig.sees(&["bytes"]);
            rig.driver.submit(Op::ShutdownInput { id });
            rig.sees(&["end"]);
            rig.driver.submit(Op::Close { id, how: CloseHow::Abort });
            rig.sees(&["closed"]);
            let end = client.read_end();
            match client {
                Client::Tcp(_) => assert_eq!(end, Err(ErrorKind::ConnectionReset)),
                Client::Unix(_) => assert_eq!(end, Ok(0)),
            }
        }
        assert_eq!(rig.rest().cancels, 0);
    }
}

#[test]
fn thousand_connections_are_probed_and_closed_without_a_cancel() {
    let mut rig = Rig::new(uring(false));
    let pairs: Vec<_> = (0..1000).map(|_| Client::unix()).collect();
    let mut clients = Vec::new();
    let mut ids = Vec::new();
    for (slot, (client, server)) in pairs.into_iter().enumerate() {
        clients.push(client);
        ids.push(rig.receiving(slot as u32, server));
    }
    ids.iter().for_each(|id| rig.driver.submit(Op::Probe { id: *id }));
    let stats = rig.rest();
    assert_eq!((stats.probes, stats.cancels, stats.receives_armed), (1000, 0, 1000));
    ids.iter().for_each(|id| rig.driver.submit(Op::ShutdownInput { id: *id }));
    rig.sees(&["end"; 1000]);
    ids.iter().for_each(|id| rig.driver.submit(Op::Close { id: *id, how: CloseHow::Orderly }));
    rig.sees(&["closed"; 1000]);
    assert_eq!(rig.driver.stats().cancels, 0);
}
