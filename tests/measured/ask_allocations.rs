//! A question to another shard allocates nothing, on either shard, once the lists have their room.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its client
//! allocates nothing while it is counted either.

use std::array;
use std::io::{Read, Write};

use ringserve::framing::Lines;
use ringserve::sync::{AskError, Mesh};
use ringserve::{Cx, Frame, Service};
use ringserve_tests::{Client, On, alone, no_time_limits};
use stats_alloc::Region;

const WARM_UP: usize = 1_000;
const ROUNDS: usize = 5_000;

/// Asks both shards 16 questions at once for each line, and returns the line.
struct Asks(Mesh<u64, u64>);

impl Service for Asks {
    type Session = ();
    type Error = AskError;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), AskError> {
        let asked = array::from_fn::<_, 16, _>(|number| self.0.ask(number % 2, number as u64));
        for (number, ask) in asked.into_iter().enumerate() {
            assert_eq!(ask.await?, 2 * number as u64);
        }
        cx.reply(line);
        Ok(())
    }
}

#[test]
fn question_to_another_shard_allocates_nothing() {
    if !alone(question_to_another_shard_allocates_nothing) {
        return;
    }
    let mesh = Mesh::new();
    let server = On::default().server(no_time_limits().unwatched()).shards(2).framing(Lines::default());
    let running = server.start(move |shard| {
        mesh.register(shard, |_from, number: u64| 2 * number);
        Asks(mesh.clone())
    });
    let running = running.expect("the server starts");
    let mut client = Client::connect(running.local_addrs()[0]);
    let line = [&[b'e'; 60][..], b"\n"].concat();
    let mut back = vec![0; line.len()];
    let mut echo = |rounds: usize| {
        for _ in 0..rounds {
            client.stream.write_all(&line).unwrap();
            client.stream.read_exact(&mut back).unwrap();
        }
    };
    echo(WARM_UP);
    let region = Region::new(crate::ALLOCATOR);
    echo(ROUNDS);
    let change = region.change();
    // A list may still grow to the largest number that arrived at once.
    let made = change.allocations + change.reallocations;
    assert!(made < 8, "{made} allocations in {ROUNDS} rounds of 16 questions");
    assert_eq!(back, line);
    drop(client);
    ringserve_tests::finish(running);
}
