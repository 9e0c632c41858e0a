//! Shared code of the integration tests.
//!
//! Nothing here sleeps to let something happen: [`eventually`] polls for it, with a bound.
#![allow(missing_docs)] // Read by tests alone.

pub mod bounds;
pub mod brake;
pub mod child;
pub mod client;
pub mod crowd;
pub mod examples;
pub mod http;
pub mod lab;
pub mod limited;
pub mod net;
pub mod openmetrics;
pub mod order;
pub mod proc_net;
pub mod puppet;
pub mod streams;
pub mod watch;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

pub use bounds::{Bounded, Bounds};
pub use child::alone;
pub use client::Client;
pub use lab::{Kernel, Lab, On};
pub use net::{Net, Site};
pub use puppet::{Puppet, Shared};
pub use streams::Streams;
pub use watch::{Logged, a_turn_passes, finish};

/// The bound of everything that should happen at once. Long, since these tests also run together
/// with others on machines with few cores; a test that passes does not wait for it.
pub const SOON: Duration = Duration::from_secs(20);

/// Polls for something, and panics with its name if it does not come.
#[track_caller]
pub fn eventually(what: &str, within: Duration, mut happened: impl FnMut() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < within, "within {within:?} it did not happen that {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// Sets a flag when it is dropped, even if the test fails: a thread that works until then ends as
/// well.
pub struct EndOf<'a>(pub &'a AtomicBool);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Limits without time limits except those of closing, so that a test meets only the limit that is
/// its subject. Lingering is short, since at the end of a test its clients are still there.
pub fn no_time_limits() -> Bounds {
    let linger = Duration::from_millis(200);
    Bounds::default()
        .first_frame_timeout(None)
        .idle_timeout(None)
        .write_stall_timeout(None)
        .write_bytes_per_second_min(0)
        .read_bytes_per_second_min(0)
        .handler_timeout(None)
        .open_timeout(None)
        .linger_timeout(linger)
}

/// True if the operator chose epoll for servers that leave the choice open.
pub fn on_epoll() -> bool {
    std::env::var("RINGSERVE_DRIVER").is_ok_and(|name| name == "epoll")
}

/// Bytes after which [`pattern`] begins again.
pub const PERIOD: usize = 251 * 256;

/// Bytes that encode their position in a stream, so that a byte lost, doubled or moved shows.
pub fn pattern(len: usize) -> Vec<u8> {
    static ONCE: LazyLock<Vec<u8>> =
        LazyLock::new(|| (0..PERIOD).map(|n| (n % 251) as u8 ^ (n / 251) as u8).collect());
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        bytes.extend_from_slice(&ONCE[..PERIOD.min(len - bytes.len())]);
    }
    bytes
}

/// A small generator of numbers that look random, the same for the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }
}

/// A value of this process from `/proc/self/status`, in KiB.
pub fn status_kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has /proc");
    let line = status.lines().find(|line| line.starts_with(name)).expect("the value is there");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Descriptors this process has open.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux has /proc").count()
}

/// Pages of the guide whose programs need more crates than the framework has.
#[cfg(all(doctest, feature = "guide"))]
mod guide {
    #[doc = include_str!("../../docs/guide/balancing.md")]
    struct Balancing;

    #[doc = include_str!("../../docs/guide/choosing.md")]
    struct Choosing;

    #[doc = include_str!("../../docs/guide/coming_from.md")]
    struct ComingFrom;

    #[doc = include_str!("../../docs/guide/databases.md")]
    struct Databases;

    #[doc = include_str!("../../docs/guide/deployment.md")]
    struct Deployment;

    #[doc = include_str!("../../docs/guide/inspecting.md")]
    struct Inspecting;

    #[doc = include_str!("../../docs/guide/names.md")]
    struct Names;

    #[doc = include_str!("../../docs/guide/operating.md")]
    struct Operating;

    #[doc = include_str!("../../docs/guide/replies.md")]
    struct Replies;

    #[doc = include_str!("../../docs/guide/replacing.md")]
    struct Replacing;

    #[doc = include_str!("../../docs/guide/services.md")]
    struct Services;

    #[doc = include_str!("../../docs/guide/upstreams.md")]
    struct Upstreams;
}
