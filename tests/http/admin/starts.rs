//! Starts of servers with an endpoint, and the endpoint's possible addresses.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;
use std::thread;

use ringserve::Server;
use ringserve::admin::Admin;
use ringserve::admin::report::Phase;
use ringserve::factory::from_future;
use ringserve::framing::LengthPrefix;
use ringserve::net::Address;
use ringserve_tests::{Client, On, Puppet, SOON, Shared, eventually, no_time_limits, watch};

use super::{Answer, endpoint, get, lab, refused};

#[test]
fn taken_port_is_an_error_of_the_start() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let error = refused(&*addr);
    assert!(error.contains(&format!("admin endpoint cannot be started: {addr} is in use")), "{error}");
    assert!(error.contains("choose another address") && !error.contains("share_port"), "{error}");
}

#[test]
fn places_that_would_not_be_safe_are_errors_of_the_start() {
    for (admin, words) in [
        (Admin::new("0.0.0.0:0"), "Admin::token"),
        (Admin::new("[::]:0"), "Admin::token"),
        (Admin::new("0.0.0.0:0").token("short"), "5 bytes"),
        (Admin::new("127.0.0.1:0").token("with a space in between"), "ASCII"),
        (Admin::new("127.0.0.1:0").read_token("short"), "5 bytes"),
        (
            Admin::new("127.0.0.1:0").token("correct-horse-battery").read_token("correct-horse-battery"),
            "are the same",
        ),
        (Admin::new("127.0.0.1:0").probes("nonsense"), "127.0.0.1:9000"),
        (Admin::new("nonsense"), "127.0.0.1:9000"),
        (Admin::new("/run/admin.sock"), "unix:/run/admin.sock"),
        (Admin::new("unix:/nowhere/at/all/admin.sock"), "/nowhere/at/all"),
    ] {
        let error = refused(admin);
        assert!(
            error.starts_with("the admin endpoint cannot be started: ") && error.contains(words),
            "{error}"
        );
    }
}

#[test]
fn server_that_does_not_start_leaves_no_endpoint() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let path = std::env::temp_dir().join(format!("ringserve-admin-{}-left", std::process::id()));
    let server =
        Server::bind(taken.local_addr().unwrap()).shards(1).admin(format!("unix:{}", path.display()));
    let started = server.framing(LengthPrefix::default()).start(|_shard| Puppet::new(Default::default()));
    assert!(started.is_err());
    assert!(!path.exists(), "its file is gone");
}

#[test]
fn socket_file_is_its_owners_alone_and_goes_with_the_server() {
    let path = std::env::temp_dir().join(format!("ringserve-admin-{}-mode", std::process::id()));
    let lab = lab(format!("unix:{}", path.display()));
    assert_eq!(lab.running.admin_address(), Some(&Address::unix(path.as_os_str().as_encoded_bytes())));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = Client::connect_unix(&path);
    client.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert_eq!(Answer::of(&client.read_to_end().0).status, 200);
    lab.finish();
    assert!(!path.exists());
}

#[test]
fn endpoint_answers_while_factories_are_pending() {
    // A free port, which is known before the start is over.
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (opens, open) = mpsc::channel::<()>();
    let open = std::sync::Arc::new(std::sync::Mutex::new(Some(open)));
    let server =
        On::default().server(no_time_limits()).admin(addr.to_string()).framing(LengthPrefix::default());
    let starts = thread::spawn(move || {
        let shared = std::sync::Arc::<Shared>::default();
        server.start(move |shard| {
            let (open, shared) = (open.lock().unwrap().take().expect("one shard"), shared.clone());
            let wait = shard.spawn_blocking(move || open.recv_timeout(SOON));
            from_future(async move {
                wait.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
                Ok::<_, String>(Puppet::new(shared))
            })
        })
    });
    eventually("the endpoint listens", SOON, || TcpStream::connect(addr).is_ok());
    assert_eq!(get(addr, "/healthz").status, 200, "nothing is wrong with it");
    assert_eq!(get(addr, "/readyz").status, 503);
    assert_eq!(get(addr, "/metrics").status, 503);
    assert_eq!(get(addr, "/report.json").report().server.phase, Phase::Starting);
    opens.send(()).unwrap();
    let running = starts.join().unwrap().expect("it starts");
    assert_eq!(endpoint(&running), addr);
    assert_eq!(get(addr, "/readyz").status, 200);
    eventually("it is reported", SOON, || get(addr, "/report.json").report().server.phase == Phase::Serving);
    watch::finish(running);
}

#[test]
fn server_without_a_shard_is_not_healthy() {
    let lab = lab("127.0.0.1:0");
    let addr = endpoint(&lab.running);
    assert_eq!(get(addr, "/healthz").text(), "ok\n");
    lab.running.shutdown();
    eventually("the shards are gone", SOON, || {
        let answer = get(addr, "/healthz");
        answer.status == 503 && answer.text() == "no shard runs\n"
    });
    lab.ended();
}

#[test]
fn keep_alive_connections_hold_up_no_end() {
    let lab = lab("127.0.0.1:0");
    let mut client = Client::connect(endpoint(&lab.running));
    client.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let (head, body) = ringserve_tests::http::read_answer(&mut client);
    assert!(head.starts_with("HTTP/1.1 200") && body == b"ok\n");
    let mut half = Client::connect(endpoint(&lab.running));
    half.stream.write_all(b"GET /repo").unwrap();
    let began = std::time::Instant::now();
    lab.finish();
    assert!(began.elapsed() < SOON);
    client.read_to_end();
    half.read_to_end();
}
