//! An upstream in the report of the admin endpoint, and in the metrics.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use ringserve::framing::Lines;
use ringserve::upstream::{Backend, Exclusive, Request, Upstream};
use ringserve::{Cx, Frame, Server, ServerHandle, Service};
use ringserve_tests::{SOON, eventually};

use super::Echo;

struct Front(Exclusive<Lines>);

impl Service for Front {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        match self.0.ask(Request::new(&line)).await {
            Ok(answer) => cx.reply(answer),
            Err(error) => cx.reply(format!("no answer: {error}")),
        }
        Ok(())
    }
}

fn addr(server: &ServerHandle) -> SocketAddr {
    server.listeners()[0].as_ip().unwrap()
}

fn get(server: &ServerHandle, path: &str) -> String {
    let mut stream = TcpStream::connect(server.admin_address().unwrap().as_ip().unwrap()).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    answer
}

#[test]
fn operator_sees_each_backend_of_an_upstream() {
    let echo = Server::bind("127.0.0.1:0").framing(Lines::default()).shards(1).start(|_shard| Echo).unwrap();
    let works = addr(&echo);
    let answers = Upstream::new("answers", [Backend::new(works).weight(3), Backend::new("127.0.0.1:1")]);
    assert!(answers.drain("127.0.0.1:1"));
    let other = Upstream::new("other", ["127.0.0.1:2"]);
    let server = Server::bind("127.0.0.1:0")
        .framing(Lines::default())
        .shards(1)
        .admin("127.0.0.1:0")
        .upstreams([&answers, &other])
        .start({
            let answers = answers.clone();
            move |shard| Front(answers.exclusive(shard, Lines::default()))
        })
        .unwrap();
    let mut client = BufReader::new(TcpStream::connect(addr(&server)).unwrap());
    for n in 0..5 {
        let mut answer = String::new();
        writeln!(client.get_mut(), "{n}").unwrap();
        client.read_line(&mut answer).unwrap();
        assert_eq!(answer, format!("{n}\n"));
    }
    eventually("the shard tells what it did", SOON, || answers.stats().backends[0].answers == 5);
    let report = get(&server, "/report.json");
    for part in [
        r#""upstreams":[{"name":"answers""#.to_owned(),
        format!(r#"{{"name":"{works}","condition":"unknown","weight":3,"in_flight":0"#),
        r#"{"name":"127.0.0.1:1","condition":"drained","weight":1"#.to_owned(),
        r#"{"name":"other""#.to_owned(),
        r#""requests":5"#.to_owned(),
    ] {
        assert!(report.contains(&part), "{part} in {report}");
    }
    let metrics = get(&server, "/metrics");
    for line in [
        format!(r#"ringserve_backend_answers_total{{upstream="answers",backend="{works}"}} 5"#),
        format!(
            r#"ringserve_backend_connects_total{{upstream="answers",backend="{works}",result="made"}} 1"#
        ),
        r#"ringserve_backend_usable{upstream="answers",backend="127.0.0.1:1"} 0"#.to_owned(),
        r#"ringserve_upstream_retries_total{upstream="other"} 0"#.to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    drop(client);
    for server in [server, echo] {
        server.abort();
        server.wait().unwrap();
    }
}
