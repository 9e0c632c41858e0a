//! The work at which servers are compared.

use crate::steps::Shape;
use crate::wire::Layer;

/// One piece of work.
pub(crate) struct Work {
    pub(crate) name: &'static str,
    /// Description for the report.
    pub(crate) about: &'static str,
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
    pub(crate) pipeline: usize,
    pub(crate) serves: Serves,
    pub(crate) how: How,
    /// Whether one more connection keeps 16 KiB messages moving back and forth.
    pub(crate) firehose: bool,
}

/// The server's part of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Serves {
    /// It echoes bytes as they arrive.
    Raw,
    /// It frames lines and echoes them.
    Lines,
    /// It echoes bytes in handlers that each wait once, so that others run.
    Awaits,
}

/// The pattern of the load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum How {
    /// Each connection sends when its replies have arrived.
    Closed,
    /// This many messages per second.
    Open(f64),
    /// This share of the slowest server's capacity in a closed loop.
    OpenPart(f64),
    /// Connections for one message each.
    Churn,
    /// Server and generator take turns on one CPU.
    LockStep,
}

impl Work {
    pub(super) fn shape(&self) -> Shape {
        let lines = self.serves == Serves::Lines;
        Shape { bytes: self.bytes, pipeline: self.pipeline, lines, layer: Layer::Plain }
    }

    const fn echo(name: &'static str, about: &'static str, connections: usize, bytes: usize) -> Work {
        Work {
            name,
            about,
            connections,
            bytes,
            pipeline: 1,
            serves: Serves::Raw,
            how: How::Closed,
            firehose: false,
        }
    }

    const fn lock_step(name: &'static str, about: &'static str, connections: usize) -> Work {
        Work { how: How::LockStep, ..Work::echo(name, about, connections, 64) }
    }
}

/// Messages per second of the pingers.
const PINGS: f64 = 5000.0;

/// All pieces of work.
pub(crate) const WORKS: &[Work] = &[
    Work::lock_step("lockstep-1", "64 bytes on one connection, in lock step", 1),
    Work::lock_step("lockstep-50", "64 bytes on each of 50 connections, in lock step", 50),
    Work::lock_step("lockstep-1000", "64 bytes on each of 1000 connections, in lock step", 1000),
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
        serves: Serves::Lines,
        ..Work::echo("lines", "16 lines of 64 bytes together, framed, 50 connections", 50, 64)
    },
    Work {
        serves: Serves::Awaits,
        ..Work::echo("awaits", "64 bytes on each of 50 connections, each handler waits once", 50, 64)
    },
    Work::echo("echo-1k", "1 KiB on each of 50 connections", 50, 1 << 10),
    Work::echo("echo-16k", "16 KiB on each of 50 connections", 50, 16 << 10),
    Work::echo("bulk", "1 MiB on each of 4 connections", 4, 1 << 20),
    Work {
        how: How::OpenPart(0.6),
        ..Work::echo(
            "open-60",
            "64 bytes on 200 connections, at 60 % of what the slowest server can do",
            200,
            64,
        )
    },
    Work {
        how: How::Open(80_000.0),
        ..Work::echo("open-80k", "80 000 messages of 64 bytes a second, 200 connections", 200, 64)
    },
    Work {
        how: How::Open(PINGS),
        ..Work::echo("pingers", "5000 messages of 64 bytes a second, 50 connections", 50, 64)
    },
    Work {
        how: How::Open(PINGS),
        firehose: true,
        ..Work::echo("firehose", "the same, beside a firehose of 16 KiB messages", 50, 64)
    },
    Work { how: How::Churn, ..Work::echo("churn", "connect, 64 bytes, close; 50 at once", 50, 64) },
];

/// The piece of work with that name.
pub(crate) fn find(name: &str) -> Option<&'static Work> {
    WORKS.iter().find(|work| work.name == name)
}
