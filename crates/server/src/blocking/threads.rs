//! Threads for blocking functions. Crates of thread pools have a fixed number of threads
//! (`rayon-core`, `threadpool`), or threads for the whole process and an unbounded queue
//! (`blocking`), so this pool stands on std's threads.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ringserve_base::clock::Deadline;
use ringserve_base::cpu;
use ringserve_base::lines::warn;
use ringserve_core::ServerLimits;
use ringserve_drivers::guarded;

use super::{BlockingError, Pool, Work};
use crate::stats::BlockingStats;

/// The time that an idle thread waits before it ends: as in tokio's pool, and long compared with
/// the cost of a new thread.
const IDLE: Duration = Duration::from_secs(10);

/// The time that the end of the server waits for running functions: as long as for connections that
/// the kernel does not end.
const END: Duration = Duration::from_secs(5);

/// The threads of a server.
pub(crate) struct Threads {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Signals work, or the end.
    called: Condvar,
    /// Signals the end of the last thread.
    empty: Condvar,
    threads_max: usize,
    queue_max: usize,
    /// The CPUs on which threads may run: a shard that starts one may be pinned.
    cpus: Vec<usize>,
    /// [`IDLE`] and [`END`], shorter in tests.
    idle: Duration,
    end: Duration,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Box<dyn Work>>,
    threads: usize,
    /// Threads that take work from the queue as soon as they run.
    free: usize,
    ended: bool,
    running: usize,
    done: u64,
    refused: u64,
    panicked: u64,
}

impl Threads {
    /// The pool of a server, without a thread yet.
    pub(crate) fn new(limits: &ServerLimits) -> Threads {
        Threads::within(IDLE, END, limits)
    }

    fn within(idle: Duration, end: Duration, limits: &ServerLimits) -> Threads {
        let shared = Shared {
            state: Mutex::default(),
            called: Condvar::new(),
            empty: Condvar::new(),
            threads_max: limits.blocking_threads_max,
            queue_max: limits.blocking_queue_max,
            cpus: cpu::cpus(),
            idle,
            end,
        };
        Threads { shared: Arc::new(shared) }
    }

    /// Starts a thread, which is counted as free already. If none can be started and there is no
    /// other, waiting functions are refused.
    fn start_thread(&self) {
        let shared = self.shared.clone();
        let builder = thread::Builder::new().name("ringserve-blocking".to_owned());
        let Err(error) = builder.spawn(move || shared.serve()) else { return };
        let mut state = self.shared.lock();
        (state.threads, state.free) = (state.threads - 1, state.free - 1);
        if state.threads > 0 {
            return;
        }
        let left = std::mem::take(&mut state.queue);
        state.refused += left.len() as u64;
        drop(state);
        refuse_all(left, &BlockingError::NoThread(error.kind()));
    }
}

impl Pool for Threads {
    fn submit(&self, work: Box<dyn Work>, _name: Option<&str>) {
        let shared = &self.shared;
        let mut state = shared.lock();
        let starts = state.queue.len() >= state.free && state.threads < shared.threads_max;
        let taken_at_once = state.free + usize::from(starts);
        let refused = if state.ended {
            Some(BlockingError::ServerEnded)
        } else {
            (state.queue.len() >= taken_at_once + shared.queue_max).then_some(BlockingError::Full)
        };
        if let Some(why) = refused {
            state.refused += 1;
            drop(state);
            return work.refuse(why);
        }
        state.queue.push_back(work);
        if !starts {
            drop(state);
            return shared.called.notify_one();
        }
        (state.threads, state.free) = (state.threads + 1, state.free + 1);
        drop(state);
        self.start_thread();
    }

    fn look_up(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok((host, port).to_socket_addrs()?.collect())
    }

    fn stats(&self) -> BlockingStats {
        let state = self.shared.lock();
        BlockingStats {
            threads: state.threads,
            running: state.running,
            queued: state.queue.len(),
            done: state.done,
            refused: state.refused,
            panicked: state.panicked,
        }
    }

    fn end(&self) {
        let shared = &self.shared;
        let mut state = shared.lock();
        if std::mem::replace(&mut state.ended, true) {
            return;
        }
        let left = std::mem::take(&mut state.queue);
        state.refused += left.len() as u64;
        drop(state);
        shared.called.notify_all();
        refuse_all(left, &BlockingError::ServerEnded);
        let state = shared.lock();
        if state.threads == 0 {
            return;
        }
        let state = Deadline::within(shared.end).wait_while(&shared.empty, state, |state| state.threads > 0);
        let threads = state.threads;
        drop(state);
        if threads > 0 {
            guarded(|| {
                warn!(
                    threads,
                    "blocking calls still run {:?} after the server ended; their threads are left alone",
                    shared.end
                );
            });
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loop of a thread.
    fn serve(&self) {
        if !self.cpus.is_empty()
            && let Err(error) = cpu::run_on(&self.cpus)
        {
            guarded(|| warn!(%error, "a thread for blocking calls stays on the CPU of a shard"));
        }
        let mut state = self.lock();
        loop {
            let Some(work) = state.queue.pop_front() else {
                if state.ended {
                    break;
                }
                let idle = Deadline::within(self.idle);
                state = idle.wait_while(&self.called, state, |state| state.queue.is_empty() && !state.ended);
                if state.queue.is_empty() {
                    break;
                }
                continue;
            };
            (state.free, state.running) = (state.free - 1, state.running + 1);
            drop(state);
            work.run(&mut |panicked| {
                let mut state = self.lock();
                state.running -= 1;
                *(if panicked { &mut state.panicked } else { &mut state.done }) += 1;
            });
            state = self.lock();
            state.free += 1;
        }
        (state.threads, state.free) = (state.threads - 1, state.free - 1);
        if state.threads == 0 {
            self.empty.notify_all();
        }
    }
}

fn refuse_all(left: VecDeque<Box<dyn Work>>, why: &BlockingError) {
    left.into_iter().for_each(|work| work.refuse(why.clone()));
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::sync::mpsc::{Sender, channel};
    use std::task::{Context, Poll, Wake, Waker};
    use std::thread::ThreadId;

    use super::super::{Blocking, submit};
    use super::*;

    /// Longer than any of these tests takes.
    const LONG: Duration = Duration::from_secs(60);

    fn threads(idle: Duration, threads: usize, queue: usize) -> Threads {
        let limits = ServerLimits::default().blocking_threads_max(threads).blocking_queue_max(queue);
        Threads::within(idle, LONG, &limits)
    }

    fn spawn<T: Send + 'static>(
        threads: &Threads,
        function: impl FnOnce() -> T + Send + 'static,
    ) -> Blocking<T> {
        submit(threads, function, None)
    }

    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn wait<T>(blocking: Blocking<T>) -> Result<T, BlockingError> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut blocking = pin!(blocking);
        loop {
            match blocking.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::park(),
            }
        }
    }

    /// The result, if it is there without a wait.
    fn at_once<T>(mut blocking: Blocking<T>) -> Option<Result<T, BlockingError>> {
        match Pin::new(&mut blocking).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        }
    }

    /// A function that runs, until the sender is dropped.
    fn busy(threads: &Threads) -> (Sender<()>, Blocking<()>) {
        let ((held, hold), (tell, told)) = (channel::<()>(), channel());
        let blocking = spawn(threads, move || {
            tell.send(()).unwrap();
            let _ = hold.recv();
        });
        told.recv().unwrap();
        (held, blocking)
    }

    #[test]
    fn full_queue_refuses_at_once_and_all_others_are_run_in_order() {
        let threads = threads(LONG, 1, 2);
        assert_eq!(threads.stats(), BlockingStats::default(), "nothing is started before it is needed");
        let (held, first) = busy(&threads);
        let (tell, told) = channel();
        let [second, third, fourth] = [2, 3, 4].map(|n| {
            let tell = tell.clone();
            spawn(&threads, move || tell.send(n).unwrap())
        });
        assert_eq!(at_once(fourth), Some(Err(BlockingError::Full)));
        let stats = threads.stats();
        assert_eq!((stats.threads, stats.running, stats.queued, stats.refused), (1, 1, 2, 1));
        drop(held);
        assert_eq!([wait(first), wait(second), wait(third)], [Ok(()), Ok(()), Ok(())]);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [2, 3]);
        let stats = threads.stats();
        assert_eq!((stats.threads, stats.running, stats.queued, stats.done), (1, 0, 0, 3));
        threads.end();
    }

    #[test]
    fn queue_of_none_takes_what_a_thread_is_free_for() {
        let threads = threads(LONG, 2, 0);
        for _ in 0..100 {
            let (one, two) = (busy(&threads), busy(&threads));
            assert_eq!(at_once(spawn(&threads, || ())), Some(Err(BlockingError::Full)));
            for (held, running) in [one, two] {
                drop(held);
                wait(running).unwrap();
            }
            // A thread is free a moment after its result is there.
            while threads.shared.lock().free < 2 {
                thread::yield_now();
            }
        }
        threads.end();
    }

    #[test]
    fn panic_is_an_error_with_its_message_and_the_thread_lives() {
        let threads = threads(LONG, 1, 1);
        let panics = spawn(&threads, || panic!("planted: {}", 7));
        assert_eq!(wait::<()>(panics), Err(BlockingError::Panicked("planted: 7".to_owned())));
        assert_eq!(wait(spawn(&threads, || 8)), Ok(8));
        let stats = threads.stats();
        assert_eq!((stats.threads, stats.done, stats.panicked), (1, 1, 1));
        threads.end();
    }

    #[test]
    fn function_of_a_dropped_future_runs_and_its_result_drops_there() {
        struct Tells(Sender<ThreadId>);
        impl Drop for Tells {
            fn drop(&mut self) {
                self.0.send(thread::current().id()).unwrap();
            }
        }
        let threads = threads(LONG, 1, 2);
        let (held, first) = busy(&threads);
        let (tell, told) = channel();
        drop(spawn(&threads, move || (thread::current().id(), Tells(tell))));
        drop(held);
        wait(first).unwrap();
        let ran_on = wait(spawn(&threads, || thread::current().id())).unwrap();
        assert_eq!(told.recv().unwrap(), ran_on);
        threads.end();
    }

    #[test]
    fn idle_thread_ends_and_another_is_started_when_needed() {
        let threads = threads(Duration::from_millis(1), 3, 1);
        for _ in 0..3 {
            wait(spawn(&threads, || ())).unwrap();
            let state = threads.shared.lock();
            let none =
                Deadline::within(LONG).wait_while(&threads.shared.empty, state, |state| state.threads > 0);
            assert_eq!((none.threads, none.free), (0, 0));
        }
        assert_eq!(threads.stats().done, 3);
    }

    #[test]
    fn end_drops_what_waits_and_waits_for_what_runs() {
        let threads = threads(LONG, 1, 10);
        let (held, running) = busy(&threads);
        let (tell, told) = channel::<()>();
        let queued = spawn(&threads, move || drop(tell));
        let ends = thread::scope(|scope| {
            let ending = scope.spawn(|| threads.end());
            assert_eq!(wait(queued), Err(BlockingError::ServerEnded));
            assert!(told.recv().is_err(), "the function is dropped");
            drop(held);
            ending.join()
        });
        assert!(ends.is_ok());
        assert_eq!(at_once(spawn(&threads, || ())), Some(Err(BlockingError::ServerEnded)));
        assert_eq!((wait(running), threads.stats().threads), (Ok(()), 0));
    }

    #[test]
    fn function_that_never_returns_holds_up_no_end() {
        let limits = ServerLimits::default();
        let threads = Threads::within(LONG, Duration::from_millis(1), &limits);
        let (held, running) = busy(&threads);
        threads.end();
        assert_eq!((threads.stats().running, threads.stats().threads), (1, 1));
        drop(held);
        wait(running).unwrap();
    }

    #[test]
    fn threads_of_a_pinned_shard_run_on_all_cpus() {
        let all = cpu::cpus();
        let threads = threads(LONG, 1, 1);
        thread::scope(|scope| {
            let pinned = scope.spawn(|| {
                cpu::pin_to(all[0]).unwrap();
                wait(spawn(&threads, cpu::cpus))
            });
            assert_eq!(pinned.join().unwrap().as_deref(), Ok(&all[..]));
        });
        threads.end();
    }
}
