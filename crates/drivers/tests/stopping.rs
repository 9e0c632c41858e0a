//! `Op::StopListening` on the kernel this runs on, with both drivers: queued connections are
//! delivered, later ones are refused, and none in between is lost.

use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringserve_buf::PoolConfig;
use ringserve_core::{AcceptEnd, Budget, Completion, Driver, Op, Socket, Wait};
use ringserve_drivers::{Epoll, EpollConfig, Listener, Uring, UringConfig};
use socket2::SockRef;

const PATIENCE: Duration = Duration::from_secs(10);

/// The address of a listener, and the client that connects to it.
#[derive(Clone, Debug)]
enum Place {
    Tcp(std::net::SocketAddr),
    Unix(PathBuf),
}

/// The client's end; it is kept open, and read from.
trait Client: Read + Send {}
impl<T: Read + Send> Client for T {}

impl Place {
    fn connect(&self) -> io::Result<Box<dyn Client>> {
        Ok(match self {
            Place::Tcp(addr) => {
                let client = TcpStream::connect(addr)?;
                client.set_read_timeout(Some(PATIENCE))?;
                Box::new(client)
            }
            Place::Unix(path) => {
                let client = UnixStream::connect(path)?;
                client.set_read_timeout(Some(PATIENCE))?;
                Box::new(client)
            }
        })
    }

    fn assert_refuses(&self) {
        let kind = self.connect().map(drop).map_err(|error| error.kind());
        assert_eq!(kind, Err(io::ErrorKind::ConnectionRefused), "{self:?}");
    }
}

fn tcp(addr: &str) -> (Place, OwnedFd) {
    let listener = TcpListener::bind(addr).unwrap();
    // The standard library's 128 are too few: a handshake that ends at a full queue is completed a
    // second later.
    SockRef::from(&listener).listen(4096).unwrap();
    (Place::Tcp(listener.local_addr().unwrap()), listener.into())
}

fn unix() -> (Place, OwnedFd) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("ringserve-stopping-{}-{number}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    (Place::Unix(path), listener.into())
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Place::Unix(path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn pool() -> PoolConfig {
    PoolConfig { buffer_bytes: 4096, buffers_max: 16, poison: true }
}

fn uring(listener: OwnedFd) -> Box<dyn Driver<Descriptor = OwnedFd>> {
    uring_of(Listener::own(listener))
}

fn uring_of(listener: Listener) -> Box<dyn Driver<Descriptor = OwnedFd>> {
    let config = UringConfig {
        submission_entries: 16,
        completion_entries: 64,
        connections: 16,
        pool: pool(),
        ..UringConfig::default()
    };
    Box::new(Uring::new(&config, vec![listener]).unwrap())
}

fn epoll(listener: OwnedFd) -> Box<dyn Driver<Descriptor = OwnedFd>> {
    epoll_of(Listener::own(listener))
}

fn epoll_of(listener: Listener) -> Box<dyn Driver<Descriptor = OwnedFd>> {
    let config = EpollConfig { connections: 16, pool: pool(), ..EpollConfig::default() };
    Box::new(Epoll::new(&config, vec![listener]).unwrap())
}

type Make = fn(OwnedFd) -> Box<dyn Driver<Descriptor = OwnedFd>>;
const DRIVERS: [(&str, Make); 2] = [("io_uring", uring), ("epoll", epoll)];

/// Takes one turn. Returns the sockets that came, and how accepting ended if it did.
fn turn(
    driver: &mut dyn Driver<Descriptor = OwnedFd>,
    completions: usize,
    sockets: &mut Vec<Socket>,
) -> Option<AcceptEnd> {
    let mut out = Vec::new();
    let budget = Budget { completions, ..Budget::default() };
    driver.turn(Wait::For(Duration::from_millis(50)), budget, &mut out).unwrap();
    assert!(out.len() <= completions, "{} completions in a turn of {completions}", out.len());
    let mut ended = None;
    for completion in out {
        assert_ne!(ended, Some(AcceptEnd::Closed), "{completion:?} after the end");
        match completion {
            Completion::Accepted { listener: 0, socket, .. } => sockets.push(socket),
            Completion::AcceptEnded { listener: 0, end } => ended = Some(end),
            other => panic!("{other:?}"),
        }
    }
    ended
}

/// Turns until accepting ends.
fn until_ended(
    driver: &mut dyn Driver<Descriptor = OwnedFd>,
    completions: usize,
    sockets: &mut Vec<Socket>,
) -> AcceptEnd {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(end) = turn(driver, completions, sockets) {
            return end;
        }
        assert!(Instant::now() < deadline, "accepting did not end");
    }
}

/// Closes the sockets: each client sees the end of its stream, and no reset.
fn refuse_all(
    driver: &mut dyn Driver<Descriptor = OwnedFd>,
    sockets: &[Socket],
    clients: &mut [Box<dyn Client>],
) {
    sockets.iter().for_each(|socket| driver.submit(Op::Refuse { socket: *socket }));
    let mut out = Vec::new();
    for _ in 0..sockets.len() / 8 + 2 {
        driver.turn(Wait::No, Budget::default(), &mut out).unwrap();
    }
    assert!(out.is_empty(), "{out:?}");
    for client in clients {
        assert_eq!(client.read(&mut [0; 4]).unwrap(), 0, "a connection that was queued is reset");
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    /// No accept was ever requested.
    Never,
    Armed,
    /// Accepting was stopped, as at a limit.
    Paused,
    /// The stop is in progress.
    Pausing,
}

fn queued_are_delivered_and_newcomers_refused(
    place: &Place,
    driver: &mut dyn Driver<Descriptor = OwnedFd>,
    before: Before,
) {
    let mut sockets = Vec::new();
    if before != Before::Never {
        driver.submit(Op::Accept { listener: 0 });
        driver.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap();
    }
    if matches!(before, Before::Paused | Before::Pausing) {
        driver.submit(Op::AcceptStop { listener: 0 });
    }
    if before == Before::Paused {
        assert_eq!(until_ended(driver, 256, &mut sockets), AcceptEnd::Stopped);
    }
    // More connections than a turn takes of a queue.
    let mut clients: Vec<_> = (0..100).map(|_| place.connect().unwrap()).collect();
    driver.submit(Op::StopListening { listener: 0 });
    let mut end = until_ended(driver, 7, &mut sockets);
    if before == Before::Pausing && end == AcceptEnd::Stopped {
        // The listener's own end was in progress.
        end = until_ended(driver, 7, &mut sockets);
    }
    assert_eq!((end, sockets.len()), (AcceptEnd::Closed, clients.len()));
    place.assert_refuses();
    refuse_all(driver, &sockets, &mut clients);
}

#[test]
fn queued_connections_are_delivered_and_newcomers_refused() {
    for (name, make) in DRIVERS {
        for before in [Before::Never, Before::Armed, Before::Paused, Before::Pausing] {
            for (place, listener) in [tcp("127.0.0.1:0"), tcp("[::1]:0"), unix()] {
                println!("{name}, {place:?}, {before:?}");
                queued_are_delivered_and_newcomers_refused(&place, &mut *make(listener), before);
            }
        }
    }
}

/// A new connection's packet is dropped, or answered with a reset if the listener is closed by
/// then.
#[test]
fn a_newcomer_does_not_enter_the_queue_of_a_closing_listener() {
    for (name, make) in DRIVERS {
        for addr in ["127.0.0.1:0", "[::1]:0"] {
            let (place, listener) = tcp(addr);
            let Place::Tcp(addr) = &place else { unreachable!("it is TCP") };
            let mut driver = make(listener);
            driver.submit(Op::StopListening { listener: 0 });
            assert_eq!(turn(&mut *driver, 256, &mut Vec::new()), None);
            let newcomer = TcpStream::connect_timeout(addr, Duration::from_millis(10));
            assert!(newcomer.is_err(), "{name}, {addr}: {newcomer:?}");
            assert_eq!(until_ended(&mut *driver, 256, &mut Vec::new()), AcceptEnd::Closed);
        }
    }
}

#[test]
fn an_empty_queue_is_closed_in_few_turns() {
    for (_, make) in DRIVERS {
        for (place, listener) in [tcp("127.0.0.1:0"), unix()] {
            let mut driver = make(listener);
            driver.submit(Op::Accept { listener: 0 });
            assert_eq!(turn(&mut *driver, 256, &mut Vec::new()), None);
            driver.submit(Op::StopListening { listener: 0 });
            let before = driver.stats().turns;
            assert_eq!(until_ended(&mut *driver, 256, &mut Vec::new()), AcceptEnd::Closed);
            // One check each 10 ms, for 50 ms.
            assert!(driver.stats().turns - before <= 20, "{} turns", driver.stats().turns - before);
            place.assert_refuses();
        }
    }
}

/// Clients connect as fast as they can while the listener is closed. A filtered packet is sent
/// again after a second and then refused.
#[test]
fn every_connect_that_succeeded_is_delivered() {
    const ROUNDS: usize = 4;
    const CLIENTS: usize = 3;
    // A connect that finds its queue closed is tried again after a second, so the drivers run at
    // the same time.
    let rounds = |(name, make): (&str, Make)| {
        let mut delivered = 0;
        for round in 0..ROUNDS {
            let (place, listener) = if round % 4 == 3 { unix() } else { tcp("127.0.0.1:0") };
            let made = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                let connect = || {
                    let mut clients = Vec::new();
                    loop {
                        match place.connect() {
                            Ok(client) => clients.push(client),
                            Err(error) => {
                                assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
                                return clients;
                            }
                        }
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                };
                let mut driver = make(listener);
                driver.submit(Op::Accept { listener: 0 });
                let mut sockets = Vec::new();
                let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(connect)).collect();
                // Close somewhere in the middle, later in each round.
                while made.load(Ordering::Relaxed) < 20 + round * 21 {
                    assert_eq!(turn(&mut *driver, 64, &mut sockets), None);
                }
                driver.submit(Op::StopListening { listener: 0 });
                assert_eq!(until_ended(&mut *driver, 64, &mut sockets), AcceptEnd::Closed);
                place.assert_refuses();
                let mut clients = Vec::new();
                threads.into_iter().for_each(|thread| clients.extend(thread.join().unwrap()));
                assert_eq!(clients.len(), sockets.len(), "{name}, round {round}: made and delivered");
                refuse_all(&mut *driver, &sockets, &mut clients);
                delivered += sockets.len();
            });
        }
        println!("{name}: {delivered} connections in {ROUNDS} rounds");
    };
    std::thread::scope(|scope| {
        for driver in DRIVERS {
            scope.spawn(move || rounds(driver));
        }
    });
}

/// Shards share the queue of a Unix socket: connections that one leaves, another takes.
#[test]
fn drivers_that_share_a_queue_deliver_all_of_it_together() {
    for (name, make) in DRIVERS {
        let (place, listener) = unix();
        let other = listener.try_clone().unwrap();
        let mut drivers = [make(listener), make(other)];
        let mut clients: Vec<_> = (0..50).map(|_| place.connect().unwrap()).collect();
        let mut sockets = [Vec::new(), Vec::new()];
        for driver in &mut drivers {
            driver.submit(Op::StopListening { listener: 0 });
        }
        place.assert_refuses();
        for (driver, sockets) in drivers.iter_mut().zip(&mut sockets) {
            assert_eq!(until_ended(&mut **driver, 8, sockets), AcceptEnd::Closed, "{name}");
        }
        assert_eq!(sockets.iter().map(Vec::len).sum::<usize>(), clients.len(), "{name}");
        refuse_all(&mut *drivers[0], &sockets[0], &mut []);
        refuse_all(&mut *drivers[1], &sockets[1], &mut clients);
    }
}

/// Other listeners of the driver go on.
#[test]
fn a_listener_beside_the_closed_one_goes_on() {
    let config = UringConfig { connections: 16, pool: pool(), ..UringConfig::default() };
    let (closed, first) = tcp("127.0.0.1:0");
    let (place, second) = tcp("127.0.0.1:0");
    let mut driver = Uring::new(&config, vec![Listener::own(first), Listener::own(second)]).unwrap();
    driver.submit(Op::Accept { listener: 0 });
    driver.submit(Op::Accept { listener: 1 });
    driver.submit(Op::StopListening { listener: 0 });
    assert_eq!(until_ended(&mut driver, 256, &mut Vec::new()), AcceptEnd::Closed);
    closed.assert_refuses();
    let _client = place.connect().unwrap();
    let mut out = Vec::new();
    driver.turn(Wait::For(PATIENCE), Budget::default(), &mut out).unwrap();
    assert!(matches!(out[..], [Completion::Accepted { listener: 1, .. }]), "{out:?}");
}

/// A filter that cannot be attached: the listener's filters are locked.
fn lock_filters(listener: &OwnedFd) {
    let one: libc::c_int = 1;
    let (fd, value, size) =
        (listener.as_raw_fd(), (&raw const one).cast(), size_of_val(&one) as libc::socklen_t);
    // SAFETY: the value is a readable int of that size, and the call keeps no pointer.
    let result = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LOCK_FILTER, value, size) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

#[test]
fn newcomers_that_cannot_be_turned_away_do_not_keep_a_listener() {
    for make in [uring, epoll] {
        let (place, listener) = tcp("127.0.0.1:0");
        lock_filters(&listener);
        let Place::Tcp(addr) = place.clone() else { unreachable!() };
        let mut driver = make(listener);
        driver.submit(Op::Accept { listener: 0 });
        driver.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap();
        driver.submit(Op::StopListening { listener: 0 });
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Keeps a few in the queue, until there is no listener to connect to.
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let _ = TcpStream::connect(addr)
                            .map(|client| SockRef::from(&client).set_linger(Some(Duration::ZERO)));
                    }
                });
            }
            let deadline = Instant::now() + PATIENCE;
            let mut closed = false;
            while !closed {
                assert!(Instant::now() < deadline, "the listener stays");
                let mut out = Vec::new();
                driver.turn(Wait::For(Duration::from_millis(50)), Budget::default(), &mut out).unwrap();
                for completion in out {
                    match completion {
                        Completion::Accepted { socket, .. } => driver.submit(Op::Refuse { socket }),
                        Completion::AcceptEnded { end, .. } => closed |= end == AcceptEnd::Closed,
                        _ => {}
                    }
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        place.assert_refuses();
    }
}

/// A listener with two owners: a driver, and another that acts like a process with a duplicate
/// descriptor.
fn adopted(place: fn() -> (Place, OwnedFd)) -> (Place, OwnedFd, Listener) {
    let (place, other) = place();
    SockRef::from(&other).set_nonblocking(true).unwrap();
    let listener = Listener::adopted(other.try_clone().unwrap());
    (place, other, listener)
}

fn any_tcp() -> (Place, OwnedFd) {
    tcp("127.0.0.1:0")
}

/// Takes all queued connections.
fn take_all(listener: &OwnedFd) -> Vec<socket2::Socket> {
    let listener = SockRef::from(listener);
    std::iter::from_fn(|| listener.accept().ok()).map(|(socket, _)| socket).collect()
}

type MakeOf = fn(Listener) -> Box<dyn Driver<Descriptor = OwnedFd>>;
const MAKE_OF: [(&str, MakeOf); 2] = [("io_uring", uring_of), ("epoll", epoll_of)];

#[test]
fn an_adopted_listener_stays_open_for_its_other_owner() {
    for (name, make) in MAKE_OF {
        for kind in [any_tcp as fn() -> _, unix] {
            let (place, other, listener) = adopted(kind);
            let mut driver = make(listener);
            driver.submit(Op::Accept { listener: 0 });
            let mut sockets = Vec::new();
            let mut clients: Vec<_> = (0..3).map(|_| place.connect().unwrap()).collect();
            while sockets.len() < clients.len() {
                assert_eq!(turn(&mut *driver, 256, &mut sockets), None, "{name}");
            }
            driver.submit(Op::StopListening { listener: 0 });
            // While it ends, and afterwards, no connection is refused.
            clients.push(place.connect().unwrap());
            assert_eq!(until_ended(&mut *driver, 256, &mut sockets), AcceptEnd::Closed, "{name}");
            clients.extend((0..4).map(|_| place.connect().unwrap()));
            let others = take_all(&other);
            assert!([3, 4].contains(&sockets.len()), "{name}: one may have been on its way");
            assert_eq!(sockets.len() + others.len(), clients.len(), "{name}");
            // No connection is reset: each is open until its owner closes it.
            drop(others);
            refuse_all(&mut *driver, &sockets, &mut clients);
            drop(driver);
            let _late = place.connect().unwrap();
            assert_eq!(take_all(&other).len(), 1, "{name}");
        }
    }
}

#[test]
fn an_adopted_listener_is_left_with_what_is_queued() {
    for (name, make) in MAKE_OF {
        for kind in [any_tcp as fn() -> _, unix] {
            let (place, other, listener) = adopted(kind);
            let mut driver = make(listener);
            let _clients: Vec<_> = (0..5).map(|_| place.connect().unwrap()).collect();
            driver.submit(Op::StopListening { listener: 0 });
            let mut sockets = Vec::new();
            assert_eq!(until_ended(&mut *driver, 256, &mut sockets), AcceptEnd::Closed, "{name}");
            assert_eq!((sockets.len(), take_all(&other).len()), (0, 5), "{name}");
        }
    }
}

/// The kernel wakes one of those who wait at a queue. A ring that is woken and stops at once must
/// not leave the connection to a driver that was not woken.
#[test]
fn connection_that_woke_a_stopping_driver_is_not_forgotten() {
    for (name, make) in MAKE_OF {
        for kind in [any_tcp as fn() -> _, unix] {
            let (place, other, listener) = adopted(kind);
            let mut stopping = make(listener);
            let mut stays = make(Listener::adopted(other));
            for driver in [&mut stopping, &mut stays] {
                driver.submit(Op::Accept { listener: 0 });
                driver.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap();
            }
            let mut client = [place.connect().unwrap()];
            stopping.submit(Op::StopListening { listener: 0 });
            let (mut taken, mut left) = (Vec::new(), Vec::new());
            assert_eq!(until_ended(&mut *stopping, 256, &mut taken), AcceptEnd::Closed, "{name}");
            let deadline = Instant::now() + PATIENCE;
            while taken.is_empty() && left.is_empty() {
                assert!(
                    Instant::now() < deadline,
                    "{name}: the connection waits, and no driver is woken for it"
                );
                turn(&mut *stays, 256, &mut left);
            }
            refuse_all(&mut *stopping, &taken, &mut client[..taken.len()]);
            refuse_all(&mut *stays, &left, &mut client[..left.len()]);
        }
    }
}

/// The listener is kept by a child that was forked without exec.
#[test]
fn newcomers_are_refused_where_a_child_keeps_the_listener() {
    for (name, make) in DRIVERS {
        for is_stopped in [true, false] {
            let (place, listener) = tcp("127.0.0.1:0");
            let kept = listener.try_clone().unwrap();
            let mut driver = make(listener);
            driver.submit(Op::Accept { listener: 0 });
            driver.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap();
            if is_stopped {
                driver.submit(Op::StopListening { listener: 0 });
                assert_eq!(until_ended(&mut *driver, 7, &mut Vec::new()), AcceptEnd::Closed);
            } else {
                drop(driver);
            }
            eprintln!("{name}, stopped: {is_stopped}");
            place.assert_refuses();
            drop(kept);
        }
    }
}
