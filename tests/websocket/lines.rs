//! Services of lines whose clients speak WebSocket, in addition to clients that send lines.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::rc::Rc;

use bytes::BufMut;
use ringserve::framing::Lines;
use ringserve::handle::LocalHandle;
use ringserve::listen::{endpoints, tcp};
use ringserve::service::{CloseCx, OpenCx, Refusal};
use ringserve::websocket::{TextLines, close};
use ringserve::{Cx, Error, Frame, Limits, Server, Service, Shard};
use ringserve_websocket::frame::Opcode;

use crate::client::{ByHand, any_port, drivers, shut_down, tcp_to};

/// Each line goes to all other clients, except a few commands.
#[derive(Clone, Default)]
struct Room(Rc<RefCell<Vec<LocalHandle>>>);

impl Service for Room {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        opening.reply("welcome");
        self.0.borrow_mut().push(opening.local_handle());
        Ok(())
    }

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        match &line[..] {
            b"two" => cx.reply("one\ntwo"),
            b"in place" => cx.reply_with(|out| out.put_slice(&[b'x'; 300])),
            b"two in place" => cx.reply_with(|out| out.put_slice(b"three\nfour")),
            b"large" => cx.reply(vec![b'y'; 100_000]),
            b"no text" => cx.reply(b"a\xffb"),
            b"bye" => cx.close(),
            said => {
                for other in self.0.borrow().iter().filter(|other| other.id() != cx.id()) {
                    other.push(said).unwrap();
                }
            }
        }
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.0.borrow_mut().retain(|member| member.id() != closed.id());
    }
}

fn room(shard: &Shard) -> Room {
    Room::clone(&shard.shared(Room::default))
}

struct ByLines(BufReader<TcpStream>);

impl ByLines {
    fn says(&mut self, line: &str) {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn hears(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

#[test]
fn one_vocabulary_serves_lines_and_messages() {
    for driver in drivers() {
        let limits = Limits::default().frame_bytes_max(4096);
        let server = Server::new()
            .driver(driver)
            .shards(1)
            .service(tcp(any_port()).framing(Lines::default()).limits(limits.clone()), room)
            .service(tcp(any_port()).websocket().framing(TextLines).limits(limits), room)
            .start()
            .unwrap();
        let [lines, messages] = server.local_addrs() else { panic!("there are two") };
        let mut ann = ByLines(BufReader::new(tcp_to(*lines)));
        assert_eq!(ann.hears(), "welcome");
        let mut bob = ByHand::connect(*messages);
        let hears = |bob: &mut ByHand| {
            let (opcode, text) = bob.recv();
            assert_eq!(opcode, Opcode::Text);
            String::from_utf8(text).unwrap()
        };
        assert_eq!(hears(&mut bob), "welcome");
        ann.says("hello bob");
        assert_eq!(hears(&mut bob), "hello bob");
        bob.send(true, Opcode::Text, b"hello ann");
        assert_eq!(ann.hears(), "hello ann");
        bob.send(true, Opcode::Text, b"with an end\r\n");
        assert_eq!(ann.hears(), "with an end");
        for asked in ["two", "two in place"] {
            ann.says(asked);
            bob.send(true, Opcode::Text, asked.as_bytes());
            for _ in 0..2 {
                assert_eq!(hears(&mut bob), ann.hears());
            }
        }
        for (asked, answer) in [("in place", "x".repeat(300)), ("large", "y".repeat(100_000))] {
            bob.send(true, Opcode::Text, asked.as_bytes());
            assert_eq!(hears(&mut bob), answer);
        }
        bob.send(true, Opcode::Text, b"no text");
        assert_eq!(hears(&mut bob), "a\u{fffd}b");
        bob.send(true, Opcode::Text, b"bye");
        assert_eq!(bob.closed_with(), close::NORMAL);
        drop((ann, bob));
        shut_down(server);
    }
}

#[test]
fn message_that_is_not_one_line_ends_its_connection() {
    for driver in drivers() {
        let server = crate::client::server(driver).websocket().framing(TextLines).start(room).unwrap();
        for (opcode, message, code) in [
            (Opcode::Text, &b"hello\n/quit"[..], close::POLICY),
            (Opcode::Binary, b"hello", close::UNSUPPORTED),
        ] {
            let mut by_hand = ByHand::connect(server.local_addrs()[0]);
            assert_eq!(by_hand.recv(), (Opcode::Text, b"welcome".to_vec()));
            by_hand.send(true, opcode, message);
            assert_eq!(by_hand.closed_with(), code);
        }
        shut_down(server);
    }
}

#[test]
fn lines_of_messages_without_websocket_are_refused_at_the_start() {
    let both = endpoints((tcp(any_port()).websocket(), tcp(any_port()))).framing(TextLines);
    let error = Server::new().service(both.name("room"), room).start().unwrap_err();
    assert!(matches!(&error, Error::Services(_) | Error::Service { .. }), "{error}");
    assert!(error.to_string().contains("takes messages of WebSocket"), "{error}");
}
