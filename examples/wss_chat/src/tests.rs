//! Pages, as clients of WebSocket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use ringserve::ServerHandle;
use serde_json::{Value, json};
use tungstenite::{Error, Message as Sent, Utf8Bytes};

use super::*;

const SOON: Duration = Duration::from_secs(20);

struct Running {
    handle: ServerHandle,
    page: SocketAddr,
    chat: SocketAddr,
}

fn start() -> Running {
    let args = Args::parse_from([
        "chat",
        "--plain",
        "--shards",
        "3",
        "--listen",
        "127.0.0.1:0",
        "--websocket",
        "127.0.0.1:0",
    ]);
    let handle = server(&args).unwrap().start().unwrap();
    let [page, chat] = *handle.local_addrs() else { panic!("{:?}", handle.local_addrs()) };
    Running { handle, page, chat }
}

struct Page(tungstenite::WebSocket<TcpStream>);

impl Page {
    /// In a room, by a name.
    fn open(running: &Running, name: &str, room: &str) -> Page {
        let stream = TcpStream::connect(running.chat).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let (socket, _) = tungstenite::client(format!("ws://{}/", running.chat), stream).unwrap();
        let mut page = Page(socket);
        page.hears("you");
        page.asks(json!({ "name": name }));
        assert_eq!(page.hears("you")["name"], name);
        page.asks(json!({ "join": room }));
        assert_eq!(page.hears("joined")["room"], room);
        page.hears("here");
        page
    }

    fn asks(&mut self, what: Value) {
        self.0.send(Sent::text(what.to_string())).unwrap();
    }

    /// The next event, if it is one that a page always receives.
    fn next(&mut self) -> Value {
        serde_json::from_str(self.0.read().unwrap().to_text().unwrap()).unwrap()
    }

    /// The next event of a kind that is about this member.
    fn hears_of(&mut self, kind: &str, name: &str) -> Value {
        loop {
            let event = self.hears(kind);
            if event["name"] == name {
                return event;
            }
        }
    }

    /// The next event of a kind; who came and left meanwhile is passed over.
    fn hears(&mut self, kind: &str) -> Value {
        loop {
            let event = self.next();
            if event["kind"] == kind {
                return event;
            }
            assert!(["came", "left", "renamed"].contains(&event["kind"].as_str().unwrap()), "{event}");
        }
    }
}

#[test]
fn what_is_said_is_heard_in_its_room_once_and_in_order() {
    let running = start();
    // More than shards, so that some are on the same and some are not.
    let mut here: Vec<Page> = (0..6).map(|n| Page::open(&running, &format!("page-{n}"), "kitchen")).collect();
    let mut elsewhere = Page::open(&running, "other", "cellar");
    for n in 0..50 {
        here[0].asks(json!({ "say": format!("grüße {n}") }));
    }
    for page in &mut here {
        for n in 0..50 {
            let said = page.hears("said");
            assert_eq!((&said["text"], &said["name"]), (&json!(format!("grüße {n}")), &json!("page-0")));
        }
    }
    elsewhere.asks(json!({ "say": "alone" }));
    assert_eq!(elsewhere.hears("said")["text"], "alone");
    drop((here, elsewhere));
    running.handle.shutdown();
    running.handle.wait().unwrap();
}

#[test]
fn members_know_who_comes_leaves_and_changes_its_name() {
    let running = start();
    let mut ann = Page::open(&running, "ann", "kitchen");
    let mut bob = Page::open(&running, "bob", "kitchen");
    let came = ann.hears_of("came", "bob");
    bob.asks(json!({ "name": "bert" }));
    assert_eq!(bob.hears("you")["name"], "bert");
    let renamed = ann.hears("renamed");
    assert_eq!(
        (&renamed["id"], &renamed["name"], &renamed["before"]),
        (&came["id"], &json!("bert"), &json!("bob"))
    );
    // A member that comes later learns of both.
    let mut eve = Page::open(&running, "eve", "cellar");
    eve.asks(json!({ "join": "kitchen" }));
    eve.hears("joined");
    let here = eve.hears("here");
    let mut names: Vec<_> =
        here["members"].as_array().unwrap().iter().map(|member| member[1].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["ann", "bert", "eve"]);
    // However a page ends.
    drop(bob);
    assert_eq!(ann.hears_of("left", "bert")["id"], came["id"]);
}

#[test]
fn bad_names_are_refused_and_other_messages_end_the_connection() {
    let running = start();
    let mut ann = Page::open(&running, "ann", "kitchen");
    for bad in [
        json!({ "name": "" }),
        json!({ "name": "a b" }),
        json!({ "join": "x".repeat(33) }),
        json!({ "join": "<b>" }),
    ] {
        ann.asks(bad);
        ann.hears("refused");
    }
    ann.0.send(Sent::Text(Utf8Bytes::from_static("hello"))).unwrap();
    match ann.0.read() {
        Ok(Sent::Close(Some(frame))) => assert_eq!(u16::from(frame.code), 1008),
        other => panic!("{other:?}"),
    }
}

#[test]
fn pages_of_other_hosts_are_refused() {
    use tungstenite::client::IntoClientRequest;
    let running = start();
    for (origin, is_own) in [
        ("http://127.0.0.1:8443", true),
        ("https://127.0.0.1", true),
        ("https://elsewhere.example", false),
        ("null", false),
        ("127.0.0.1", false),
    ] {
        let mut request = format!("ws://{}/", running.chat).into_client_request().unwrap();
        request.headers_mut().insert("origin", origin.parse().unwrap());
        let answer = tungstenite::client(request, TcpStream::connect(running.chat).unwrap());
        match answer {
            Ok(_) => assert!(is_own, "{origin}"),
            Err(tungstenite::HandshakeError::Failure(Error::Http(answer))) => {
                assert_eq!((answer.status().as_u16(), is_own), (403, false), "{origin}");
            }
            Err(error) => panic!("{origin}: {error}"),
        }
    }
}

#[test]
fn page_connects_to_where_the_chat_is_and_has_no_external_parts() {
    let args = Args::parse_from(["chat", "--plain"]);
    assert_eq!(args.websocket.port(), 8444);
    let running = start();
    let mut stream = TcpStream::connect(running.page).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && answer.contains("content-security-policy: default-src 'none'")
    );
    assert!(answer.contains("address.port = \"0\"") && !answer.contains("WEBSOCKET_PORT"));
    for external in ["src=\"", "href=\"http", "@import", "url("] {
        assert!(!PAGE.contains(external), "{external}");
    }
}
