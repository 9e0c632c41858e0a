//! Memory of a shard: a pool of equal receive buffers that are lent to the kernel, leases on what it wrote, the counted
//! blocks of connections, and how replies are written.
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
//! A [`Pool`] is one core's. Its [`KernelSide`] exists once and belongs to the driver: it lends buffers and
//! turns what arrived into a [`LeaseMut`], which alone may write the received bytes until it is frozen. A [`Lease`] is an
//! owned, cheaply cloned window on bytes that do not change any more; when the last one on a buffer is dropped the buffer goes back on top of the free list, so that the buffer used
//! next is the one that is warm in the cache. What spans leases is put together in a [`Block`].
//!
//! Memory is taken from the system in chunks, the first one when the first buffer is lent, and is zeroed, so
//! that a lease can never show bytes that were not received here.
//!
//! This crate knows no kernel: the whole of it runs under Miri.

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

/// Has `Debug` of an error print the text of its `Display`: an error that `main` returns, or on which `unwrap` is called, is
/// shown by `Debug`, and is to be read there as a sentence. Type parameters follow in brackets, with their bounds.
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
