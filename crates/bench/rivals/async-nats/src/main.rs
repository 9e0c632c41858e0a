//! CPU for a message that goes out to a nats-server and comes back, of this process alone:
//! `async-nats SERVER MESSAGES`.

use std::fs;

use futures_util::StreamExt;

/// Messages on their way at once.
const WINDOW: u64 = 2000;

/// Nanoseconds of CPU that all threads of this process took.
fn cpu_nanos() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos = tasks.filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    nanos.sum()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let server = args.next().unwrap_or_else(|| "127.0.0.1:4222".to_owned());
    let messages: u64 = args.next().map_or(Ok(1_000_000), |count| count.parse())?;
    let client = async_nats::connect(server).await?;
    let mut heard = client.subscribe("flood").await?;
    client.flush().await?;
    let before = cpu_nanos();
    let (mut sent, mut received) = (0, 0);
    while received < messages {
        while sent < messages && sent < received + WINDOW {
            client.publish("flood", vec![b'x'; 64].into()).await?;
            sent += 1;
        }
        heard.next().await.ok_or("the subscription ended")?;
        received += 1;
    }
    println!("async-nats: {:.0} ns of CPU a message", (cpu_nanos() - before) as f64 / messages as f64);
    Ok(())
}
