//! WebSocket echo on tokio-tungstenite: a task per connection on one thread.

use std::io;

use common::{BUFFER_BYTES, MESSAGE_BYTES_MAX};
use futures_util::{FutureExt, SinkExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, accept_async_with_config};

/// The way in which a connection's messages are answered.
#[derive(Clone, Copy, Debug)]
pub enum Answers {
    /// A message is read, then sent: the first version of most programs.
    OneByOne,
    /// Every available message is answered, then all answers are sent in one write.
    Batched,
}

/// Accepts until the process ends, and gives each connection a task.
pub fn serve(answers: Answers) -> io::Result<()> {
    let address = common::websocket_arguments();
    tokio::runtime::Builder::new_current_thread().enable_io().build()?.block_on(async {
        let listener = TcpListener::from_std(common::listen(address)?)?;
        common::announce(listener.local_addr()?)?;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(echo(stream, answers))),
                // Out of descriptors: let connections end before the next try.
                Err(_) => tokio::task::yield_now().await,
            }
        }
    })
}

/// Buffers of the same size as everywhere here; by default each connection has 128 KiB to read into
/// from the start.
fn config() -> WebSocketConfig {
    WebSocketConfig::default().read_buffer_size(BUFFER_BYTES).max_message_size(Some(MESSAGE_BYTES_MAX))
}

async fn echo(stream: TcpStream, answers: Answers) -> Result<(), Error> {
    let mut socket = accept_async_with_config(stream, Some(config())).await?;
    match answers {
        Answers::OneByOne => one_by_one(&mut socket).await,
        Answers::Batched => batched(&mut socket).await,
    }
}

/// True for messages to echo: the library itself answers pings and closes.
fn has_payload(message: &Message) -> bool {
    message.is_binary() || message.is_text()
}

async fn one_by_one(socket: &mut WebSocketStream<TcpStream>) -> Result<(), Error> {
    while let Some(message) = socket.next().await {
        let message = message?;
        if has_payload(&message) {
            socket.send(message).await?;
        }
    }
    Ok(())
}

async fn batched(socket: &mut WebSocketStream<TcpStream>) -> Result<(), Error> {
    while let Some(message) = socket.next().await {
        let mut message = Some(message?);
        // Asks for messages without waiting for them. The loop above asks again, with a waker, for
        // one that was not there.
        while let Some(answered) = message {
            if has_payload(&answered) {
                socket.feed(answered).await?;
            }
            message = socket.next().now_or_never().flatten().transpose()?;
        }
        socket.flush().await?;
    }
    Ok(())
}
