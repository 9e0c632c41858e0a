//! Services that wrap services.
//!
//! Each is a plain struct that wraps a [`Service`](crate::Service) and is one, with the same session, so they stack:
//!
//! ```
//! use std::time::Duration;
//!
//! use ringserve::middleware::{Calls, ConcurrencyLimit, Observe, TimeLimit};
//! # use ringserve::{Cx, Frame, Server, Service};
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
//! let calls = Calls::default();
//! let seen = calls.clone();
//! let running = Server::bind("127.0.0.1:0").start(move |_shard| {
//!     let limited = ConcurrencyLimit::new(Echo, 100);
//!     Observe::new(TimeLimit::new(limited, Duration::from_secs(5)), calls.on_shard())
//! })?;
//! assert_eq!(seen.counts().begun, 0);
//! # running.shutdown();
//! # running.wait()?;
//! # Ok::<(), ringserve::Error>(())
//! ```
//!
//! The outer one sees the calls first: here the time that a call waits for its turn counts to its timeout, and what is
//! observed is the whole.
//!
//! There is one of each for each shard, as there is one service. A call that is done at once goes through them without
//! allocation, lock or look at the clock.
//!
//! To write one, wrap a service and delegate every method of the trait: one that is not delegated does what its default
//! does, and the inner service never hears of it.

pub(crate) mod calls;
mod concurrency_limit;
mod observe;
pub(crate) mod permits;
mod timeout;

pub use calls::{Calls, ShardCalls};
pub use concurrency_limit::ConcurrencyLimit;
pub use observe::{CallEnd, CallObserver, Observe};
pub use timeout::{TimeLimit, TimeLimitError};
