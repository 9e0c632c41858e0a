//! Services that wrap services.
//!
//! Each is a plain struct that wraps a [`Service`](crate::Service) and is one, with the same session, so they stack:
//!
//! ```
//! use std::time::Duration;
//!
//! use ringserve::middleware::{Calls, ConcurrencyLimit, Observe, Timeout};
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
//!     Observe::new(Timeout::new(limited, Duration::from_secs(5)), calls.on_shard())
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

mod calls;
mod concurrency_limit;
mod observe;
mod permits;
mod timeout;

pub use calls::{CallCounts, Calls, ShardCalls};
pub use concurrency_limit::ConcurrencyLimit;
pub use observe::{CallEnd, CallObserver, Observe};
#[cfg(feature = "tower")]
pub(crate) use permits::Permits;
pub use timeout::{Timeout, TimeoutError};

/// The methods of a service beside `call`, all handed to the field `service`.
macro_rules! delegate_to_service {
    () => {
        fn open(&self, cx: &$crate::Cx<'_, Self::Session>) -> Result<(), $crate::Refusal> {
            self.service.open(cx)
        }

        fn malformed(&self, cx: &$crate::Cx<'_, Self::Session>, error: &$crate::framing::FrameError) {
            self.service.malformed(cx, error);
        }

        fn heartbeat(&self, cx: &$crate::Cx<'_, Self::Session>) {
            self.service.heartbeat(cx);
        }

        fn input_ended(&self, cx: &$crate::Cx<'_, Self::Session>) {
            self.service.input_ended(cx);
        }

        fn close(&self, session: &Self::Session, reason: $crate::CloseReason) {
            self.service.close(session, reason);
        }
    };
}
use delegate_to_service;
