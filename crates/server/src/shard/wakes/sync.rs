//! The types below [`wake`](crate::shard::wakes::wake). Its model check builds the same file on
//! loom's types.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};
