//! The rows of the drill, their bars, and their results.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use crate::text::plain;

/// The kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Row {
    /// Four times the capacity of the server: how much it still serves, and how soon
    Goodput,
    /// The same: whether marked frames are served
    Marked,
    /// A flood of connects from one address: whether another address is admitted
    Prefix,
    /// All clients return at once: whether one is lost
    Return,
    /// Peers that make the server hold memory: who is closed
    Memory,
    /// Peers that ask for much at the same moment: how much memory the process uses
    Burst,
}

impl Row {
    pub(super) const ALL: [Row; 6] =
        [Row::Goodput, Row::Marked, Row::Prefix, Row::Return, Row::Memory, Row::Burst];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Row::Goodput => "goodput",
            Row::Marked => "marked",
            Row::Prefix => "prefix",
            Row::Return => "return",
            Row::Memory => "memory",
            Row::Burst => "burst",
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A figure that is compared with a number.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Bar {
    /// The measured quantity.
    pub(super) of: &'static str,
    pub(super) unit: &'static str,
    pub(super) value: f64,
    /// The number.
    pub(super) bar: f64,
    /// Whether the value must not be below the number; otherwise it must not be above.
    pub(super) at_least: bool,
    pub(super) held: bool,
}

impl Bar {
    pub(super) fn at_least(of: &'static str, unit: &'static str, value: f64, bar: f64) -> Bar {
        Bar { of, unit, value, bar, at_least: true, held: value >= bar }
    }

    pub(super) fn at_most(of: &'static str, unit: &'static str, value: f64, bar: f64) -> Bar {
        Bar { of, unit, value, bar, at_least: false, held: value <= bar }
    }
}

/// `goodput 0.93 (>= 0.90)`.
impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.at_least { ">=" } else { "<=" };
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        let number = |value: f64| match self.unit {
            "" if value.fract() != 0.0 => format!("{value:.4}"),
            "ms" | "s" => format!("{value:.1}"),
            _ => format!("{value:.0}"),
        };
        write!(f, "{} {}{unit} ({sign} {})", self.of, number(self.value), number(self.bar))
    }
}

/// The result of a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Outcome {
    pub(super) row: &'static str,
    /// The driver, or the program measured for comparison.
    pub(super) server: String,
    pub(super) bars: Vec<Bar>,
    /// Whether all bars are met.
    pub(super) held: bool,
    /// Whether it is only for comparison, and fails nothing.
    pub(super) beside: bool,
    /// More figures, as a sentence.
    pub(super) why: String,
    /// The share of the time in which others had the server's CPU.
    pub(super) starved: f64,
    /// The reason why it was not tried.
    pub(super) left_out: Option<String>,
    /// It could not be measured, and `why` has the reason: it fails, also for comparison.
    pub(super) failed: bool,
}

impl Outcome {
    pub(super) fn of(row: Row, server: &str, bars: Vec<Bar>, why: String) -> Outcome {
        let held = bars.iter().all(|bar| bar.held);
        Outcome { row: row.name(), server: server.to_owned(), held, bars, why, ..Outcome::default() }
    }

    pub(super) fn left_out(row: Row, server: &str, why: impl Into<String>) -> Outcome {
        let (row, server) = (row.name(), server.to_owned());
        Outcome { row, server, left_out: Some(why.into()), ..Outcome::default() }
    }

    pub(super) fn failed(row: Row, server: &str, why: impl Into<String>) -> Outcome {
        let (row, server, why) = (row.name(), server.to_owned(), why.into());
        Outcome { row, server, why, failed: true, ..Outcome::default() }
    }

    pub(super) fn fails(&self) -> bool {
        self.failed || !self.held && !self.beside && self.left_out.is_none()
    }

    pub(super) fn row(&self) -> Vec<String> {
        let verdict = match self {
            Outcome { left_out: Some(_), .. } => "left out",
            Outcome { failed: true, .. } => "FAILED",
            Outcome { beside: true, .. } => "beside",
            Outcome { held: true, .. } => "held",
            _ => "MISSED",
        };
        let bars: Vec<String> = self.bars.iter().map(Bar::to_string).collect();
        vec![
            self.row.to_owned(),
            self.server.clone(),
            verdict.to_owned(),
            bars.join(", "),
            plain(self.left_out.as_ref().unwrap_or(&self.why)).chars().take(160).collect(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_is_held_by_all_of_its_bars() {
        let bars = vec![Bar::at_least("goodput", "", 0.9, 0.9), Bar::at_most("p99", "ms", 15.0, 15.0)];
        let held = Outcome::of(Row::Goodput, "epoll", bars.clone(), String::new());
        assert!(held.held && !held.fails());
        assert_eq!(
            held.row()[..4],
            ["goodput", "epoll", "held", "goodput 0.9000 (>= 0.9000), p99 15.0 ms (<= 15.0)"]
        );
        for missed in [Bar::at_least("goodput", "", 0.899, 0.9), Bar::at_most("p99", "ms", 15.1, 15.0)] {
            let bars = [&bars[..], &[missed]].concat();
            let missed = Outcome::of(Row::Goodput, "epoll", bars, String::new());
            assert!(missed.fails() && missed.row()[2] == "MISSED");
            assert!(!Outcome { beside: true, ..missed }.fails(), "rivals fail nothing");
        }
        assert!(!Outcome::left_out(Row::Memory, "io_uring", "no rings").fails());
    }

    #[test]
    fn row_that_could_not_be_measured_fails_with_its_cause() {
        let failed = Outcome::failed(Row::Goodput, "go-shed", "the server ended: no such file");
        for failed in [failed.clone(), Outcome { beside: true, ..failed }] {
            assert!(failed.fails());
            assert_eq!(failed.row(), ["goodput", "go-shed", "FAILED", "", "the server ended: no such file"]);
        }
    }

    #[test]
    fn each_row_is_found_by_its_name() {
        assert_eq!(Row::ALL.len(), Row::value_variants().len());
        for row in Row::ALL {
            assert_eq!(Row::from_str(row.name(), false), Ok(row));
        }
    }
}
