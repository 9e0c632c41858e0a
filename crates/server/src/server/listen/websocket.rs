//! Listeners that speak WebSocket.

use std::any::TypeId;

use ringserve_websocket::{Messages, TextLines, WebSocketTransport};

use super::addr::Bind;
use super::transport::MakeTransport;
use crate::error::Error;

/// Puts WebSocket above what the listeners of a service with this framing have else. One of whole
/// messages is reached by nothing else.
pub(crate) fn prepare(binds: &mut [Bind], framing: TypeId) -> Result<(), Error> {
    let takes_messages = [TypeId::of::<Messages>(), TypeId::of::<TextLines>()].contains(&framing);
    for bind in binds {
        let Some(options) = bind.websocket.clone() else {
            if takes_messages {
                let text = format!(
                    "the service at {} takes messages of WebSocket, and its endpoint does not speak it; add `.websocket()` to that",
                    bind.addr
                );
                return Err(Error::Services(text));
            }
            continue;
        };
        let make = move || match takes_messages {
            true => WebSocketTransport::messages(&options),
            false => WebSocketTransport::stream(&options),
        };
        bind.transport = Some(MakeTransport::new(make).above(bind.transport.take()));
    }
    Ok(())
}
