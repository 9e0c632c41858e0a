//! Errors of a start for a new user: the method, its value, the allowed values and the fix.

use std::convert::Infallible;
use std::fmt::Write;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use ringserve::admission::Admission;
use ringserve::framing::{Fixed, TypedFraming};
use ringserve::limits::ServerLimits;
use ringserve::listen::{ProxyProtocol, endpoints, tcp};
use ringserve::net::SocketOptions;
use ringserve::server::MultiService;
use ringserve::service::IntoService;
use ringserve::tls::{Pem, Tls};
use ringserve::websocket::{Message, Messages, WebSocket, WsCx, ws};
use ringserve::{Error, Limits, Server, Shard, Stream, stream};
use ringserve_tests::Puppet;

const ANY: &str = "127.0.0.1:0";

async fn nothing(_: Stream) {}

fn error<F: TypedFraming + Clone + Send>(server: Server<F>) -> String
where
    Puppet: IntoService<F>,
{
    of(server.shards(1).start(|_shard| Puppet::new(Default::default())).err())
}

/// The text of an error, which `Debug` prints too.
fn of(error: Option<Error>) -> String {
    let error = error.expect("the start fails");
    assert_eq!(format!("{error:?}"), error.to_string());
    error.to_string()
}

fn limits(limits: Limits) -> String {
    error(Server::bind(ANY).limits(limits))
}

fn server_limits(limits: ServerLimits) -> String {
    error(Server::bind(ANY).server_limits(limits))
}

fn several(server: Server<MultiService>) -> String {
    of(server.shards(1).start().err())
}

/// Fails with each text that differs.
#[track_caller]
fn compare(rows: &[(String, &str)]) {
    let mut wrong = String::new();
    for (text, expected) in rows.iter().filter(|(text, expected)| text != expected) {
        let _ = writeln!(wrong, "  says: {text}\nexpected: {expected}\n");
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn address_is_named_with_what_to_write() {
    let form = "write HOST:PORT, such as \"127.0.0.1:7000\" or \"[::1]:7000\", with port 0 for a free one";
    for (addr, why) in [
        ("127.0.0.1", "invalid socket address"),
        ("localhost", "invalid socket address"),
        ("", "invalid socket address"),
        ("127.0.0.1:http", "invalid port value"),
        ("[::1]:65536", "invalid port value"),
    ] {
        let expected =
            format!("the address to listen on cannot be used: {addr:?} is no address ({why}); {form}");
        compare(&[
            (error(Server::bind(addr)), &expected),
            (error(Server::bind(ANY).listen(addr)), &expected),
            (several(Server::new().service(tcp(addr), |_| stream(nothing))), &expected),
        ]);
    }
    let unknown = error(Server::bind(":7000"));
    let is_named = unknown
        .starts_with("the address to listen on cannot be used: \":7000\" is not found: failed to look");
    assert!(is_named && unknown.contains("0.0.0.0 or [::] for all"), "{unknown}");
    let unix = "the address to listen on cannot be used: \"unix:/run/app.sock\" is no address of TCP; a Unix socket is reached by \
        Server::bind_unix, Server::listen_unix or listen::unix";
    compare(&[(error(Server::bind("unix:/run/app.sock")), unix)]);
    let none = "the address to listen on cannot be used: [] has no address";
    let foreign = "cannot listen on 192.0.2.1:7000: Cannot assign requested address (os error 99); this machine has no such address: \
         0.0.0.0 and [::] stand for all that it has";
    compare(&[
        (error(Server::bind(&[] as &[SocketAddr])), none),
        (error(Server::bind("192.0.2.1:7000")), foreign),
    ]);
}

#[test]
fn limit_is_named_with_its_unit_and_what_is_allowed() {
    let (limits_of, of_server) = (Limits::default, ServerLimits::default);
    compare(&[
        (
            limits(limits_of().idle_timeout(Duration::ZERO)),
            "limits: Limits::idle_timeout is 0 s; it must be 17ms to 365 days, or None, which switches it off",
        ),
        (
            limits(limits_of().handler_timeout(Duration::from_micros(500))),
            "limits: Limits::handler_timeout is 500µs; it must be 17ms to 365 days, or None, which switches it off",
        ),
        (
            limits(limits_of().linger_timeout(Duration::ZERO)),
            "limits: Limits::linger_timeout is 0 s; it must be 17ms to 365 days",
        ),
        (
            limits(limits_of().heartbeat_interval(Duration::from_secs(601))),
            "limits: Limits::heartbeat_interval is 601s and Limits::idle_timeout is 600s; Limits::heartbeat_interval must not be \
             longer: lower it, or raise Limits::idle_timeout",
        ),
        (
            limits(limits_of().frame_bytes_max(0)),
            "limits: Limits::frame_bytes_max is 0; it must be 1 to 1073741824",
        ),
        (
            limits(limits_of().outbox_bytes_low(1 << 20)),
            "limits: Limits::outbox_bytes_low is 1048576 and Limits::outbox_bytes_high is 262144; Limits::outbox_bytes_low must \
             not be larger: lower it, or raise Limits::outbox_bytes_high",
        ),
        (
            server_limits(of_server().connections_max(0)),
            "limits: ServerLimits::connections_max is 0; it must be 1 or more",
        ),
        (
            server_limits(of_server().drain_timeout(Duration::ZERO)),
            "limits: ServerLimits::drain_timeout is 0 s; it must be 17ms to 365 days",
        ),
        (
            server_limits(of_server().start_timeout(Duration::ZERO)),
            "limits: ServerLimits::start_timeout is 0 s; it must be 17ms to 365 days, or None, which switches it off",
        ),
        (
            server_limits(of_server().held_bytes_max(1000)),
            "limits: ServerLimits::held_bytes_max is 1000; it must be 16384 or more: it bounds the bytes of all unsent replies \
             and unfinished frames of a shard, of which one connection may hold half. For less, set Limits that fit in",
        ),
        (
            error(Server::bind(ANY).server_limits(of_server().held_bytes_max(1000)).limits(limits_of())),
            "limits: Limits::outbox_bytes_max is 67108864 and ServerLimits::held_bytes_max is 1000; Limits::outbox_bytes_max \
             must not be larger: lower it, or raise ServerLimits::held_bytes_max",
        ),
        (
            error(Server::bind(ANY).framing(Fixed::bytes(2 << 20))),
            "limits: Fixed::bytes is 2097152 and Limits::frame_bytes_max is 1048576; Fixed::bytes must not be larger: lower it, \
             or raise Limits::frame_bytes_max",
        ),
        (
            error(Server::bind(ANY).sockets(SocketOptions::default().backlog(0))),
            "socket options: SocketOptions::backlog is 0; it must be 1 to 2147483647",
        ),
        (
            error(Server::bind(ANY).sockets(SocketOptions::default().user_timeout(Duration::ZERO))),
            "socket options: SocketOptions::user_timeout is 0ns; it must be 1 ms to 24 days, or None, which is off",
        ),
    ]);
}

#[test]
fn setting_of_the_server_is_named() {
    let two = || tcp(ANY).name("web");
    let echo = |_: &Shard| stream(nothing);
    let taken = TcpListener::bind(ANY).unwrap();
    let addr = taken.local_addr().unwrap();
    let in_use = format!(
        "{addr} is in use by process {} (accepting): stop that, choose another address, or set share_port(true) on both to share it",
        std::process::id()
    );
    let said = error(Server::bind(addr));
    let same_but_for_the_name = said.split(" (").next() == in_use.split(" (").next();
    assert!(same_but_for_the_name && said.ends_with("set share_port(true) on both to share it"), "{said}");
    compare(&[
        (
            of(Server::bind(ANY).shards(0).start(echo).err()),
            "Server::shards is 0; it must be 1 to 1024, or None, which is the number of CPUs",
        ),
        (
            error(Server::bind(ANY).coalesce(Duration::from_secs(1))),
            "Server::coalesce is 1s; it must be 0, which is off, or 1 µs to 1 ms, by which requests are late",
        ),
        (
            error(Server::bind(ANY).trace_peer("10.0.0.0/33")),
            "Server::trace_peer: \"10.0.0.0/33\" is no network whose connections could be traced; write ADDRESS or ADDRESS/BITS",
        ),
        (several(Server::new()), "the services cannot be served: there is none: add one by Server::service"),
        (
            several(Server::new().service(two(), echo).service(two(), echo)),
            "the services cannot be served: two have the name web; give each another one by Endpoints::name",
        ),
        (
            several(Server::new().service(endpoints(Vec::new()).name("web"), echo)),
            "the services cannot be served: the service web has no endpoint; give it one, such as tcp(\"127.0.0.1:7000\")",
        ),
        (
            error(Server::bind(ANY).proxy_protocol(ProxyProtocol::default())),
            "the address to listen on cannot be used: no network is named whose PROXY headers are trusted at 127.0.0.1:0; name \
             those of the proxies, such as ProxyProtocol::from([\"10.0.0.0/8\"])",
        ),
        (
            error(Server::bind(ANY).admin("127.0.0.1")),
            "the admin endpoint cannot be started: \"127.0.0.1\" is no address (invalid socket address): give one as \
             127.0.0.1:9000 or unix:/run/admin.sock",
        ),
    ]);
}

#[test]
fn admission_and_tls_are_told_what_is_missing() {
    let admission = |admission: Admission| error(Server::bind(ANY).admission(admission));
    let no_file = Pem::file("/nonexistent/cert.pem").expect_err("there is none");
    assert_eq!(format!("{no_file:?}"), no_file.to_string());
    compare(&[
        (
            admission(Admission::default().per_address(0)),
            "admission: per_address is 0, which lets no peer in; set 1 at least, or leave it out",
        ),
        (
            admission(Admission::default().address_rate(0, 1)),
            "admission: the rate of address_rate is 0; it must be 1 to 1000000, or leave address_rate out",
        ),
        (
            admission(Admission::default().ipv6_prefix(56)),
            "admission: ipv6_prefix is set, and neither per_address nor address_rate is: set one of them, or leave ipv6_prefix out",
        ),
        (
            error(Server::bind(ANY).tls(Tls::server())),
            "TLS: there is no certificate: give one to `Tls::certificate`",
        ),
        (
            error(Server::bind(ANY).tls(Tls::server().record_bytes(1))),
            "TLS: Tls::record_bytes is 1; it must be 512 to 16384",
        ),
        (
            no_file.to_string(),
            "/nonexistent/cert.pem: cannot be read: No such file or directory (os error 2)",
        ),
    ]);
}

struct Loud;

impl WebSocket for Loud {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, _: &WsCx<'_, ()>, _: Message) -> Result<(), Infallible> {
        Ok(())
    }
}

#[test]
fn factory_is_told_by_what_it_said() {
    let panics = Server::bind(ANY).shards(1).start(|_| -> Puppet { panic!("planted: no table {}", 7) });
    let fails = Server::bind(ANY).shards(1).start(|_| Err::<Puppet, _>("no table"));
    let messages = Server::new().service(tcp(ANY).framing(Messages::text()), |_| ws(Loud));
    compare(&[
        (of(panics.err()), "the factory panicked for shard 0: planted: no table 7"),
        (of(fails.err()), "no service for shard 0: no table"),
        (
            several(messages),
            "the services cannot be served: the service at 127.0.0.1:0 takes messages of WebSocket, and its endpoint does not speak \
             it; add `.websocket()` to that",
        ),
    ]);
}
