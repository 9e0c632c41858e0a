//! compio with a buffer per connection, which moves into the ring and back.

use std::io;

use common::BUFFER_BYTES;
use compio::BufResult;
use compio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use compio::net::TcpStream;

fn main() -> io::Result<()> {
    rival_compio::run(async |stream| drop(raw(stream).await), async |stream| drop(lines(stream).await))
}

/// Sends received bytes back until the peer ends or breaks the connection.
async fn raw(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    loop {
        let BufResult(read, filled) = stream.read(buffer).await;
        if read? == 0 {
            return Ok(());
        }
        // A read sets the length of the vector to the bytes received.
        let BufResult(written, mut sent) = stream.write_all(filled).await;
        written?;
        sent.clear();
        buffer = sent;
    }
}

/// Cuts lines by hand, and sends all that one read completes in one write: the library's `Framed`
/// would write each one separately.
async fn lines(mut stream: TcpStream) -> io::Result<()> {
    let mut input = Vec::with_capacity(2 * BUFFER_BYTES);
    let mut output = Vec::with_capacity(2 * BUFFER_BYTES);
    loop {
        input.reserve(BUFFER_BYTES);
        let BufResult(read, filled) = stream.append(input).await;
        input = filled;
        if read? == 0 {
            return Ok(());
        }
        let taken = common::echo_lines(&input, &mut output)?;
        input.drain(..taken);
        if !output.is_empty() {
            let BufResult(written, sent) = stream.write_all(output).await;
            written?;
            output = sent;
            output.clear();
        }
    }
}
