//! Examples where this host lacks something: an output, IPv6.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::{io, thread};

use rustix::pipe::pipe;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use ringserve_tests::examples::build;
use ringserve_tests::{SOON, eventually};

/// An address that was free a moment ago.
fn free() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Waits until it takes a connection.
    #[track_caller]
    fn takes(mut self, addr: SocketAddr, what: &str) {
        let mut ended = None;
        eventually(&format!("{what} listens"), SOON, || {
            ended = self.0.try_wait().unwrap();
            ended.is_some() || TcpStream::connect(addr).is_ok()
        });
        assert_eq!(ended, None, "{what} ended");
    }
}

/// All that serve, with the options that each of them needs, and those whose port is another one
/// than their first.
const SERVERS: &[(&str, &[&str])] = &[
    ("admin", &["--admin"]),
    ("balancer", &["--upstream", "127.0.0.1:9", "--status"]),
    ("behind_a_proxy", &["--trust", "127.0.0.0/8", "--proxies"]),
    ("cache", &["--upstream", "127.0.0.1:9"]),
    ("chat", &["--http"]),
    ("custom_framing", &[]),
    ("echo", &[]),
    ("graceful_shutdown", &[]),
    ("guarded", &[]),
    ("http", &[]),
    ("https", &[]),
    ("kv", &[]),
    ("middleware", &[]),
    ("mqtt", &[]),
    ("nats", &["--nats", "127.0.0.1:9"]),
    ("opentelemetry", &["--collector", "http://127.0.0.1:9/"]),
    ("proxy", &["--upstream", "127.0.0.1:9"]),
    ("push", &["--api-key", "k", "--anonymous", "--http"]),
    ("rpc", &["--user", "ann:secret"]),
    ("smtp", &["--spool", "/tmp/ringserve-smtp-of-no-output"]),
    ("tls_echo", &[]),
    ("tokio_inside", &[]),
    ("wss_chat", &["--websocket"]),
];

/// The command of a server, and where it will listen. A last option that wants an address has
/// another one.
fn command(name: &str, options: &[&str]) -> (Command, SocketAddr) {
    let (addr, other) = (free(), free().to_string());
    let mut command = Command::new(build(name));
    command.args(["--listen", &addr.to_string()]).args(options);
    let takes_address = ["--admin", "--status", "--proxies", "--http", "--websocket"];
    if options.last().is_some_and(|last| takes_address.contains(last)) {
        command.arg(other);
    }
    (command, addr)
}

#[test]
fn each_server_starts_whose_output_nothing_reads() {
    for (name, options) in SERVERS {
        let (mut served, addr) = command(name, options);
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        served.stdout(Stdio::from(writer.try_clone().unwrap())).stderr(Stdio::from(writer));
        Running(served.spawn().unwrap()).takes(addr, name);
    }
}

#[test]
fn each_server_starts_whose_output_is_closed() {
    for (name, options) in SERVERS {
        let (served, addr) = command(name, options);
        // No descriptor 1 and none 2: the next ones that are opened would be those.
        let mut closed = Command::new("sh");
        closed.args(["-c", "exec \"$0\" \"$@\" >&- 2>&-"]).arg(served.get_program()).args(served.get_args());
        Running(closed.spawn().unwrap()).takes(addr, name);
    }
}

/// The examples that the repository has.
#[test]
fn all_examples_that_serve_are_in_the_list() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let main = if entry.path().is_dir() { entry.path().join("src/main.rs") } else { entry.path() };
        let text = if main.extension().is_some_and(|is| is == "rs") {
            std::fs::read_to_string(main)
        } else {
            continue;
        };
        let name = entry.path().file_stem().unwrap().to_string_lossy().into_owned();
        found.insert(name, text.is_ok_and(|text| text.contains(".serve(")));
    }
    found.retain(|name, serves| *serves != SERVERS.iter().any(|(known, _)| known == name));
    assert!(found.is_empty(), "not as in the list: {found:?}");
}

/// Has sockets of IPv6 fail on the calling thread, and in the processes that it starts, as on a
/// host whose kernel has none.
fn without_ipv6() {
    let is_ipv6 = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, libc::AF_INET6 as u64);
    let rules = [(libc::SYS_socket, vec![SeccompRule::new(vec![is_ipv6.unwrap()]).unwrap()])];
    let refused = SeccompAction::Errno(libc::EAFNOSUPPORT as u32);
    let arch = std::env::consts::ARCH.try_into().expect("an architecture that seccomp knows");
    let filter = SeccompFilter::new(rules.into(), SeccompAction::Allow, refused, arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).expect("every thread may filter itself");
}

#[test]
fn guarded_serves_where_there_is_no_ipv6() {
    build("guarded");
    let served = thread::spawn(|| {
        without_ipv6();
        let error = TcpListener::bind("[::]:0").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EAFNOSUPPORT));
        let port = free().port();
        for driver in ["io_uring", "epoll"] {
            let listen = format!("[::]:{port}");
            let served =
                Command::new(build("guarded")).args(["--listen", &listen, "--driver", driver]).spawn();
            Running(served.unwrap()).takes((Ipv4Addr::LOCALHOST, port).into(), driver);
        }
        io::Result::Ok(())
    });
    served.join().unwrap().unwrap();
}
