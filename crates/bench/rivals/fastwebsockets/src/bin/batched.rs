//! fastwebsockets on one thread. Messages are answered in batches.

use std::io;

use rival_fastwebsockets::{Answers, serve};

fn main() -> io::Result<()> {
    serve(Answers::Batched)
}
