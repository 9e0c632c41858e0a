//! The TLS of a listener on all shards, which may be replaced in use.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use ringserve_core::{Transport, TransportConn};
use ringserve_files::Watcher;
use rustls::ServerConfig;

use crate::config::Built;
use crate::{Tls, TlsError};

/// The TLS of a listener in use. Clones share it: a program that keeps one can replace the server's
/// certificates.
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
    /// Grows with each replacement. A shard reads it for each connection, and the fields below only
    /// if it grew.
    version: AtomicU64,
    /// Shards take this lock too, so no file is read under it.
    current: Mutex<Current>,
    /// Held during a replacement, so that replacements wait for each other. The secret seals
    /// tickets if the program set none: it stays the same after a replacement.
    secret: Mutex<Option<Arc<[u8]>>>,
    /// The receiver of warnings.
    warn: OnceLock<fn(fmt::Arguments<'_>)>,
    /// True once its files are watched.
    is_watched: AtomicBool,
}

struct Current {
    tls: Tls,
    /// `None` until it was checked.
    built: Option<Arc<Built>>,
}

/// Checked when the server starts.
impl From<Tls> for TlsListener {
    fn from(tls: Tls) -> TlsListener {
        TlsListener {
            shared: Arc::new(Shared {
                version: AtomicU64::new(0),
                current: Mutex::new(Current { tls, built: None }),
                secret: Mutex::new(None),
                warn: OnceLock::new(),
                is_watched: AtomicBool::new(false),
            }),
        }
    }
}

impl TlsListener {
    /// Checks a configuration.
    ///
    /// # Errors
    /// If a file has wrong content, a key does not fit its certificate, or a certificate is not
    /// within its time.
    pub fn new(tls: Tls) -> Result<TlsListener, TlsError> {
        let listener = TlsListener::from(tls);
        listener.prepare()?;
        Ok(listener)
    }

    /// Checks the configuration, unless it was already checked.
    ///
    /// # Errors
    /// Those of [`new`](TlsListener::new).
    #[doc(hidden)]
    pub fn prepare(&self) -> Result<(), TlsError> {
        let secret = &mut *self.writing();
        if self.current().built.is_some() {
            return Ok(());
        }
        let tls = self.current().tls.clone();
        self.set(secret, tls)
    }

    fn set(&self, secret: &mut Option<Arc<[u8]>>, tls: Tls) -> Result<(), TlsError> {
        let in_use = {
            let current = self.current();
            current.built.is_some().then(|| current.tls.clone())
        };
        let built = Arc::new(tls.build(secret, in_use.as_ref())?);
        let key_log = tls.key_log_file().map(Path::to_owned);
        let before = std::mem::replace(&mut *self.current(), Current { tls, built: Some(built.clone()) });
        self.shared.version.fetch_add(1, Ordering::Release);
        if let Some(warn) = self.shared.warn.get() {
            built.warnings.iter().for_each(|warning| warn(format_args!("{warning}; it stays in use")));
            if let Some(file) = key_log.filter(|file| before.tls.key_log_file() != Some(file)) {
                warn(format_args!("the secrets of connections are logged in {}", file.display()));
            }
        }
        Ok(())
    }

    /// Uses `tls` for new connections from now on. Open connections keep their certificates.
    ///
    /// # Errors
    /// If `tls` cannot be used. Then the old one stays.
    pub fn replace(&self, tls: Tls) -> Result<(), TlsError> {
        self.set(&mut self.writing(), tls)
    }

    /// Reads all files of certificates, keys and authorities again. It waits for the disk, and for
    /// another replacement: call it on a thread that is not a shard.
    ///
    /// # Errors
    /// If their content cannot be used. Then the old one stays. A certificate in use may have
    /// expired.
    pub fn reload(&self) -> Result<(), TlsError> {
        let secret = &mut *self.writing();
        let tls = self.current().tls.clone();
        self.set(secret, tls.read_again()?)
    }

    /// The times at which the certificates in use expire, in seconds since the beginning of 1970:
    /// the earliest for each name, which is empty for the certificate of all other names.
    pub(crate) fn expiries(&self) -> BTreeMap<String, u64> {
        // Not under the lock, which shards take too.
        let tls = self.current().tls.clone();
        tls.expiries()
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

    /// Reports warnings after a replacement, about dangerous settings and expired certificates, to
    /// the first `warn` that is set.
    #[doc(hidden)]
    pub fn warn_by(&self, warn: fn(fmt::Arguments<'_>)) {
        let _ = self.shared.warn.set(warn);
    }

    /// Starts to watch its files, if the program wants that ([`Tls::watch_files`]), on a thread
    /// that ends with the last clone of this. `report` is called after each reading, and once if
    /// they cannot be read. Does nothing if that thread already runs.
    ///
    /// # Errors
    /// If no thread can be started.
    #[doc(hidden)]
    pub fn watch(&self, report: fn(Result<(), TlsError>)) -> io::Result<()> {
        let Some(interval) = self.current().tls.watch_interval() else { return Ok(()) };
        if self.shared.is_watched.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let (shared, stamps) = (Arc::downgrade(&self.shared), self.current().tls.stamps());
        let mut watcher = Watcher::of_judged(stamps);
        let watch = move || {
            loop {
                thread::sleep(interval);
                let Some(shared) = shared.upgrade() else { return };
                if let Some(reloaded) = (TlsListener { shared }).look(&mut watcher) {
                    report(reloaded);
                }
            }
        };
        thread::Builder::new().name("ringserve-tls".into()).spawn(watch).map(drop).inspect_err(|_| {
            self.shared.is_watched.store(false, Ordering::Relaxed);
        })
    }

    /// Reads its files again if they changed. `None` if there is nothing to report.
    fn look(&self, watcher: &mut Watcher) -> Option<Result<(), TlsError>> {
        // Nothing waits for a check that finds no change, however slow the disk is.
        let read = || {
            let secret = self.writing();
            let tls = self.current().tls.clone();
            let again = tls.read_again()?;
            let stamps = again.stamps();
            Ok(((again, secret), stamps))
        };
        watcher.look(&self.files(), read, |(again, mut secret)| self.set(&mut secret, again))
    }

    /// The current configuration of rustls.
    ///
    /// # Panics
    /// If it was made from a [`Tls`] and no server has checked it.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.built().server.config()
    }

    /// The state that the connections of one shard share.
    ///
    /// # Panics
    /// If it was made from a [`Tls`] and no server has checked it.
    pub fn transport(&self) -> TlsTransport {
        self.transport_for(&[])
    }

    /// The same state for a service that speaks `protocols` (ALPN) if the program sets none.
    /// Services may share a listener.
    ///
    /// # Panics
    /// If it was made from a [`Tls`] and no server has checked it.
    #[doc(hidden)]
    pub fn transport_for(&self, protocols: &'static [&'static str]) -> TlsTransport {
        let version = self.shared.version.load(Ordering::Acquire);
        let kept = of_shard(&self.built(), protocols);
        TlsTransport {
            listener: self.clone(),
            protocols,
            version: Cell::new(version),
            kept: RefCell::new(kept),
        }
    }

    /// # Panics
    /// If it was not checked.
    fn built(&self) -> Arc<Built> {
        self.current().built.clone().expect("TLS that was looked at")
    }

    fn writing(&self) -> std::sync::MutexGuard<'_, Option<Arc<[u8]>>> {
        self.shared.secret.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
    /// The protocols of the service above it.
    protocols: &'static [&'static str],
    version: Cell<u64>,
    kept: RefCell<Box<dyn Transport>>,
}

fn of_shard(built: &Built, protocols: &[&str]) -> Box<dyn Transport> {
    built.server.transport(built.alpn_by_service.then_some(protocols), built.rules)
}

impl Transport for TlsTransport {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        let version = self.listener.shared.version.load(Ordering::Acquire);
        if version != self.version.get() {
            *self.kept.borrow_mut() = of_shard(&self.listener.built(), self.protocols);
            self.version.set(version);
        }
        self.kept.borrow().begin(out)
    }
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsTransport")
    }
}
