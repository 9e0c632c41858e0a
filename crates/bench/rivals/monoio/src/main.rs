//! Echo on monoio: a task per connection, whose buffer moves into the ring and back.

use std::io;

use common::{BUFFER_BYTES, Mode, RING_ENTRIES};
use monoio::buf::IoBufMut;
use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::{TcpListener, TcpStream};
use monoio::{IoUringDriver, RuntimeBuilder};

fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    let mut ring = io_uring::IoUring::builder();
    // The library submits from one thread and waits in the ring, which is the condition for these
    // two.
    ring.setup_single_issuer().setup_defer_taskrun();
    let mut runtime =
        RuntimeBuilder::<IoUringDriver>::new().with_entries(RING_ENTRIES).uring_builder(ring).build()?;
    runtime.block_on(async move {
        let listener = TcpListener::from_std(common::listen_blocking(address)?)?;
        common::announce(listener.local_addr()?)?;
        loop {
            // If it fails, out of descriptors, the next try is another round through the ring, in
            // which connections can end.
            if let Ok((stream, _)) = listener.accept().await {
                match mode {
                    Mode::Raw => drop(monoio::spawn(raw(stream))),
                    Mode::Lines => drop(monoio::spawn(lines(stream))),
                }
            }
        }
    })
}

/// Sends received bytes back until the peer ends or breaks the connection.
async fn raw(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    loop {
        let (read, filled) = stream.read(buffer).await;
        if read? == 0 {
            return Ok(());
        }
        // A read sets the length of the vector to the bytes received.
        let (written, sent) = stream.write_all(filled).await;
        written?;
        buffer = sent;
    }
}

/// Cuts lines by hand, since the library has no codec for them, and sends all that one read
/// completes in one write.
async fn lines(mut stream: TcpStream) -> io::Result<()> {
    let mut input = Vec::with_capacity(2 * BUFFER_BYTES);
    let mut output = Vec::with_capacity(2 * BUFFER_BYTES);
    loop {
        input.reserve(BUFFER_BYTES);
        let start = input.len();
        let (read, slice) = stream.read(input.slice_mut(start..)).await;
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
