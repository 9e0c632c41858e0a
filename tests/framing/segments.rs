//! A path with small segments.

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Client, Lab, no_time_limits, order, pattern};
use socket2::{Domain, SockRef, Socket, Type};

/// The smallest segment that Linux accepts, with its 12 bytes of TCP options.
const MSS: u32 = 88;

#[test]
fn every_byte_arrives_in_segments_as_small_as_there_are() {
    let lab = Lab::start(no_time_limits());
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    // Before the connect it applies to both directions: the server is informed.
    socket.set_tcp_mss(MSS).unwrap();
    socket.connect(&lab.addr().into()).unwrap();
    let mut client = Client::of(socket);
    assert!(SockRef::from(client.stream.socket()).tcp_mss().unwrap() <= MSS);
    for len in [1, 75, 76, 77, 1_000, 100_000] {
        let payload = order::echo(pattern(len));
        assert!(client.ask(&payload) == payload, "{len} bytes");
    }
    // More at once than the smallest window holds, in frames that end anywhere in a segment.
    let wire: Vec<u8> = (0..300).flat_map(|n| frame(order::echo(pattern(n * 7 % 500)))).collect();
    client.write(&wire);
    client.finish_writing();
    let (replies, end) = client.read_to_end();
    assert!(replies == wire, "{} whole replies", frames(&replies).len());
    assert_eq!(end, End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}
