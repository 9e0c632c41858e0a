//! Lines by `LinesCodec` of `tokio_util`: on ringserve, and on tokio in the fastest form that can
//! be written by hand.

use std::io;
use std::net::{SocketAddr, TcpListener};

use ringserve::codec::{CodecCx, CodecService, WithCodec};
use ringserve::framing::Raw;
use ringserve::server::Driver;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::bytes::BytesMut;
use tokio_util::codec::{Decoder, Encoder, LinesCodec, LinesCodecError};

use super::product::serve;
use super::tokio_echo::{self, BUFFER_BYTES};

struct Echo;

impl CodecService for Echo {
    type Codec = LinesCodec;
    type Session = ();
    type Error = LinesCodecError;

    fn codec(&self) -> LinesCodec {
        LinesCodec::new()
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
        cx.reply(line)
    }
}

/// Echoes the codec's lines on io_uring.
pub(super) fn ringserve(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Raw, Driver::IoUring, |_| WithCodec::new(Echo))
}

/// Does the same on epoll.
pub(super) fn ringserve_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, 1, Raw, Driver::Epoll, |_| WithCodec::new(Echo))
}

/// Does the same on tokio: the answers to all lines of a read are sent in one write.
pub(super) fn tokio_batched(listener: TcpListener) -> io::Result<()> {
    tokio_echo::for_each(listener, echo)
}

async fn echo(mut stream: TcpStream) -> io::Result<()> {
    let (mut codec, mut input) = (LinesCodec::new(), BytesMut::with_capacity(BUFFER_BYTES));
    let mut output = BytesMut::with_capacity(BUFFER_BYTES);
    while stream.read_buf(&mut input).await? > 0 {
        while let Some(line) = codec.decode(&mut input).map_err(io::Error::other)? {
            codec.encode(line, &mut output).map_err(io::Error::other)?;
        }
        stream.write_all(&output).await?;
        output.clear();
        input.reserve(BUFFER_BYTES);
    }
    Ok(())
}
