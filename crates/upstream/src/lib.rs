//! Upstreams of [ringserve](https://docs.rs/ringserve): which server is asked, over which
//! connection, and what happens if it fails.
//!
//! An [`Upstream`] is a group of equal servers. Each shard makes a client from it in its factory:
//! [`Exclusive`] asks a question at a time on each of its pooled connections, [`Pipelined`] and
//! [`Multiplexed`] have many under way on each, [`Relay`] passes bytes both ways between a client
//! and a server, and [`Connections`] lends pooled connections of any protocol.
//!
//! ```text
//!            process                                              shard (one of many)
//!   set_backends ──▶ the backends: ArcSwap ── version: one load ──▶ those that are usable, a table of weights
//!   checks ──▶ each: health │ ejected until │ failures in a row        │ choose ──▶ idle connection │ connect │ wait
//!                     in flight on all shards                          ▼                                │
//!                          ▲  at most once a millisecond               its average time ◀── outcome ◀───┘
//!                          └───────────────────────────────────────────┘
//! ```
//!
//! | room | holds | may not |
//! |---|---|---|
//! | `policy` | decisions as pure functions | know a shard, an atomic, a clock |
//! | `settings`, `check`, `discover`, `backend`, `upstream`, `stats` | rules, and what all shards share | wait, or know a connection |
//! | `view` | what a shard knows, and its choice | know connections |
//! | `connect`, `pool` | connections of a shard | choose |
//! | `health`, `names` | the tasks that check, and that look names up | know clients |
//! | `clients` | what users call | |

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]

mod backend;
mod check;
mod clients;
mod connect;
mod discover;
mod error;
mod health;
mod names;
mod policy;
mod pool;
mod settings;
mod stats;
mod upstream;
mod view;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use backend::{Backend, Health};
pub use check::Check;
pub use clients::call::Call;
pub use clients::connections::Connections;
pub use clients::exclusive::Exclusive;
pub use clients::multiplexed::Multiplexed;
pub use clients::pipelined::Pipelined;
pub use clients::pooled::{Outcome, PooledConnection};
pub use clients::relay::{Place, Relay};
pub use clients::request::Request;
pub use discover::{Backends, Discover};
pub use error::UpstreamError;
#[cfg(feature = "dns")]
pub use names::Dns;
pub use names::{BackendFile, Names};
pub use pool::{Connection, IdleEvent};
pub use settings::{Balance, Hedge, PoolLimits, Retry, SendProxy};
pub use stats::{BackendStats, UpstreamStats};
pub use upstream::Upstream;

/// Nothing panics while one of these is held, so a poisoned one is whole.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
