//! Echo on ntex with its own runtime, neon, and its codecs. The package selects the driver: epoll
//! in `ntex`, io_uring in `ntex-uring`.

use std::io;

use common::{BACKLOG, BUFFER_BYTES, LINE_BYTES_MAX, Mode};
use memchr::memchr;
use ntex::codec::{BytesCodec, Decoder, Encoder};
use ntex::io::{Io, IoConfig};
use ntex::service::{cfg::SharedCfg, fn_service};
use ntex::util::{Buf, BytePages, Bytes, BytesMut};

#[ntex::main]
async fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    let listener = common::listen(address)?;
    common::announce(listener.local_addr()?)?;
    // Reading stops at the high mark, which has to be above the longest line; for bytes it is the
    // size of a buffer, which is also the default.
    let high = match mode {
        Mode::Raw => BUFFER_BYTES,
        Mode::Lines => 2 * LINE_BYTES_MAX,
    };
    let config = SharedCfg::new("echo").add(IoConfig::new().set_read_buf(high, 1024, 128));
    let builder = ntex::server::build().workers(1).backlog(BACKLOG).disable_signals();
    match mode {
        Mode::Raw => builder.listen("echo", listener, async |_| fn_service(|io| echo(io, BytesCodec)))?,
        Mode::Lines => builder.listen("echo", listener, async |_| fn_service(|io| echo(io, Lines)))?,
    }
    .config("echo", config)
    .run()
    .await
}

/// Encodes each decoded item. The runtime sends all encoded bytes once there is nothing more to
/// decode, and `recv` waits while too much waits to be sent.
async fn echo<C>(io: Io, codec: C) -> io::Result<()>
where
    C: Decoder<Item = Bytes, Error = io::Error> + Encoder<Item = Bytes, Error = io::Error>,
{
    while let Ok(Some(item)) = io.recv(&codec).await {
        io.encode(item, &codec)?;
    }
    io.shutdown().await
}

/// Lines of bytes, without their ends.
struct Lines;

impl Decoder for Lines {
    type Item = Bytes;
    type Error = io::Error;

    fn decode(&self, input: &mut BytesMut) -> io::Result<Option<Bytes>> {
        let end = memchr(b'\n', input);
        if end.unwrap_or(input.len()) > LINE_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is longer than 64 KiB"));
        }
        Ok(end.map(|end| {
            let mut line = input.split_to(end);
            input.advance(1);
            if line.last() == Some(&b'\r') {
                line.truncate(end - 1);
            }
            line
        }))
    }
}

impl Encoder for Lines {
    type Item = Bytes;
    type Error = io::Error;

    fn encodev(&self, line: Bytes, output: &mut BytePages) -> io::Result<()> {
        // Copies, so that a line and its end share a page, and so do short lines: `append` may
        // start a new one.
        output.extend_from_slice(&line);
        output.extend_from_slice(b"\n");
        Ok(())
    }
}
