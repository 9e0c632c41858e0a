//! Sockets that a service manager passes to a process: `LISTEN_FDS`, and one process after another
//! at one socket.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

use ringserve::Server;
use ringserve::framing::LengthPrefix;
use ringserve::listen::systemd;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::frame;
use ringserve_tests::{Client, EndOf, Puppet, SOON, eventually, no_time_limits, order};
use rustix::process::Signal;

/// The child: a puppet at the socket that is named `web`.
#[test]
#[ignore = "the child process of the other tests here, which start it with a socket; alone: systemd-socket-activate -l 7000 --fdname=web env RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes activation::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let handed = std::fs::read_link("/proc/self/fd/3").unwrap();
    assert!(systemd("nonesuch").is_none());
    let Some(web) = systemd("web") else {
        return println!("\nnone is named web");
    };
    assert!(systemd("web").is_none(), "it was taken");
    // Processes that this one starts do not inherit the sockets that were passed to it.
    let listed = Command::new("ls").args(["-l", "/proc/self/fd"]).output().unwrap();
    let inherits = String::from_utf8(listed.stdout).unwrap().contains(handed.to_str().unwrap());
    println!("\na child inherits it: {inherits}");
    let bounds = no_time_limits();
    let ended = Server::new()
        .limits(bounds.service)
        .server_limits(bounds.server)
        .shards(2)
        .service(web.framing(LengthPrefix::default()), |_| Puppet::new(Default::default()))
        .serve();
    println!("\nserve returned {ended:?}");
}

/// Starts the child like a service manager: with the socket as descriptor 3, and with these
/// variables. `$$` is replaced by the process ID of the child.
fn activate(listener: &TcpListener, variables: &str) -> Process {
    let script = format!("exec 3<&2 2>&1; {variables} exec \"$@\"");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, "sh"]).arg(std::env::current_exe().unwrap());
    shell.stderr(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())));
    Process::start_by(child_serves, &mut shell)
}

fn socket() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

const WEB: &str = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=web";

#[test]
fn a_process_serves_at_the_socket_it_was_handed() {
    let (listener, addr) = socket();
    // It comes before the process, like the connection for which a service manager starts the
    // service.
    let mut first = Client::connect(addr);
    first.send(order::echo("first"));
    let mut process = activate(&listener, WEB);
    assert_eq!(process.line_after("a child inherits it: "), "false");
    process.line_after(&format!("listening on {addr} (adopted) with 2 shards"));
    assert_eq!(first.recv(), order::echo("first"));
    process.signal(Signal::TERM);
    process.line_after("serve returned Ok");
    let _late = Client::connect(addr);
    listener.accept().unwrap();
}

#[test]
fn sockets_of_another_process_or_name_are_not_taken() {
    let (listener, _) = socket();
    for variables in [
        "LISTEN_PID=1 LISTEN_FDS=1 LISTEN_FDNAMES=web",
        "LISTEN_FDS=1 LISTEN_FDNAMES=web",
        "LISTEN_PID=$$ LISTEN_FDS=0 LISTEN_FDNAMES=web",
        "LISTEN_PID=$$ LISTEN_FDS=many LISTEN_FDNAMES=web",
        "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=admin",
        "LISTEN_PID=$$ LISTEN_FDS=1",
    ] {
        activate(&listener, variables).line_after("none is named web");
    }
}

#[test]
fn one_process_after_the_other_loses_no_connection() {
    let (listener, addr) = socket();
    let mut old = activate(&listener, WEB);
    old.line_after("listening on ");
    let (over, served, unanswered) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    let mut client = Client::connect(addr);
                    client.send(order::echo("x"));
                    match client.read_whole_or_fin(&mut frame(order::echo("y"))) {
                        Some(_) => served.fetch_add(1, SeqCst),
                        None => unanswered.fetch_add(1, SeqCst),
                    };
                }
            });
        }
        let _end = EndOf(&over);
        let served_more = || {
            let then = served.load(SeqCst) + 100;
            eventually("clients are served", SOON, || served.load(SeqCst) >= then);
        };
        for _ in 0..3 {
            served_more();
            let new = activate(&listener, WEB);
            old.signal(Signal::TERM);
            old.line_after("serve returned Ok");
            old = new;
            served_more();
        }
    });
    // A request that arrives more than 30 ms after its connection was accepted by a draining server
    // has no answer. Each shard accepts at most one then.
    assert!(unanswered.load(SeqCst) <= 3 * 2, "{unanswered:?} of {served:?}");
    old.signal(Signal::TERM);
    old.line_after("serve returned Ok");
}
