//! What is counted, of a process or a machine with nothing else to do: allocations, wake-ups, system calls, memory, turns.
//! Each that counts for a whole process has one to itself, and at most two of them run at once: [`ringserve_tests::alone`].

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
mod silent_all;
mod stream_allocations;
mod system_calls;
mod task_allocations;
mod waiting_calls;
mod websocket;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;
