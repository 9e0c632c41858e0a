//! Echo on glommio: a task per connection on one executor.

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};

use common::{BUFFER_BYTES, Mode, RING_ENTRIES};
use futures_lite::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use glommio::net::{Preallocated, TcpListener, TcpStream};
use glommio::{LocalExecutorBuilder, Placement};

fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    let listener = common::listen_blocking(address)?;
    let address = listener.local_addr()?;
    // Unbound, so that the affinity of the process is kept.
    let executor = LocalExecutorBuilder::new(Placement::Unbound)
        .ring_depth(RING_ENTRIES as usize)
        .make()
        .map_err(|error| io::Error::other(error.to_string()))?;
    executor.run(async move {
        // `TcpListener::bind` would listen with a backlog of 1024.
        #[expect(unsafe_code)]
        // SAFETY: the descriptor is a listening socket, and `into_raw_fd` gave its ownership away.
        let listener = unsafe { TcpListener::from_raw_fd(listener.into_raw_fd()) };
        common::announce(address)?;
        loop {
            match listener.accept().await {
                Ok(stream) => match mode {
                    Mode::Raw => drop(glommio::spawn_local(raw(stream)).detach()),
                    Mode::Lines => {
                        let stream = stream.buffered_with(Preallocated::new(BUFFER_BYTES));
                        drop(glommio::spawn_local(lines(stream)).detach());
                    }
                },
                // Out of descriptors: let connections end before the next try.
                Err(_) => glommio::yield_if_needed().await,
            }
        }
    })
}

/// Sends received bytes back until the peer ends or breaks the connection.
async fn raw(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count]).await?,
        }
    }
}

/// Cuts lines by hand out of the stream's buffer, since the library has no codec, and sends all
/// that one read completes in one write.
async fn lines(mut stream: TcpStream<Preallocated>) -> io::Result<()> {
    // The start of a line whose end has not arrived.
    let mut start = Vec::new();
    let mut output = Vec::with_capacity(2 * BUFFER_BYTES);
    loop {
        let arrived = stream.fill_buf().await?;
        let count = arrived.len();
        if count == 0 {
            return Ok(());
        }
        if start.is_empty() {
            let taken = common::echo_lines(arrived, &mut output)?;
            start.extend_from_slice(&arrived[taken..]);
        } else {
            start.extend_from_slice(arrived);
            let taken = common::echo_lines(&start, &mut output)?;
            start.drain(..taken);
        }
        AsyncBufRead::consume(std::pin::Pin::new(&mut stream), count);
        stream.write_all(&output).await?;
        output.clear();
    }
}
