//! Two ends of the toy transport in memory, whose bytes arrive in any pieces.

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, Transport, TransportConn, TransportEvent};

use super::*;
use crate::rng::Rng;

/// One end, and its results.
struct End {
    channel: Box<dyn TransportConn>,
    /// Bytes for the other end.
    out: Vec<u8>,
    plain: Vec<u8>,
    is_ready: bool,
    is_closed: bool,
    has_fault: bool,
    permits: usize,
}

impl End {
    fn new(toy: &Toy) -> End {
        let mut out = Vec::new();
        let channel = toy.begin(&mut out).unwrap();
        End {
            channel,
            out,
            plain: Vec::new(),
            is_ready: false,
            is_closed: false,
            has_fault: false,
            permits: 0,
        }
    }

    fn receive(&mut self, bytes: &[u8]) {
        let mut wire = LeaseMut::try_copy_of(bytes).unwrap();
        let mut next = self.channel.decode(&mut wire, &mut self.out);
        loop {
            match next {
                TransportEvent::Plain(bytes) => self.plain.extend_from_slice(&bytes),
                TransportEvent::More => break assert!(wire.is_empty(), "more is wanted, and not taken"),
                TransportEvent::Ready => self.is_ready = true,
                TransportEvent::Work => {
                    self.permits += 1;
                    next = self.channel.work(&mut self.out);
                    if matches!(next, TransportEvent::More) {
                        next = self.channel.decode(&mut wire, &mut self.out);
                    }
                    continue;
                }
                TransportEvent::Closed => break self.is_closed = true,
                TransportEvent::Speaks => panic!("it says all at once"),
                TransportEvent::Fault(_) => break self.has_fault = true,
            }
            next = self.channel.decode(&mut wire, &mut self.out);
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        let mut batch = Batch::new();
        batch.put(bytes);
        self.channel.encode(&batch, &mut self.out).unwrap();
    }
}

/// Passes the output of one end to the other, in pieces.
fn bring(rng: &mut Rng, from: &mut End, to: &mut End) {
    let bytes = std::mem::take(&mut from.out);
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let piece = rng.spread(1, rest.len() as u64) as usize;
        to.receive(&rest[..piece]);
        rest = &rest[piece..];
    }
}

fn settle(rng: &mut Rng, client: &mut End, server: &mut End) {
    while !client.out.is_empty() || !server.out.is_empty() {
        bring(rng, client, server);
        bring(rng, server, client);
    }
}

#[test]
fn both_ends_say_all_in_any_pieces() {
    for seed in 0..200 {
        let rng = &mut Rng::new(seed);
        let alive = Alive::default();
        let (permits, updates) = (rng.pick(Permits::ALL), rng.below(5));
        let record = rng.spread(1, 4096) as usize;
        let toy = Toy::server().permits(permits).record_bytes(record).updates_every(updates).counted(&alive);
        let mut server = End::new(&toy);
        let mut client = End::new(&Toy::client("me", seed).updates_every(rng.below(5)));
        let (mut asked, mut answered) = (Vec::<u8>::new(), Vec::<u8>::new());
        for round in 0..20u8 {
            let bytes = vec![round; rng.spread(1, 10_000) as usize];
            if client.is_ready && rng.one_in(2) {
                client.say(&bytes);
                asked.extend(&bytes);
            }
            if server.is_ready && rng.one_in(2) {
                server.say(&bytes);
                answered.extend(&bytes);
            }
            match rng.one_in(2) {
                true => bring(rng, &mut client, &mut server),
                false => bring(rng, &mut server, &mut client),
            }
        }
        settle(rng, &mut client, &mut server);
        assert!(client.is_ready && server.is_ready, "seed {seed}");
        assert!(server.plain == asked && client.plain == answered, "seed {seed}: other bytes");
        let facts = server.channel.info().unwrap().downcast::<Facts>().unwrap();
        assert_eq!(facts.name, b"me");
        let wanted = [0, 1, 1, 2][Permits::ALL.iter().position(|of| *of == permits).unwrap()];
        assert_eq!(server.permits, wanted, "seed {seed}");
        client.channel.finish(&mut client.out);
        settle(rng, &mut client, &mut server);
        assert!(server.is_closed && !server.channel.is_mid_record() && server.channel.held_bytes() == 0);
        assert_eq!(alive.count(), 1);
        drop(server);
        assert_eq!(alive.count(), 0);
    }
}

#[test]
fn bytes_that_are_altered_are_a_fault_that_is_told() {
    for seed in 0..200 {
        let rng = &mut Rng::new(seed);
        let mut server = End::new(&Toy::server());
        let mut client = End::new(&Toy::client("me", seed));
        settle(rng, &mut client, &mut server);
        let at_rest = client.plain.len();
        client.say(b"hello");
        let at = rng.below(client.out.len() as u64) as usize;
        client.out[at] ^= 1 << rng.below(8);
        settle(rng, &mut client, &mut server);
        assert!(server.has_fault || server.channel.is_mid_record(), "seed {seed}: {:?}", server.plain);
        assert_eq!(
            (client.has_fault, client.plain.len()),
            (server.has_fault, at_rest),
            "the client hears of it"
        );
        assert_eq!(server.plain, b"");
    }
}
