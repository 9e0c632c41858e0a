//! Socket options on running servers: their effect on connections, and the messages about those
//! that the kernel changes.
//!
//! Another test checks that accepted sockets inherit the options of their listener.

use std::fs;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use ringserve::Error;
use ringserve::framing::LengthPrefix;
use ringserve::net::SocketOptions;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::proc_net::tcp_counter;
use ringserve_tests::{Client, Lab, On, Puppet, SOON, eventually, no_time_limits, order};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use socket2::{Domain, Socket, Type};

fn lab_with(sockets: SocketOptions) -> Lab {
    Lab::of(On::default().server(no_time_limits()).sockets(sockets).framing(LengthPrefix::default()))
}

fn warnings(lab: &Lab) -> Vec<String> {
    lab.running.socket_option_warnings().iter().map(ToString::to_string).collect()
}

#[test]
fn a_start_tells_the_program_what_the_kernel_gave() {
    let wanted = 1 << 30;
    let sockets = SocketOptions::default().receive_buffer_bytes(wanted);
    let lab = lab_with(sockets);
    let max = fs::read_to_string("/proc/sys/net/core/rmem_max").unwrap();
    let max = max.trim();
    let text = format!(
        "receive_buffer_bytes {wanted} was cut to {max} by net.core.rmem_max; raise that to have more"
    );
    assert_eq!(warnings(&lab), [text]);
    let [warning] = lab.running.socket_option_warnings() else { unreachable!() };
    assert_eq!((warning.name(), warning.given()), ("receive_buffer_bytes", Some(max)));
    lab.finish();
    let lab = lab_with(SocketOptions::default());
    assert_eq!(warnings(&lab), [""; 0]);
    lab.finish();
}

#[test]
fn a_congestion_control_that_is_not_there_stops_the_start() {
    let sockets = SocketOptions::default().congestion("nonesuch");
    let server = On::default().server(no_time_limits()).sockets(sockets);
    let error = server.start(|_| Puppet::new(Default::default())).unwrap_err();
    assert!(matches!(error, Error::SocketOption(_)));
    let start =
        "socket options: the kernel refused SocketOptions::congestion = nonesuch: No such file or directory";
    let text = error.to_string();
    assert!(
        text.starts_with(start) && text.contains("net.ipv4.tcp_available_congestion_control has "),
        "{text}"
    );
}

#[test]
fn connection_without_data_is_not_accepted_while_deferred() {
    let lab = lab_with(SocketOptions::default().defer_accept(Duration::from_secs(31)));
    assert_eq!(warnings(&lab), [""; 0], "31 s is a step of the kernel's");
    let mut silent: Vec<Client> = (0..5).map(|_| lab.client()).collect();
    for _ in 0..10 {
        lab.client().echoes("");
    }
    // A peer that came before them would have been accepted before them.
    assert_eq!(lab.stats().counters.accepted, 10);
    silent.iter_mut().for_each(|client| client.echoes(""));
    assert_eq!(lab.stats().counters.accepted, 15);
    drop(silent);
    lab.finish();
}

#[test]
fn silent_connection_is_accepted_after_the_deferral() {
    let lab = lab_with(SocketOptions::default().defer_accept(Duration::from_secs(1)));
    let mut silent = lab.client();
    eventually("it is accepted", SOON, || lab.stats().counters.accepted == 1);
    silent.echoes("");
    drop(silent);
    lab.finish();
}

#[test]
fn a_shard_takes_the_connections_of_its_cpu() {
    let all = sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).take(2).collect();
    if cpus.len() < 2 {
        return eprintln!("not tested: there is one CPU");
    }
    let sockets = SocketOptions::default().incoming_cpu(true);
    let server = On::default().server(no_time_limits()).shards(2).pin(true).sockets(sockets);
    let lab = Lab::of(server.framing(LengthPrefix::default()));
    assert_eq!(warnings(&lab), [""; 0]);
    let addr = lab.addr();
    // The packets of loopback are handled on the CPU that sends them.
    let shards_of = |cpu: usize, count: usize| -> Vec<String> {
        let ask = move || {
            let mut set = CpuSet::new();
            set.set(cpu);
            sched_setaffinity(None, &set).unwrap();
            (0..count).map(|_| Client::connect(addr).ask_text(order::shard())).collect()
        };
        thread::spawn(ask).join().unwrap()
    };
    assert_eq!(shards_of(cpus[1], 30), ["1"; 30]);
    assert_eq!(lab.stats().skew(), Some(2.0), "one of two shards has all");
    assert_eq!(shards_of(cpus[0], 30), ["0"; 30]);
    assert_eq!(lab.stats().skew(), Some(1.0));
    lab.finish();
}

#[test]
fn steering_without_pinned_shards_is_warned_of() {
    let lab = lab_with(SocketOptions::default().incoming_cpu(true));
    assert_eq!(
        warnings(&lab),
        ["incoming_cpu has no effect: the shards are not pinned to CPUs (Server::pin)"]
    );
    lab.client().echoes("");
    lab.finish();
}

/// The child, in a separate network: changes the kernel's settings there, and checks the effect on
/// options.
#[test]
#[ignore = "the child process of another test here, which starts it; alone: RINGSERVE_TEST_CHILD=1 unshare -rn sh -c 'ip link set lo up; cargo test -p ringserve-tests --test accepting socket_options::child_changes_settings -- --exact --ignored --nocapture'"]
fn child_changes_settings() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let set = |file: &str, value: &str| fs::write(format!("/proc/sys/net/{file}"), value).unwrap();
    set("core/somaxconn", "8");
    set("ipv4/tcp_fastopen", "1");
    let sockets = SocketOptions::default().backlog(9).fast_open(7);
    let lab = lab_with(sockets.clone());
    let no_effect = "fast_open 7 has no effect: net.ipv4.tcp_fastopen is 1 and lacks the 2 that allows it for listeners; \
                     set it to 3";
    let cut = "listen backlog 9 was cut to 8 by net.core.somaxconn; raise that to have more";
    assert_eq!(warnings(&lab), [cut, no_effect]);
    assert_eq!((fast_opened(lab.addr()), fast_opened(lab.addr())), (false, false));
    lab.finish();

    set("ipv4/tcp_fastopen", "3");
    let lab = lab_with(sockets.backlog(8));
    assert_eq!(warnings(&lab), [""; 0]);
    assert!(!fast_opened(lab.addr()), "the first one is given a cookie");
    for _ in 0..10 {
        assert!(fast_opened(lab.addr()));
    }
    assert_eq!(lab.stats().counters.accepted, 11);
    lab.finish();

    let shared = || {
        let lab =
            Lab::of(On::default().server(no_time_limits()).share_port(true).framing(LengthPrefix::default()));
        let warnings = lab
            .running
            .socket_option_warnings()
            .iter()
            .filter(|warning| warning.name() == "share_port")
            .count();
        lab.finish();
        warnings
    };
    set("ipv4/tcp_migrate_req", "0");
    assert_eq!(shared(), 1, "tcp_migrate_req is named where it is off");
    set("ipv4/tcp_migrate_req", "1");
    assert_eq!(shared(), 0);
    println!("\nall is as it should be");
}

/// Sends a frame with the first packet, if the kernel can, and returns whether it did.
fn fast_opened(addr: SocketAddr) -> bool {
    /// From `linux/socket.h`.
    const MSG_FASTOPEN: i32 = 0x2000_0000;
    let before = tcp_counter("TCPFastOpenPassive");
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None).unwrap();
    let frame = ringserve_tests::client::frame(order::echo("first"));
    assert_eq!(socket.send_to_with_flags(&frame, &addr.into(), MSG_FASTOPEN).unwrap(), frame.len());
    assert_eq!(Client::of(socket).recv(), order::echo("first"));
    tcp_counter("TCPFastOpenPassive") > before
}

#[test]
fn kernel_settings_that_cut_or_forbid_an_option_are_named() {
    let Some(mut process) = Process::start_in_own_network(child_changes_settings) else {
        return eprintln!("not tested: there can be no network namespace");
    };
    // The line is in the log before the program looks.
    let line = process.line_after("WARN");
    assert!(
        line.ends_with("listen backlog 9 was cut to 8 by net.core.somaxconn; raise that to have more"),
        "{line}"
    );
    let line = process.line_after("WARN");
    assert!(
        line.contains("fast_open 7 has no effect: net.ipv4.tcp_fastopen is 1 and lacks the 2 that allows it"),
        "{line}"
    );
    process.line_after("all is as it should be");
    eventually("the process ends", SOON, || process.child.try_wait().unwrap().is_some());
}
