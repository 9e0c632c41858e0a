//! Adopted listening sockets: who accepts from them, their options, and the conditions that they
//! must meet.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ringserve::framing::LengthPrefix;
use ringserve::listen::{Endpoint, IntoEndpoints, adopt, endpoints, systemd, tcp, unix};
use ringserve::net::{Address, SocketOptions};
use ringserve::server::MultiService;
use ringserve::{Error, Server, ServerHandle};
use ringserve_tests::watch::a_turn_passes;
use ringserve_tests::{
    Client, Logged, Puppet, SOON, Shared, alone, eventually, finish, no_time_limits, on_epoll, order,
};
use socket2::SockRef;
use tracing_subscriber::filter::LevelFilter;

fn server() -> Server<MultiService> {
    let bounds = no_time_limits();
    Server::new().shards(1).pin(false).limits(bounds.service).server_limits(bounds.server)
}

fn serves(
    server: Server<MultiService>,
    list: impl IntoEndpoints<Framing = ringserve::framing::Raw>,
) -> Server<MultiService> {
    let list = endpoints(list).framing(LengthPrefix::default());
    server.service(list, |_| Puppet::new(Arc::new(Shared::default())))
}

fn start(server: Server<MultiService>) -> ServerHandle {
    server.start().expect("the server starts")
}

#[track_caller]
fn refused(list: impl IntoEndpoints<Framing = ringserve::framing::Raw>) -> String {
    serves(server(), list).start().expect_err("it does not start").to_string()
}

fn any_port() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

/// A listener and its file, which is removed at the end.
struct Unix(UnixListener, PathBuf);

impl Unix {
    fn new(name: &str) -> Unix {
        let path = std::env::temp_dir().join(format!("ringserve-adopted-{}-{name}", std::process::id()));
        Unix(UnixListener::bind(&path).unwrap(), path)
    }

    fn address(&self) -> Address {
        Address::unix(self.1.to_str().unwrap())
    }
}

impl Drop for Unix {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.1);
    }
}

#[test]
fn adopted_sockets_stand_beside_other_endpoints() {
    let ((listener, addr), file) = (any_port(), Unix::new("beside"));
    let made = file.1.with_extension("made");
    let list = (
        adopt(listener.try_clone().unwrap()),
        tcp("127.0.0.1:0"),
        unix(&made),
        adopt(file.0.try_clone().unwrap()),
    );
    let running = start(serves(server(), list));
    let [first, _, third, fourth] = running.listeners() else { panic!("{:?}", running.listeners()) };
    assert_eq!((first, third), (&Address::from(addr), &Address::unix(made.to_str().unwrap())));
    assert_eq!((fourth, running.local_addrs()[0]), (&file.address(), addr));
    running.local_addrs().iter().for_each(|addr| Client::connect(*addr).echoes(""));
    [&made, &file.1].iter().for_each(|path| Client::connect_unix(path).echoes(""));
    let stats = running.stats_now();
    assert_eq!((&*stats.services[0].name, stats.services[0].counters.accepted), (&*addr.to_string(), 4));
    finish(running);
    assert!(!made.exists() && file.1.exists(), "the file of an adopted socket stays");
    // Both sockets listen as before.
    let _late = (Client::connect(addr), UnixStream::connect(&file.1).unwrap());
    listener.accept().unwrap();
    file.0.accept().unwrap();
}

#[test]
fn all_shards_accept_from_an_adopted_socket() {
    let ((listener, addr), file) = (any_port(), Unix::new("shards"));
    SockRef::from(&listener).listen(1024).unwrap();
    let list = (adopt(listener), adopt(file.0.try_clone().unwrap()));
    let running = start(serves(server().shards(4), list));
    // Every shard waits at the sockets.
    a_turn_passes(&running);
    for connect in [|addr, _: &_| Client::connect(addr), |_, path: &PathBuf| Client::connect_unix(path)] {
        let mut clients = Vec::new();
        for _ in 0..100 {
            let mut client: Client = connect(addr, &file.1);
            client.echoes("");
            clients.push(client);
        }
        clients.iter_mut().for_each(|client| client.gets_back(order::thread_wakes("")));
    }
    let report = running.stats_now();
    let accepted: Vec<u64> = report.shards.iter().map(|shard| shard.counters.accepted).collect();
    assert_eq!(accepted.iter().sum::<u64>(), 200);
    // The ring that waits longest is next. With epoll all are woken, and the first one takes it.
    assert!(on_epoll() || report.skew().unwrap() < 1.5, "{accepted:?}");
    finish(running);
}

#[test]
fn a_burst_at_an_adopted_socket_is_spread_over_the_shards() {
    let (listener, addr) = any_port();
    SockRef::from(&listener).listen(1024).unwrap();
    let running = start(serves(server().shards(4), adopt(listener)));
    a_turn_passes(&running);
    let mut clients: Vec<Client> = (0..200).map(|_| Client::connect(addr)).collect();
    clients.iter_mut().for_each(|client| client.send(order::echo("")));
    clients.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("")));
    let held: Vec<usize> = running.stats_now().shards.iter().map(|shard| shard.connections).collect();
    assert!(held.iter().all(|count| (20..=80).contains(count)), "{held:?}");
    drop(clients);
    finish(running);
}

#[test]
fn queue_of_an_adopted_socket_is_measured() {
    let (listener, addr) = any_port();
    let shared = Arc::new(Shared::default());
    let for_shards = shared.clone();
    let endpoint = adopt(listener).framing(LengthPrefix::default());
    let running = start(server().service(endpoint, move |_| Puppet::new(for_shards.clone())));
    let mut busy = Client::connect(addr);
    busy.send(order::block());
    eventually("the shard is blocked", SOON, || shared.block.came() == 1);
    let waits = [Client::connect(addr), Client::connect(addr)];
    let queues = running.accept_queues();
    assert_eq!((queues.len(), queues[0].shard, queues[0].waiting), (1, None, 2));
    shared.block.end();
    eventually("they are accepted", SOON, || running.accept_queues()[0].waiting == 0);
    drop((busy, waits));
    finish(running);
}

#[test]
fn what_cannot_be_adopted_is_refused_at_the_start() {
    let (listener, addr) = any_port();
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    let text = refused(adopt(datagrams));
    let end = "was adopted, but it is a socket of datagrams and not of a stream: adopt one of SOCK_STREAM";
    assert!(
        text.starts_with("the address to listen on cannot be used: descriptor ") && text.ends_with(end),
        "{text}"
    );
    let client = std::net::TcpStream::connect(addr).unwrap();
    let error = serves(server(), tcp("127.0.0.1:0"))
        .service(adopt(client).name("admin"), |_| Puppet::new(Default::default()));
    let text = error.start().expect_err("it does not start").to_string();
    assert!(
        text.starts_with("service admin: ") && text.contains("it does not listen: call listen(2)"),
        "{text}"
    );
    let two = || [&listener, &listener].map(|listener| adopt(listener.try_clone().unwrap()));
    assert!(refused(two()).ends_with(&format!("{addr} is given twice")), "{}", refused(two()));
    let [web, admin] = two();
    let both = serves(server(), tcp("127.0.0.1:0"))
        .service(web.name("web"), |_| Puppet::new(Default::default()))
        .service(admin.name("admin"), |_| Puppet::new(Default::default()));
    let text = both.start().expect_err("it does not start").to_string();
    assert!(text.ends_with(&format!("{addr} is given twice: to the service web and to admin")), "{text}");
    // The same address again is that of a socket in use.
    let text = refused((adopt(listener.try_clone().unwrap()), tcp(addr)));
    assert!(text.contains(&format!("{addr} is in use by process {}", std::process::id())), "{text}");
    assert!(systemd("web").is_none(), "this process was handed none");
}

#[test]
fn a_start_that_fails_leaves_an_adopted_socket_as_it_is() {
    let ((listener, addr), file) = (any_port(), Unix::new("fails"));
    let list = [adopt(listener.try_clone().unwrap()), adopt(file.0.try_clone().unwrap())];
    let failed = server()
        .shards(2)
        .service(list, |_| -> Result<Puppet, std::io::Error> { Err(std::io::Error::other("no service")) });
    assert!(matches!(failed.start(), Err(Error::Factory { .. })));
    let _client = (Client::connect(addr), UnixStream::connect(&file.1).unwrap());
    listener.accept().unwrap();
    file.0.accept().unwrap();
}

#[test]
fn inherited_options_are_set_on_an_adopted_socket() {
    let ((listener, addr), file) = (any_port(), Unix::new("options"));
    let options = SocketOptions::default()
        .backlog(7)
        .defer_accept(Duration::from_secs(3))
        .user_timeout(Duration::from_millis(200_777))
        .unix_mode(0o700);
    let list: [Endpoint; 2] = [adopt(listener.try_clone().unwrap()), adopt(file.0.try_clone().unwrap())];
    let running = start(serves(server().sockets(options), list));
    let socket = SockRef::from(&listener);
    assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
    assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_millis(200_777)));
    let warnings: Vec<String> = running.socket_option_warnings().iter().map(ToString::to_string).collect();
    let expected = [&Address::from(addr), &file.address()].map(|addr| {
        ["backlog", "defer_accept", "unix_mode"].map(|name| {
            format!("{name} has no effect on {addr}, which was adopted: set it where the socket is made")
        })
    });
    assert_eq!(warnings, expected.concat());
    Client::connect(addr).echoes("");
    finish(running);
}

#[test]
fn the_log_names_adopted_sockets() {
    if !alone(the_log_names_adopted_sockets) {
        return;
    }
    let (listener, addr) = any_port();
    let logged = Logged::from(LevelFilter::INFO);
    let running = start(serves(server(), (adopt(OwnedFd::from(listener)), tcp("127.0.0.1:0"))));
    let other = running.local_addrs()[1];
    let text = logged.text();
    for line in [
        format!("listening on {addr} (adopted) with 1 shards"),
        format!("listening on {other} with 1 shards"),
    ] {
        assert!(text.contains(&line), "{text}");
    }
    finish(running);
}
