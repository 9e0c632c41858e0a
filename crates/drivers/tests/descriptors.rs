//! The limit on descriptors. It is the process's, so this is the only test in this file.

mod common;

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

use common::{UringRig as Rig, small};
use ringserve_core::{AcceptEnd, Budget, CloseHow, Completion, Driver, Op, Socket, Wait};
use ringserve_drivers::{Epoll, EpollConfig, Listener, Uring};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit is the process's, so one test at a time.
static LIMIT: Mutex<()> = Mutex::new(());

fn accept_ended(rig: &mut Rig) -> AcceptEnd {
    rig.wait_for("AcceptEnded", |event| match event {
        Completion::AcceptEnded { end, .. } => Some(*end),
        _ => None,
    })
}

#[test]
fn queued_connection_survives_the_limit_of_descriptors() {
    let _limit = LIMIT.lock().unwrap_or_else(|lock| lock.into_inner());
    let mut rig = Rig::accepting(&small());
    let (_first, id) = rig.connect(0);
    // An armed accept goes by the limit of when it was armed (seen on 6.18).
    rig.driver.submit(Op::AcceptStop { listener: 0 });
    assert_eq!(accept_ended(&mut rig), AcceptEnd::Stopped);
    rig.turn(Wait::No);
    let limit = getrlimit(Resource::Nofile);
    let next = rustix::io::dup(std::io::stdin()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&next) as u64;
    drop(next);
    // The client gets the last one.
    setrlimit(Resource::Nofile, Rlimit { current: Some(number + 1), maximum: limit.maximum }).unwrap();
    let mut client = TcpStream::connect(rig.address).unwrap();
    rig.driver.submit(Op::Accept { listener: 0 });
    assert_eq!(accept_ended(&mut rig), AcceptEnd::Descriptors);
    setrlimit(Resource::Nofile, limit).unwrap();
    rig.driver.submit(Op::Accept { listener: 0 });
    let (socket, peer) = rig.accepted();
    assert_eq!(peer, client.local_addr().unwrap());
    let second = rig.adopt(1, socket);
    rig.close(second, CloseHow::Orderly);
    assert_eq!(client.read(&mut [0; 4]).unwrap(), 0);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

/// Turns, with waits that nothing but the driver itself ends, until the listener is closed. The
/// sockets that came first.
fn until_closed(driver: &mut dyn Driver<Descriptor = OwnedFd>, turns_max: u64) -> Vec<Socket> {
    let (mut sockets, mut out) = (Vec::new(), Vec::new());
    for _ in 0..turns_max {
        driver.turn(Wait::Forever, Budget::default(), &mut out).unwrap();
        for completion in out.drain(..) {
            match completion {
                Completion::Accepted { socket, .. } => sockets.push(socket),
                Completion::AcceptEnded { end: AcceptEnd::Closed, .. } => return sockets,
                other => panic!("{other:?}"),
            }
        }
    }
    panic!("it is not closed after {turns_max} turns");
}

/// Lowers the limit so that the process has no descriptor left, while `run` runs.
fn without_descriptors<T>(run: impl FnOnce() -> T) -> T {
    let limit = getrlimit(Resource::Nofile);
    let next = rustix::io::dup(std::io::stdin()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&next) as u64;
    drop(next);
    setrlimit(Resource::Nofile, Rlimit { current: Some(number), maximum: limit.maximum }).unwrap();
    let ran = run();
    setrlimit(Resource::Nofile, limit).unwrap();
    ran
}

#[test]
fn queue_is_taken_once_descriptors_are_back_or_given_up() {
    let _limit = LIMIT.lock().unwrap_or_else(|lock| lock.into_inner());
    for uring in [true, false] {
        for back in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let mut driver: Box<dyn Driver<Descriptor = OwnedFd>> = if uring {
                Box::new(Uring::new(&small(), vec![Listener::own(listener)]).unwrap())
            } else {
                let pool = small().pool;
                let config = EpollConfig { connections: 16, pool, ..EpollConfig::default() };
                Box::new(Epoll::new(&config, vec![Listener::own(listener)]).unwrap())
            };
            let mut client = TcpStream::connect(address).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            driver.submit(Op::StopListening { listener: 0 });
            if !back {
                assert!(without_descriptors(|| until_closed(&mut *driver, 300)).is_empty());
                assert!(client.read(&mut [0; 4]).is_err(), "what was left in the queue is reset");
                continue;
            }
            without_descriptors(|| {
                let mut out = Vec::new();
                for _ in 0..3 {
                    driver.turn(Wait::Forever, Budget::default(), &mut out).unwrap();
                }
                assert!(out.is_empty(), "{out:?}");
            });
            let sockets = until_closed(&mut *driver, 10);
            assert_eq!(sockets.len(), 1);
            driver.submit(Op::Refuse { socket: sockets[0] });
            driver.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap();
            assert_eq!(client.read(&mut [0; 4]).unwrap(), 0);
        }
    }
}
