//! Options of a connection.

use std::fmt;
use std::time::Duration;

#[cfg(feature = "tls")]
use ringserve_server::tls::TlsClient;

#[cfg(feature = "nkeys")]
use crate::nkeys::{KeyError, Signer};
use crate::protocol::info::Connect;

/// Options of a [`Nats`](crate::Nats): how it connects, and its bounds.
///
/// ```
/// use std::time::Duration;
///
/// use ringserve_nats::NatsOptions;
///
/// let options = NatsOptions::new("nats-1.internal:4222")
///     .server("nats-2.internal:4222")
///     .name("orders")
///     .user_password("ann", "secret")
///     .reconnect_max(Duration::from_secs(2));
/// # let _ = options;
/// ```
#[derive(Clone)]
pub struct NatsOptions {
    pub(crate) servers: Vec<String>,
    pub(crate) name: String,
    credentials: Credentials,
    pub(crate) echo: bool,
    pub(crate) pending_bytes_max: usize,
    pub(crate) queue_messages_max: usize,
    pub(crate) queue_bytes_max: usize,
    pub(crate) ping_interval: Duration,
    pub(crate) handshake_timeout: Duration,
    pub(crate) reconnect_max: Duration,
    #[cfg(feature = "tls")]
    pub(crate) tls: Option<TlsClient>,
}

#[derive(Clone)]
enum Credentials {
    None,
    Password(String, String),
    Token(String),
    #[cfg(feature = "nkeys")]
    Signed(Signer),
}

impl NatsOptions {
    /// Options with this first server: `NAME:PORT`, `IP:PORT` or `unix:PATH`; `nats://` before it
    /// is allowed, and without a port it is 4222. What is none of these is a failure of each
    /// attempt to connect, which the log says.
    pub fn new(server: impl Into<String>) -> NatsOptions {
        NatsOptions {
            servers: vec![server.into()],
            name: "ringserve".to_owned(),
            credentials: Credentials::None,
            echo: true,
            pending_bytes_max: 1 << 20,
            queue_messages_max: 4096,
            queue_bytes_max: 16 << 20,
            ping_interval: Duration::from_secs(30),
            handshake_timeout: Duration::from_secs(5),
            reconnect_max: Duration::from_secs(5),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Adds a server. One of them is connected to, chosen at random; the next one follows where
    /// that fails. Servers of the cluster that INFO names are added by themselves, at most 256.
    pub fn server(mut self, server: impl Into<String>) -> NatsOptions {
        self.servers.push(server.into());
        self
    }

    /// The name that the server shows for this client. Default `ringserve`.
    pub fn name(self, name: impl Into<String>) -> NatsOptions {
        NatsOptions { name: name.into(), ..self }
    }

    /// Authenticates by user and password. Later calls of this and of the like replace earlier
    /// ones.
    pub fn user_password(self, user: impl Into<String>, password: impl Into<String>) -> NatsOptions {
        NatsOptions { credentials: Credentials::Password(user.into(), password.into()), ..self }
    }

    /// Authenticates by a token.
    pub fn token(self, token: impl Into<String>) -> NatsOptions {
        NatsOptions { credentials: Credentials::Token(token.into()), ..self }
    }

    /// Authenticates by an NKEY: a text that begins with `SU`.
    ///
    /// # Errors
    /// If it is no seed of a user.
    #[cfg(feature = "nkeys")]
    pub fn nkey(self, seed: &str) -> Result<NatsOptions, KeyError> {
        Ok(NatsOptions { credentials: Credentials::Signed(Signer::from_seed(seed)?), ..self })
    }

    /// Authenticates by the text of a file of credentials, as `nsc` writes it: a JWT and the seed
    /// of its user.
    ///
    /// # Errors
    /// If one of the two is missing, or the seed is none.
    #[cfg(feature = "nkeys")]
    pub fn credentials(self, text: &str) -> Result<NatsOptions, KeyError> {
        Ok(NatsOptions { credentials: Credentials::Signed(Signer::from_credentials(text)?), ..self })
    }

    /// Connects over TLS, which begins with the first byte: the server is configured with
    /// `handshake_first`. Its certificate must have the name, or the address, that was given for
    /// it.
    #[cfg(feature = "tls")]
    pub fn tls(self, tls: TlsClient) -> NatsOptions {
        NatsOptions { tls: Some(tls), ..self }
    }

    /// Whether this client's subscriptions get what it publishes itself. Default true.
    pub fn echo(self, echo: bool) -> NatsOptions {
        NatsOptions { echo, ..self }
    }

    /// Bytes that may wait to be sent, with or without a connection; at least 4 KiB, default 1 MiB.
    /// Above it publishing fails with [`Full`](crate::NatsError::Full).
    /// [`Limits::outbox_bytes_max`](ringserve_server::Limits::outbox_bytes_max) of the server's
    /// first service has to be larger than this and one message together, as its default of 64 MiB
    /// is.
    pub fn pending_bytes_max(self, bytes: usize) -> NatsOptions {
        NatsOptions { pending_bytes_max: bytes.max(4096), ..self }
    }

    /// Messages and bytes that may wait in a subscription; at least 1 each, default 4096 and 16
    /// MiB. Above one of them the oldest messages go, and [`missed`](crate::Subscription::missed)
    /// counts them. A message that waits pins its receive buffer of 16 KiB as long as others do not
    /// share it, within
    /// [`ServerLimits::receive_bytes_max`](ringserve_server::limits::ServerLimits::receive_bytes_max).
    pub fn queue_max(self, messages: usize, bytes: usize) -> NatsOptions {
        NatsOptions { queue_messages_max: messages.max(1), queue_bytes_max: bytes.max(1), ..self }
    }

    /// The time of silence after which the server is asked whether it is there; the third one
    /// without an answer ends the connection. At least 10 ms, default 30 s.
    pub fn ping_interval(self, time: Duration) -> NatsOptions {
        NatsOptions { ping_interval: time.max(Duration::from_millis(10)), ..self }
    }

    /// The longest wait between two attempts to connect, of which a random part is waited; at least
    /// 50 ms, default 5 s. The first one after a loss waits at most 50 ms, and each further one up
    /// to twice as long.
    pub fn reconnect_max(self, time: Duration) -> NatsOptions {
        NatsOptions { reconnect_max: time.max(Duration::from_millis(50)), ..self }
    }

    /// The time for a connection, with TLS and authentication. Default 5 s.
    pub fn handshake_timeout(self, time: Duration) -> NatsOptions {
        NatsOptions { handshake_timeout: time, ..self }
    }

    /// The line that answers INFO.
    pub(crate) fn connect_line(&self, nonce: Option<&str>, has_tls: bool) -> String {
        let mut connect = Connect {
            tls_required: has_tls,
            lang: "rust",
            version: env!("CARGO_PKG_VERSION"),
            protocol: 1,
            echo: self.echo,
            headers: true,
            no_responders: true,
            name: &self.name,
            ..Connect::default()
        };
        match &self.credentials {
            Credentials::None => {}
            Credentials::Password(user, password) => {
                (connect.user, connect.pass) = (Some(user.as_str()), Some(password.as_str()));
            }
            Credentials::Token(token) => connect.auth_token = Some(token),
            #[cfg(feature = "nkeys")]
            Credentials::Signed(signer) => {
                // A JWT names its user; a key without one is the user.
                match signer.jwt() {
                    Some(jwt) => connect.jwt = Some(jwt),
                    None => connect.nkey = Some(signer.public_key()),
                }
                connect.sig = nonce.map(|nonce| signer.sign(nonce));
            }
        }
        let _ = nonce;
        connect.line()
    }
}

/// Without secrets.
impl fmt::Debug for NatsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsOptions")
            .field("servers", &self.servers)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
