//! Faults of a configuration.

use std::fmt;
use std::path::{Path, PathBuf};

/// The reason why a TLS configuration cannot be used: one line with the cause and, if there is one,
/// the file.
#[derive(Clone)]
pub struct TlsError {
    file: Option<PathBuf>,
    cause: String,
}

impl TlsError {
    pub(crate) fn new(cause: impl fmt::Display) -> TlsError {
        TlsError { file: None, cause: cause.to_string() }
    }

    pub(crate) fn of(file: Option<&Path>, cause: impl fmt::Display) -> TlsError {
        TlsError { file: file.map(Path::to_owned), cause: cause.to_string() }
    }

    pub(crate) fn early_data() -> TlsError {
        TlsError::new(
            "the configuration takes early data, which can be replayed: set `max_early_data_size` to 0",
        )
    }

    /// The file with the fault.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{}: {}", file.display(), self.cause),
            None => f.write_str(&self.cause),
        }
    }
}

ringserve_buf::debug_is_display!(TlsError);

impl std::error::Error for TlsError {}
