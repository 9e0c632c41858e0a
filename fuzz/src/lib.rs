//! The fuzz targets without the fuzzer: their bodies, which `tests/corpus.rs` runs over the corpus
//! with nothing but cargo.
//!
//! * [`framing`]: any bytes, cut anywhere, give the frames of a naive reading.
//! * [`shard`]: a script of completions and user code, under a driver that keeps the contract of
//!   `ringserve_core`'s driver module and otherwise follows the bytes.
//! * [`proxy`]: any bytes as a PROXY header mean the same however they arrive.
//! * [`switching`]: the same as the first, for a framing whose rule calls switch, with pieces.
//! * [`dot_stuffed`]: any bytes of lines and texts mean the same as to a naive reading.
//! * [`resp`]: any bytes of a Redis client mean the same however they arrive, and the same as to a
//!   naive reading.
//! * [`tls_bytes`]: any bytes in place of a TLS client's are refused or waited for.
//! * [`websocket_bytes`]: any bytes of a WebSocket client mean the same however they arrive.
//!
//! `framing` and `shard` use [`rig`], which checks the shard against its own contract and against a
//! model of every byte in and out.

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
