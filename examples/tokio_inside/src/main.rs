//! Handlers that use parts of tokio: a timer, a channel to a task, a connection of tokio's, a local
//! task.
//!
//!     cargo run --release -p example-tokio-inside
//!     printf 'wait 200\ncount\nfetch 127.0.0.1:7000\n' | nc -N 127.0.0.1 7000
//!
//! With a feature and `--runtime tokio-uring` files are read by io_uring too:
//!
//!     cargo run --release -p example-tokio-inside --features runtime-tokio-uring -- --runtime tokio-uring
//!     printf 'file /etc/hostname\n' | nc -N 127.0.0.1 7000

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::log::LogOptions;
use ringserve::server::{Driver, Runtime};
use ringserve::{Cx, Frame, Server, Service};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

/// Answers lines: `wait MS`, `count`, `fetch ADDR:PORT`, `file PATH`; everything else is sent back.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// tokio or tokio-uring.
    #[arg(long, default_value = "tokio", value_name = "NAME")]
    runtime: Runtime,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The time that `fetch` waits for an answer.
const FETCH_MAX: Duration = Duration::from_secs(2);

/// The most bytes of a file that tokio-uring reads.
#[cfg(feature = "runtime-tokio-uring")]
const FILE_BYTES_MAX: usize = 64 << 10;

struct Answers {
    runtime: Runtime,
    /// A channel to the task that counts for this shard.
    counter: mpsc::Sender<oneshot::Sender<u64>>,
}

impl Answers {
    /// Runs on the shard's thread, inside its runtime.
    fn new(runtime: Runtime) -> Answers {
        let (counter, mut questions) = mpsc::channel::<oneshot::Sender<u64>>(100);
        spawn_local(async move {
            let mut count = 0;
            while let Some(answer) = questions.recv().await {
                count += 1;
                // The asker may have gone on.
                let _ = answer.send(count);
            }
        });
        Answers { runtime, counter }
    }

    async fn count(&self) -> io::Result<u64> {
        let (answer, answered) = oneshot::channel();
        self.counter.send(answer).await.map_err(io::Error::other)?;
        answered.await.map_err(io::Error::other)
    }

    async fn file(&self, path: &str) -> io::Result<Vec<u8>> {
        match self.runtime {
            #[cfg(feature = "runtime-tokio-uring")]
            Runtime::TokioUring => {
                let path = path.to_owned();
                // A task, since the call is dropped if its peer goes away. An open of tokio-uring
                // that is dropped loses its descriptor.
                spawn_local(async move {
                    let file = ringserve::tokio_uring::fs::File::open(path).await?;
                    let (read, mut bytes) = file.read_at(Vec::with_capacity(FILE_BYTES_MAX), 0).await;
                    // Also after a read that failed: it is closed, or its descriptor is lost.
                    file.close().await?;
                    bytes.truncate(read?);
                    Ok(bytes)
                })
                .await?
            }
            _ => {
                let path = path.to_owned();
                tokio::task::spawn_blocking(move || std::fs::read(path)).await?
            }
        }
    }
}

/// The first line that a server at this address answers to a line.
async fn fetch(addr: &str) -> io::Result<String> {
    let mut stream = BufReader::new(TcpStream::connect(addr).await?);
    stream.write_all(b"hello\n").await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    Ok(line)
}

impl Service for Answers {
    type Session = ();
    type Error = io::Error;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> io::Result<()> {
        let line = String::from_utf8_lossy(&frame);
        let mut answer = String::new();
        let failed = |error: io::Error| format!("failed: {error}");
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("wait", millis) => {
                let millis = millis.parse().unwrap_or(100).min(10_000);
                sleep(Duration::from_millis(millis)).await;
                let _ = write!(answer, "waited {millis} ms");
            }
            ("count", _) => {
                let _ = write!(answer, "{}", self.count().await?);
            }
            ("fetch", addr) => match timeout(FETCH_MAX, fetch(addr)).await {
                Ok(fetched) => answer = fetched.unwrap_or_else(failed),
                Err(_) => answer.push_str("failed: no answer in time"),
            },
            ("file", path) => {
                let read = self.file(path).await;
                answer = read.map_or_else(failed, |bytes| String::from_utf8_lossy(&bytes).into_owned());
            }
            _ => answer = line.into_owned(),
        }
        // One line each.
        cx.reply(answer.lines().next().unwrap_or_default().as_bytes());
        Ok(())
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    if args.runtime == Runtime::Own {
        eprintln!("--runtime own: this example needs a runtime; choose tokio or tokio-uring");
        std::process::exit(2);
    }
    let mut server =
        Server::bind(args.listen).driver(args.driver).runtime(args.runtime).framing(Lines::default());
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    server.serve(move |_shard| Answers::new(args.runtime))
}
