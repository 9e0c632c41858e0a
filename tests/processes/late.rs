//! A process that is stopped while its peers send: their limits run out, and their bytes wait in
//! the kernel.

use std::net::SocketAddr;
use std::time::Duration;

use ringserve::framing::LengthPrefix;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::End;
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order};
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

const IDLE: Duration = Duration::from_millis(700);

const PEERS: usize = 300;

/// The child: serves with a short idle limit until its input ends.
#[test]
#[ignore = "the child process of the other test here, which starts it; alone: echo | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes late::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let server = On::default().server(no_time_limits().idle_timeout(Some(IDLE)));
    let lab = Lab::of(server.framing(LengthPrefix::default()));
    println!("\naddress {}", lab.addr());
    std::io::stdin().lines().for_each(drop);
    lab.finish();
}

#[test]
fn peers_whose_bytes_wait_outlive_a_stop_of_the_process() {
    let mut process = Process::start(child_serves);
    let addr: SocketAddr = process.line_after("address ").parse().unwrap();
    let mut peers: Vec<Client> = (0..PEERS).map(|_| Client::connect(addr)).collect();
    peers.iter_mut().for_each(|peer| peer.echoes("before"));
    process.signal(Signal::STOP);
    let pid = Pid::from_child(&process.child);
    eventually("the server stops", SOON, || {
        let told = waitpid(Some(pid), WaitOptions::UNTRACED | WaitOptions::NOHANG).unwrap();
        told.is_some_and(|(_, status)| status.stopped())
    });
    peers.iter_mut().for_each(|peer| peer.send(order::echo("meanwhile")));
    // The limit expires, as it does for a silent peer of a server that runs.
    let mut beside = Process::start(child_serves);
    let mut silent = Client::connect(beside.line_after("address ").parse::<SocketAddr>().unwrap());
    silent.echoes("before");
    assert_eq!(silent.end(), End::Fin);
    process.signal(Signal::CONT);
    peers.iter_mut().for_each(|peer| assert_eq!(peer.recv(), order::echo("meanwhile")));
}
