//! The admin endpoint: its answers, the requests that it refuses, and that shards do not notice.

mod crowds;
mod load;
mod paths;
mod program;
mod safety;
mod starts;

use std::net::SocketAddr;

use ringserve::admin::Admin;
use ringserve::admin::report::Report;
use ringserve::framing::LengthPrefix;
use ringserve::net::Address;
use ringserve::{Server, ServerHandle, Stream, stream};
use ringserve_tests::{Bounds, Client, Lab, On, no_time_limits};

/// A server of puppets on two shards, with an endpoint.
fn lab(admin: impl Into<Admin>) -> Lab {
    lab_with(no_time_limits(), admin)
}

fn lab_with(limits: Bounds, admin: impl Into<Admin>) -> Lab {
    Lab::of(On::default().server(limits).shards(2).admin(admin).framing(LengthPrefix::default()))
}

const LOCAL: &str = "127.0.0.1:0";

fn endpoint(running: &ServerHandle) -> SocketAddr {
    running.admin_address().and_then(Address::as_ip).expect("it has an endpoint at an IP address")
}

/// An answer.
struct Answer {
    status: u16,
    /// Names in lower case, as hyper writes them.
    head: String,
    body: Vec<u8>,
}

impl Answer {
    #[track_caller]
    fn of(bytes: &[u8]) -> Answer {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(bytes[..end + 2].to_vec()).expect("text");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Answer { status, head, body: bytes[end + 4..].to_vec() }
    }

    fn header(&self, name: &str) -> Option<&str> {
        let begin = format!("{name}: ");
        self.head.lines().find_map(|line| line.strip_prefix(&begin))
    }

    #[track_caller]
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    #[track_caller]
    fn report(&self) -> Report {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }
}

/// One request on its own connection, as bytes.
#[track_caller]
fn exchange(addr: SocketAddr, request: impl AsRef<[u8]>) -> Answer {
    let mut client = Client::connect(addr);
    client.write(request.as_ref());
    Answer::of(&client.read_to_end().0)
}

/// A request with these lines in its head.
#[track_caller]
fn ask(addr: SocketAddr, method: &str, path: &str, head: &[&str], body: &str) -> Answer {
    let more: String = head.iter().map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n{more}\r\n{body}"
    );
    exchange(addr, request)
}

#[track_caller]
fn get(addr: SocketAddr, path: &str) -> Answer {
    ask(addr, "GET", path, &[], "")
}

/// A request with an effect, as programs send it.
#[track_caller]
fn post(addr: SocketAddr, path: &str, body: &str) -> Answer {
    ask(addr, "POST", path, &["x-ringserve: 1"], body)
}

/// The error of a server that cannot be started with this endpoint.
#[track_caller]
fn refused(admin: impl Into<Admin>) -> String {
    let server = Server::bind("127.0.0.1:0").shards(1).admin(admin);
    match server.start(|_shard| stream(async |_stream: Stream| ())) {
        Ok(_) => panic!("it starts"),
        Err(error) => error.to_string(),
    }
}
