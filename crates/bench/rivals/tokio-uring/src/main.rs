//! Echo on tokio-uring: a task per connection, whose buffer moves into the ring and back.
//!
//! Buffers are not registered: that saves the kernel nothing when it copies to and from a socket,
//! and would lock memory for every connection.

use std::io;

use common::{BUFFER_BYTES, Mode, RING_ENTRIES};
use tokio_uring::buf::BoundedBuf;
use tokio_uring::net::{TcpListener, TcpStream};

fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    let listener = common::listen_blocking(address)?;
    let address = listener.local_addr()?;
    let mut ring = tokio_uring::uring_builder();
    // One thread submits, and completions need not interrupt it. Not `setup_defer_taskrun`: the
    // library waits with epoll on the ring, not in it.
    ring.setup_single_issuer().setup_coop_taskrun();
    tokio_uring::builder().entries(RING_ENTRIES).uring_builder(&ring).start(async move {
        let listener = TcpListener::from_std(listener);
        common::announce(address)?;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match mode {
                    Mode::Raw => drop(tokio_uring::spawn(raw(stream))),
                    Mode::Lines => drop(tokio_uring::spawn(lines(stream))),
                },
                // Out of descriptors. The next try is another round through the ring, in which
                // connections can end.
                Err(_) => tokio_uring::no_op().await?,
            }
        }
    })
}

/// Sends received bytes back until the peer ends or breaks the connection.
async fn raw(stream: TcpStream) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    loop {
        let (read, filled) = stream.read(buffer).await;
        let count = read?;
        if count == 0 {
            return Ok(());
        }
        let (written, slice) = stream.write_all(filled.slice(..count)).await;
        written?;
        buffer = slice.into_inner();
    }
}

/// Cuts lines by hand, since the library has no codec, and sends all that one read completes in one
/// write.
async fn lines(stream: TcpStream) -> io::Result<()> {
    let mut input = Vec::with_capacity(2 * BUFFER_BYTES);
    let mut output = Vec::with_capacity(2 * BUFFER_BYTES);
    loop {
        input.reserve(BUFFER_BYTES);
        let start = input.len();
        let (read, slice) = stream.read(input.slice(start..)).await;
        input = slice.into_inner();
        if read? == 0 {
            return Ok(());
        }
        let taken = common::echo_lines(&input, &mut output)?;
        input.drain(..taken);
        if !output.is_empty() {
            let (written, sent) = stream.write_all(output).await;
            written?;
            output = sent;
            output.clear();
        }
    }
}
