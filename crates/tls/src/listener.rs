//! The TLS of a listener on all shards, which may be replaced while it is in use.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::SystemTime;

use ringserve_core::{Channel, Transport};
use rustls::ServerConfig;
use rustls::server::UnbufferedServerConnection;

use crate::channel::{Common, TlsChannel};
use crate::config::Built;
use crate::{Tls, TlsError};

/// The TLS of a listener, while it is in use. Clones are the same one: a program that keeps one can replace what the server has.
///
/// ```no_run
/// # use ringserve_tls::{Pem, Tls, TlsListener};
/// # fn main() -> Result<(), ringserve_tls::TlsError> {
/// let tls = TlsListener::new(Tls::server().certificate(Pem::file("cert.pem")?, Pem::file("key.pem")?))?;
/// // The server was given a clone. The files changed:
/// if let Err(error) = tls.reload() {
///     eprintln!("the old certificate stays: {error}");
/// }
/// # Ok(())
/// # }
/// ```
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
    /// `None` until it was looked at.
    built: Option<Arc<Built>>,
    /// What tickets are sealed with where the program gave nothing: the same after a replacement.
    secret: Option<Arc<[u8]>>,
}

/// It is looked at when the server starts.
impl From<Tls> for TlsListener {
    fn from(tls: Tls) -> TlsListener {
        let current = Current { tls, built: None, secret: None };
        TlsListener { shared: Arc::new(Shared { version: AtomicU64::new(0), current: Mutex::new(current) }) }
    }
}

impl TlsListener {
    /// One that was looked at.
    ///
    /// # Errors
    /// If a file holds what it should not, a key does not fit its certificate, or a certificate is not within its time.
    pub fn new(tls: Tls) -> Result<TlsListener, TlsError> {
        let listener = TlsListener::from(tls);
        listener.prepare()?;
        Ok(listener)
    }

    /// Looks at it, unless that was done.
    ///
    /// # Errors
    /// Those of [`new`](TlsListener::new).
    #[doc(hidden)]
    pub fn prepare(&self) -> Result<(), TlsError> {
        let mut current = self.current();
        if current.built.is_some() {
            return Ok(());
        }
        let tls = current.tls.clone();
        self.set(&mut current, tls)
    }

    fn set(&self, current: &mut Current, tls: Tls) -> Result<(), TlsError> {
        let built = tls.build(&mut current.secret)?;
        current.built = Some(Arc::new(built));
        current.tls = tls;
        self.shared.version.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// New connections have `tls` from now on. Those that are there keep what they have.
    ///
    /// # Errors
    /// If it cannot be used: then the old one stays.
    pub fn replace(&self, tls: Tls) -> Result<(), TlsError> {
        self.set(&mut self.current(), tls)
    }

    /// Reads all files of certificates, keys and authorities again.
    ///
    /// # Errors
    /// If what they hold now cannot be used: then the old one stays.
    pub fn reload(&self) -> Result<(), TlsError> {
        let mut current = self.current();
        let again = current.tls.read_again()?;
        self.set(&mut current, again)
    }

    /// The files that [`reload`](TlsListener::reload) reads.
    pub fn files(&self) -> Vec<PathBuf> {
        self.current().tls.files()
    }

    /// The file in which the secrets of connections are logged.
    #[doc(hidden)]
    pub fn key_log_file(&self) -> Option<PathBuf> {
        self.current().tls.key_log_file().map(Into::into)
    }

    /// Starts to watch its files, where the program wants that ([`Tls::watch_files`]), on a thread that ends with the last clone of
    /// this. `report` is told of each time that they were read again.
    ///
    /// # Errors
    /// If there can be no thread.
    #[doc(hidden)]
    pub fn watch(&self, report: fn(Result<(), TlsError>)) -> io::Result<()> {
        let Some(interval) = self.current().tls.watch_interval() else { return Ok(()) };
        let (shared, mut seen) = (Arc::downgrade(&self.shared), Stamp::of(&self.files()));
        let watch = move || {
            loop {
                thread::sleep(interval);
                let Some(shared) = shared.upgrade() else { return };
                let listener = TlsListener { shared };
                let stamp = Stamp::of(&listener.files());
                if stamp != seen {
                    seen = stamp;
                    report(listener.reload());
                }
            }
        };
        thread::Builder::new().name("ringserve-tls".into()).spawn(watch).map(drop)
    }

    /// What rustls has of it now.
    ///
    /// # Panics
    /// If it was made from a [`Tls`] and no server has looked at it.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.built().config.clone()
    }

    /// What the connections of one shard have in common.
    ///
    /// # Panics
    /// If it was made from a [`Tls`] and no server has looked at it.
    pub fn transport(&self) -> TlsTransport {
        self.transport_for(&[])
    }

    /// The same, of a service that speaks `protocols` (ALPN) if the program says nothing else. Services may share a listener.
    ///
    /// # Panics
    /// If it was made from a [`Tls`] and no server has looked at it.
    #[doc(hidden)]
    pub fn transport_for(&self, protocols: &'static [&'static str]) -> TlsTransport {
        let version = self.shared.version.load(Ordering::Acquire);
        let kept = Kept::of(&self.built(), protocols);
        TlsTransport {
            listener: self.clone(),
            protocols,
            version: Cell::new(version),
            kept: RefCell::new(kept),
        }
    }

    /// # Panics
    /// If it was not looked at.
    fn built(&self) -> Arc<Built> {
        self.current().built.clone().expect("TLS that was looked at")
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

/// What shows that a file changed: its time and its size.
#[derive(PartialEq, Eq)]
struct Stamp(Vec<Option<(SystemTime, u64)>>);

impl Stamp {
    fn of(files: &[PathBuf]) -> Stamp {
        let stamp = |file| fs::metadata(file).and_then(|data| Ok((data.modified()?, data.len()))).ok();
        Stamp(files.iter().map(stamp).collect())
    }
}

/// TLS of a listener on one shard.
pub struct TlsTransport {
    listener: TlsListener,
    /// Those of the service behind it.
    protocols: &'static [&'static str],
    version: Cell<u64>,
    kept: RefCell<Kept>,
}

struct Kept {
    /// A copy, since the count of the shared one would be written by all shards.
    config: Arc<ServerConfig>,
    common: Rc<Common>,
}

impl Kept {
    fn of(built: &Built, protocols: &[&str]) -> Kept {
        let mut config = (*built.config).clone();
        if built.alpn_by_service {
            config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        }
        Kept {
            config: Arc::new(config),
            common: Rc::new(Common::new(built.require_close_notify, built.clients.clone())),
        }
    }
}

impl Transport for TlsTransport {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn Channel>> {
        let version = self.listener.shared.version.load(Ordering::Acquire);
        if version != self.version.get() {
            *self.kept.borrow_mut() = Kept::of(&self.listener.built(), self.protocols);
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
