//! Peers that send without end, and take nothing.

use std::io::{Read, Write};
use std::thread;

use ringserve::framing::Lines;
use ringserve::{Cx, Frame, Service};
use ringserve_tests::SOON;
use ringserve_tests::eventually;
use ringserve_websocket::frame::{Opcode, put_masked};

use crate::client::{ByHand, drivers, server, shut_down};

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
        cx.reply(frame);
        Ok(())
    }
}

const PINGS: u32 = 1_000_000;

#[test]
fn a_million_pings_of_a_peer_that_takes_nothing_hold_one_pong() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Lines::default()).start(|_shard| Echo).unwrap();
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        let mut wire = Vec::new();
        for n in 0..PINGS {
            put_masked(true, 0, Opcode::Ping, &n.to_be_bytes(), [1, 2, 3, 4], &mut wire);
        }
        let received = wire.len() as u64;
        // All of it is taken, though its answers are not.
        by_hand.stream.write_all(&wire).unwrap();
        eventually("all of it was received", SOON, || server.stats().counters.bytes_received >= received);
        let mut stream = by_hand.stream.try_clone().unwrap();
        let reader = thread::spawn(move || {
            let (mut heard, mut last, mut count) = ([0; 6], None, 0);
            while last != Some(PINGS - 1) {
                stream.read_exact(&mut heard).unwrap();
                let [0x8a, 4, payload @ ..] = heard else { panic!("{heard:x?}") };
                let n = u32::from_be_bytes(payload);
                assert!(last < Some(n), "pongs are in order, each once");
                (last, count) = (Some(n), count + 1);
            }
            count
        });
        let pongs = reader.join().unwrap();
        // One for what came together, and not one for each ping.
        assert!((1..PINGS / 20).contains(&pongs), "{pongs} pongs");
        by_hand.send(true, Opcode::Text, b"hello\n");
        assert_eq!(by_hand.recv(), (Opcode::Binary, b"hello\n".to_vec()));
        drop(by_hand);
        shut_down(server);
    }
}
