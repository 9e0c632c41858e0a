//! What is fuzzed, apart from the fuzzer: the bodies of the targets, which `tests/corpus.rs` runs over the corpus
//! with nothing but cargo.
//!
//! * [`framing`]: any bytes, cut anywhere, give the frames that a naive reading of them gives.
//! * [`shard`]: a script of completions and user code, under a driver that keeps the contract of
//!   `ringserve_core`'s driver module and otherwise does whatever the bytes say.
//! * [`proxy`]: any bytes as a PROXY header mean the same however they come.
//! * [`switching`]: the same as the first, of a framing whose rule calls switch, with pieces.
//! * [`dot_stuffed`]: any bytes of lines and texts mean what a naive reading of them gives.
//! * [`resp`]: any bytes of a client of Redis mean the same however they come, and what a naive reading of them gives.
//! * [`tls_bytes`]: any bytes in place of what a client of TLS says are refused or waited for.
//! * [`websocket_bytes`]: any bytes of a client of WebSocket mean the same however they come.
//!
//! `framing` and `shard` go through [`rig`], which holds the shard to its own contract and to a model of every byte in and out.

pub mod dot_stuffed;
pub mod framing;
pub mod framings;
pub mod input;
pub mod proxy;
pub mod resp;
pub mod rig;
pub mod shard;
pub mod switching;
pub mod tls_bytes;
pub mod websocket_bytes;
pub mod wire;

/// Runs each file named on the command line through a target.
pub fn replay(target: fn(&[u8])) {
    for path in std::env::args_os().skip(1) {
        match std::fs::read(&path) {
            Ok(bytes) => {
                println!("{}: {} bytes", path.display(), bytes.len());
                target(&bytes);
            }
            Err(error) => eprintln!("{}: {error}", path.display()),
        }
    }
}
