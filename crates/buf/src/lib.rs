//! Memory of a shard: a pool of equal receive buffers that are lent to the kernel, leases on
//! received bytes, the counted blocks of connections, and the writing of replies.
//!
//! ```text
//!            lend                      received
//!   free ───────────▶ with the kernel ───────────▶ leased
//!     ▲                     │                         │
//!     │      take_back      │                         │ last lease dropped
//!     ├─────────────────────┘                         │
//!     └───────────────────────────────────────────────┘
//! ```
//!
//! A [`Pool`] belongs to one core. Its [`KernelSide`] exists once and belongs to the driver: it
//! lends buffers and turns received bytes into a [`LeaseMut`], which alone may write them until it
//! is frozen. A [`Lease`] is an owned, cheaply cloned window on bytes that no longer change. When
//! the last one on a buffer is dropped, the buffer returns to the top of the free list, so that the
//! next buffer used is the one that is warm in the cache. Bytes that span leases are put together
//! in a [`Block`].
//!
//! Memory is taken from the system in chunks, the first one when the first buffer is lent, and is
//! zeroed, so that a lease can never show bytes that were not received here.
//!
//! This crate does not know any kernel: all of it runs under Miri.

#![no_std]
#![deny(clippy::too_many_lines)]

extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

mod block;
mod buffers;
mod counted;
mod fallible;
mod lease;
mod lease_mut;
mod pool;
mod region;
mod writer;

/// Makes `Debug` of an error print the text of its `Display`: an error that `main` returns, or on
/// which `unwrap` is called, is shown by `Debug`, and should be readable there as a sentence. Type
/// parameters follow in brackets, with their bounds.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_is_display {
    ($error:ty $(, [$($parameters:tt)*])?) => {
        impl $(<$($parameters)*>)? ::core::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::fmt::Display::fmt(self, f)
            }
        }
    };
}

pub use block::{Block, Blocks};
pub use buffers::{CHUNK_BUFFERS, PoolConfig};
pub use counted::{Counted, CountedHead, WeakHead};
pub use fallible::{has_room_for, try_box};
pub use lease::Lease;
pub use lease_mut::LeaseMut;
pub use pool::{BufferStats, KernelSide, Pool, PoolError};
pub use writer::{ReplyWriter, Tail};
