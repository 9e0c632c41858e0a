//! Errors of a file, with their places.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An error of a file: its name, the line and the column, and what is allowed there.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError {
    file: PathBuf,
    /// From 1. `None` for the file as a whole.
    place: Option<(usize, usize)>,
    text: String,
}

impl ConfigError {
    pub(super) fn of_file(file: &Path, text: impl fmt::Display) -> ConfigError {
        ConfigError { file: file.into(), place: None, text: text.to_string() }
    }

    pub(super) fn at(file: &Path, source: &str, span: &Range<usize>, text: impl fmt::Display) -> ConfigError {
        ConfigError { file: file.into(), place: Some(place(source, span.start)), text: text.to_string() }
    }
}

/// The line and the column of a byte, from 1.
pub(super) fn place(source: &str, at: usize) -> (usize, usize) {
    let before = source.get(..at.min(source.len())).unwrap_or(source);
    let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
    let begin = before.rfind('\n').map_or(0, |end| end + 1);
    (line, before[begin..].chars().count() + 1)
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        match self.place {
            Some((line, column)) => write!(f, "{file}:{line}:{column}: {}", self.text),
            None => write!(f, "{file}: {}", self.text),
        }
    }
}

ringserve_buf::debug_is_display!(ConfigError);

impl std::error::Error for ConfigError {}
