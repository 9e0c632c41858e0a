//! The ends of WebSocket connections, and signs of life.

use std::convert::Infallible;
use std::io::Write;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::websocket::close;
use ringserve::{CloseReason, Cx, Frame, Limits, Service};
use ringserve_tests::watch::closed_for;
use ringserve_websocket::frame::Opcode;
use tungstenite::Message;

use crate::client::{ByHand, connect, drivers, frame, request, server, shut_down, tcp_to};

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if *frame == *b"slow" {
            cx.sleep(Duration::from_millis(20)).await;
        }
        cx.reply(frame);
        Ok(())
    }

    fn heartbeat(&self, _cx: &Cx<'_, ()>) {
        panic!("planted: the channel asks, and not the service");
    }
}

#[test]
fn the_peers_close_is_echoed_behind_what_it_asked_for() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Lines::default()).start(|_shard| Echo).unwrap();
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        by_hand.send(true, Opcode::Text, b"slow\nhello\n");
        by_hand.send(true, Opcode::Close, &[&4321u16.to_be_bytes()[..], b"done"].concat());
        // It is received, and nothing after it.
        by_hand.send(true, Opcode::Text, b"more\n");
        let mut heard = Vec::new();
        while heard.len() < 11 {
            let (opcode, payload) = by_hand.recv();
            assert_eq!(opcode, Opcode::Binary, "{payload:?}");
            heard.extend(payload);
        }
        assert_eq!(heard, b"slow\nhello\n");
        assert_eq!(by_hand.closed_with(), 4321);
        drop(by_hand);
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        by_hand.send(true, Opcode::Close, b"");
        assert_eq!(by_hand.recv(), (Opcode::Close, Vec::new()));
        by_hand.ends();
        drop(by_hand);
        closed_for(&server, CloseReason::PeerClosed, 2);
        shut_down(server);
    }
}

#[test]
fn fin_without_a_close_frame_ends_as_without_websocket() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Lines::default()).start(|_shard| Echo).unwrap();
        let addr = server.local_addrs()[0];
        let wire = frame(true, Opcode::Text, b"hello\n");
        for (sent, code) in [(0, close::NORMAL), (1, close::PROTOCOL_ERROR), (8, close::PROTOCOL_ERROR)] {
            let mut by_hand = ByHand::connect(addr);
            by_hand.stream.write_all(&wire[..sent]).unwrap();
            by_hand.stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(by_hand.closed_with(), code);
        }
        // Between two fragments.
        let mut by_hand = ByHand::connect(addr);
        by_hand.send(false, Opcode::Text, b"hello\n");
        assert_eq!(by_hand.recv(), (Opcode::Binary, b"hello\n".to_vec()));
        by_hand.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(by_hand.closed_with(), close::PROTOCOL_ERROR);
        drop(by_hand);
        closed_for(&server, CloseReason::PeerClosed, 1);
        closed_for(&server, CloseReason::PeerClosedMidFrame, 3);
        shut_down(server);
    }
}

#[test]
fn a_drain_says_that_the_server_goes_away() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Lines::default()).start(|_shard| Echo).unwrap();
        let addr = server.local_addrs()[0];
        let mut socket = connect(addr);
        let mut by_hand = ByHand::connect(addr);
        let mut never = tcp_to(addr);
        never.write_all(&request("/").as_bytes()[..20]).unwrap();
        socket.send(Message::text("hello\n")).unwrap();
        assert_eq!(socket.read().unwrap(), Message::binary("hello\n"));
        by_hand.send(true, Opcode::Text, b"slow\n");
        server.shutdown();
        let Message::Close(Some(ended)) = socket.read().unwrap() else { panic!("it is told") };
        assert_eq!(u16::from(ended.code), close::GOING_AWAY);
        // Its requests are answered first, if they had arrived.
        match by_hand.recv() {
            (Opcode::Binary, reply) => {
                assert_eq!(reply, b"slow\n");
                assert_eq!(by_hand.closed_with(), close::GOING_AWAY);
            }
            (opcode, payload) => {
                assert_eq!((opcode, payload), (Opcode::Close, close::GOING_AWAY.to_be_bytes().to_vec()));
            }
        }
        drop((socket, by_hand));
        let stats = server.wait().unwrap();
        assert_eq!(stats.counters.opened, stats.counters.closed);
    }
}

#[test]
fn silent_peers_are_asked_by_pings_and_mute_ones_are_lost() {
    let limits = Limits::default()
        .heartbeat_interval(Duration::from_millis(50))
        .heartbeats_missed_max(4)
        .idle_timeout(None);
    for driver in drivers() {
        let server = server(driver).websocket().framing(Lines::default()).limits(limits.clone());
        let server = server.start(|_shard| Echo).unwrap();
        let addr = server.local_addrs()[0];
        let (mut answers, mut mute) = (ByHand::connect(addr), ByHand::connect(addr));
        for _ in 0..8 {
            assert_eq!(answers.recv(), (Opcode::Ping, Vec::new()));
            answers.send(true, Opcode::Pong, b"");
        }
        for _ in 0..4 {
            assert_eq!(mute.recv(), (Opcode::Ping, Vec::new()));
        }
        assert_eq!(mute.closed_with(), close::POLICY);
        drop(mute);
        closed_for(&server, CloseReason::HeartbeatLost, 1);
        answers.send(true, Opcode::Text, b"still here\n");
        while answers.recv().0 == Opcode::Ping {
            answers.send(true, Opcode::Pong, b"");
        }
        drop(answers);
        server.shutdown();
        server.wait().unwrap();
    }
}
