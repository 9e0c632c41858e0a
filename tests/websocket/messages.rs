//! Services of whole messages.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;
use std::thread;

use ringserve::framing::Lines;
use ringserve::listen::{endpoints, tcp};
use ringserve::service::{CloseCx, OpenCx, Refusal};
use ringserve::websocket::{Message, Messages, Outgoing, WebSocket, WsCx, WsHandle, WsLocalHandle, close};
use ringserve::{Cx, Error, Frame, Limits, Server, Service, Shard, ws};
use ringserve_websocket::frame::Opcode;

use crate::client::{ByHand, any_port, connect, drivers, frame, server, shut_down, unbounded};

type Theirs = tungstenite::Message;

/// Sends each message back; some are commands.
#[derive(Clone, Default)]
struct Room {
    members: Rc<RefCell<Vec<WsLocalHandle>>>,
}

impl WebSocket for Room {
    type Session = u32;
    type Error = String;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<u32, Refusal> {
        let path = opening.websocket().map(|info| info.path().to_owned());
        match path.as_deref() {
            Some("/closed") => Err(Refusal::new("closed")),
            Some("/greeted") => {
                opening.send("welcome");
                Ok(1)
            }
            _ => Ok(0),
        }
    }

    async fn message(&self, cx: &WsCx<'_, u32>, message: Message) -> Result<(), String> {
        match message.as_text() {
            Some("join") => self.members.borrow_mut().push(cx.ws_local_handle()),
            Some("all") => {
                for member in &*self.members.borrow() {
                    let _ = member.send("to all");
                    let _ = member.send(&b"bytes"[..]);
                }
            }
            Some("kick") => self.members.borrow().iter().for_each(|member| member.close_with(4002, "kicked")),
            Some("thread") => {
                let handle: WsHandle = cx.ws_handle();
                thread::spawn(move || {
                    handle.send("from a thread").unwrap();
                    handle.send(vec![7; 70_000]).unwrap();
                    handle.close();
                });
            }
            Some("bye") => {
                cx.send("last");
                cx.close_with(close::POLICY, "enough");
                cx.close_with(close::NORMAL, "the first one holds");
            }
            Some("fail") => return Err("planted".to_owned()),
            Some("wait") => {
                cx.sleep(std::time::Duration::from_millis(5)).await;
                cx.send(Outgoing::text_unchecked(b"waited"));
            }
            Some("session") => cx.send(cx.session().to_string()),
            _ => cx.send(message),
        }
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, u32>) {
        self.members.borrow_mut().retain(|member| member.id() != closed.id());
    }
}

fn rooms(_shard: &Shard) -> impl ringserve::service::IntoService<Messages> + use<> {
    ws(Room::default())
}

#[test]
fn messages_of_every_size_come_back_as_they_were() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Messages::default()).start(rooms).unwrap();
        let mut socket = unbounded(server.local_addrs()[0]);
        for size in [0, 1, 5, 125, 126, 4095, 4096, 20_000, 65_535, 65_536, 300_000, 1 << 20] {
            let bytes: Vec<u8> = (0..size).map(|n| (n * 31 / 7) as u8).collect();
            socket.send(Theirs::binary(bytes.clone())).unwrap();
            assert!(socket.read().unwrap() == Theirs::binary(bytes), "{size}");
            let text = "aé€😀".chars().cycle().take(size / 4).collect::<String>();
            socket.send(Theirs::text(text.clone())).unwrap();
            assert!(socket.read().unwrap() == Theirs::text(text), "{size}");
        }
        // Many in one segment, and in fragments with a ping between.
        let mut by_hand = ByHand { stream: socket.get_ref().try_clone().unwrap() };
        let many: Vec<u8> =
            (0..100).flat_map(|n: u8| frame(true, Opcode::Text, &[b'a' + n % 26; 64])).collect();
        std::io::Write::write_all(&mut by_hand.stream, &many).unwrap();
        for n in 0..100 {
            assert_eq!(by_hand.recv(), (Opcode::Text, vec![b'a' + n % 26; 64]));
        }
        by_hand.send(false, Opcode::Text, "ü".as_bytes().split_at(1).0);
        by_hand.send(true, Opcode::Ping, b"there?");
        assert_eq!(by_hand.recv(), (Opcode::Pong, b"there?".to_vec()));
        by_hand.send(true, Opcode::Continuation, "ü".as_bytes().split_at(1).1);
        assert_eq!(by_hand.recv(), (Opcode::Text, "ü".as_bytes().to_vec()));
        shut_down(server);
    }
}

#[test]
fn a_service_greets_waits_and_reaches_others() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Messages::default()).start(rooms).unwrap();
        let addr = server.local_addrs()[0];
        let mut greeted = ByHand { stream: crate::client::tcp_to(addr) };
        greeted.upgrade("/greeted");
        assert_eq!(greeted.recv(), (Opcode::Text, b"welcome".to_vec()));
        greeted.send(true, Opcode::Text, b"session");
        assert_eq!(greeted.recv(), (Opcode::Text, b"1".to_vec()));
        let mut refused = ByHand { stream: crate::client::tcp_to(addr) };
        refused.upgrade("/closed");
        assert_eq!(refused.closed_with(), close::POLICY);
        let mut member = connect(addr);
        member.send(Theirs::text("join")).unwrap();
        member.send(Theirs::text("wait")).unwrap();
        assert_eq!(member.read().unwrap(), Theirs::text("waited"));
        greeted.send(true, Opcode::Text, b"all");
        assert_eq!(member.read().unwrap(), Theirs::text("to all"));
        assert_eq!(member.read().unwrap(), Theirs::binary("bytes"));
        member.send(Theirs::text("thread")).unwrap();
        assert_eq!(member.read().unwrap(), Theirs::text("from a thread"));
        assert_eq!(member.read().unwrap().len(), 70_000);
        let Theirs::Close(Some(ended)) = member.read().unwrap() else { panic!("it ends") };
        assert_eq!(u16::from(ended.code), close::NORMAL);
        let mut kicked = ByHand::connect(addr);
        kicked.send(true, Opcode::Text, b"join");
        kicked.send(true, Opcode::Text, b"session");
        assert_eq!(kicked.recv(), (Opcode::Text, b"0".to_vec()));
        greeted.send(true, Opcode::Text, b"kick");
        assert_eq!(kicked.recv(), (Opcode::Close, [&4002u16.to_be_bytes()[..], b"kicked"].concat()));
        shut_down(server);
    }
}

#[test]
fn a_service_closes_with_its_code_and_fails_with_1011() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Messages::default()).start(rooms).unwrap();
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        by_hand.send(true, Opcode::Text, b"bye");
        assert_eq!(by_hand.recv(), (Opcode::Text, b"last".to_vec()));
        assert_eq!(by_hand.recv(), (Opcode::Close, [&1008u16.to_be_bytes()[..], b"enough"].concat()));
        by_hand.ends();
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        by_hand.send(true, Opcode::Text, b"fail");
        assert_eq!(by_hand.closed_with(), close::INTERNAL_ERROR);
        shut_down(server);
    }
}

#[test]
fn a_message_is_as_long_as_the_smaller_bound() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Messages::default());
        let server = server.limits(Limits::default().frame_bytes_max(1000)).start(rooms).unwrap();
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        by_hand.send(true, Opcode::Binary, &[1; 1000]);
        assert_eq!(by_hand.recv(), (Opcode::Binary, vec![1; 1000]));
        by_hand.send(true, Opcode::Binary, &[1; 1001]);
        assert_eq!(by_hand.closed_with(), close::TOO_LARGE);
        drop(by_hand);
        shut_down(server);
    }
}

struct Frames;

impl Service for Frames {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

#[test]
fn messages_without_websocket_are_refused_at_the_start() {
    let error = Server::bind(any_port()).framing(Messages::default()).start(rooms).unwrap_err();
    assert!(matches!(&error, Error::Services(_)), "{error}");
    assert!(
        error.to_string().contains("takes messages of WebSocket, and its endpoint does not speak it"),
        "{error}"
    );
    let both = endpoints((tcp(any_port()).websocket(), tcp(any_port()))).framing(Messages::default());
    let lines = endpoints([tcp(any_port())]).name("lines").framing(Lines::default());
    let server = Server::new().service(both.name("room"), rooms).service(lines, |_shard| Frames);
    let error = server.start().unwrap_err();
    assert!(error.to_string().starts_with("service room: "), "{error}");
}
