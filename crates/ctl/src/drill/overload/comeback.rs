//! The return of all clients at once, after all lost their server at once.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::peer::{connect, descriptors, echo, of_client, run_local};
use super::process::Process;
use super::rows::{Bar, Outcome, Row};
use crate::client::Failure;

/// Clients, where descriptors suffice.
const CLIENTS: usize = 19_000;

/// Descriptors that a server needs in addition to its connections, and this process in addition to
/// its clients.
const SPARE: u64 = 500;

/// Clients that connect together at first: they have to meet a server that waits for them.
const AT_ONCE: usize = 500;

/// Time limit for all clients to connect at first.
const COME_WITHIN: Duration = Duration::from_secs(120);

/// The bar: seconds within which all have returned.
const BACK_WITHIN: f64 = 10.0;

/// Time for which the drill waits for them.
const WAITED: Duration = Duration::from_secs(20);

/// Wait of a refused client before it returns: this, and up to as much more by its number.
const AGAIN_MILLIS: usize = 20;

/// Counts of all clients together.
struct Count {
    served: Cell<usize>,
    first: Semaphore,
}

/// Connects all clients, restarts the server, and waits for all clients to return.
pub(super) fn run(name: &str, process: &mut Process) -> Result<Outcome, Failure> {
    let clients = CLIENTS.min(usize::try_from(descriptors().saturating_sub(SPARE)).unwrap_or(CLIENTS));
    run_local(async {
        let count = Rc::new(Count { served: Cell::new(0), first: Semaphore::new(AT_ONCE) });
        for number in 0..clients {
            spawn_local(client(number, process.addr(), count.clone()));
        }
        if !all_within(COME_WITHIN, &count, clients).await {
            let served = count.served.get();
            return Err(Failure(format!(
                "{served} of {clients} clients were served at first: the machine is too slow"
            )));
        }
        let begun = Instant::now();
        process.begins_again()?;
        let is_all = all_within(WAITED, &count, 2 * clients).await;
        let time = begun.elapsed().as_secs_f64();
        let back = count.served.get() - clients;
        process.has_begun()?;
        let told = process.told()?;
        let bars = vec![
            Bar::at_least("clients back", "", back as f64, clients as f64),
            Bar::at_most("after", "s", time, BACK_WITHIN),
            Bar::at_most("packets lost in the accept queue", "", told.lost as f64, 0.0),
        ];
        let fewer = if clients < CLIENTS { "; RLIMIT_NOFILE allows no more" } else { "" };
        let accepted = told.accepted;
        let why = format!("{accepted} connections were accepted{fewer}");
        let waited = if is_all { "" } else { "; not waited for longer" };
        Ok(Outcome::of(Row::Return, name, bars, format!("{why}{waited}")))
    })
}

/// True once this number was served in total.
async fn all_within(time: Duration, count: &Count, served: usize) -> bool {
    let all = async {
        while count.served.get() < served {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(time, all).await.is_ok()
}

/// Waits until it is served, and once more after it lost the server.
async fn client(number: usize, addr: SocketAddr, count: Rc<Count>) {
    let first = count.first.acquire().await;
    let mut stream = served(number, addr).await;
    drop(first);
    count.served.set(count.served.get() + 1);
    // Until the server ends.
    let _ended = stream.read(&mut [0]).await;
    drop(stream);
    let _stays = served(number, addr).await;
    count.served.set(count.served.get() + 1);
    std::future::pending::<()>().await;
}

/// Connects until it is served.
async fn served(number: usize, addr: SocketAddr) -> TcpStream {
    loop {
        if let Ok(stream) = once(number, addr).await {
            return stream;
        }
        sleep(Duration::from_millis((AGAIN_MILLIS + number % AGAIN_MILLIS) as u64)).await;
    }
}

async fn once(number: usize, addr: SocketAddr) -> io::Result<TcpStream> {
    let mut stream = connect(of_client(number), addr).await?;
    echo(&mut stream).await?;
    Ok(stream)
}
