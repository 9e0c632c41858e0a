//! Functions that block, and names, in a simulation: on its thread, by its clock.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringserve_base::clock::VirtualTime;
use ringserve_core::ServerLimits;
use ringserve_simkernel::rng::Rng;

use crate::blocking::{BlockingError, Pool, Work};
use crate::stats::BlockingStats;

/// The time of most functions, in nanoseconds: from a page in memory to a slow disk.
const TAKES: (u64, u64) = (10_000, 100_000_000);

/// One in as many takes longer, up to this.
const SLOW_ONE_IN: u64 = 64;
const SLOW_MAX: u64 = 5_000_000_000;

/// The names of a simulation, as its test gave them.
#[derive(Default)]
pub(crate) struct Names {
    addrs: Mutex<BTreeMap<String, Vec<IpAddr>>>,
    /// The duration of a look-up, where the test says so.
    takes: Mutex<BTreeMap<String, Duration>>,
}

impl Names {
    pub(crate) fn set(&self, name: &str, addrs: Option<Vec<IpAddr>>) {
        let mut known = self.addrs.lock().unwrap_or_else(PoisonError::into_inner);
        match addrs {
            Some(addrs) => _ = known.insert(name.to_owned(), addrs),
            None => _ = known.remove(name),
        }
    }

    pub(crate) fn set_takes(&self, name: &str, time: Duration) {
        self.takes.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), time);
    }

    fn takes(&self, name: &str) -> Option<Duration> {
        self.takes.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied()
    }
}

/// The threads of a simulated server, of which none is a thread.
pub(crate) struct SimPool {
    time: VirtualTime,
    names: Arc<Names>,
    threads_max: usize,
    queue_max: usize,
    state: Mutex<State>,
}

struct State {
    rng: Rng,
    /// By the time of their end.
    running: BTreeMap<(Duration, u64), Box<dyn Work>>,
    queue: VecDeque<(Box<dyn Work>, Option<String>)>,
    begun: u64,
    ended: bool,
    done: u64,
    refused: u64,
    panicked: u64,
}

impl SimPool {
    pub(crate) fn new(seed: u64, time: VirtualTime, names: Arc<Names>, limits: &ServerLimits) -> SimPool {
        let state = State {
            rng: Rng::new(seed ^ 0x626C_6F63_6B73),
            running: BTreeMap::new(),
            queue: VecDeque::new(),
            begun: 0,
            ended: false,
            done: 0,
            refused: 0,
            panicked: 0,
        };
        let (threads_max, queue_max) = (limits.blocking_threads_max, limits.blocking_queue_max);
        SimPool { time, names, threads_max, queue_max, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, state: &mut State, work: Box<dyn Work>, name: Option<&str>) {
        let slowest = if state.rng.one_in(SLOW_ONE_IN) { SLOW_MAX } else { TAKES.1 };
        let drawn = Duration::from_nanos(state.rng.spread(TAKES.0, slowest));
        let takes = name.and_then(|name| self.names.takes(name)).unwrap_or(drawn);
        state.begun += 1;
        state.running.insert((self.time.now().saturating_add(takes), state.begun), work);
    }

    /// When the next function ends.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.lock().running.first_key_value().map(|((at, _), _)| *at)
    }

    /// Runs the next function that ends until then. False if there is none.
    pub(crate) fn run_next(&self, until: Duration) -> bool {
        let mut state = self.lock();
        let Some(first) = state.running.first_entry().filter(|first| first.key().0 <= until) else {
            return false;
        };
        let work = first.remove();
        drop(state);
        work.run(&mut |panicked| {
            let mut state = self.lock();
            *(if panicked { &mut state.panicked } else { &mut state.done }) += 1;
            if let Some((next, name)) = state.queue.pop_front() {
                self.begin(&mut state, next, name.as_deref());
            }
        });
        true
    }
}

impl Pool for SimPool {
    fn submit(&self, work: Box<dyn Work>, name: Option<&str>) {
        let mut state = self.lock();
        let refused = match () {
            () if state.ended => Some(BlockingError::ServerEnded),
            () if state.running.len() < self.threads_max => None,
            () => (state.queue.len() >= self.queue_max).then_some(BlockingError::Full),
        };
        if let Some(why) = refused {
            state.refused += 1;
            drop(state);
            return work.refuse(why);
        }
        if state.running.len() < self.threads_max {
            self.begin(&mut state, work, name);
        } else {
            state.queue.push_back((work, name.map(str::to_owned)));
        }
    }

    fn look_up(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let names = self.names.addrs.lock().unwrap_or_else(PoisonError::into_inner);
        let unknown =
            || io::Error::new(io::ErrorKind::NotFound, "no such name in this simulation (Sim::name)");
        let addrs = names.get(host).ok_or_else(unknown)?;
        Ok(addrs.iter().map(|ip| SocketAddr::new(*ip, port)).collect())
    }

    fn stats(&self) -> BlockingStats {
        let state = self.lock();
        BlockingStats {
            threads: state.running.len(),
            running: state.running.len(),
            queued: state.queue.len(),
            done: state.done,
            refused: state.refused,
            panicked: state.panicked,
        }
    }

    fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let left = std::mem::take(&mut state.queue);
        state.refused += left.len() as u64;
        drop(state);
        left.into_iter().for_each(|(work, _)| work.refuse(BlockingError::ServerEnded));
    }
}
