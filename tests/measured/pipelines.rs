//! Clients that pipeline without end, when the server shuts down: each call that began is answered,
//! then FIN follows.

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ringserve::CloseReason;
use ringserve::framing::LengthPrefix;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, SOON, alone, eventually, no_time_limits, order};

const CLIENTS: usize = 200;
const THREADS: usize = 2;

/// A client that writes as much as it can, until it reads the end.
struct Pipeline {
    client: Client,
    written: usize,
    read: Vec<u8>,
    replies: usize,
    end: Option<End>,
}

impl Pipeline {
    fn new(client: Client) -> Pipeline {
        client.stream.set_nonblocking(true).unwrap();
        Pipeline { client, written: 0, read: Vec::new(), replies: 0, end: None }
    }

    /// Writes and reads as much as possible at once.
    fn step(&mut self, wire: &[u8], repeated: &[u8], piece: &mut [u8]) {
        match self.client.stream.write(&repeated[self.written % wire.len()..]) {
            Ok(n) => self.written += n,
            // It reads to the end, whatever happened to its writes.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => {}
        }
        match self.client.stream.read(piece) {
            Ok(0) => self.end = Some(End::Fin),
            Ok(n) => self.read.extend_from_slice(&piece[..n]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.end = Some(End::Reset),
        }
        let whole = self.read.len() / wire.len() * wire.len();
        assert!(self.read[..whole].chunks(wire.len()).all(|reply| reply == wire));
        self.read.drain(..whole);
        self.replies += whole / wire.len();
    }
}

#[test]
fn pipelining_clients_are_answered_and_closed_with_fin() {
    if !alone(pipelining_clients_are_answered_and_closed_with_fin) {
        return;
    }
    // A machine with other work takes its time: neither limit is the subject here.
    let patient =
        no_time_limits().linger_timeout(Duration::from_secs(60)).drain_timeout(Duration::from_secs(60));
    let lab = Lab::start(patient);
    let answered = AtomicUsize::new(0);
    let wire = frame(order::echo_of(100));
    let resets: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let mut all: Vec<Pipeline> =
                    (0..CLIENTS / THREADS).map(|_| Pipeline::new(lab.client())).collect();
                let (answered, wire) = (&answered, &wire);
                scope.spawn(move || {
                    let (mut resets, mut piece, repeated) = (0, vec![0; 64 << 10], wire.repeat(16));
                    while !all.is_empty() {
                        for one in &mut all {
                            let before = one.replies;
                            one.step(wire, &repeated, &mut piece);
                            answered.fetch_add(usize::from(before == 0 && one.replies > 0), SeqCst);
                            if one.end == Some(End::Fin) {
                                assert_eq!(one.read.len(), 0, "the end is within a reply");
                            }
                        }
                        resets += all.iter().filter(|one| one.end == Some(End::Reset)).count();
                        all.retain(|one| one.end.is_none());
                    }
                    resets
                })
            })
            .collect();
        eventually("every client is answered", SOON, || answered.load(SeqCst) == CLIENTS);
        lab.running.shutdown();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let report = lab.ended();
    assert_eq!(resets, 0, "{:?}", report.counters);
    assert_eq!(report.counters.closed_for(CloseReason::Shutdown), CLIENTS as u64, "{:?}", report.counters);
}

/// Keeps that many calls in flight, which wait for different times, so that they are never all
/// done; counts the frames that it sent and received.
fn keep_in_flight(mut client: Client, depth: usize, sent: &AtomicUsize, stop: &AtomicBool) -> (usize, End) {
    let request = |n: usize| frame(order::sleep(1 + n as u64 % 9));
    (0..depth).for_each(|n| client.write(&request(n)));
    sent.fetch_add(depth, SeqCst);
    let (mut got, mut reply) = (0, vec![0; request(0).len()]);
    loop {
        if client.read_whole_or_fin(&mut reply).is_none() {
            return (got, End::Fin);
        }
        assert_eq!(reply[..5], request(0)[..5]);
        got += 1;
        // A write may fail once the server has closed.
        if client.stream.write_all(&request(got)).is_ok() && !stop.load(SeqCst) {
            sent.fetch_add(1, SeqCst);
        }
    }
}

#[test]
fn a_client_with_calls_always_in_flight_is_drained() {
    if !alone(a_client_with_calls_always_in_flight_is_drained) {
        return;
    }
    let limits = no_time_limits().calls_in_flight_max(16).linger_timeout(Duration::from_secs(60));
    let lab = Lab::of(On::default().server(limits).framing(LengthPrefix::default()));
    let (sent, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let got: usize = thread::scope(|scope| {
        let clients: Vec<_> = (0..10)
            .map(|_| {
                let (client, sent, stop) = (lab.client(), &sent, &stop);
                scope.spawn(move || keep_in_flight(client, 16, sent, stop))
            })
            .collect();
        eventually("all are busy", SOON, || lab.stats().counters.frames > 2000);
        stop.store(true, SeqCst);
        lab.running.shutdown();
        clients
            .into_iter()
            .map(|client| {
                let (got, end) = client.join().unwrap();
                assert_eq!(end, End::Fin);
                got
            })
            .sum()
    });
    let (sent, report) = (sent.load(SeqCst), lab.ended());
    // Each call that began was answered; of those sent after the order few began: as many as a few
    // turns bring.
    assert_eq!(got as u64, report.counters.frames);
    assert!(got <= sent + 10 * 17 * 16, "{got} answers to {sent} requests sent before the order");
    assert_eq!(report.counters.closed_for(CloseReason::Shutdown), 10, "{:?}", report.counters);
}
