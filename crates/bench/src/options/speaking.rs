//! Options shared by the subcommands that exchange messages with servers that echo.

use std::io;

use clap::Args;

use super::refused;
use crate::steps::Shape;
use crate::websocket::MESSAGE_BYTES_MAX;
use crate::wire::{Handshakes, Layer};

/// The layer of the messages.
#[derive(Args)]
pub(super) struct Speaking {
    /// Speak TLS: 1.3, AES-128-GCM, P-256; the generator's end is not counted. With whole
    /// handshakes, or resumed ones.
    #[arg(long, num_args = 0..=1, default_missing_value = "full")]
    tls: Option<Handshakes>,
    /// Speak WebSocket: each message is one of bytes, masked, on connections that requested it
    /// before. The generator prepares its frames once. Messages of at most 1 MiB.
    #[arg(long, conflicts_with = "tls")]
    websocket: bool,
}

impl Speaking {
    pub(super) fn layer(&self) -> Layer {
        match self.tls {
            Some(handshakes) => Layer::Tls(handshakes),
            None if self.websocket => Layer::WebSocket,
            None => Layer::Plain,
        }
    }
}

/// Refuses messages that are too large for their layer.
pub(super) fn check_bytes(shape: Shape) -> io::Result<()> {
    if shape.layer == Layer::WebSocket && shape.bytes > MESSAGE_BYTES_MAX {
        let bytes = shape.bytes;
        return Err(refused(format!("--bytes {bytes}: at most {MESSAGE_BYTES_MAX} with --websocket")));
    }
    Ok(())
}
