//! compio with a multishot receive per connection, into buffers of the runtime's pool.

use std::io;
use std::pin::pin;

use common::BUFFER_BYTES;
use compio::BufResult;
use compio::io::{AsyncReadMulti, AsyncWriteExt};
use compio::net::TcpStream;
use futures_util::StreamExt;

fn main() -> io::Result<()> {
    rival_compio::run(async |stream| drop(raw(stream).await), async |stream| drop(lines(stream).await))
}

/// Sends each buffer of the pool back unchanged, without a copy.
async fn raw(stream: TcpStream) -> io::Result<()> {
    let (mut reader, mut writer) = (&stream, &stream);
    let mut arrivals = pin!(reader.read_multi(0));
    while let Some(arrival) = arrivals.next().await {
        match arrival {
            Ok(buffer) => writer.write_all(buffer).await.0?,
            Err(error) if is_pool_empty(&error) => {}
            Err(error) => return Err(error),
        };
    }
    Ok(())
}

/// Cuts lines by hand, and sends all that one buffer completes in one write.
async fn lines(stream: TcpStream) -> io::Result<()> {
    let (mut reader, mut writer) = (&stream, &stream);
    let mut arrivals = pin!(reader.read_multi(0));
    // The start of a line whose end has not arrived.
    let mut start = Vec::new();
    let mut output = Vec::with_capacity(2 * BUFFER_BYTES);
    while let Some(arrival) = arrivals.next().await {
        let buffer = match arrival {
            Ok(buffer) => buffer,
            Err(error) if is_pool_empty(&error) => continue,
            Err(error) => return Err(error),
        };
        if start.is_empty() {
            let taken = common::echo_lines(&buffer, &mut output)?;
            start.extend_from_slice(&buffer[taken..]);
        } else {
            start.extend_from_slice(&buffer);
            let taken = common::echo_lines(&start, &mut output)?;
            start.drain(..taken);
        }
        // Returned to the pool before the wait.
        drop(buffer);
        if !output.is_empty() {
            let BufResult(written, sent) = writer.write_all(output).await;
            written?;
            output = sent;
            output.clear();
        }
    }
    Ok(())
}

/// True if the pool was empty. The stream asks again at the next poll, when others may have
/// returned buffers.
fn is_pool_empty(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy
}
