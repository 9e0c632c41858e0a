//! Tickets, with which a client resumes a session without a full handshake.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, NONCE_LEN, OutboundPlainMessage,
};
use rustls::crypto::tls13::HkdfExpander;
use rustls::crypto::{CryptoProvider, SecureRandom};
use rustls::server::ProducesTickets;
use rustls::{ContentType, ProtocolVersion, SupportedCipherSuite, Tls13CipherSuite};

use crate::TlsError;

/// Seconds for which one key makes tickets. It opens them for the same time again.
const EPOCH: u64 = 6 * 60 * 60;

/// The fewest bytes of a secret: the length of the key that is derived from it.
const SECRET_BYTES_MIN: usize = 32;

/// The most bytes of a session in a ticket. It holds the client's chain of certificates; the ciphers take one record.
const SESSION_BYTES_MAX: usize = 15 * 1024;

/// The secret of a server's tickets. Keys are derived from the secret, the time and the configuration, and change every 6
/// hours, so all shards make and open tickets without asking each other. A ticket is announced as good for 6 hours; the server
/// accepts it for 6 to 12 hours, by its age. A client that resumes gets new tickets, and its certificates are verified again.
#[derive(Clone, Default)]
pub struct Tickets {
    pub(crate) secret: Option<Arc<[u8]>>,
}

impl Tickets {
    /// A secret of this process: tickets are good on all its shards, until it ends. The default.
    pub fn random() -> Tickets {
        Tickets { secret: None }
    }

    /// A secret of at least 32 bytes from `file`: tickets are good after a restart too, and at all servers with the same file
    /// and the same configuration. A reader of the file can decrypt recorded TLS 1.2 connections.
    ///
    /// ```sh
    /// head -c 48 /dev/urandom > tickets.key && chmod 600 tickets.key
    /// ```
    ///
    /// # Errors
    /// If the file cannot be read or is too short.
    pub fn from_file(file: impl Into<PathBuf>) -> Result<Tickets, TlsError> {
        let file = file.into();
        let secret = fs::read(&file)
            .map_err(|error| TlsError::of(Some(&file), format_args!("cannot be read: {error}")))?;
        if secret.len() < SECRET_BYTES_MIN {
            let cause =
                format!("has {} bytes; a secret for tickets has at least {SECRET_BYTES_MIN}", secret.len());
            return Err(TlsError::of(Some(&file), cause));
        }
        Ok(Tickets { secret: Some(secret.into()) })
    }
}

/// The secret is not printed.
impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.secret.is_some() { "Tickets(of a file)" } else { "Tickets(random)" })
    }
}

/// 32 bytes for a process.
pub(crate) fn random_secret(provider: &CryptoProvider) -> Result<Arc<[u8]>, TlsError> {
    let mut secret = [0; SECRET_BYTES_MIN];
    provider
        .secure_random
        .fill(&mut secret)
        .map_err(|_| TlsError::new("the system gives no random bytes"))?;
    Ok(Arc::new(secret))
}

/// Seals and opens tickets, without a lock: its state never changes.
///
/// ```text
///   epoch: 4 bytes │ nonce: 12 │ the session, sealed with HKDF(secret, configuration, epoch)
/// ```
pub(crate) struct Ticketer {
    /// Of the secret.
    expander: Box<dyn HkdfExpander>,
    suite: &'static Tls13CipherSuite,
    random: &'static dyn SecureRandom,
    /// A hash of everything that a session depends on.
    configuration: Vec<u8>,
    /// Seconds since 1970.
    now: fn() -> u64,
}

impl Ticketer {
    /// A session is resumed only if `depends_on` is unchanged.
    pub(crate) fn new(
        provider: &CryptoProvider,
        secret: &[u8],
        depends_on: &[Vec<u8>],
        now: fn() -> u64,
    ) -> Result<Ticketer, TlsError> {
        let suite = provider
            .cipher_suites
            .iter()
            .filter_map(|suite| match suite {
                SupportedCipherSuite::Tls13(suite) if suite.aead_alg.key_len() == 32 => Some(*suite),
                _ => None,
            })
            .next()
            .ok_or_else(|| {
                TlsError::new("the provider has no cipher of TLS 1.3 with a key of 256 bits for tickets")
            })?;
        let mut hash = suite.common.hash_provider.start();
        for part in depends_on {
            hash.update(&(part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        Ok(Ticketer {
            expander: suite.hkdf_provider.extract_from_secret(Some(b"ringserve tickets"), secret),
            suite,
            random: provider.secure_random,
            configuration: hash.finish().as_ref().to_vec(),
            now,
        })
    }

    fn key(&self, epoch: u32) -> Option<AeadKey> {
        let mut key = [0; 32];
        self.expander.expand_slice(&[b"ticket", &self.configuration, &epoch.to_be_bytes()], &mut key).ok()?;
        Some(AeadKey::from(key))
    }

    fn epoch(&self) -> u32 {
        ((self.now)() / EPOCH) as u32
    }
}

impl ProducesTickets for Ticketer {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        EPOCH as u32
    }

    fn encrypt(&self, session: &[u8]) -> Option<Vec<u8>> {
        if session.len() > SESSION_BYTES_MAX {
            return None;
        }
        let epoch = self.epoch();
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).ok()?;
        let mut cipher: Box<dyn MessageEncrypter> =
            self.suite.aead_alg.encrypter(self.key(epoch)?, Iv::new(nonce));
        let plain = OutboundPlainMessage {
            typ: ContentType::ApplicationData,
            version: ProtocolVersion::TLSv1_3,
            payload: session.into(),
        };
        let sealed = cipher.encrypt(plain, 0).ok()?;
        let sealed = sealed.payload.as_ref();
        let mut ticket = Vec::with_capacity(4 + NONCE_LEN + sealed.len());
        ticket.extend_from_slice(&epoch.to_be_bytes());
        ticket.extend_from_slice(&nonce);
        ticket.extend_from_slice(sealed);
        Some(ticket)
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        let (epoch, rest) = ticket.split_first_chunk::<4>()?;
        let (nonce, sealed) = rest.split_first_chunk::<NONCE_LEN>()?;
        let (epoch, now) = (u32::from_be_bytes(*epoch), self.epoch());
        if epoch != now && epoch.checked_add(1) != Some(now) {
            return None;
        }
        let mut cipher: Box<dyn MessageDecrypter> =
            self.suite.aead_alg.decrypter(self.key(epoch)?, Iv::new(*nonce));
        let mut sealed = sealed.to_vec();
        let message =
            InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, &mut sealed);
        let session = cipher.decrypt(message, 0).ok()?;
        Some(session.payload.to_vec())
    }
}

impl fmt::Debug for Ticketer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticketer")
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(all(test, any(feature = "ring", feature = "graviola", feature = "aws-lc-rs")))]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local!(static NOW: Cell<u64> = const { Cell::new(0) });

    fn ticketer(secret: u8, configuration: &str) -> Ticketer {
        let provider = crate::provider::provider().unwrap();
        Ticketer::new(&provider, &[secret; 32], &[configuration.into()], || NOW.get()).unwrap()
    }

    #[test]
    fn ticket_is_good_in_its_epoch_and_the_next() {
        let session = b"a session".repeat(40);
        NOW.set(100 * EPOCH);
        let ticketer = ticketer(1, "a");
        let ticket = ticketer.encrypt(&session).unwrap();
        for (seconds, good) in [(0, true), (EPOCH - 1, true), (2 * EPOCH - 1, true), (2 * EPOCH, false)] {
            NOW.set(100 * EPOCH + seconds);
            assert_eq!(
                ticketer.decrypt(&ticket).is_some_and(|opened| opened == session),
                good,
                "after {seconds} s"
            );
        }
        NOW.set(99 * EPOCH);
        assert_eq!(ticketer.decrypt(&ticket), None, "one from the future");
    }

    #[test]
    fn ticket_opens_with_equal_secret_and_configuration_only() {
        NOW.set(EPOCH);
        let ticket = ticketer(1, "a").encrypt(b"a session").unwrap();
        assert_eq!(ticketer(1, "a").decrypt(&ticket).as_deref(), Some(&b"a session"[..]));
        assert_eq!(ticketer(2, "a").decrypt(&ticket), None);
        assert_eq!(ticketer(1, "b").decrypt(&ticket), None);
    }

    #[test]
    fn changed_or_cut_ticket_is_refused() {
        NOW.set(EPOCH);
        let ticketer = ticketer(1, "a");
        let ticket = ticketer.encrypt(b"a session").unwrap();
        for at in 0..ticket.len() {
            let mut changed = ticket.clone();
            changed[at] ^= 1;
            assert_eq!(ticketer.decrypt(&changed), None, "byte {at}");
            assert_eq!(ticketer.decrypt(&ticket[..at]), None, "{at} bytes");
        }
        assert_eq!(ticketer.encrypt(&vec![0; SESSION_BYTES_MAX + 1]), None);
    }
}
