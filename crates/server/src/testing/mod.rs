//! Tests of services and whole servers by seed, in virtual time, without sockets. Cargo feature
//! `testing`.
//!
//! A [`Sim`] runs the very loop that [`Server::start`](crate::Server::start) runs, for all shards
//! on the test's thread, over a simulated kernel and a network in memory. The seed decides which
//! shard or client goes on next, and which faults strike when. When nothing is left to do the clock
//! jumps, so an hour takes milliseconds. A service names no socket, so it runs unchanged.
//!
//! ```
//! use ringserve::testing::{Faults, Sim};
//! use ringserve::{Cx, Frame, Server, Service, framing::Lines};
//! use std::time::Duration;
//! # struct Echo;
//! # impl Service for Echo {
//! #     type Session = ();
//! #     type Error = std::convert::Infallible;
//! #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
//! #         cx.reply(frame);
//! #         Ok(())
//! #     }
//! # }
//!
//! Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
//!     let addr = sim.serve(Server::bind("10.0.0.1:7000").framing(Lines::default()).shards(2), |_shard| Echo);
//!     for n in 0..5 {
//!         sim.client(format!("c{n}"), async move |net| {
//!             let mut me = net.connect(addr).await?;
//!             me.send(format!("hello {n}\n")).await?;
//!             net.sleep(Duration::from_secs(60)).await;
//!             assert_eq!(me.line().await?, Some(format!("hello {n}")));
//!             Ok(())
//!         });
//!     }
//!     sim.run_until_done();
//! });
//! ```
//!
//! # Checked in every run
//!
//! * Each `open` has one `close`, after the last call of the connection, and no call comes without
//!   an `open`.
//! * No code panics, in services or clients; [`Seeds::allow_panics`] names exceptions.
//! * A shard never has more connections or receive memory than its [`Limits`](crate::Limits) allow.
//! * At the end nothing is left: connections, descriptors, buffers, operations in the kernel; and
//!   counters add up.
//! * Something can always happen while a client waits, and the run ends.
//! * Each hundredth seed does the same thing twice.
//!
//! # When a seed fails
//!
//! The test panics with the seed, the broken rule, the last events of the connection, and the
//! command that runs it again: `RINGSERVE_SEED=1187 cargo test each_line_is_heard_once`, which
//! prints every event.
//!
//! # Not simulated
//!
//! * [Runtimes](crate::Server::runtime) around shards, and threads of the program: their wake-ups
//!   come whenever they run. Functions given to [`spawn_blocking`](crate::Shard::spawn_blocking) do
//!   run, and end when the seed says.
//! * The system's clock and randomness: a service asks [`Shard::now`](crate::Shard::now) and
//!   [`Shard::random`](crate::Shard::random).
//! * Unix sockets, socket options, signals. Of an [adopted](crate::listen::adopt) TCP socket the
//!   address is used: all servers that adopt it accept from one simulated queue, which stays until
//!   the end of the run.
//!
//! # One call
//!
//! [`TestConn`] is a connection to one service, for plain unit tests; [`frame`] makes a frame of
//! bytes.

mod blocking;
mod client;
mod panics;
mod seeds;
mod sim;
mod tasks;
mod unit;
mod world;

pub use client::{ClientListener, ClientResult, ClientSleep, ClientStream, Net};
pub use ringserve_simkernel::{Fault, FaultCounts, Faults};
pub use seeds::{SeedFailure, SeedOutcome, Seeds};
pub use sim::{Sim, SimServer};
pub use unit::{CallOutcome, TestConn, frame};
pub use world::compute;
