//! Several listeners of all kinds on one server, and the listener that their connections report.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use ringserve::framing::{LengthPrefix, Lines};
use ringserve::net::Address;
use ringserve::{Cx, Error, Frame, Peer, Server, Service};
use ringserve_tests::Bounded;
use ringserve_tests::{Client, Lab, On, Puppet, SOON, eventually, no_time_limits, order};
use rustix::process::{Pid, Signal, kill_process};

fn socket_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("ringserve-{}-{name}", std::process::id()))
}

/// Replies with the listener of its connection.
struct Numbers;

impl Service for Numbers {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Self::Error> {
        let peer = cx.peer();
        cx.reply(format!("{} {peer}", peer.listener()).as_bytes());
        Ok(())
    }
}

#[test]
fn listeners_of_all_kinds_serve_at_once_and_peers_know_which() {
    let (one, two) = (socket_path("one"), format!("@ringserve-{}-two", std::process::id()));
    let admitted = Arc::new(Mutex::new(Vec::<Peer>::new()));
    let for_shards = admitted.clone();
    let server = Server::bind_unix(&one).listen("127.0.0.1:0").listen_unix(&two).listen("[::1]:0");
    let server = server.shards(2).bounded(no_time_limits()).framing(Lines::default());
    let running = server
        .admit(move |peer| {
            for_shards.lock().unwrap().push(*peer);
            true
        })
        .start(|_| Numbers)
        .unwrap();
    let (v4, v6) = match running.listeners() {
        [Address::Unix(first), Address::Ip(v4), Address::Unix(third), Address::Ip(v6)] => {
            assert!(
                **first == *one.as_os_str().as_bytes()
                    && third[1..] == two.as_bytes()[1..]
                    && v4.is_ipv4()
                    && v6.is_ipv6()
            );
            (*v4, *v6)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(running.local_addrs(), [v4, v6]);
    let queues: Vec<usize> = running.accept_queues().iter().map(|queue| queue.listener).collect();
    assert_eq!(queues, [1, 1, 3, 3], "those of TCP, of two shards");
    let ask = |mut client: Client| {
        let mut line = String::new();
        client.write(b"which\n");
        BufReader::new(&mut client.stream).read_line(&mut line).unwrap();
        line
    };
    let abstract_two = || {
        use std::os::linux::net::SocketAddrExt;
        let addr = std::os::unix::net::SocketAddr::from_abstract_name(&two[1..]).unwrap();
        Client::of(UnixStream::connect_addr(&addr).unwrap())
    };
    for _ in 0..20 {
        assert_eq!(ask(Client::connect_unix(&one)), "0 unknown\n");
        let client = Client::connect(v4);
        let addr = client.local_addr();
        assert_eq!(ask(client), format!("1 {addr}\n"));
        assert_eq!(ask(abstract_two()), "2 unknown\n");
        let client = Client::connect(v6);
        let addr = client.local_addr();
        assert_eq!(ask(client), format!("3 {addr}\n"));
    }
    let mut seen = [0; 4];
    admitted.lock().unwrap().iter().for_each(|peer| seen[peer.listener()] += 1);
    assert_eq!(seen, [20; 4]);
    ringserve_tests::finish(running);
    assert!(!one.exists());
}

/// A port that is free for both families.
fn free_port() -> u16 {
    TcpListener::bind("[::]:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn wildcard_of_ipv6_takes_both_families_unless_beside_ipv4() {
    let port = free_port();
    let v4: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
    let v6: SocketAddr = (Ipv6Addr::LOCALHOST, port).into();
    let start = |addrs: &[&str]| {
        let at = |addr: &&str| format!("{addr}:{port}");
        let server =
            Server::bind(at(&addrs[0])).shards(2).bounded(no_time_limits()).framing(Lines::default());
        addrs[1..].iter().fold(server, |server, addr| server.listen(at(addr))).start(|_| Numbers).unwrap()
    };
    let ask = |addr| {
        let mut client = Client::connect(addr);
        let (mut line, own) = (String::new(), client.local_addr());
        client.write(b"which\n");
        BufReader::new(&mut client.stream).read_line(&mut line).unwrap();
        (line.trim().to_owned(), own.port())
    };
    for (addrs, of_v4, of_v6) in [
        (&["[::]"][..], "0 127.0.0.1", "0 [::1]"),
        (&["0.0.0.0", "[::]"], "0 127.0.0.1", "1 [::1]"),
        (&["[::]", "0.0.0.0"], "1 127.0.0.1", "0 [::1]"),
        (&["[::]", "127.0.0.1"], "1 127.0.0.1", "0 [::1]"),
        (&["0.0.0.0", "127.0.0.1", "[::]", "[::1]"], "1 127.0.0.1", "3 [::1]"),
    ] {
        let running = start(addrs);
        // Every shard of every listener.
        for _ in 0..20 {
            let (told, port) = ask(v4);
            assert_eq!(told, format!("{of_v4}:{port}"), "{addrs:?}");
            let (told, port) = ask(v6);
            assert_eq!(told, format!("{of_v6}:{port}"), "{addrs:?}");
        }
        ringserve_tests::finish(running);
    }
}

#[test]
fn one_listener_that_cannot_be_had_leaves_nothing_behind() {
    let path = socket_path("nothing");
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = || On::default().server(no_time_limits()).listen_unix(&path);
    let error =
        server().listen(other.local_addr().unwrap()).start(|_| Puppet::new(Default::default())).unwrap_err();
    assert!(matches!(error, Error::AddressInUse { addr: Address::Ip(_), .. }), "{error}");
    assert!(!path.exists());
    let error =
        server().listen_unix("/nowhere/at/all").start(|_| Puppet::new(Default::default())).unwrap_err();
    assert!(matches!(error, Error::Listen { addr: Address::Unix(_), .. }), "{error}");
    assert!(!path.exists());
    let error = server().listen_unix(&path).start(|_| Puppet::new(Default::default())).unwrap_err();
    let text = format!("the address to listen on cannot be used: unix:{} is given twice", path.display());
    assert_eq!(error.to_string(), text);
    let error =
        server().listen("no such host.invalid:1").start(|_| Puppet::new(Default::default())).unwrap_err();
    assert!(matches!(error, Error::Address(_)));
}

#[test]
fn full_server_takes_from_all_listeners_once_there_is_room() {
    let path = socket_path("full");
    let limits = no_time_limits().connections_max(4);
    let server = On::default().server(limits).shards(2).listen_unix(&path);
    let lab = Lab::of(server.framing(LengthPrefix::default()));
    for _ in 0..20 {
        let mut clients: Vec<Client> =
            (0..2).flat_map(|_| [lab.client(), Client::connect_unix(&path)]).collect();
        clients.iter_mut().for_each(|client| client.echoes(""));
        let mut waits = [lab.client(), Client::connect_unix(&path)];
        waits.iter_mut().for_each(|client| client.send(order::echo("")));
        clients.iter_mut().for_each(|client| client.echoes(""));
        assert!(waits.iter().all(Client::is_silent));
        drop(clients);
        waits.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("")));
        drop(waits);
        lab.holds(0);
    }
    lab.finish();
}

/// Does not outlive its test.
struct Example(Child);

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_echo_example_serves_ports_and_a_unix_socket() {
    let path = socket_path("example");
    let child = Command::new(ringserve_tests::examples::build("echo"))
        .args(["--listen", "127.0.0.1:0", "--listen", "[::1]:0", "--shards", "2"])
        .args(["--unix-mode", "600", "--unix"])
        .arg(&path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut example = Example(child);
    let child = &mut example.0;
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut next = || {
        let line = lines.find(|line| line.contains("listening on ")).expect("it says where it listens");
        let (_, rest) = line.split_once("listening on ").unwrap();
        rest.split(' ').next().unwrap().to_owned()
    };
    let addrs: [SocketAddr; 2] = [next(), next()].map(|addr| addr.parse().unwrap());
    assert_eq!(next(), format!("unix:{}", path.display()));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // It must not block on its log.
    let log = thread::spawn(move || lines.last());
    let echo = |mut stream: ringserve_tests::net::ClientStream| {
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.write_all(b"hello\n").unwrap();
        let mut bytes = [0; 6];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello\n");
    };
    addrs
        .iter()
        .for_each(|addr| echo(ringserve_tests::net::ClientStream::Tcp(TcpStream::connect(addr).unwrap())));
    echo(UnixStream::connect(&path).unwrap().into());
    kill_process(Pid::from_child(child), Signal::TERM).unwrap();
    let mut status = None;
    eventually("it ends", SOON, || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success());
    assert!(!path.exists());
    let last = log.join().unwrap().unwrap();
    assert!(last.contains("stopped after 3 connections") && last.ends_with(" times the mean"), "{last}");
}
