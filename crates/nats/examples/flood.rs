//! CPU for a message that goes out to a nats-server and comes back, of this process alone, to
//! compare with the rival `async-nats`.
//!
//!     nats-server
//!     cargo run --profile measured -p ringserve-nats --example flood -- 127.0.0.1:4222 2000000

use std::fs;
use std::sync::mpsc;

use ringserve::framing::Lines;
use ringserve::{Cx, Frame, Server, Service, Shard};
use ringserve_nats::{Event, Nats, NatsError, NatsOptions};

/// Messages on their way at once.
const WINDOW: u64 = 2000;

struct Idle;

impl Service for Idle {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Nanoseconds of CPU that all threads of this process took.
fn cpu_nanos() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos = tasks.filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    nanos.sum()
}

/// Sends and receives, and returns the nanoseconds of CPU for a message and how many were missed.
async fn flood(shard: Shard, server: String, messages: u64) -> Result<(f64, u64), NatsError> {
    let nats = Nats::connect(&shard, NatsOptions::new(server));
    let mut heard = nats.subscribe("flood")?;
    nats.connected().await;
    nats.flush().await?;
    let before = cpu_nanos();
    let (mut sent, mut received) = (0, 0);
    while received < messages {
        while sent < messages && sent < received + WINDOW && nats.publish("flood", &[b'x'; 64]).is_ok() {
            sent += 1;
        }
        match heard.next().await {
            Some(Event::Message(_)) => received += 1,
            _ => return Err(NatsError::Disconnected),
        }
    }
    Ok(((cpu_nanos() - before) as f64 / messages as f64, heard.missed()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let server = args.next().unwrap_or_else(|| "127.0.0.1:4222".to_owned());
    let messages = args.next().map_or(Ok(1_000_000), |count| count.parse())?;
    let (done, result) = mpsc::channel();
    let running = Server::bind("127.0.0.1:0").framing(Lines::default()).shards(1).start(move |shard| {
        let (on, server, done) = (shard.clone(), server.clone(), done.clone());
        shard.spawn(async move { done.send(flood(on, server, messages).await) });
        Idle
    })?;
    let (nanos, missed) = result.recv()??;
    println!("ringserve-nats: {nanos:.0} ns of CPU a message, {missed} missed");
    running.shutdown();
    running.wait()?;
    Ok(())
}
