//! Listeners with TLS.

use std::fmt;

use ringserve_base::lines::{info, warn};
use ringserve_base::log_thread::hand_over;
use ringserve_tls::{ServerTls, TlsError};

use super::addr::Bind;
use super::transport::MakeTransport;
use crate::error::Error;

/// Looks at the TLS of a service's listeners, for a service that speaks `protocols`.
pub(crate) fn prepare(binds: &mut [Bind], protocols: &'static [&'static str]) -> Result<(), Error> {
    for bind in binds {
        if let Some(tls) = bind.tls.clone() {
            tls.prepare().map_err(Error::Tls)?;
            bind.transport = Some(MakeTransport::new(move || tls.transport_for(protocols)));
        }
    }
    Ok(())
}

/// TLS that can be replaced while the server runs.
pub(crate) fn all<'a>(binds: impl Iterator<Item = &'a Bind>) -> ServerTls {
    binds.filter_map(|bind| bind.tls.clone()).collect()
}

/// Begins to watch the files of all, and says what is dangerous.
pub(crate) fn begin<'a>(binds: impl Iterator<Item = &'a Bind>) -> Result<(), Error> {
    for bind in binds {
        let Some(tls) = &bind.tls else { continue };
        if let Some(file) = tls.key_log_file() {
            warn!(
                "the secrets of connections to {} are logged in {}: a reader of that file can decrypt them",
                bind.addr,
                file.display()
            );
        }
        tls.warn_by(caution);
        tls.watch(report).map_err(Error::Thread)?;
    }
    Ok(())
}

/// The program's log may block, and the replacement holds.
fn caution(warning: fmt::Arguments<'_>) {
    let _handing = hand_over(None);
    warn!("TLS: {warning}");
}

/// The program's log may block, and the thread that watches goes on.
fn report(reloaded: Result<(), TlsError>) {
    let _handing = hand_over(None);
    match reloaded {
        Ok(()) => info!("TLS: certificates were read again"),
        Err(error) => warn!("TLS: the old certificates stay: {error}"),
    }
}
