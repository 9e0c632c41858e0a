//! The server of a drill: a process with the settings and the behaviour that its cause needs.

use std::convert::Infallible;
use std::hint::black_box;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringserve::admin::Admin;
use ringserve::framing::Lines;
use ringserve::limits::ServerLimits;
use ringserve::net::SocketOptions;
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Limits, Server, Service};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::causes::Cause;
use crate::client::Failure;

/// Time for which a handler computes.
const COMPUTES: Duration = Duration::from_secs(3);

/// Time for which a call waits: as long as it may.
const SLOW: Duration = Duration::from_secs(3600);

/// Descriptors of a process that has few: a shard takes 32 of them, and the endpoint its own.
const DESCRIPTORS: u64 = 160;

/// Content of a reply that is sent again and again.
static FLOOD: [u8; 32 << 10] = [b'x'; 32 << 10];

/// Does what its frames order.
struct Victim {
    lock: Arc<Mutex<()>>,
}

impl Service for Victim {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        match line.first() {
            Some(b'L') => drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner)),
            Some(b'C') => {
                let begun = Instant::now();
                while begun.elapsed() < COMPUTES {
                    black_box((0..10_000_u64).fold(0, |sum, n| black_box(sum ^ n)));
                }
            }
            Some(b'F') => {
                while !cx.is_closed() {
                    cx.ready().await;
                    cx.reply(&FLOOD[..]);
                }
            }
            Some(b'S') => cx.sleep(SLOW).await,
            Some(b'D') => {}
            _ => cx.reply(line),
        }
        Ok(())
    }
}

/// Serves until its input ends, when the drill is over or was killed.
pub fn serve(cause: Cause, admin: &Path) -> Result<u8, Failure> {
    if cause == Cause::Descriptors {
        let few = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
        setrlimit(Resource::Nofile, few)
            .map_err(|error| Failure(format!("RLIMIT_NOFILE cannot be changed: {error}")))?;
    }
    let lock = Arc::new(Mutex::new(()));
    let held = lock.clone();
    thread::spawn(move || {
        let _held = held.lock();
        loop {
            thread::park();
        }
    });
    let server = set(cause).admin(Admin::new(format!("unix:{}", admin.display())));
    let started = server.start(move |_shard| Victim { lock: lock.clone() });
    let running =
        started.map_err(|error| Failure(format!("the server of the drill does not start: {error}")))?;
    println!("{}", running.local_addrs()[0]);
    let _ended = std::io::stdin().read(&mut [0]);
    running.abort();
    // A handler may be blocked for longer than any wait.
    std::process::exit(0);
}

/// A server with the settings of the cause.
fn set(cause: Cause) -> Server<Lines> {
    let server = Server::bind("127.0.0.1:0").framing(Lines::default());
    let (limits, all) = (Limits::default(), ServerLimits::default());
    match cause {
        Cause::Backlog => server.shards(1).sockets(SocketOptions::default().backlog(1)),
        Cause::Table => server.shards(2).server_limits(all.connections_max(16)),
        Cause::Descriptors => server.shards(1).driver(Driver::Epoll),
        Cause::Memory => {
            let buffer = 4096;
            server.shards(1).server_limits(all.receive_buffer_bytes(buffer).receive_bytes_max(2 * buffer))
        }
        Cause::Reader => server.shards(1).limits(limits.write_stall_timeout(Duration::from_secs(2))),
        Cause::Lock | Cause::Cpu => server.shards(2),
        Cause::Conntrack | Cause::Quota | Cause::Slow => server.shards(1),
    }
}
