//! The TLS of listeners. Without the feature `tls` none has any.

#[cfg(feature = "tls")]
use std::fmt;

#[cfg(feature = "tls")]
use ringserve_base::lines::{info, warn};
#[cfg(feature = "tls")]
use ringserve_base::log_thread::hand_over;
use ringserve_core::Address;
#[cfg(feature = "tls")]
use ringserve_tls::{TlsError, TlsListener};

use super::transport::MakeTransport;
use crate::error::Error;
use crate::shard::remote::control::ReplaceableTls;

/// The TLS of a listener, if it has any.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsLayer {
    #[cfg(feature = "tls")]
    listener: Option<TlsListener>,
}

#[cfg(feature = "tls")]
impl TlsLayer {
    pub(crate) fn of(listener: TlsListener) -> TlsLayer {
        TlsLayer { listener: Some(listener) }
    }

    pub(crate) fn is_set(&self) -> bool {
        self.listener.is_some()
    }

    /// This one, or what all listeners have.
    pub(crate) fn or(self, all: &TlsLayer) -> TlsLayer {
        TlsLayer { listener: self.listener.or_else(|| all.listener.clone()) }
    }

    /// The transport for a service that speaks `protocols`.
    pub(crate) fn transport(
        &self,
        protocols: &'static [&'static str],
    ) -> Result<Option<MakeTransport>, Error> {
        let Some(tls) = self.listener.clone() else { return Ok(None) };
        tls.prepare().map_err(Error::Tls)?;
        Ok(Some(MakeTransport::new(move || tls.transport_for(protocols))))
    }

    /// Begins to watch its files, and says what is dangerous.
    pub(crate) fn begin(&self, addr: &Address) -> Result<(), Error> {
        let Some(tls) = &self.listener else { return Ok(()) };
        if let Some(file) = tls.key_log_file() {
            warn!(
                "the secrets of connections to {addr} are logged in {}: a reader of that file can decrypt them",
                file.display()
            );
        }
        tls.warn_by(caution);
        tls.watch(report).map_err(Error::Thread)
    }

    /// The TLS of all listeners, which can be replaced while the server runs.
    pub(crate) fn all<'a>(layers: impl Iterator<Item = &'a TlsLayer>) -> ReplaceableTls {
        ReplaceableTls::of(layers.filter_map(|layer| layer.listener.clone()))
    }
}

#[cfg(not(feature = "tls"))]
impl TlsLayer {
    pub(crate) fn is_set(&self) -> bool {
        false
    }

    pub(crate) fn or(self, _all: &TlsLayer) -> TlsLayer {
        self
    }

    pub(crate) fn transport(
        &self,
        _protocols: &'static [&'static str],
    ) -> Result<Option<MakeTransport>, Error> {
        Ok(None)
    }

    pub(crate) fn begin(&self, _addr: &Address) -> Result<(), Error> {
        Ok(())
    }

    pub(crate) fn all<'a>(_layers: impl Iterator<Item = &'a TlsLayer>) -> ReplaceableTls {
        ReplaceableTls::default()
    }
}

/// The program's log may block, and the replacement holds.
#[cfg(feature = "tls")]
fn caution(warning: fmt::Arguments<'_>) {
    let _handing = hand_over(None);
    warn!("TLS: {warning}");
}

/// The program's log may block, and the thread that watches goes on.
#[cfg(feature = "tls")]
fn report(reloaded: Result<(), TlsError>) {
    let _handing = hand_over(None);
    match reloaded {
        Ok(()) => info!("TLS: certificates were read again"),
        Err(error) => warn!("TLS: the old certificates stay: {error}"),
    }
}
