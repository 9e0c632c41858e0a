//! Echo on tokio: a task per connection, and lines by the codec of tokio-util.

use std::io;
use std::net::SocketAddr;

use common::{BUFFER_BYTES, LINE_BYTES_MAX, Mode};
use futures_util::{FutureExt, SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::codec::{Framed, LinesCodec, LinesCodecError};

/// The way in which a connection's lines are answered.
#[derive(Clone, Copy, Debug)]
pub enum Answers {
    /// A line is read, then sent: the first version of most programs.
    OneByOne,
    /// Every available line is answered, then all answers are sent in one write: the version after
    /// a look at the profile.
    Batched,
}

/// Accepts until the process ends, and gives each connection a task.
pub async fn serve(mode: Mode, address: SocketAddr, answers: Answers) -> io::Result<()> {
    let listener = TcpListener::from_std(common::listen(address)?)?;
    common::announce(listener.local_addr()?)?;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match (mode, answers) {
                (Mode::Raw, _) => drop(tokio::spawn(raw(stream))),
                (Mode::Lines, Answers::OneByOne) => drop(tokio::spawn(lines(stream))),
                (Mode::Lines, Answers::Batched) => drop(tokio::spawn(batched_lines(stream))),
            },
            // Out of descriptors: let connections end before the next try.
            Err(_) => tokio::task::yield_now().await,
        }
    }
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

fn framed(stream: TcpStream) -> Framed<TcpStream, LinesCodec> {
    Framed::with_capacity(stream, LinesCodec::new_with_max_length(LINE_BYTES_MAX), BUFFER_BYTES)
}

async fn lines(stream: TcpStream) -> Result<(), LinesCodecError> {
    let mut framed = framed(stream);
    while let Some(line) = framed.next().await {
        framed.send(line?).await?;
    }
    Ok(())
}

async fn batched_lines(stream: TcpStream) -> Result<(), LinesCodecError> {
    let mut framed = framed(stream);
    // Up to one read's worth is sent in one write: by default, `feed` writes at 8 KiB.
    framed.set_backpressure_boundary(LINE_BYTES_MAX);
    while let Some(line) = framed.next().await {
        framed.feed(line?).await?;
        // Asks for lines without waiting for them. The loop above asks again, with a waker, for one
        // that was not there.
        while let Some(Some(line)) = framed.next().now_or_never() {
            framed.feed(line?).await?;
        }
        SinkExt::<String>::flush(&mut framed).await?;
    }
    Ok(())
}
