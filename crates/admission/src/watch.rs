//! Reading lists again that changed, and giving the kernel what is denied, on a thread beside the
//! shards.

use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use ringserve_base::clock::Deadline;
use ringserve_base::log_thread::hand_over;

use super::Limiter;
use super::kernel_filter::KernelFilters;
use super::shard::Limiters;

/// The interval at which the files are looked at, one `stat` for each, and the networks that are
/// denied for a time: the kernel gets no more than one program in this time.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// Gives the kernel the deny lists, and starts a thread that does so again when a list changed, or
/// networks were denied or allowed for a time, or that is over. It ends, a moment late, with the
/// server; there is none if no list is a file, and no listener can have a filter.
///
/// # Errors
/// If no thread can be started.
pub fn watch(limiters: &Limiters, mut filters: KernelFilters) -> io::Result<()> {
    filters.set(true);
    let is_watched = |limiter: &&Arc<Limiter>| limiter.has_files() || !filters.is_empty();
    let watched: Vec<Weak<Limiter>> = limiters.each().filter(is_watched).map(Arc::downgrade).collect();
    if watched.is_empty() {
        return Ok(());
    }
    let watch = move || {
        let _handing = hand_over(None);
        while rests() {
            let alive: Vec<_> = watched.iter().filter_map(Weak::upgrade).collect();
            if alive.is_empty() {
                return;
            }
            let mut changed = false;
            alive.iter().for_each(|limiter| changed |= limiter.refresh());
            filters.set(changed);
        }
    };
    thread::Builder::new().name("ringserve-lists".into()).spawn(watch).map(drop)
}

fn rests() -> bool {
    Deadline::within(LOOKS_EVERY).pauses(LOOKS_EVERY)
}
