//! The TLS of a listener on all shards, which may be replaced while it is in use.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ringserve_core::{Channel, Transport};
use rustls::ServerConfig;
use rustls::server::UnbufferedServerConnection;

use crate::channel::{Common, TlsChannel};
use crate::config::Built;
use crate::{Tls, TlsError};

/// The TLS of a listener, looked at. Clones are the same one.
#[derive(Clone)]
pub struct TlsListener {
    shared: Arc<Shared>,
}

struct Shared {
    /// Grows with each replacement. A shard looks at it for each connection, and at what follows only if it grew.
    version: AtomicU64,
    current: Mutex<Current>,
}

struct Current {
    tls: Tls,
    built: Arc<Built>,
    /// What tickets are sealed with where the program gave nothing: the same after a replacement.
    secret: Option<Arc<[u8]>>,
}

impl TlsListener {
    /// # Errors
    /// If a file holds what it should not, a key does not fit its certificate, or a certificate is not within its time.
    pub fn new(tls: Tls) -> Result<TlsListener, TlsError> {
        let mut secret = None;
        let built = Arc::new(tls.build(&mut secret)?);
        let current = Mutex::new(Current { tls, built, secret });
        Ok(TlsListener { shared: Arc::new(Shared { version: AtomicU64::new(0), current }) })
    }

    /// New connections have `tls` from now on. Those that are there keep what they have.
    ///
    /// # Errors
    /// If it cannot be used: then the old one stays.
    pub fn replace(&self, tls: Tls) -> Result<(), TlsError> {
        let mut current = self.current();
        let mut secret = current.secret.clone();
        let built = Arc::new(tls.build(&mut secret)?);
        *current = Current { tls, built, secret };
        self.shared.version.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Reads all files of certificates, keys and authorities again.
    ///
    /// # Errors
    /// If what they hold now cannot be used: then the old one stays.
    pub fn reload(&self) -> Result<(), TlsError> {
        let again = self.current().tls.read_again()?;
        self.replace(again)
    }

    /// The files that [`reload`](TlsListener::reload) reads.
    pub fn files(&self) -> Vec<PathBuf> {
        self.current().tls.files()
    }

    /// What rustls has of it now.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.current().built.config.clone()
    }

    /// What the connections of one shard have in common.
    pub fn transport(&self) -> TlsTransport {
        let version = self.shared.version.load(Ordering::Acquire);
        let kept = Kept::of(&self.current().built);
        TlsTransport { listener: self.clone(), version: Cell::new(version), kept: RefCell::new(kept) }
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Current> {
        self.shared.current.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl fmt::Debug for TlsListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TlsListener").field(&self.current().tls).finish()
    }
}

/// TLS of a listener on one shard.
pub struct TlsTransport {
    listener: TlsListener,
    version: Cell<u64>,
    kept: RefCell<Kept>,
}

struct Kept {
    /// A copy, since the count of the shared one would be written by all shards.
    config: Arc<ServerConfig>,
    common: Rc<Common>,
}

impl Kept {
    fn of(built: &Built) -> Kept {
        Kept {
            config: Arc::new((*built.config).clone()),
            common: Rc::new(Common::new(built.require_close_notify)),
        }
    }
}

impl Transport for TlsTransport {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn Channel>> {
        let version = self.listener.shared.version.load(Ordering::Acquire);
        if version != self.version.get() {
            *self.kept.borrow_mut() = Kept::of(&self.listener.current().built);
            self.version.set(version);
        }
        let kept = self.kept.borrow();
        let connection = UnbufferedServerConnection::new(kept.config.clone()).ok()?;
        Some(Box::new(TlsChannel::new(connection, kept.common.clone(), out)))
    }
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsTransport")
    }
}
