//! Secrets of connections, to read recorded traffic.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use crate::TlsError;

/// Appends the secrets of each connection to a file, in the format of NSS, which Wireshark reads.
pub(crate) struct KeyLogFile(Mutex<File>);

impl KeyLogFile {
    pub(crate) fn open(path: &Path) -> Result<KeyLogFile, TlsError> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
        let file = file.map_err(|error| {
            TlsError::of(Some(path), format_args!("keys cannot be logged there: {error}"))
        })?;
        Ok(KeyLogFile(Mutex::new(file)))
    }

    pub(crate) fn append(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let line = format!("{label} {} {}\n", hex(client_random), hex(secret));
        // A log that cannot be written costs no connection.
        let _ = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).write_all(line.as_bytes());
    }
}

impl fmt::Debug for KeyLogFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyLogFile")
    }
}
