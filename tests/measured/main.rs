//! Counts of a process or a machine with nothing else to do: allocations, wake-ups, system calls,
//! memory, turns. Each test that counts for a whole process has one to itself, and at most four of
//! them run at once: [`ringserve_tests::alone`].

mod abort_all;
mod ask_allocations;
mod bounded_turns;
mod churn;
mod claimed_lengths;
mod clocks;
mod codec_allocations;
mod deaths;
mod firehose;
mod five_thousand;
mod frame_allocations;
mod idle;
mod large_bodies;
mod large_frames;
mod log_lines;
mod middleware_allocations;
mod owned_allocations;
mod pinned_memory;
mod pipelines;
mod receive_memory;
mod rpc_allocations;
mod scrapes;
mod silent_all;
mod stream_allocations;
mod system_calls;
mod task_allocations;
mod upstream_allocations;
mod waiting_calls;
mod websocket;

use std::alloc::System;
use std::fmt::Debug;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Runs up to three passes and ends at the first whose count fits. One-time growth, such as of a
/// list, costs one pass.
///
/// # Panics
/// If no pass fits, with the counts of all.
fn a_pass_fits<T: Debug>(what: &str, fits: impl Fn(&T) -> bool, mut pass: impl FnMut() -> T) {
    let mut counts = Vec::new();
    for _ in 0..3 {
        let count = pass();
        if fits(&count) {
            return println!("{what}: {count:?}");
        }
        counts.push(count);
    }
    panic!("{what}: no pass fits: {counts:?}");
}
