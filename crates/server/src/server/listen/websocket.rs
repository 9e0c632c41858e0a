//! Listeners that speak WebSocket. Without the feature `websocket` none does.

use std::any::TypeId;

use ringserve_core::Address;
#[cfg(feature = "websocket")]
use ringserve_websocket::{Messages, TextLines, WebSocketOptions, WebSocketTransport};

use super::transport::MakeTransport;
use crate::error::Error;

/// The WebSocket of a listener, if it has any.
#[derive(Clone, Debug, Default)]
pub(crate) struct WebSocketLayer {
    #[cfg(feature = "websocket")]
    options: Option<WebSocketOptions>,
}

#[cfg(feature = "websocket")]
impl WebSocketLayer {
    pub(crate) fn of(options: WebSocketOptions) -> WebSocketLayer {
        WebSocketLayer { options: Some(options) }
    }

    /// This one, or what all listeners have.
    pub(crate) fn or(self, all: &WebSocketLayer) -> WebSocketLayer {
        WebSocketLayer { options: self.options.or_else(|| all.options.clone()) }
    }

    /// The transport of a listener at `addr` for a service with this framing, above what the
    /// listener has else. A service of whole messages is reached by nothing else.
    pub(crate) fn above(
        &self,
        lower: Option<MakeTransport>,
        addr: &Address,
        framing: TypeId,
    ) -> Result<Option<MakeTransport>, Error> {
        let takes_messages = [TypeId::of::<Messages>(), TypeId::of::<TextLines>()].contains(&framing);
        let Some(options) = self.options.clone() else {
            if takes_messages {
                return Err(Error::Services(format!(
                    "the service at {addr} takes messages of WebSocket, and its endpoint does not speak it; add `.websocket()` to that"
                )));
            }
            return Ok(lower);
        };
        let make = move || match takes_messages {
            true => WebSocketTransport::messages(&options),
            false => WebSocketTransport::stream(&options),
        };
        Ok(Some(MakeTransport::new(make).above(lower)))
    }
}

#[cfg(not(feature = "websocket"))]
impl WebSocketLayer {
    pub(crate) fn or(self, _all: &WebSocketLayer) -> WebSocketLayer {
        self
    }

    pub(crate) fn above(
        &self,
        lower: Option<MakeTransport>,
        _addr: &Address,
        _framing: TypeId,
    ) -> Result<Option<MakeTransport>, Error> {
        Ok(lower)
    }
}
