//! Tickets, with which a client resumes a session without a full handshake.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::TlsError;

/// Seconds for which one key seals tickets. It opens them for another such period.
const EPOCH: u64 = 6 * 60 * 60;

/// The fewest bytes of a secret: as many as the key that is derived from it.
const SECRET_BYTES_MIN: usize = KEY_LEN;

/// Bytes of a key, and of a nonce.
pub(crate) const KEY_LEN: usize = 32;
const NONCE_LEN: usize = 12;

/// The most bytes of a session in a ticket. It holds the client's chain of certificates; the
/// ciphers take one record.
const SESSION_BYTES_MAX: usize = 15 * 1024;

/// The secret of a server's tickets. Keys are derived from the secret, the time and the
/// configuration, and change every 6 hours, so all shards seal and open tickets without
/// coordination. A ticket is announced as valid for 6 hours; the server accepts it for 6 to 12
/// hours, by its age. A client that resumes gets new tickets, and its certificates are verified
/// again.
#[derive(Clone, Default)]
pub struct Tickets {
    pub(crate) secret: Option<Arc<[u8]>>,
}

impl Tickets {
    /// Creates a secret of this process: tickets are valid on all its shards, until it ends. The
    /// default.
    pub fn random() -> Tickets {
        Tickets { secret: None }
    }

    /// Reads a secret of at least 32 bytes from `file`: tickets stay valid after a restart, and are
    /// valid at all servers with the same file and the same configuration. A reader of the file can
    /// decrypt recorded TLS 1.2 connections.
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

/// Returns 32 bytes for a process from `random`, which is false if the system gives none.
pub(crate) fn random_secret(random: impl FnOnce(&mut [u8]) -> bool) -> Result<Arc<[u8]>, TlsError> {
    let mut secret = [0; SECRET_BYTES_MIN];
    match random(&mut secret) {
        true => Ok(Arc::new(secret)),
        false => Err(TlsError::new("the system gives no random bytes")),
    }
}

/// A TLS 1.3 cipher with a key of 256 bits, and keys that are derived from a secret.
pub(crate) trait Cipher: Send + Sync {
    fn hash(&self, bytes: &[u8]) -> Vec<u8>;

    /// Does HKDF-Expand of the secret. False if the provider cannot.
    fn expand(&self, info: &[&[u8]], key: &mut [u8; KEY_LEN]) -> bool;

    /// Fills `bytes` with random ones. False if the system gives none.
    fn random(&self, bytes: &mut [u8]) -> bool;

    fn seal(&self, key: [u8; KEY_LEN], nonce: [u8; NONCE_LEN], plain: &[u8]) -> Option<Vec<u8>>;

    /// Opens `sealed` in place.
    fn open(&self, key: [u8; KEY_LEN], nonce: [u8; NONCE_LEN], sealed: &mut [u8]) -> Option<Vec<u8>>;
}

/// Seals and opens tickets, without a lock: its state never changes.
///
/// ```text
///   epoch: 4 bytes │ nonce: 12 │ the session, sealed with HKDF(secret, configuration, epoch)
/// ```
pub(crate) struct Ticketer {
    cipher: Box<dyn Cipher>,
    /// A hash of everything that a session depends on.
    configuration: Vec<u8>,
    /// Seconds since 1970.
    now: fn() -> u64,
}

impl Ticketer {
    /// Creates a ticketer. `depends_on` must be the same for a session to be resumed. `cipher` is
    /// `None` if the provider has none.
    pub(crate) fn new(
        cipher: Option<Box<dyn Cipher>>,
        depends_on: &[Vec<u8>],
        now: fn() -> u64,
    ) -> Result<Ticketer, TlsError> {
        let cipher = cipher.ok_or_else(|| {
            TlsError::new("the provider has no cipher of TLS 1.3 with a key of 256 bits for tickets")
        })?;
        let mut all = Vec::new();
        for part in depends_on {
            all.extend_from_slice(&(part.len() as u64).to_be_bytes());
            all.extend_from_slice(part);
        }
        Ok(Ticketer { configuration: cipher.hash(&all), cipher, now })
    }

    fn key(&self, epoch: u32) -> Option<[u8; KEY_LEN]> {
        let mut key = [0; KEY_LEN];
        let info = [&b"ticket"[..], &self.configuration, &epoch.to_be_bytes()];
        self.cipher.expand(&info, &mut key).then_some(key)
    }

    fn epoch(&self) -> u32 {
        ((self.now)() / EPOCH) as u32
    }

    /// The announced lifetime of a ticket.
    pub(crate) fn lifetime(&self) -> Duration {
        Duration::from_secs(EPOCH)
    }

    pub(crate) fn seal(&self, session: &[u8]) -> Option<Vec<u8>> {
        if session.len() > SESSION_BYTES_MAX {
            return None;
        }
        let epoch = self.epoch();
        let mut nonce = [0; NONCE_LEN];
        if !self.cipher.random(&mut nonce) {
            return None;
        }
        let sealed = self.cipher.seal(self.key(epoch)?, nonce, session)?;
        let mut ticket = Vec::with_capacity(4 + NONCE_LEN + sealed.len());
        ticket.extend_from_slice(&epoch.to_be_bytes());
        ticket.extend_from_slice(&nonce);
        ticket.extend_from_slice(&sealed);
        Some(ticket)
    }

    pub(crate) fn open(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        let (epoch, rest) = ticket.split_first_chunk::<4>()?;
        let (nonce, sealed) = rest.split_first_chunk::<NONCE_LEN>()?;
        let (epoch, now) = (u32::from_be_bytes(*epoch), self.epoch());
        if epoch != now && epoch.checked_add(1) != Some(now) {
            return None;
        }
        self.cipher.open(self.key(epoch)?, *nonce, &mut sealed.to_vec())
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
    use crate::stable::Stable;
    use crate::version::Version;

    thread_local!(static NOW: Cell<u64> = const { Cell::new(0) });

    fn ticketer(secret: u8, configuration: &str) -> Ticketer {
        let version = Stable(crate::provider::provider().unwrap());
        Ticketer::new(version.cipher(&[secret; 32]), &[configuration.into()], || NOW.get()).unwrap()
    }

    #[test]
    fn ticket_is_good_in_its_epoch_and_the_next() {
        let session = b"a session".repeat(40);
        NOW.set(100 * EPOCH);
        let ticketer = ticketer(1, "a");
        let ticket = ticketer.seal(&session).unwrap();
        for (seconds, good) in [(0, true), (EPOCH - 1, true), (2 * EPOCH - 1, true), (2 * EPOCH, false)] {
            NOW.set(100 * EPOCH + seconds);
            assert_eq!(
                ticketer.open(&ticket).is_some_and(|opened| opened == session),
                good,
                "after {seconds} s"
            );
        }
        NOW.set(99 * EPOCH);
        assert_eq!(ticketer.open(&ticket), None, "one from the future");
    }

    #[test]
    fn ticket_opens_with_equal_secret_and_configuration_only() {
        NOW.set(EPOCH);
        let ticket = ticketer(1, "a").seal(b"a session").unwrap();
        assert_eq!(ticketer(1, "a").open(&ticket).as_deref(), Some(&b"a session"[..]));
        assert_eq!(ticketer(2, "a").open(&ticket), None);
        assert_eq!(ticketer(1, "b").open(&ticket), None);
    }

    #[test]
    fn changed_or_cut_ticket_is_refused() {
        NOW.set(EPOCH);
        let ticketer = ticketer(1, "a");
        let ticket = ticketer.seal(b"a session").unwrap();
        for at in 0..ticket.len() {
            let mut changed = ticket.clone();
            changed[at] ^= 1;
            assert_eq!(ticketer.open(&changed), None, "byte {at}");
            assert_eq!(ticketer.open(&ticket[..at]), None, "{at} bytes");
        }
        assert_eq!(ticketer.seal(&vec![0; SESSION_BYTES_MAX + 1]), None);
    }
}
