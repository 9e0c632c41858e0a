//! The example `balancer` where the host it runs on has no port left.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use ringserve_tests::child::{Process, is_child};
use ringserve_tests::examples::{Example, build};
use ringserve_tests::{SOON, eventually};

const STATUS: &str = "127.0.0.1:9000";

/// A connection from a port that the kernel would not choose.
fn connect(number: u16, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 3], 50_000 + number)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.into()
}

fn state(number: &mut u16) -> String {
    *number += 1;
    let mut stream = connect(*number, STATUS.parse().unwrap());
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
#[ignore = "the child process of another test here, which starts it; alone: RINGSERVE_TEST_CHILD=1 unshare -rn sh -c 'ip link set lo up; cargo test -p ringserve-tests --test examples balancer::child_has_four_ports -- --exact --ignored --nocapture'"]
fn child_has_four_ports() {
    if !is_child() {
        return;
    }
    let _upstream = TcpListener::bind("127.0.0.2:8000").unwrap();
    let options =
        ["--shards", "1", "--upstream", "127.0.0.2:8000", "--status", STATUS, "--check-interval", "0.2"];
    let example = Example::start("balancer", &options);
    let ports = |range| fs::write("/proc/sys/net/ipv4/ip_local_port_range", range).unwrap();
    ports("40000 40003");
    let mut number = 0;
    let mut next = || {
        number += 1;
        connect(number, example.addr)
    };
    // One that has an upstream stays, and the others are closed. Checks have ports too, and leave
    // them taken for a while.
    let (mut kept, mut refused) = (Vec::new(), 0);
    eventually("clients find no port", SOON, || {
        let mut client = next();
        client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        match client.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => kept.push(client),
            _ => refused += 1,
        }
        refused > 2
    });
    assert!((1..=4).contains(&kept.len()), "{} clients by four ports", kept.len());
    let mut number = 1000;
    eventually("a check has no port", SOON, || state(&mut number).contains(", not checked"));
    let text = state(&mut number);
    assert!(text.contains("127.0.0.2:8000 up") && text.contains(", 0 failed,"), "{text}");
    ports("40000 49999");
    eventually("checks go on", SOON, || !state(&mut number).contains("not checked"));
    assert!(state(&mut number).contains(", 0 failed, 0 broken"));
    // This process is killed once it has said so, and would leave it behind.
    drop(example);
    println!("\nall is as it should be");
}

#[test]
fn want_of_ports_is_counted_against_no_upstream() {
    build("balancer");
    let Some(mut child) = Process::start_in_own_network(child_has_four_ports) else { return };
    child.line_after("all is as it should be");
}
