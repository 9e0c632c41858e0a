//! Runs a piece of the fast path a given number of times, for tools that count instructions:
//! `scripts/instructions` runs it under callgrind and compares with the figures kept in the repository. The driver does
//! nothing here; `turns` has the bookkeeping of a real one.

#[path = "support/echo.rs"]
mod echo;
#[path = "support/loopback.rs"]
mod loopback;

use ringserve::framing::{Lines, Raw};

use echo::Echo;

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (Some(case), Some(turns)) = (args.next(), args.next().and_then(|turns| turns.parse().ok())) else {
        // `cargo bench` runs every benchmark without arguments.
        return println!("usage: instructions CASE TURNS, where CASE is raw, line or lines");
    };
    let line = [[b'x'; 63].as_slice(), b"\n"].concat();
    match case.as_str() {
        "raw" => loopback::run(Echo, Raw, &line, turns),
        "line" => loopback::run(Echo, Lines::default(), &line, turns),
        "lines" => loopback::run(Echo, Lines::default(), &line.repeat(16), turns),
        other => panic!("there is no case {other}"),
    };
}
