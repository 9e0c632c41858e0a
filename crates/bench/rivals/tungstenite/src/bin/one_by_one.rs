//! tokio-tungstenite on one thread. Messages are answered one by one.

use std::io;

use rival_tungstenite::{Answers, serve};

fn main() -> io::Result<()> {
    serve(Answers::OneByOne)
}
