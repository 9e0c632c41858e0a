//! One message to many listeners, again and again: the next one is sent when all have the last one.

use std::io::{self, ErrorKind, Read, Write};
use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use super::{LOOK, Outcome, Phase, Plan, REPLY_MAX, Shared, connect, cpu_time};
use crate::process;
use crate::servers::LISTEN;

/// Runs all of it on one thread. A delivery is an answer.
pub(super) fn one_thread(
    plan: &Plan,
    number: usize,
    shared: &Shared,
    connected: &Barrier,
) -> io::Result<Outcome> {
    let made = process::pin_to(plan.cpus[number]).and_then(|()| listeners(plan));
    connected.wait();
    let (mut poll, mut streams, mut publisher) = made?;
    let messages = plan.shape.messages();
    let line = messages.sent();
    let mut scratch = vec![0; 64 << 10];
    let mut received = vec![0usize; streams.len()];
    let mut events = Events::with_capacity(1024);
    let (mut outcome, mut delivered, mut measured) = (Outcome::new(), 0u64, None);
    while shared.phase() != Phase::Over as u8 {
        if measured.is_none() && shared.phase() == Phase::Measured as u8 {
            outcome.latency.reset();
            measured = Some((cpu_time(), Instant::now()));
        }
        let sent = Instant::now();
        publisher.write_all(line)?;
        let mut missing = streams.len();
        while missing > 0 {
            match poll.poll(&mut events, Some(LOOK)) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in &events {
                let Token(at) = event.token();
                let count = receive(&mut streams[at], &mut scratch, &line[received[at]..])?;
                received[at] += count;
                if received[at] == line.len() {
                    received[at] = 0;
                    missing -= 1;
                    delivered += 1;
                    outcome.latency.saturating_record(sent.elapsed().as_nanos() as u64);
                }
            }
            if events.is_empty() && sent.elapsed() > REPLY_MAX {
                return Err(io::Error::other(format!(
                    "{missing} listeners got nothing within {REPLY_MAX:?}"
                )));
            }
            if shared.phase() == Phase::Over as u8 {
                break;
            }
        }
        shared.answered[number].store(delivered, Ordering::Relaxed);
    }
    if let Some((cpu, since)) = measured {
        outcome.busy = (cpu_time() - cpu).as_secs_f64() / since.elapsed().as_secs_f64();
    }
    Ok(outcome)
}

/// Receives a part of the line, which has to be as expected. Returns its length.
fn receive(stream: &mut TcpStream, scratch: &mut [u8], expected: &[u8]) -> io::Result<usize> {
    match stream.read(scratch) {
        Ok(0) => Err(io::Error::other("the server closed a listener")),
        Ok(count) if expected.starts_with(&scratch[..count]) => Ok(count),
        Ok(_) => Err(io::Error::other("a listener got other bytes than were sent")),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error),
    }
}

/// The listeners, each of which the server knows, and the sender.
fn listeners(plan: &Plan) -> io::Result<(Poll, Vec<TcpStream>, std::net::TcpStream)> {
    let poll = Poll::new()?;
    let hello = [LISTEN, b"\n"].concat();
    let mut streams = Vec::with_capacity(plan.connections);
    for number in 0..plan.connections {
        let mut stream = connect(plan.address, number)?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(REPLY_MAX))?;
        stream.write_all(&hello)?;
        let mut answer = vec![0; hello.len()];
        stream.read_exact(&mut answer)?;
        if answer != hello {
            return Err(io::Error::other("the server does not know how to fan out"));
        }
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        poll.registry().register(&mut stream, Token(number), Interest::READABLE)?;
        streams.push(stream);
    }
    let publisher = connect(plan.address, plan.connections)?;
    publisher.set_nonblocking(false)?;
    Ok((poll, streams, publisher))
}
