//! Sockets accepted at a listener with a filter have none: they would run it for each segment.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use ringserve_core::{Budget, Completion, Driver, Op, Wait};
use ringserve_drivers::{Epoll, EpollConfig, Listener, ListenerFilter, Uring, UringConfig};
use socket2::SockFilter;

/// Keeps every packet.
const KEEP: SockFilter = SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, u32::MAX);

/// Instructions of a socket's filter.
fn instructions(socket: impl AsFd) -> u32 {
    let mut count: libc::socklen_t = 0;
    // SAFETY: with room for no instruction the kernel writes none, and their number to `count`,
    // which lives until the call returns; the descriptor is borrowed, so it is open.
    let got = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_GET_FILTER,
            std::ptr::null_mut(),
            &raw mut count,
        )
    };
    assert_eq!(got, 0);
    count
}

fn listener() -> (Listener, ListenerFilter, TcpListener) {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let same = socket.try_clone().unwrap();
    let listener = Listener::own(socket);
    let filter = ListenerFilter::of(&listener).unwrap();
    (listener, filter, same)
}

/// The next socket that the driver accepts.
fn accepted(driver: &mut impl Driver<Descriptor = OwnedFd>) -> OwnedFd {
    let (began, mut completions) = (Instant::now(), Vec::new());
    while began.elapsed() < Duration::from_secs(10) {
        driver.turn(Wait::For(Duration::from_millis(10)), Budget::default(), &mut completions).unwrap();
        for completion in completions.drain(..) {
            if let Completion::Accepted { socket, .. } = completion {
                return driver.hand_over(socket).unwrap();
            }
        }
    }
    panic!("nothing is accepted")
}

fn is_freed(make: impl Fn(Listener) -> Box<dyn FnMut() -> OwnedFd>) {
    let (own, filter, same) = listener();
    let addr = same.local_addr().unwrap();
    let mut accept = make(own);
    let _first = TcpStream::connect(addr).unwrap();
    assert_eq!(instructions(accept()), 0);
    filter.set(&[KEEP; 3]).unwrap();
    assert_eq!(instructions(&same), 3);
    let _second = TcpStream::connect(addr).unwrap();
    assert_eq!(instructions(accept()), 0, "it was inherited");
    let _queued = TcpStream::connect(addr).unwrap();
    filter.set(&[]).unwrap();
    assert_eq!(instructions(&same), 0);
    assert_eq!(instructions(accept()), 0, "it came before the filter went");
}

#[test]
fn accepted_socket_inherits_the_filter_of_its_listener() {
    let (own, filter, same) = listener();
    filter.set(&[KEEP; 3]).unwrap();
    let _peer = TcpStream::connect(same.local_addr().unwrap()).unwrap();
    let (socket, _) = same.accept().unwrap();
    assert_eq!(instructions(socket), 3, "a driver has to free it of that");
    drop(own);
}

#[test]
fn sockets_of_an_io_uring_have_no_filter() {
    let config = UringConfig { connections: 64, ..UringConfig::default() };
    is_freed(|listener| {
        let mut driver = Uring::new(&config, vec![listener]).unwrap();
        driver.submit(Op::Accept { listener: 0 });
        Box::new(move || accepted(&mut driver))
    });
}

#[test]
fn sockets_that_an_io_uring_accepts_one_by_one_have_no_filter() {
    let config = UringConfig { connections: 64, ..UringConfig::default() };
    is_freed(|mut listener| {
        listener.one_by_one();
        let mut driver = Uring::new(&config, vec![listener]).unwrap();
        driver.submit(Op::Accept { listener: 0 });
        Box::new(move || accepted(&mut driver))
    });
}

#[test]
fn sockets_of_an_epoll_have_no_filter() {
    let config = EpollConfig { connections: 64, ..EpollConfig::default() };
    is_freed(|listener| {
        let mut driver = Epoll::new(&config, vec![listener]).unwrap();
        driver.submit(Op::Accept { listener: 0 });
        Box::new(move || accepted(&mut driver))
    });
}

#[test]
fn io_uring_accepts_no_more_than_one_in_a_turn_if_told_so() {
    let config = UringConfig { connections: 64, ..UringConfig::default() };
    let (mut own, _, same) = listener();
    own.one_by_one();
    let _peers: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(same.local_addr().unwrap()).unwrap()).collect();
    let mut driver = Uring::new(&config, vec![own]).unwrap();
    driver.submit(Op::Accept { listener: 0 });
    let (mut sockets, mut completions) = (Vec::new(), Vec::new());
    while sockets.len() < 20 {
        driver.turn(Wait::For(Duration::from_secs(5)), Budget::default(), &mut completions).unwrap();
        let came = completions.drain(..).filter_map(|completion| match completion {
            Completion::Accepted { socket, .. } => Some(socket),
            _ => None,
        });
        let before = sockets.len();
        sockets.extend(came);
        assert!(sockets.len() <= before + 1, "{} came at once", sockets.len() - before);
    }
    sockets.into_iter().for_each(|socket| driver.submit(Op::Refuse { socket }));
}
