//! The gateway: devices, events and the API in simulations, by seed, and a client of WebSocket on
//! the kernel.

use std::cell::{Cell, RefCell};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use jsonwebtoken::{EncodingKey, Header, encode};
use ringserve::testing::{ClientStream, Faults, Net, Sim};
use serde_json::{Value, json};
use tungstenite::Message;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn token(user: &str) -> String {
    token_until(user, 4_102_444_800)
}

/// A token that expires at this time, in seconds since 1970.
fn token_until(user: &str, exp: u64) -> String {
    let room = ["room.*"];
    let claims = json!({ "sub": user, "exp": exp, "subscribe": room, "publish": room });
    encode(&Header::default(), &claims, &EncodingKey::from_secret(b"secret")).unwrap()
}

fn args(listen: &str, http: &str, shards: u64) -> Args {
    let shards = shards.to_string();
    let args = ["push", "--listen", listen, "--http", http, "--api-key", "key", "--shards", &shards];
    Args::parse_from(args.into_iter().chain(["--token-secret", "secret", "--history", "100"]))
}

/// A request to the API.
fn request(path: &str, body: Option<&Value>) -> String {
    let head = "host: push\r\nconnection: close\r\nauthorization: Bearer key\r\n";
    match body.map(Value::to_string) {
        None => format!("GET {path} HTTP/1.1\r\n{head}\r\n"),
        Some(body) => {
            format!("POST {path} HTTP/1.1\r\n{head}content-length: {}\r\n\r\n{body}", body.len())
        }
    }
}

/// The status of an answer, and its body, where that is JSON.
fn answer(bytes: &[u8]) -> (String, Value) {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).unwrap_or_default().to_owned();
    (status, serde_json::from_str(body).unwrap_or_default())
}

async fn api(net: &Net, path: &str, body: Option<Value>) -> io::Result<(String, Value)> {
    let mut stream = net.connect("10.0.0.1:8080").await?;
    stream.send(request(path, body.as_ref())).await?;
    Ok(answer(&stream.closed().await?))
}

async fn line(stream: &mut ClientStream) -> io::Result<String> {
    Ok(stream.line().await?.expect("the server goes on"))
}

/// A device that may use all rooms.
async fn device(net: &Net, user: &str) -> io::Result<ClientStream> {
    let mut stream = net.connect("10.0.0.1:7000").await?;
    stream.send("subscribe room.7\n").await?;
    assert_eq!(line(&mut stream).await?, "- auth TOKEN comes first");
    stream.send(format!("auth {}\n", token(user))).await?;
    assert_eq!(line(&mut stream).await?, format!("+ {user}"));
    Ok(stream)
}

/// The next event of a stream: its id and its data.
async fn event(stream: &mut ClientStream) -> io::Result<(String, String)> {
    let (mut id, mut data) = (String::new(), None);
    loop {
        let line = line(stream).await?;
        if let Some(text) = line.strip_prefix("id: ") {
            id = text.trim_end().to_owned();
        } else if let Some(text) = line.strip_prefix("data: ") {
            data = Some(text.trim_end().to_owned());
        } else if let Some(data) = data.take().filter(|_| line.trim_end().is_empty()) {
            return Ok((id, data));
        }
    }
}

async fn events(net: &Net, last: &str) -> io::Result<ClientStream> {
    let mut stream = net.connect("10.0.0.1:8080").await?;
    let last = if last.is_empty() { String::new() } else { format!("last-event-id: {last}\r\n") };
    let path = format!("/events?topic=room.7&token={}", token("eve"));
    stream.send(format!("GET {path} HTTP/1.1\r\nhost: push\r\n{last}\r\n")).await?;
    assert!(line(&mut stream).await?.contains("200"));
    while !line(&mut stream).await?.trim_end().is_empty() {}
    Ok(stream)
}

#[test]
fn devices_and_events_get_what_is_published_and_recover() {
    Sim::seeds(15).faults(Faults::harmless()).run(|sim| {
        let args = args("10.0.0.1:7000", "10.0.0.1:8080", 1 + sim.seed() % 3);
        sim.start_several(server(&args)).unwrap();
        let ready = Rc::new(Cell::new(0));
        let is_ready = ready.clone();
        sim.client("device", async move |net| {
            let mut stream = device(&net, "ann").await?;
            stream.send("subscribe other.7\npublish room.7 {\nsubscribe room.7\n").await?;
            assert_eq!(line(&mut stream).await?, "- not allowed: other.7");
            assert_eq!(line(&mut stream).await?, "- the data is no JSON");
            let said = line(&mut stream).await?;
            assert!(said.starts_with("+ room.7 "), "{said}");
            is_ready.set(is_ready.get() + 1);
            let mut n = 0;
            while n < 40 {
                let said = line(&mut stream).await?;
                let words: Vec<&str> = said.splitn(3, ' ').collect();
                assert_eq!(words[2], format!("{{\"n\":{n}}}"), "each comes once");
                n += 1;
                if net.random().is_multiple_of(8) {
                    drop(stream);
                    net.sleep(SECOND).await;
                    stream = device(&net, "ann").await?;
                    stream.send(format!("subscribe room.7 {}\n", words[1])).await?;
                    assert!(line(&mut stream).await?.starts_with("+ room.7 "));
                }
            }
            Ok(())
        });
        let is_ready = ready.clone();
        sim.client("browser", async move |net| {
            let mut stream = events(&net, "").await?;
            // Its first line says that it is a member.
            assert_eq!(line(&mut stream).await?.trim_end(), "3");
            is_ready.set(is_ready.get() + 1);
            let mut last = String::new();
            for n in 0..40 {
                let (id, data) = event(&mut stream).await?;
                assert_eq!(data, format!("{{\"n\":{n}}}"), "each comes once");
                last = id;
                if net.random().is_multiple_of(8) && n < 39 {
                    drop(stream);
                    net.sleep(SECOND).await;
                    stream = events(&net, &last).await?;
                }
            }
            assert!(!last.is_empty());
            Ok(())
        });
        sim.client("program", async move |net| {
            while ready.get() < 2 {
                net.sleep(SECOND).await;
            }
            let (status, presence) = api(&net, "/api/presence?topic=room.7", None).await?;
            assert_eq!((&*status, &presence["count"]), ("200", &json!(2)), "{presence}");
            for n in 0..40 {
                let message = json!({ "topic": "room.7", "data": { "n": n } });
                let (status, said) = api(&net, "/api/publish", Some(message)).await?;
                assert_eq!(status, "200", "{said}");
            }
            let (_, history) = api(&net, "/api/history?topic=room.7&limit=2", None).await?;
            let data: Vec<&Value> =
                history["messages"].as_array().unwrap().iter().map(|of| &of["data"]["n"]).collect();
            assert_eq!(data, [38, 39]);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn requests_without_the_key_and_bad_ones_are_refused() {
    Sim::seeds(3).faults(Faults::harmless()).run(|sim| {
        sim.start_several(server(&args("10.0.0.1:7000", "10.0.0.1:8080", 2))).unwrap();
        sim.client("stranger", async move |net| {
            for key in ["", "authorization: Bearer ke\r\n", "authorization: Basic key\r\n"] {
                let mut stream = net.connect("10.0.0.1:8080").await?;
                let head =
                    format!("GET /api/presence?topic=a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{key}");
                stream.send(head + "\r\n").await?;
                assert_eq!(answer(&stream.closed().await?).0, "401", "{key}");
            }
            let cases = [
                ("/api/publish", Some(json!({ "topic": "a b", "data": 1 })), "400"),
                ("/api/publish", Some(json!({ "topic": "*", "data": 1 })), "400"),
                ("/api/publish", Some(json!({ "topic": "x".repeat(256), "data": 1 })), "400"),
                ("/api/publish", Some(json!({ "data": 1 })), "400"),
                ("/api/publish", Some(json!({ "topic": "a", "data": "x".repeat(300_000) })), "413"),
                ("/api/broadcast", Some(json!({ "topics": ["a", "b"], "data": 1 })), "200"),
                ("/api/history", None, "400"),
                ("/api/nothing", None, "404"),
                ("/events?topic=room.7", None, "403"),
                ("/", None, "200"),
            ];
            for (path, body, expected) in cases {
                assert_eq!(api(&net, path, body).await?.0, expected, "{path}");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn device_without_a_token_is_disconnected() {
    Sim::seeds(3).faults(Faults::harmless()).run(|sim| {
        sim.start_several(server(&args("10.0.0.1:7000", "10.0.0.1:8080", 2))).unwrap();
        sim.client("stranger", async move |net| {
            let mut stream = net.connect("10.0.0.1:7000").await?;
            assert_eq!(stream.line().await?, None, "it says nothing");
            Ok(())
        });
        sim.client("device", async move |net| {
            let mut stream = device(&net, "ann").await?;
            net.sleep(60 * SECOND).await;
            stream.send("subscribe room.7\n").await?;
            assert!(line(&mut stream).await?.starts_with("+ room.7 "));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn device_ends_with_its_token() {
    let handle = server(&args("127.0.0.1:0", "127.0.0.1:0", 1)).start().unwrap();
    let mut stream = TcpStream::connect(handle.local_addrs()[0]).unwrap();
    let mut said = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
    // On a busy machine a token may expire before it is read.
    loop {
        let token = token_until("ann", jsonwebtoken::get_current_timestamp() + 2);
        writeln!(stream, "auth {token}").unwrap();
        if said.next().unwrap() == "+ ann" {
            break;
        }
    }
    assert_eq!(said.next(), None, "the server ends it");
    handle.shutdown();
    handle.wait().unwrap();
}

#[test]
fn keys_and_secrets_without_a_byte_are_refused() {
    let parse = |key, secret| Args::try_parse_from(["push", "--api-key", key, "--token-secret", secret]);
    assert!(parse("key", "secret").is_ok());
    assert!(parse("", "secret").is_err() && parse("key", "").is_err());
}

#[test]
fn socket_recovers_from_its_cursor_and_is_disconnected() {
    let handle = server(&args("127.0.0.1:0", "127.0.0.1:0", 2)).start().unwrap();
    let [_, http] = *handle.local_addrs() else { panic!("{:?}", handle.local_addrs()) };
    let ask = |path: &str, body: Option<Value>| {
        let mut stream = TcpStream::connect(http).unwrap();
        stream.write_all(request(path, body.as_ref()).as_bytes()).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        answer(&all)
    };
    let open = |token: &str| {
        let stream = TcpStream::connect(http).unwrap();
        stream.set_read_timeout(Some(20 * SECOND)).unwrap();
        tungstenite::client(format!("ws://{http}/ws?token={token}"), stream).unwrap().0
    };
    let last = RefCell::new(String::new());
    let next = |socket: &mut tungstenite::WebSocket<TcpStream>| {
        let text = socket.read().unwrap().into_text().unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        if let Some(cursor) = value["cursor"].as_str() {
            last.replace(cursor.to_owned());
        }
        value
    };
    let publish = |n: u64| ask("/api/publish", Some(json!({ "topic": "room.1", "data": n }))).0;

    let mut socket = open(&token("ann"));
    let say = |socket: &mut tungstenite::WebSocket<TcpStream>, value: Value| {
        socket.send(Message::text(value.to_string())).unwrap();
    };
    say(&mut socket, json!({ "subscribe": { "topic": "secret" } }));
    assert_eq!(next(&mut socket)["error"], "not allowed: secret");
    say(&mut socket, json!({ "subscribe": { "topic": "room.1" } }));
    assert_eq!(next(&mut socket)["subscribed"], "room.1");
    assert_eq!(publish(0), "200");
    assert_eq!(next(&mut socket)["data"], 0);
    drop(socket);
    (1..4).for_each(|n| assert_eq!(publish(n), "200"));

    let mut socket = open(&token("ann"));
    let since = last.borrow().clone();
    say(&mut socket, json!({ "subscribe": { "topic": "room.1", "since": since } }));
    assert_eq!(next(&mut socket)["subscribed"], "room.1");
    for n in 1..4 {
        assert_eq!(next(&mut socket)["data"], n, "it missed none while it was away");
    }
    say(&mut socket, json!({ "publish": { "topic": "room.1", "data": { "from": "ann" } } }));
    let said = [next(&mut socket), next(&mut socket)];
    assert!(said.iter().any(|said| said["data"]["from"] == "ann"), "{said:?}");
    assert_eq!(ask("/api/presence?topic=room.1", None).1["members"], json!(["ann"]));
    assert_eq!(ask("/api/disconnect", Some(json!({ "user": "ann" }))).1["ended"], 1);
    assert!(matches!(socket.read(), Ok(Message::Close(_))), "it is told");
    handle.shutdown();
    handle.wait().unwrap();
}
