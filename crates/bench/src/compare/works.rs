//! The work that servers are compared at.

use crate::generator::Pace;
use crate::steps::Shape;

/// One piece of work.
pub(crate) struct Work {
    pub(crate) name: &'static str,
    /// For the report.
    pub(crate) about: &'static str,
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
    pub(crate) pipeline: usize,
    pub(crate) lines: bool,
    pub(crate) pace: Pace,
}

impl Work {
    pub(super) fn shape(&self) -> Shape {
        Shape { bytes: self.bytes, pipeline: self.pipeline, lines: self.lines }
    }

    const fn echo(name: &'static str, about: &'static str, connections: usize, bytes: usize) -> Work {
        Work { name, about, connections, bytes, pipeline: 1, lines: false, pace: Pace::Closed }
    }
}

/// All of it.
pub(crate) const WORKS: &[Work] = &[
    Work::echo("echo-1", "64 bytes on one connection", 1, 64),
    Work::echo("echo-50", "64 bytes on each of 50 connections", 50, 64),
    Work::echo("echo-1000", "64 bytes on each of 1000 connections", 1000, 64),
    Work::echo("echo-10000", "64 bytes on each of 10 000 connections", 10_000, 64),
    Work {
        pipeline: 16,
        ..Work::echo("pipelined", "16 messages of 64 bytes together, 50 connections", 50, 64)
    },
    Work {
        pipeline: 16,
        lines: true,
        ..Work::echo("lines", "16 lines of 64 bytes together, framed, 50 connections", 50, 64)
    },
    Work::echo("echo-1k", "1 KiB on each of 50 connections", 50, 1 << 10),
    Work::echo("echo-16k", "16 KiB on each of 50 connections", 50, 16 << 10),
    Work::echo("bulk", "1 MiB on each of 4 connections", 4, 1 << 20),
    Work {
        pace: Pace::Open(80_000.0),
        ..Work::echo("open-80k", "80 000 messages of 64 bytes a second, 200 connections", 200, 64)
    },
    Work { pace: Pace::Churn, ..Work::echo("churn", "connect, 64 bytes, close; 50 at once", 50, 64) },
];

/// The one of that name.
pub(crate) fn find(name: &str) -> Option<&'static Work> {
    WORKS.iter().find(|work| work.name == name)
}
