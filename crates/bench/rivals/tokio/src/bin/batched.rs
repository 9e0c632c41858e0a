//! tokio on one thread. Lines are answered in batches.

use std::io;

use rival_tokio::{Answers, serve};

fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(serve(mode, address, Answers::Batched))
}
