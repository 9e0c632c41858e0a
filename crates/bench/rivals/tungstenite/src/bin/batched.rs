//! tokio-tungstenite on one thread. Messages are answered in batches.

use std::io;

use rival_tungstenite::{Answers, serve};

fn main() -> io::Result<()> {
    serve(Answers::Batched)
}
