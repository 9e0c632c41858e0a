//! Facts about peers in addition to their address: the address to which they connected, and the
//! process at their end.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

use ringserve::net::{PeerCredentials, SocketOptions};
use ringserve::server::Driver;
use ringserve::{Peer, Server, Stream, stream};
use ringserve_tests::{On, no_time_limits, watch};
use rustix::process::{getegid, geteuid};

/// For each driver, the facts that a server at all addresses and at a Unix socket gets about three
/// peers and returns to them.
fn told(options: &SocketOptions) -> Vec<[String; 3]> {
    let on_driver = |driver| {
        let on = On { driver, ..On::default() };
        let name = format!("@ringserve-peers-{}-{driver}-{}", std::process::id(), options.local_address);
        let server: Server = on.server_at("0.0.0.0:0", no_time_limits());
        // An admission gets the same facts.
        let admit = |peer: &Peer| peer.local_addr().is_none_or(|addr| addr.ip().is_loopback());
        let server = server.listen_unix(&name).sockets(options.clone()).admit(admit);
        let running = server.start(|_shard| {
            stream(async |stream: Stream| {
                let peer = stream.peer();
                stream.queue(format!("{:?} {:?}", peer.local_addr(), peer.credentials()).as_bytes());
            })
        });
        let running = running.expect("the server starts");
        let port = running.local_addrs()[0].port();
        let tcp = |host: [u8; 4]| read(TcpStream::connect(SocketAddr::from((host, port))).unwrap());
        let unix = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
        let abstract_name = name.replacen('@', "\0", 1);
        unix.connect(&socket2::SockAddr::unix(abstract_name).unwrap()).unwrap();
        let told = [tcp([127, 0, 0, 1]), tcp([127, 0, 0, 9]), read(UnixStream::from(unix))];
        watch::finish(running);
        told.map(|told| told.replace(&format!(":{port}"), ""))
    };
    [Driver::IoUring, Driver::Epoll].map(on_driver).into()
}

fn read(mut from: impl Read) -> String {
    let mut text = String::new();
    from.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn peers_came_to_an_address_and_are_a_process() {
    let options = SocketOptions::default().local_address(true).peer_credentials(true);
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let own = PeerCredentials { pid: Some(std::process::id()), uid, gid };
    for told in told(&options) {
        assert_eq!(told[0], "Some(127.0.0.1) None");
        assert_eq!(told[1], "Some(127.0.0.9) None");
        assert_eq!(told[2], format!("None Some({own:?})"));
    }
}

#[test]
fn nothing_is_asked_unless_it_is_wanted() {
    for told in told(&SocketOptions::default()) {
        assert_eq!(told, ["None None", "None None", "None None"]);
    }
}
