//! One line to every listener: `+` makes a connection a listener, and any other line goes to all of
//! them.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;

use ringserve::framing::Lines;
use ringserve::handle::LocalHandle;
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Server, Service};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::broadcast::{self, Receiver, Sender, error::RecvError};

use super::product;

/// The line by which a connection becomes a listener. It is answered with itself.
pub(crate) const LISTEN: &[u8] = b"+";

#[derive(Default)]
struct Fanout {
    listeners: RefCell<Vec<LocalHandle>>,
}

impl Service for Fanout {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if *frame == *LISTEN {
            self.listeners.borrow_mut().push(cx.local_handle());
            cx.reply(frame);
            return Ok(());
        }
        // A closed listener is forgotten; a full one misses the line.
        self.listeners.borrow_mut().retain(|listener| {
            let _ = listener.push(&*frame);
            !listener.is_gone()
        });
        Ok(())
    }
}

/// The product, on io_uring.
pub(super) fn ringserve(address: SocketAddr) -> io::Result<()> {
    on(address, Driver::IoUring)
}

/// The product, on epoll.
pub(super) fn ringserve_on_epoll(address: SocketAddr) -> io::Result<()> {
    on(address, Driver::Epoll)
}

fn on(address: SocketAddr, driver: Driver) -> io::Result<()> {
    let server = Server::bind(address).framing(Lines::default()).driver(driver).shards(1).pin(false);
    product::wait(server.start(|_shard| Fanout::default()).map_err(io::Error::other)?)
}

/// Lines that may wait for a listener with tokio.
const LINES_MAX: usize = 1024;

/// The typical tokio program: a broadcast channel, and a task for each connection.
pub(super) fn tokio(listener: TcpListener) -> io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_io().build()?.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (sender, _) = broadcast::channel::<Rc<[u8]>>(LINES_MAX);
        tokio::task::LocalSet::new()
            .run_until(async {
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => drop(tokio::task::spawn_local(connection(stream, sender.clone()))),
                        Err(_) => tokio::task::yield_now().await,
                    }
                }
            })
            .await
    })
}

async fn connection(stream: TcpStream, sender: Sender<Rc<[u8]>>) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let (mut read, mut line) = (BufReader::new(read), Vec::new());
    while read.read_until(b'\n', &mut line).await? > 0 {
        if line.strip_suffix(b"\n") == Some(LISTEN) {
            write.write_all(&line).await?;
            return listen(write, sender.subscribe()).await;
        }
        // Without listeners the line goes nowhere.
        let _ = sender.send(Rc::from(&*line));
        line.clear();
    }
    Ok(())
}

async fn listen(
    mut write: tokio::net::tcp::OwnedWriteHalf,
    mut receiver: Receiver<Rc<[u8]>>,
) -> io::Result<()> {
    loop {
        match receiver.recv().await {
            Ok(line) => write.write_all(&line).await?,
            // Too slow: it misses the dropped lines.
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return Ok(()),
        }
    }
}
