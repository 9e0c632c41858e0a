//! The typical tokio echo: a current-thread runtime and a task per connection.

use std::io;
use std::net::TcpListener;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Bytes of a connection's buffer, the same as a receive buffer of the io_uring servers.
pub(super) const BUFFER_BYTES: usize = 16 * 1024;

/// Serves `listener` until the process ends.
pub(super) fn run(listener: TcpListener) -> io::Result<()> {
    for_each(listener, |stream| echo(stream, false))
}

/// Does the same, but each echo lets others run first.
pub(super) fn awaits(listener: TcpListener) -> io::Result<()> {
    for_each(listener, |stream| echo(stream, true))
}

/// Runs a task for each connection.
pub(super) fn for_each<F>(listener: TcpListener, serve: fn(TcpStream) -> F) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    tokio::runtime::Builder::new_current_thread().enable_io().build()?.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(serve(stream))),
                // Out of descriptors: let connections end before the next try.
                Err(_) => tokio::task::yield_now().await,
            }
        }
    })
}

/// Sends received bytes back until the peer ends or breaks the connection.
async fn echo(mut stream: TcpStream, awaits: bool) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        if awaits {
            tokio::task::yield_now().await;
        }
        stream.write_all(&buffer[..count]).await?;
    }
}
