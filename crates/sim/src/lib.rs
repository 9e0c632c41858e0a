//! A simulated kernel below ringserve's io_uring driver, and everything around it: peers and a
//! service that misbehave, a controlled clock, and oracles that watch.
//!
//! ```text
//!   service model          whose replies are owed to the peer
//!   ringserve-core         the real state machine of a shard
//!   ringserve-drivers      the real bookkeeping half of the io_uring driver
//!   ─ kernel interface ─   operations out; user_data, res, flags in
//!   kernel                 simulated: readiness, completion times, and every fault, above the
//!                          queues, buffer ring and file table of ringserve-simkernel's model of a ring
//!   peers                  scripted
//! ```
//!
//! A seed draws everything: sizes, limits, framing, scripts, and the rate of each fault, some of
//! which are off. It runs until every peer has finished its script, or for `--turns` turns; then
//! the shard is ordered to drain, and must end. The same seed has the same result every time.
//!
//! Checks:
//!
//! * every byte: a frame that the service gets is the next one its peer sent, a byte that the
//!   kernel is given is the next one the service owes ([`sock`]); bytes of different connections
//!   are distinguished one by one ([`bytes`]);
//! * after every turn: buffers, slots, queues and bounds ([`world`]), the rules of the driver
//!   boundary, for both sides of it ([`protocol`]);
//! * at the start and the end of every turn: each time limit is kept, neither early nor more than a
//!   few steps late, and only the peer was the cause ([`clocks`]);
//! * waiting calls, as the shard lists them: no more than allowed, each once, all dropped at the
//!   end ([`tasks`]);
//! * state that other threads and shards share with it: room in an outbox ([`pushes`]), the quota
//!   of the server ([`world`]);
//! * whenever the shard sleeps: no received byte waits unread, no reply waits unsent, no limit is
//!   forgotten ([`kernel`]);
//! * at the end of each connection: its reason is true, and its peer got all owed bytes, or a
//!   reset;
//! * at the end: no slot, buffer, descriptor or operation is left.
//!
//! A violation is a panic, of an oracle or of the code itself. It is printed with its seed, the
//! last lines of the trace, and the command that reproduces it.
//!
//! All this is one shard with scripted peers, and a kernel with every fault. [`servers`] runs whole
//! servers, with several shards and the services' own loop, on the kernel of `ringserve-simkernel`,
//! which stands above the same model of a ring and has an adversary there: all faults except those
//! that no completion shows.

pub mod bytes;
pub mod clocks;
pub mod faults;
pub mod kernel;
pub mod pace;
pub mod plan;
pub mod protocol;
pub mod pushes;
pub use ringserve_simkernel::rng;
pub mod run;
pub mod servers;
pub mod service;
pub mod sock;
pub mod tasks;
pub mod toy;
pub mod websocket;
pub mod world;
