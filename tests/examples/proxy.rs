//! The example `proxy` before servers of this process; `tests/clients/proxy` sends much more
//! through it.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;

use ringserve::CloseReason;
use ringserve_tests::client::End;
use ringserve_tests::examples::Example;
use ringserve_tests::{Client, Lab, no_time_limits, order, pattern};

#[test]
fn clients_are_passed_on_to_the_upstreams_in_turns() {
    let (first, second) = (Lab::start(no_time_limits()), Lab::start(no_time_limits()));
    let upstreams = [first.addr().to_string(), second.addr().to_string()];
    let proxy =
        Example::start("proxy", &["--shards", "1", "--upstream", &upstreams[0], "--upstream", &upstreams[1]]);
    let mut clients: Vec<Client> = (0..4).map(|_| Client::connect(proxy.addr)).collect();
    for client in &mut clients {
        let large = [b"e", &pattern(300_000)[..]].concat();
        assert!(client.ask(&large) == large);
    }
    first.holds(2);
    second.holds(2);
    // One end closes, then the other one.
    let mut left = clients.pop().unwrap();
    left.send(order::reply(100_000));
    left.finish_writing();
    assert!(left.recv() == pattern(100_000));
    assert_eq!(left.end(), End::Fin);
    let mut closed = clients.pop().unwrap();
    closed.send(order::close());
    assert_eq!((closed.recv(), closed.end()), (b"bye".to_vec(), End::Fin));
    drop((left, closed));
    // Those that are left are let finish.
    let answered: Vec<Vec<u8>> = clients.iter_mut().map(|client| client.ask(order::echo("last"))).collect();
    assert_eq!(answered, [b"elast", b"elast"]);
    drop(clients);
    first.holds(0);
    second.holds(0);
    assert!(proxy.stop().success());
    first.finish();
    second.finish();
}

#[test]
fn missing_upstream_closes_the_client_and_is_logged() {
    let no_server = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let proxy = Example::start("proxy", &["--shards", "1", "--upstream", &no_server.to_string()]);
    assert_eq!(Client::connect(proxy.addr).end(), End::Fin);
    proxy.said(&format!("no connection to {no_server}: Connection refused"));
    assert!(proxy.stop().success());
}

#[test]
fn an_upstream_that_resets_resets_the_client() {
    let upstream = Lab::start(no_time_limits());
    let proxy = Example::start("proxy", &["--shards", "1", "--upstream", &upstream.addr().to_string()]);
    let mut client = Client::connect(proxy.addr);
    client.echoes("");
    client.send(order::abort());
    assert_eq!(client.end(), End::Reset);
    upstream.closed_for(CloseReason::Aborted, 1);
    proxy.said("upstream 127.0.0.1:");
    assert!(proxy.stop().success());
    upstream.finish();
}

#[test]
fn a_unix_socket_is_an_upstream_too() {
    let path = std::env::temp_dir().join(format!("ringserve-proxy-example-{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let proxy =
        Example::start("proxy", &["--shards", "1", "--upstream", &format!("unix:{}", path.display())]);
    let client = Client::connect(proxy.addr);
    let (mut upstream, _) = listener.accept().unwrap();
    std::io::Write::write_all(&mut upstream, b"from a Unix socket").unwrap();
    let mut client = client;
    assert_eq!(client.read(18), b"from a Unix socket");
    drop(upstream);
    assert_eq!(client.end(), End::Fin);
    drop(client);
    assert!(proxy.stop().success());
    std::fs::remove_file(path).unwrap();
}
