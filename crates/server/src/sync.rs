//! Synchronisation of tasks: messages and questions between shards, the end of the start, the
//! drain, and, with the feature `tokio`, channels and locks.
//!
//! # Channels and locks
//!
//! | | for |
//! |---|---|
//! | `oneshot` | one value, once: the answer to a request |
//! | `mpsc` | a queue with one reader, bounded or not: work for a task |
//! | `broadcast` | each value to each reader, bounded: what happens in a room |
//! | `watch` | the last value alone: a configuration, a state |
//! | `Semaphore` | a number of permits: how much may be under way |
//! | `Mutex` | a lock that is held across an await |
//! | `Notify` | a wake-up without a value |
//!
//! These are tokio's ([`tokio::sync`](https://docs.rs/tokio/latest/tokio/sync/)), re-exported. They
//! need no runtime: a task is woken by its own waker, which on a shard is the shard's. So they work
//! in services on every runtime of a [`Server`](crate::Server), between shards, between shards and
//! other threads, and in a simulation, where each seed decides the order. The rest of `tokio::sync`
//! works too: `RwLock`, `Barrier`, `OnceCell`, `SetOnce`. Methods that end in `_timeout` need
//! tokio's timer; use [`Shard::timeout`](crate::Shard::timeout) instead. `tokio::time`,
//! `tokio::spawn`, `tokio::net` and `tokio::fs` need [`Runtime::Tokio`](crate::Runtime).
//!
//! A value of a single shard needs no lock: use `Cell` and `RefCell`, and hold no borrow across an
//! await.
//!
//! ## Why these
//!
//! Crates for a single thread save an atomic operation at each step. None of them has the whole
//! table above, nor tokio's care:
//!
//! | crate | has | lacks | crates it adds |
//! |---|---|---|---|
//! | tokio 1.54, feature `sync` | all of it | | 1 |
//! | futures-channel 0.3 | oneshot, mpsc | broadcast, watch, semaphore, mutex | 2 |
//! | async-channel 2.5, event-listener 5.4 | mpmc, notify | oneshot, watch; locks are in async-lock | 7 |
//! | local-channel 0.1 | mpsc, unbounded | all else | 4 |
//! | local-sync 0.1, of 2023 | oneshot, mpsc, semaphore | broadcast, watch, mutex | 5 |
//! | unsync 0.2 | oneshot, spsc, broadcast, semaphore | mpsc, watch, mutex | 2 |
//! | async-unsync 0.3 | oneshot, mpsc, semaphore | broadcast, watch, mutex | 1 |
//!
//! ```
//! # #[cfg(feature = "tokio")] {
//! use std::{convert::Infallible, rc::Rc};
//! use ringserve::{Cx, Frame, Service, Shard, sync::{mpsc, oneshot}};
//!
//! /// Lines for a task that writes them one after the other, of which at most 16 wait.
//! struct Journal { lines: mpsc::Sender<(Frame, oneshot::Sender<usize>)> }
//!
//! impl Journal {
//!     fn new(shard: &Shard) -> Journal {
//!         let (lines, mut waiting) = mpsc::channel::<(Frame, oneshot::Sender<usize>)>(16);
//!         shard.spawn_named("journal", async move {
//!             let mut written = 0;
//!             while let Some((line, done)) = waiting.recv().await {
//!                 written += line.len();
//!                 // The call that asked may have been dropped.
//!                 let _ = done.send(written);
//!             }
//!         });
//!         Journal { lines }
//!     }
//! }
//!
//! impl Service for Journal {
//!     type Session = ();
//!     type Error = &'static str;
//!
//!     async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), &'static str> {
//!         let (done, written) = oneshot::channel();
//!         self.lines.send((line, done)).await.map_err(|_| "the journal ended")?;
//!         let written = written.await.map_err(|_| "the journal ended")?;
//!         cx.reply(written.to_string().as_bytes());
//!         Ok(())
//!     }
//! }
//! # }
//! ```

#[cfg(feature = "tokio")]
pub use tokio::sync::{
    AcquireError, Mutex, MutexGuard, Notify, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore,
    SemaphorePermit, TryAcquireError, TryLockError, broadcast, mpsc, oneshot, watch,
};

pub use crate::shard::messages::asks::{Ask, AskAll, AskError, Reply};
pub use crate::shard::messages::mailbox::{SendError, SendFuture};
pub use crate::shard::messages::mesh::{Mesh, SendToOthers};
pub use crate::shard::tasks::draining::Draining;
pub use crate::shard::tasks::ends::{ServiceEnded, UnknownService};
pub use crate::shard::tasks::started::{NotStarted, Started};
