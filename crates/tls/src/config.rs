//! What a listener's TLS is to be.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection, WebPkiClientVerifier};

use crate::clients::Verifier;
use crate::key_log::KeyLogFile;
use crate::names::Names;
use crate::tickets::{self, Ticketer};
use crate::{Clients, Pem, Tickets, TlsError, provider};

/// TLS of a listener, version 1.2 and 1.3: certificates, and what else differs from the defaults. It is looked at when the server
/// starts.
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
    require_close_notify: bool,
    watch: Option<Duration>,
}

#[derive(Clone)]
enum Source {
    Own(Own),
    Given(Arc<ServerConfig>),
}

#[derive(Clone, Default)]
struct Own {
    provider: Option<Arc<CryptoProvider>>,
    certificates: Vec<(Option<String>, Pem, Pem)>,
    alpn: Option<Vec<Vec<u8>>>,
    tickets: Tickets,
    tickets_sent: Option<usize>,
    clients: Option<Clients>,
    key_log: Option<PathBuf>,
}

impl Tls {
    /// TLS of a server, to which certificates are added.
    pub fn server() -> Tls {
        Tls { source: Source::Own(Own::default()), require_close_notify: false, watch: None }
    }

    /// All that rustls can: `config` is used as it is, with its tickets, its storage of sessions and its key log. What else is said
    /// here of a configuration does nothing then, but for [`require_close_notify`](Tls::require_close_notify). One that takes early
    /// data is refused when the server starts, as one of which rustls makes no connection.
    ///
    /// A client that resumes a session of `config` is not verified again: not against other authorities, and not against the time.
    /// So where configurations differ in which clients they believe, their tickets must have different keys; ours have.
    pub fn from_config(config: Arc<ServerConfig>) -> Tls {
        Tls { source: Source::Given(config), require_close_notify: false, watch: None }
    }

    fn own(mut self, change: impl FnOnce(&mut Own)) -> Tls {
        if let Source::Own(own) = &mut self.source {
            change(own);
        }
        self
    }

    /// The certificate for clients that ask for no name, or for one for which there is none. `chain` is the server's certificate and
    /// those between it and its authority, in this order; `key` is its private key. Called twice, as for an ECDSA and an RSA key, a
    /// client is shown the first that it can use.
    pub fn certificate(self, chain: Pem, key: Pem) -> Tls {
        self.own(|own| own.certificates.push((None, chain, key)))
    }

    /// A certificate for clients that ask for `name`: `www.example.org`, or `*.example.org` for all names with one more label. A name
    /// given in full goes before one with a star.
    pub fn certificate_for(self, name: impl Into<String>, chain: Pem, key: Pem) -> Tls {
        self.own(|own| own.certificates.push((Some(name.into()), chain, key)))
    }

    /// The protocols that are spoken (ALPN), the preferred one first. A client that offers others alone is refused; one that offers
    /// none is not. HTTP services set `h2` and `http/1.1` themselves.
    pub fn alpn<P: Into<Vec<u8>>>(self, protocols: impl IntoIterator<Item = P>) -> Tls {
        self.own(|own| own.alpn = Some(protocols.into_iter().map(Into::into).collect()))
    }

    /// Looks at the files of certificates, keys and authorities every `interval`, and reads them again where one changed. What cannot
    /// be used then is named in the log, and the old one stays. 0 s is taken for 1.
    pub fn watch_files(mut self, interval: Duration) -> Tls {
        self.watch = Some(if interval.is_zero() { Duration::from_secs(1) } else { interval });
        self
    }

    pub(crate) fn watch_interval(&self) -> Option<Duration> {
        self.watch
    }

    /// What tickets are sealed with. Without it they are good until the process ends.
    pub fn tickets(self, tickets: Tickets) -> Tls {
        self.own(|own| own.tickets = tickets)
    }

    /// Tickets that are sent after a full handshake of TLS 1.3: 2 by default. Each costs some 250 bytes. With 0 no client resumes.
    pub fn tickets_sent(self, count: usize) -> Tls {
        self.own(|own| own.tickets_sent = Some(count))
    }

    /// Clients are asked for certificates.
    pub fn clients(self, clients: Clients) -> Tls {
        self.own(|own| own.clients = Some(clients))
    }

    /// Appends the secrets of all connections to a file, so that what was recorded of them can be read, as by Wireshark. For finding
    /// faults alone.
    pub fn key_log(self, file: impl Into<PathBuf>) -> Tls {
        self.own(|own| own.key_log = Some(file.into()))
    }

    /// The file in which secrets are logged.
    pub(crate) fn key_log_file(&self) -> Option<&Path> {
        match &self.source {
            Source::Own(own) => own.key_log.as_deref(),
            Source::Given(_) => None,
        }
    }

    /// The cryptography, instead of what the features have.
    pub fn provider(self, provider: Arc<CryptoProvider>) -> Tls {
        self.own(|own| own.provider = Some(provider))
    }

    /// A peer that ends its side without saying so by TLS (`close_notify`) was cut off, and the connection ends with
    /// [`TlsTruncated`](ringserve_core::CloseReason::TlsTruncated). Off by default: many peers do that, and most framings show where a
    /// frame is cut.
    pub fn require_close_notify(mut self, require: bool) -> Tls {
        self.require_close_notify = require;
        self
    }

    /// The same with all files read again.
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

    /// The files that it was read from.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let Source::Own(own) = &self.source else { return Vec::new() };
        let certificates = own.certificates.iter().flat_map(|(_, chain, key)| [chain, key]);
        let clients = own.clients.iter().flat_map(Clients::files);
        certificates.chain(clients).filter_map(|pem| pem.path().map(Into::into)).collect()
    }

    /// As rustls has it. `secret` is what tickets are sealed with if the program has given none; it is set where it is first needed.
    pub(crate) fn build(&self, secret: &mut Option<Arc<[u8]>>) -> Result<Built, TlsError> {
        let (config, clients, alpn_by_service) = match &self.source {
            Source::Own(own) => {
                let (config, clients) = own.build(secret)?;
                (Arc::new(config), clients, own.alpn.is_none())
            }
            Source::Given(config) => (config.clone(), None, false),
        };
        if config.max_early_data_size > 0 {
            return Err(TlsError::new(
                "the configuration takes early data, which can be replayed: set `max_early_data_size` to 0",
            ));
        }
        // What rustls refuses it refuses for each connection.
        UnbufferedServerConnection::new(config.clone()).map_err(TlsError::new)?;
        Ok(Built { config, clients, alpn_by_service, require_close_notify: self.require_close_notify })
    }
}

/// A configuration that was looked at.
pub(crate) struct Built {
    pub(crate) config: Arc<ServerConfig>,
    /// What decides about clients, where they are asked for certificates.
    pub(crate) clients: Option<Arc<dyn ClientCertVerifier>>,
    /// The program said nothing of protocols.
    pub(crate) alpn_by_service: bool,
    pub(crate) require_close_notify: bool,
}

impl Own {
    fn build(
        &self,
        secret: &mut Option<Arc<[u8]>>,
    ) -> Result<(ServerConfig, Option<Arc<dyn ClientCertVerifier>>), TlsError> {
        let provider = match &self.provider {
            Some(provider) => provider.clone(),
            None => provider::provider()?,
        };
        if self.certificates.is_empty() {
            return Err(TlsError::new("there is no certificate: give one to `Tls::certificate`"));
        }
        let mut names = Names::default();
        for (name, chain, key) in &self.certificates {
            names.add(name.as_deref(), chain, key, &provider)?;
        }
        let (clients, mut depends_on) = match &self.clients {
            Some(clients) => {
                let Verifier { verifier, decides_by } = clients.verifier(&provider)?;
                (Some(verifier), decides_by)
            }
            None => (None, Vec::new()),
        };
        depends_on.push(names.names().join(" ").into_bytes());
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
            (None, none) => none.insert(tickets::random_secret(&provider)?).clone(),
        };
        let mut config = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::new)?
            .with_client_cert_verifier(clients.clone().unwrap_or_else(WebPkiClientVerifier::no_client_auth))
            .with_cert_resolver(Arc::new(names));
        // All of them are good; scanners want the server to choose.
        config.ignore_client_order = true;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        if self.tickets_sent != Some(0) {
            config.ticketer = Arc::new(Ticketer::new(&provider, &secret, &depends_on, tickets::now)?);
        }
        config.send_tls13_tickets = self.tickets_sent.unwrap_or(config.send_tls13_tickets);
        config.alpn_protocols = alpn;
        if let Some(file) = &self.key_log {
            config.key_log = Arc::new(KeyLogFile::open(file)?);
        }
        Ok((config, clients))
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
            Source::Given(_) => f.write_str("Tls(of a configuration of rustls)"),
        }
    }
}
