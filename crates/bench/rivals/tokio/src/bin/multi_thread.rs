//! tokio with its work-stealing runtime, which `#[tokio::main]` starts: a worker for each core that
//! the process may run on, or as many as `TOKIO_WORKER_THREADS` says. Lines are answered one by
//! one.

use std::io;

use rival_tokio::{Answers, serve};

fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_io().build()?;
    // In a task, so that the accepting loop runs on a worker too and passes connections on without
    // a wake-up.
    runtime.block_on(runtime.spawn(serve(mode, address, Answers::OneByOne))).map_err(io::Error::other)?
}
