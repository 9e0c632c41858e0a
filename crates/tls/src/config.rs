//! Configurations of a listener's TLS.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringserve_files::Stamp;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;

use crate::channel::Rules;
use crate::key_log::KeyLogFile;
use crate::names::{Names, Times, not_after};
use crate::stable::{self, Stable};
use crate::tickets::{self, Ticketer};
use crate::version::{Parts, Server, Version};
use crate::{Clients, Pem, Tickets, TlsError, provider};

/// TLS of a listener, versions 1.2 and 1.3: certificates and other settings. They are checked when
/// the server starts.
///
/// ```no_run
/// use ringserve_tls::{Clients, Pem, Tickets, Tls};
///
/// # fn main() -> Result<(), ringserve_tls::TlsError> {
/// let tls = Tls::server()
///     .certificate(Pem::file("cert.pem")?, Pem::file("key.pem")?)
///     .certificate_for("*.example.org", Pem::file("example.pem")?, Pem::file("example.key")?)
///     .tickets(Tickets::from_file("tickets.key")?)
///     .clients(Clients::required("ca.pem")?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tls {
    source: Source,
    rules: Rules,
    watch: Option<Duration>,
}

#[derive(Clone)]
enum Source {
    Own(Box<Own>),
    Given(Arc<ServerConfig>),
}

#[derive(Clone, Default)]
struct Own {
    /// Replaces the provider that the features select.
    provider: Option<Arc<CryptoProvider>>,
    certificates: Vec<(Option<String>, Pem, Pem)>,
    alpn: Option<Vec<Vec<u8>>>,
    tickets: Tickets,
    tickets_sent: Option<usize>,
    clients: Option<Clients>,
    key_log: Option<PathBuf>,
}

impl Tls {
    /// Creates the TLS of a server, without a certificate yet.
    pub fn server() -> Tls {
        Tls { source: Source::Own(Box::default()), rules: Rules::default(), watch: None }
    }

    /// Gives access to everything that rustls can do: `config` is used as it is, with its tickets,
    /// session storage and key log. Other settings of this value then have no effect, except
    /// [`require_close_notify`](Tls::require_close_notify). A configuration with early data is
    /// refused when the server starts, since rustls creates no unbuffered connection with it.
    ///
    /// A client that resumes a session of `config` is not verified again: neither against new
    /// authorities nor against the time. So if configurations trust different clients, their
    /// tickets must have different keys; ours do.
    pub fn from_config(config: Arc<ServerConfig>) -> Tls {
        Tls { source: Source::Given(config), rules: Rules::default(), watch: None }
    }

    /// The first expiry of its certificates, by name.
    pub(crate) fn expiries(&self) -> BTreeMap<String, u64> {
        let mut found = BTreeMap::new();
        let Source::Own(own) = &self.source else { return found };
        for (name, chain, _) in &own.certificates {
            let Some(not_after) = not_after(chain) else { continue };
            let earliest = found.entry(name.clone().unwrap_or_default()).or_insert(not_after);
            *earliest = not_after.min(*earliest);
        }
        found
    }

    fn own(mut self, change: impl FnOnce(&mut Own)) -> Tls {
        if let Source::Own(own) = &mut self.source {
            change(own);
        }
        self
    }

    /// Adds the certificate for clients that ask for no name, or for one without a certificate.
    /// `chain` is the server's certificate followed by those between it and its authority; `key` is
    /// its private key. If this is called twice, for an ECDSA and an RSA key, a client gets the
    /// first that it can use.
    pub fn certificate(self, chain: Pem, key: Pem) -> Tls {
        self.own(|own| own.certificates.push((None, chain, key)))
    }

    /// Adds a certificate for clients that ask for `name`: `www.example.org`, or `*.example.org`
    /// for all names with one more label. A full name has precedence over one with a star.
    pub fn certificate_for(self, name: impl Into<String>, chain: Pem, key: Pem) -> Tls {
        self.own(|own| own.certificates.push((Some(name.into()), chain, key)))
    }

    /// Sets the protocols (ALPN), the preferred one first. A client that offers only others is
    /// refused; a client that offers none is not. HTTP services set `h2` and `http/1.1` themselves.
    pub fn alpn<P: Into<Vec<u8>>>(self, protocols: impl IntoIterator<Item = P>) -> Tls {
        self.own(|own| own.alpn = Some(protocols.into_iter().map(Into::into).collect()))
    }

    /// Checks the files of certificates, keys and authorities every `interval`, and reads them
    /// again when one changes. If they cannot be used, the log names the file and the old
    /// certificate stays. A file that cannot be read, for example while no descriptor is left, is
    /// named once and tried again every `interval`. 0 s is treated as 1 s.
    pub fn watch_files(mut self, interval: Duration) -> Tls {
        self.watch = Some(if interval.is_zero() { Duration::from_secs(1) } else { interval });
        self
    }

    pub(crate) fn watch_interval(&self) -> Option<Duration> {
        self.watch
    }

    /// Sets the secret of tickets. Without it tickets are valid until the process ends.
    pub fn tickets(self, tickets: Tickets) -> Tls {
        self.own(|own| own.tickets = tickets)
    }

    /// Sets the number of tickets after a full handshake of TLS 1.3; 2 by default. Each costs some
    /// 250 bytes. With 0 no client resumes.
    pub fn tickets_sent(self, count: usize) -> Tls {
        self.own(|own| own.tickets_sent = Some(count))
    }

    /// Asks clients for certificates.
    pub fn clients(self, clients: Clients) -> Tls {
        self.own(|own| own.clients = Some(clients))
    }

    /// Appends the secrets of all connections to a file, so that recorded traffic can be read, by
    /// Wireshark for example. Only for debugging. The file is created for its owner alone; a link
    /// in its place is refused.
    pub fn key_log(self, file: impl Into<PathBuf>) -> Tls {
        self.own(|own| own.key_log = Some(file.into()))
    }

    /// The file to which secrets are appended.
    pub(crate) fn key_log_file(&self) -> Option<&Path> {
        match &self.source {
            Source::Own(own) => own.key_log.as_deref(),
            _ => None,
        }
    }

    /// Sets the cryptography, instead of the provider that the features select.
    pub fn provider(self, provider: Arc<CryptoProvider>) -> Tls {
        self.own(|own| own.provider = Some(provider))
    }

    /// Treats a peer that ends without `close_notify` as cut off: the connection ends with
    /// [`TlsTruncated`](ringserve_core::CloseReason::TlsTruncated). Off by default: many peers omit
    /// it, and most framings show where a frame is cut.
    pub fn require_close_notify(mut self, require: bool) -> Tls {
        self.rules.require_close_notify = require;
        self
    }

    /// The most bytes of plaintext in the records of the first 16 KiB of an answer, counted from
    /// the start or after a second of silence: 4096 unless set; from 512 to 16 384, the largest
    /// record. A peer can use the first bytes of a small record while the next one is still in
    /// flight. Each further record costs 22 to 29 bytes and a fraction of a microsecond.
    pub fn record_bytes(mut self, bytes: usize) -> Tls {
        self.rules.record_bytes = bytes;
        self
    }

    /// The same settings with all files read again.
    ///
    /// # Errors
    /// If one cannot be read.
    pub(crate) fn read_again(&self) -> Result<Tls, TlsError> {
        let mut again = self.clone();
        if let Source::Own(own) = &mut again.source {
            for (_, chain, key) in &mut own.certificates {
                (*chain, *key) = (chain.read_again()?, key.read_again()?);
            }
            own.clients = own.clients.as_ref().map(Clients::read_again).transpose()?;
        }
        Ok(again)
    }

    /// The files of these settings.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        self.pems().filter_map(|pem| pem.path().map(Into::into)).collect()
    }

    /// Values that change with the files.
    pub(crate) fn stamps(&self) -> Vec<Stamp> {
        self.pems().filter_map(Pem::stamp).collect()
    }

    fn pems(&self) -> impl Iterator<Item = &Pem> {
        let own = match &self.source {
            Source::Own(own) => Some(own),
            _ => None,
        };
        own.into_iter().flat_map(|own| {
            let certificates = own.certificates.iter().flat_map(|(_, chain, key)| [chain, key]);
            certificates.chain(own.clients.iter().flat_map(Clients::files))
        })
    }

    /// Creates a configuration of rustls. `secret` seals tickets if the program set none; it is set
    /// at its first use. `before` is the configuration in use.
    pub(crate) fn build(
        &self,
        secret: &mut Option<Arc<[u8]>>,
        before: Option<&Tls>,
    ) -> Result<Built, TlsError> {
        let in_use = before.map(Tls::shown).unwrap_or_default();
        let mut times = Times { in_use, warnings: Vec::new() };
        self.rules.check()?;
        let (server, alpn_by_service) = match &self.source {
            Source::Own(own) => {
                let provider = own.provider.clone().map_or_else(provider::provider, Ok)?;
                let server = own.build(Stable(provider), secret, &mut times)?;
                (server, own.alpn.is_none())
            }
            Source::Given(config) => (stable::server(config.clone(), None)?, false),
        };
        let Times { warnings, .. } = times;
        Ok(Built { server, alpn_by_service, rules: self.rules, warnings })
    }

    /// The first certificate of each chain.
    fn shown(&self) -> Vec<CertificateDer<'static>> {
        let Source::Own(own) = &self.source else { return Vec::new() };
        let chains = own.certificates.iter().filter_map(|(_, chain, _)| chain.certificates().ok());
        chains.filter_map(|chain| chain.into_iter().next()).collect()
    }
}

/// A configuration that was checked.
pub(crate) struct Built {
    pub(crate) server: Arc<dyn Server>,
    /// The program set no protocols.
    pub(crate) alpn_by_service: bool,
    pub(crate) rules: Rules,
    /// Faults that existed before.
    pub(crate) warnings: Vec<TlsError>,
}

impl Own {
    fn build<V: Version>(
        &self,
        version: V,
        secret: &mut Option<Arc<[u8]>>,
        times: &mut Times,
    ) -> Result<Arc<dyn Server>, TlsError> {
        if self.certificates.is_empty() {
            return Err(TlsError::new("there is no certificate: give one to `Tls::certificate`"));
        }
        let mut names = Names::default();
        for (name, chain, key) in &self.certificates {
            names.add(name.as_deref(), chain, key, |chain, key| version.key(chain, key), times)?;
        }
        let (clients, mut depends_on) = match &self.clients {
            Some(clients) => {
                let (clients, decides_by) = clients.verifier(&version)?;
                (Some(clients), decides_by)
            }
            None => (None, Vec::new()),
        };
        depends_on.push([V::SESSIONS, &names.names().join(" ")].concat().into_bytes());
        let alpn = self.alpn.clone().unwrap_or_default();
        if let Some(protocol) = alpn.iter().find(|protocol| !(1..=255).contains(&protocol.len())) {
            return Err(TlsError::new(format_args!(
                "a protocol of ALPN has {} bytes; it must have 1 to 255",
                protocol.len()
            )));
        }
        let secret = match (&self.tickets.secret, secret) {
            (Some(own), _) => own.clone(),
            (None, Some(secret)) => secret.clone(),
            (None, none) => none.insert(tickets::random_secret(|bytes| version.random(bytes))?).clone(),
        };
        let ticketer = match self.tickets_sent {
            Some(0) => None,
            _ => Some(Ticketer::new(version.cipher(&secret), &depends_on, tickets::now)?),
        };
        let key_log = self.key_log.as_deref().map(KeyLogFile::open).transpose()?;
        let tickets_sent = self.tickets_sent;
        version.server(Parts { names, clients, ticketer, tickets_sent, alpn, key_log })
    }
}

/// Keys are not printed.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::Own(own) => f
                .debug_struct("Tls")
                .field("certificates", &own.certificates)
                .field(
                    "alpn",
                    &own.alpn
                        .as_ref()
                        .map(|all| all.iter().map(|name| String::from_utf8_lossy(name)).collect::<Vec<_>>()),
                )
                .field("tickets", &own.tickets)
                .field("clients", &own.clients)
                .field("key_log", &own.key_log)
                .finish_non_exhaustive(),
            _ => f.write_str("Tls(of a configuration of rustls)"),
        }
    }
}
