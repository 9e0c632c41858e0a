//! Unix sockets: the file and its owner, and all behaviour that they share with TCP.

use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use ringserve::framing::LengthPrefix;
use ringserve::net::{Address, SocketOptions};
use ringserve::{CloseReason, Error, Server, ServerHandle};
use ringserve_tests::Bounded;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::End;
use ringserve_tests::{Client, Lab, On, Puppet, no_time_limits, on_epoll, order, pattern};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

/// A directory of this test alone, which is removed with it.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("ringserve-{}-{name}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Dir(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The names of the files in it.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn server_at(path: impl Into<PathBuf>) -> Server<LengthPrefix> {
    let server = Server::bind_unix(path).shards(1).pin(false).bounded(no_time_limits());
    server.framing(LengthPrefix::default())
}

fn start(path: impl Into<PathBuf>) -> Result<ServerHandle, Error> {
    server_at(path).start(|_| Puppet::new(Default::default()))
}

#[track_caller]
fn refused(path: impl Into<PathBuf>) -> String {
    start(path).expect_err("it does not start").to_string()
}

#[test]
fn all_shards_accept_from_one_unix_socket() {
    let dir = Dir::new("shards");
    let lab = Lab::of(server_at(dir.path("s")).shards(4));
    assert_eq!(lab.running.listeners(), [Address::unix(dir.path("s").into_os_string().into_vec())]);
    assert!(lab.running.local_addrs().is_empty() && lab.accept_queues().is_empty());
    let mut clients = Vec::new();
    for _ in 0..100 {
        let mut client = Client::connect_unix(dir.path("s"));
        client.echoes("");
        clients.push(client);
    }
    let payload = order::echo(pattern(200_000));
    clients.iter_mut().for_each(|client| client.gets_back(order::thread_wakes("")));
    clients.iter_mut().for_each(|client| assert!(client.ask(&payload) == payload));
    let report = lab.stats();
    let accepted: Vec<u64> = report.shards.iter().map(|shard| shard.counters.accepted).collect();
    assert_eq!((report.connections, accepted.iter().sum()), (100, 100));
    // The peer that waits longest is next. With epoll all are woken, and the first one takes it.
    assert!(on_epoll() || report.skew().unwrap() < 1.5, "{accepted:?}");
    assert!(lab.shared.peers.lock().unwrap().iter().all(Option::is_none));
    drop(clients);
    lab.finish();
}

#[test]
fn a_burst_of_connections_is_spread_over_the_shards() {
    let dir = Dir::new("burst");
    let lab = Lab::of(server_at(dir.path("s")).shards(4));
    for _ in 0..5 {
        let mut clients: Vec<Client> = (0..200).map(|_| Client::connect_unix(dir.path("s"))).collect();
        clients.iter_mut().for_each(|client| client.send(order::echo("")));
        clients.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("")));
        let held: Vec<usize> = lab.stats().shards.iter().map(|shard| shard.connections).collect();
        assert!(held.iter().all(|count| (20..=80).contains(count)), "{held:?}");
        drop(clients);
        lab.holds(0);
    }
    let counters = lab.finish().counters;
    assert_eq!((counters.accepted, counters.opened, counters.refused), (1000, 1000, 0));
}

#[test]
fn the_file_of_a_server_that_is_gone_is_replaced() {
    let dir = Dir::new("stale");
    drop(UnixListener::bind(dir.path("s")).unwrap());
    assert!(UnixStream::connect(dir.path("s")).is_err(), "no server listens there");
    let lab = Lab::of(server_at(dir.path("s")));
    Client::connect_unix(dir.path("s")).echoes("");
    lab.finish();
    assert!(dir.names().is_empty(), "{:?}", dir.names());
}

/// The child: serves at the path in its input, until it is killed.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo /tmp/s | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test accepting unix_sockets::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let mut lines = std::io::stdin().lines();
    let path = lines.next().unwrap().unwrap();
    let _running = start(path).unwrap();
    println!("\nserves");
    lines.next();
}

#[test]
fn a_killed_server_leaves_a_file_that_the_next_one_replaces() {
    let dir = Dir::new("killed");
    let mut process = Process::start(child_serves);
    process.say(dir.path("s").to_str().unwrap());
    process.line_after("serves");
    Client::connect_unix(dir.path("s")).echoes("");
    let text = refused(dir.path("s"));
    let holder = format!("is in use by process {} (accepting", process.child.id());
    assert!(text.contains(&holder[..holder.len() - 5]), "{text}");
    drop(process);
    assert_eq!(dir.names(), ["s"]);
    let lab = Lab::of(server_at(dir.path("s")));
    Client::connect_unix(dir.path("s")).echoes("");
    lab.finish();
}

#[test]
fn path_of_a_listening_server_is_refused_with_its_holder() {
    let dir = Dir::new("in-use");
    let lab = Lab::of(server_at(dir.path("s")));
    let error = start(dir.path("s")).unwrap_err();
    assert!(
        matches!(&error, Error::AddressInUse { addr, .. } if addr.as_unix() == Some(dir.path("s").as_os_str().as_bytes()))
    );
    let text = error.to_string();
    assert!(text.contains(&format!("is in use by process {}", std::process::id())), "{text}");
    assert!(text.ends_with("stop that, or choose another path; one cannot be shared"), "{text}");
    assert!(server_at(dir.path("s")).share_port(true).start(|_| Puppet::new(Default::default())).is_err());
    Client::connect_unix(dir.path("s")).echoes("");
    lab.finish();
}

#[test]
fn file_in_use_by_any_listener_is_kept() {
    let dir = Dir::new("kept");
    let busy = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    busy.bind(&socket2::SockAddr::unix(dir.path("busy")).unwrap()).unwrap();
    busy.listen(0).unwrap();
    let _fills_it = UnixStream::connect(dir.path("busy")).unwrap();
    assert!(refused(dir.path("busy")).contains("is in use"));
    let _datagrams = UnixDatagram::bind(dir.path("datagrams")).unwrap();
    assert!(refused(dir.path("datagrams")).contains("is in use"));
    assert_eq!(dir.names().len(), 2);
}

#[test]
fn file_that_is_no_socket_is_left_alone() {
    let dir = Dir::new("no-socket");
    fs::write(dir.path("file"), "precious").unwrap();
    fs::create_dir(dir.path("dir")).unwrap();
    drop(UnixListener::bind(dir.path("stale")).unwrap());
    symlink(dir.path("stale"), dir.path("link")).unwrap();
    symlink(dir.path("nowhere"), dir.path("broken")).unwrap();
    for name in ["file", "dir", "link", "broken"] {
        let text = refused(dir.path(name));
        assert!(text.ends_with("a file that is no socket is there already; it is left alone"), "{text}");
    }
    assert_eq!(fs::read(dir.path("file")).unwrap(), b"precious");
    assert_eq!(dir.names().len(), 5);
}

#[test]
fn file_goes_with_its_server_and_never_before() {
    let dir = Dir::new("removal");
    let lab = Lab::of(server_at(dir.path("s")));
    let mut client = Client::connect_unix(dir.path("s"));
    client.echoes("");
    assert!(fs::symlink_metadata(dir.path("s")).unwrap().file_type().is_socket());
    drop(client);
    lab.abort();
    assert!(dir.names().is_empty());

    let lab = Lab::of(server_at(dir.path("s")));
    fs::remove_file(dir.path("s")).unwrap();
    let other = UnixListener::bind(dir.path("s")).unwrap();
    lab.finish();
    assert_eq!(dir.names(), ["s"]);
    let _client = UnixStream::connect(dir.path("s")).unwrap();
    other.accept().unwrap();

    let failed = server_at(dir.path("t")).start(|_| Err::<Puppet, _>("planted: no service"));
    assert!(failed.is_err());
    assert_eq!(dir.names(), ["s"], "nothing is left of a server that does not start");
}

#[test]
fn file_has_the_permissions_asked_for_under_any_umask() {
    let dir = Dir::new("mode");
    for mode in [0o600, 0o666, 0o777, 0o000] {
        let sockets = SocketOptions::default().unix_mode(mode);
        let running =
            server_at(dir.path("s")).sockets(sockets).start(|_| Puppet::new(Default::default())).unwrap();
        let given = fs::symlink_metadata(dir.path("s")).unwrap().mode() & 0o7777;
        assert_eq!(given, mode, "{given:o}");
        assert_eq!(running.socket_option_warnings(), []);
    }
    let sockets = SocketOptions::default().unix_mode(0o10000);
    let error =
        server_at(dir.path("s")).sockets(sockets).start(|_| Puppet::new(Default::default())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "socket options: SocketOptions::unix_mode is 0o10000; it must be 0 to 0o777"
    );
}

#[test]
fn a_path_that_cannot_be_had_is_named_with_the_cause() {
    let dir = Dir::new("errors");
    let long = dir.path(&"x".repeat(120));
    let text = refused(&long);
    let len = long.as_os_str().len();
    let why = format!(
        "the path has {len} bytes and a Unix socket's has 107 at most; a relative path may be shorter"
    );
    assert_eq!(text, format!("cannot listen on unix:{}: {why}", long.display()));
    // The longest one.
    let longest = dir.path(&"x".repeat(106 - dir.0.as_os_str().len()));
    assert_eq!(longest.as_os_str().len(), 107);
    drop(start(&longest).unwrap());

    assert!(refused("").ends_with("cannot listen on unix:: the path is empty"));
    assert!(refused("a\0b").ends_with("the path has a zero byte in it"));
    let text = refused(dir.path("none/s"));
    let why = format!(
        "No such file or directory (os error 2): there is no directory {}",
        dir.path("none").display()
    );
    assert!(text.ends_with(&why), "{text}");
    fs::write(dir.path("file"), "").unwrap();
    let text = refused(dir.path("file/s"));
    assert!(text.ends_with(&format!("{} is no directory", dir.path("file").display())), "{text}");

    let closed = dir.path("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    let path = closed.join("s");
    let text = thread::spawn(move || {
        // Root may write anywhere; any other user stays that user.
        let unprivileged = Uid::from_raw(65_534);
        let _ = set_thread_res_uid(unprivileged, unprivileged, unprivileged);
        refused(&path)
    });
    let text = text.join().unwrap();
    assert!(text.contains("Permission denied (os error 13): user ") && !text.contains("CAP_NET"), "{text}");
}

#[test]
fn an_abstract_name_needs_no_file() {
    let name = format!("@ringserve-{}", std::process::id());
    let lab = Lab::of(server_at(&name));
    assert_eq!(lab.running.listeners()[0].to_string(), format!("unix:{name}"));
    let connect = || {
        use std::os::linux::net::SocketAddrExt;
        let addr = std::os::unix::net::SocketAddr::from_abstract_name(&name[1..]).unwrap();
        UnixStream::connect_addr(&addr)
    };
    Client::of(connect().unwrap()).echoes("");
    let text = refused(&name);
    assert!(text.contains(&format!("unix:{name} is in use by process {}", std::process::id())), "{text}");
    lab.finish();
    assert!(connect().is_err());
    assert!(refused("@").ends_with("the name is empty"));
    assert!(
        refused(format!("@{}", "x".repeat(108)))
            .ends_with("the name has 108 bytes and a Unix socket's has 107 at most")
    );
    assert!(!Path::new(&name).exists());
}

#[test]
fn limits_drain_and_ends_are_those_of_tcp() {
    let dir = Dir::new("limits");
    let lab =
        Lab::of(server_at(dir.path("s")).bounded(no_time_limits().idle_timeout(Duration::from_millis(300))));
    let connect = || Client::connect_unix(dir.path("s"));
    let mut silent = connect();
    silent.echoes("");
    assert_eq!(silent.end(), End::Fin);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    lab.finish();

    let lab = Lab::of(server_at(dir.path("s")));
    let mut aborts = connect();
    aborts.send(order::abort());
    aborts.end();
    lab.closed_for(CloseReason::Aborted, 1);
    // The half close of a peer that waits for its replies.
    let mut half = connect();
    half.send(order::reply(300_000));
    half.finish_writing();
    assert_eq!(half.recv().len(), 300_000);
    assert_eq!(half.end(), End::Fin);
    let mut slow = connect();
    slow.send(order::reply(3_000_000));
    let mut waits = connect();
    waits.send(order::gate("waits"));
    lab.parked(1);
    lab.running.shutdown();
    lab.shared.gate.open();
    assert_eq!(waits.recv(), order::gate("waits"));
    assert_eq!(waits.end(), End::Fin);
    assert_eq!(slow.recv().len(), 3_000_000);
    drop((aborts, half, slow, waits));
    let report = lab.ended();
    assert_eq!(report.counters.closed_for(CloseReason::Shutdown), 2);
}

#[test]
fn a_shard_that_waits_for_connections_does_nothing() {
    let dir = Dir::new("idle");
    let lab = Lab::of(server_at(dir.path("s")).shards(3));
    let mut client = Client::connect_unix(dir.path("s"));
    let turns = || lab.stats().shards.iter().map(|shard| shard.driver.turns).sum::<u64>();
    let before = turns();
    client.gets_back(order::sleep(500));
    let turns = turns() - before;
    assert!(turns < 40, "{turns} turns");
    drop(client);
    lab.finish();
}

#[test]
fn a_full_shard_passes_what_came_by_a_unix_socket_on() {
    let dir = Dir::new("passed-on");
    // Each shard's own table holds four with io_uring; with epoll each could hold them all.
    let limits = no_time_limits().connections_max(16);
    let server = On::default().server(limits).shards(16).listen_unix(dir.path("s"));
    let lab = Lab::of(server.framing(LengthPrefix::default()));
    let mut first = lab.client();
    let full = first.ask_text(order::shard());
    let mut clients = vec![first];
    for _ in 0..10_000 {
        if clients.len() == 4 {
            break;
        }
        let mut client = lab.client();
        if client.ask_text(order::shard()) == full {
            clients.push(client);
        }
    }
    assert_eq!(clients.len(), 4, "the kernel leaves out a shard");
    let payload = order::echo(pattern(50_000));
    let handed_off = || lab.stats().counters.handed_off;
    let before = handed_off();
    for n in 0..1_000 {
        let mut client = Client::connect_unix(dir.path("s"));
        let shard = client.ask_text(order::shard());
        assert!(shard != full || on_epoll(), "there are four already");
        assert!(client.ask(&payload) == payload);
        if handed_off() >= before + 3 || on_epoll() && n > 100 {
            break;
        }
    }
    assert!(on_epoll() || handed_off() >= before + 3, "{:?}", lab.stats().counters);
    clients.iter_mut().for_each(|client| assert_eq!(client.ask_text(order::shard()), full));
    drop(clients);
    lab.finish();
}

#[test]
fn of_two_that_start_at_once_over_a_stale_file_one_serves() {
    let dir = Dir::new("race");
    let race = |path: PathBuf| {
        drop(UnixListener::bind(&path).unwrap());
        let both = Barrier::new(2);
        let started: Vec<Result<ServerHandle, Error>> = thread::scope(|scope| {
            let begin = || {
                both.wait();
                start(&path)
            };
            [scope.spawn(begin), scope.spawn(begin)].map(|thread| thread.join().unwrap()).into()
        });
        let (served, refused): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
        assert_eq!(served.len(), 1);
        let text = refused[0].as_ref().err().unwrap().to_string();
        assert!(text.contains("is in use by process"), "{text}");
        Client::connect_unix(&path).echoes("");
        drop(served);
        assert!(!path.exists());
    };
    thread::scope(|scope| {
        for n in 0..30 {
            let path = dir.path(&format!("s{n}"));
            scope.spawn(move || race(path));
        }
    });
}
