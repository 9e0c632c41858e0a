//! Secrets of connections, for reading recorded traffic.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::TlsError;

/// Appends the secrets of each connection to a file, in the format of NSS, which Wireshark reads.
pub(crate) struct KeyLogFile(Mutex<File>);

impl KeyLogFile {
    pub(crate) fn open(path: &Path) -> Result<KeyLogFile, TlsError> {
        // A link may belong to another user, who would have the secrets appended to a file of his
        // choice.
        let no_link = OFlags::NOFOLLOW.bits().cast_signed();
        let file = OpenOptions::new().create(true).append(true).mode(0o600).custom_flags(no_link).open(path);
        let file = file.map_err(|error| match error.raw_os_error() {
            Some(code) if code == Errno::LOOP.raw_os_error() => {
                TlsError::of(Some(path), "keys cannot be logged there: it is a link, which is not followed")
            }
            _ => TlsError::of(Some(path), format_args!("keys cannot be logged there: {error}")),
        })?;
        Ok(KeyLogFile(Mutex::new(file)))
    }

    pub(crate) fn append(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let line = format!("{label} {} {}\n", hex(client_random), hex(secret));
        // If the log cannot be written, the connection continues.
        let _ = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).write_all(line.as_bytes());
    }
}

impl fmt::Debug for KeyLogFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyLogFile")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn link_is_not_followed() {
        let name = |name: &str| {
            std::env::temp_dir().join(format!("ringserve-key-log-{name}-{}", std::process::id()))
        };
        let (target, link) = (name("target"), name("link"));
        symlink(&target, &link).unwrap();
        let refused = KeyLogFile::open(&link).unwrap_err().to_string();
        let made = target.exists();
        fs::remove_file(&link).unwrap();
        let opened = KeyLogFile::open(&target);
        fs::remove_file(&target).unwrap();
        assert!(refused.contains("it is a link") && !made, "{refused}");
        opened.unwrap().append("CLIENT_RANDOM", &[1], &[2]);
    }
}
