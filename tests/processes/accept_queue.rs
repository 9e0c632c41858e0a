//! More peers at once than the accept queue holds, at a server that is stopped.

use std::net::SocketAddr;

use ringserve::framing::LengthPrefix;
use ringserve::net::SocketOptions;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::frame;
use ringserve_tests::proc_net::{accept_queue, listen_drops};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, waitpid};
use socket2::{Domain, Socket, Type};

const BACKLOG: u32 = 16;

/// One more than the backlog: the kernel checks whether there are more than that.
const QUEUE: u64 = BACKLOG as u64 + 1;

const PEERS: usize = 100;

/// The child: serves with a short accept queue, and for each line of its input reports its
/// connections, until there are none.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes accept_queue::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    let sockets = SocketOptions::default().backlog(BACKLOG);
    let server = On::default().server(no_time_limits()).sockets(sockets);
    let lab = Lab::of(server.framing(LengthPrefix::default()));
    println!("\naddress {}", lab.addr());
    for _ in std::io::stdin().lines() {
        let report = lab.stats();
        let [queue] = lab.accept_queues()[..] else { panic!("one listener on one shard") };
        assert_eq!((queue.listener, queue.shard, queue.capacity), (0, Some(0), u64::from(BACKLOG)));
        println!("\nreport {} {} {}", report.connections, report.counters.accepted, queue.lost.unwrap());
        if report.connections == 0 {
            break;
        }
    }
    lab.finish();
    println!("\nended");
}

/// A peer that may not be connected yet.
struct Attempt(Socket);

impl Attempt {
    fn to(addr: SocketAddr) -> Attempt {
        let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let begun = socket.connect(&addr.into());
        let on_its_way = Some(Errno::INPROGRESS.raw_os_error());
        assert!(begun.is_ok() || begun.is_err_and(|error| error.raw_os_error() == on_its_way));
        Attempt(socket)
    }

    fn is_established(&self) -> bool {
        assert!(self.0.take_error().unwrap().is_none(), "no peer is refused");
        self.0.peer_addr().is_ok()
    }

    fn into_client(self) -> Client {
        self.0.set_nonblocking(false).unwrap();
        Client::of(self.0)
    }
}

#[test]
fn peers_of_an_overflowed_accept_queue_are_all_served() {
    let mut process = Process::start(child_serves);
    let addr: SocketAddr = process.line_after("address ").parse().unwrap();
    let mut canary = Client::connect(addr);
    canary.echoes("canary");
    process.signal(Signal::STOP);
    let pid = Pid::from_child(&process.child);
    eventually("the server stops", SOON, || {
        let told = waitpid(Some(pid), WaitOptions::UNTRACED | WaitOptions::NOHANG).unwrap();
        told.is_some_and(|(_, status)| status.stopped())
    });

    let before = listen_drops();
    assert_eq!(accept_queue(addr), 0);
    canary.send(order::echo("waits too"));
    let peers: Vec<Attempt> = (0..PEERS).map(|_| Attempt::to(addr)).collect();
    eventually("the accept queue is full", SOON, || accept_queue(addr) == QUEUE);
    let (established, waiting): (Vec<Attempt>, Vec<Attempt>) =
        peers.into_iter().partition(Attempt::is_established);
    assert!(established.len() as u64 >= QUEUE, "{} established", established.len());
    assert!(!waiting.is_empty(), "the accept queue took every peer");
    let text = |n: usize| order::echo(format!("peer {n}"));
    let mut established: Vec<Client> = established.into_iter().map(Attempt::into_client).collect();
    established.iter_mut().enumerate().for_each(|(n, client)| client.write(&frame(text(n))));

    process.signal(Signal::CONT);
    let line = process.line_after("packets of newcomers were dropped");
    assert!(line.contains(" shard=0 ") && line.contains(&format!(" listener={addr} lost=")), "{line}");
    assert_eq!(canary.recv(), order::echo("waits too"));
    for (n, client) in established.iter_mut().enumerate() {
        assert_eq!(client.recv(), text(n));
    }
    // Their kernel tries again, after a second for the first time, and later if all of them come at
    // once again.
    eventually("all others are connected", 3 * SOON, || waiting.iter().all(Attempt::is_established));
    let mut waited: Vec<Client> = waiting.into_iter().map(Attempt::into_client).collect();
    waited.iter_mut().for_each(|client| client.send(order::echo("waited")));
    waited.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("waited")));

    drop((canary, established, waited));
    let mut told = String::new();
    eventually("the server lets go of all", SOON, || {
        process.say("report");
        told = process.line_after("report ");
        told.starts_with("0 ")
    });
    let [accepted, lost] =
        told["0 ".len()..].split(' ').map(|count| count.parse().unwrap()).collect::<Vec<u64>>()[..]
    else {
        panic!("{told}")
    };
    assert_eq!(accepted, PEERS as u64 + 1, "each was accepted once");
    // The counter of the machine includes the losses of other listeners, too.
    let dropped = listen_drops() - before;
    assert!((1..=dropped).contains(&lost), "{lost} lost here, and {dropped} on the machine");
    process.line_after("ended");
}
