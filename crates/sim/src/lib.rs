//! A simulated kernel below ringserve's io_uring driver, and everything around it: peers that misbehave, a
//! service that does too, a clock that obeys, and oracles that watch.
//!
//! ```text
//!   service model          what it replies is what the peer is owed
//!   ringserve-core         the real state machine of a shard
//!   ringserve-drivers      the real bookkeeping half of the io_uring driver
//!   ─ kernel interface ─   operations out; user_data, res, flags in
//!   kernel                 simulated: what is ready, when it completes, and every fault, above the
//!                          queues, buffer ring and file table of ringserve-simkernel's model of a ring
//!   peers                  scripted
//! ```
//!
//! A seed draws everything: sizes, limits, framing, scripts, and the rate of each fault, some of which are off.
//! It runs until every peer is through with its script, or for `--turns` turns; then the shard is told to
//! drain, and must end. The same seed does the same thing every time.
//!
//! What is checked:
//!
//! * every byte: a frame the service gets is the next one its peer sent, a byte the kernel is given is the
//!   next one the service owes ([`sock`]); bytes of different connections are told apart one by one
//!   ([`bytes`]);
//! * after every turn: buffers, slots, queues and bounds ([`world`]), the rules of the driver boundary, for
//!   both sides of it ([`protocol`]);
//! * at the start and the end of every turn: each time limit is kept, neither early nor more than a few steps late, and
//!   nothing but the peer was in the way ([`clocks`]);
//! * calls that wait, as the shard lists them: no more than may, each once, all dropped at the end ([`tasks`]);
//! * what other threads and shards share with it: room in an outbox ([`pushes`]), the quota of the server
//!   ([`world`]);
//! * whenever the shard sleeps: nothing that arrived waits unread, no reply waits unsent, no limit is forgotten
//!   ([`kernel`]);
//! * at the end of each connection: its reason is true, and its peer got all that was owed, or a reset;
//! * at the end: no slot, buffer, descriptor or operation is left.
//!
//! A violation is a panic, of an oracle or of the code itself. It is printed with its seed, the last lines of
//! the trace, and the command that does it again.
//!
//! All this is one shard with scripted peers, and a kernel that does everything wrong. [`servers`] runs whole servers, with several
//! shards and the services' own loop, on the kernel of `ringserve-simkernel`, which stands above the same model of a ring and
//! has an adversary there: all but what no completion tells of.

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
