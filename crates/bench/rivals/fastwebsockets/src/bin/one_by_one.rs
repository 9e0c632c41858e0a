//! fastwebsockets on one thread. Messages are answered one by one.

use std::io;

use rival_fastwebsockets::{Answers, serve};

fn main() -> io::Result<()> {
    serve(Answers::OneByOne)
}
