//! Signals during [`serve`](crate::Server::serve), and their former effect before and after.
//!
//! | signal | in a start | while it serves |
//! |---|---|---|
//! | SIGTERM, SIGINT | ends the start; a second one the process | the first drains, the second aborts, the third ends the process |
//! | SIGHUP, from a terminal | ends the start | drains |
//! | SIGHUP | opens the log's files again | the same, and reads certificates again |
//! | SIGUSR1, SIGUSR2 | | are logged |
//!
//! A thread apart ends the process where the server does not end: [`Ending::outlasts`].

use std::fs;
use std::io;
#[cfg(feature = "tls")]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ringserve_base::clock::Deadline;
#[cfg(feature = "tls")]
use ringserve_base::guard::guard;
use ringserve_base::lines::{error, info, warn};
use ringserve_base::log_thread::{hand_over, write_at_the_end};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level;

use super::running::ServerHandle;
use crate::error::Error;
use crate::shard::remote::control::ServerControl;
use crate::shard::remote::ending::Ending;
use crate::shard::running::starting::Interrupter;
#[cfg(feature = "log")]
use crate::subscriber::{flush, reopen};

/// Those that stop a server are taken unless they are ignored, the others where they would end the
/// process.
const STOPS: [i32; 2] = [SIGINT, SIGTERM];
const OTHERS: [i32; 3] = [SIGHUP, SIGUSR1, SIGUSR2];

/// Two SIGTERMs within this time are one: `timeout` of GNU sends two at once, to the process and to
/// its group.
const JOINED: Duration = Duration::from_millis(200);

/// The servers in [`serve`](crate::Server::serve) in this process. A handler of the process cannot
/// be removed, so ours stays when the last server returns, and then does what the signal did
/// before: it ends the process, unless the program handled the signal itself when the first server
/// began. An ignored signal is left alone.
struct Serving {
    servers: usize,
    /// Set when the first server begins.
    known: Option<Known>,
}

struct Known {
    /// True while there is no server.
    none_serves: Arc<AtomicBool>,
    /// The signals that servers take.
    taken: Vec<i32>,
    /// Those of them that would end the process.
    ends_process: Vec<i32>,
}

static SERVING: Mutex<Serving> = Mutex::new(Serving { servers: 0, known: None });

/// Takes the signals of this process for a server until it is dropped.
pub(super) struct StopSignals {
    receiver: Arc<Mutex<Receiver>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    /// Ends the process where the server does not end.
    ends: Option<(Arc<Ending>, JoinHandle<()>)>,
}

/// The receiver of signals.
struct Receiver {
    stage: Stage,
    /// SIGHUP says that the terminal is gone, and otherwise that files are to be read again.
    has_terminal: bool,
    /// A SIGTERM until then is the one that came before.
    joined: Option<Deadline>,
    reloads: Reloads,
}

enum Stage {
    Starting(Interrupter),
    /// The start was interrupted, by this signal.
    Interrupted(i32),
    Running {
        handle: Box<ServerControl>,
        /// Signals to stop that came before.
        stops: u32,
    },
}

impl StopSignals {
    pub(super) fn take(interrupter: Interrupter) -> Result<StopSignals, Error> {
        // The order matters: a signal always has either its former effect or this server.
        let wanted = signals_to_take().map_err(Error::Signals)?;
        let mut signals = Signals::new(wanted).map_err(Error::Signals)?;
        begin_serving();
        let has_terminal = fs::File::open("/dev/tty").is_ok();
        let receiver = Receiver {
            stage: Stage::Starting(interrupter),
            has_terminal,
            joined: None,
            reloads: Reloads::default(),
        };
        let (handle, receiver) = (signals.handle(), Arc::new(Mutex::new(receiver)));
        let for_thread = receiver.clone();
        let thread = thread::Builder::new().name("ringserve-signals".into()).spawn(move || {
            let _handing = hand_over(None);
            for signal in signals.forever() {
                lock(&for_thread).on_signal(signal);
            }
        });
        let thread = thread.map_err(Error::Thread).inspect_err(|_| end_serving())?;
        Ok(StopSignals { receiver, handle, thread: Some(thread), ends: None })
    }

    /// Sends signals to this server from now on, and a signal that came before.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn stop(&mut self, running: &ServerHandle) -> Result<(), Error> {
        let ending = running.control().ending().clone();
        let outlasted = ending.clone();
        let ends = thread::Builder::new().name("ringserve-ends".into()).spawn(move || {
            if outlasted.outlasts() {
                end_process("the server did not end in time");
            }
        });
        self.ends = Some((ending, ends.map_err(Error::Thread)?));
        let receiver = &mut *lock(&self.receiver);
        let stops = u32::from(matches!(receiver.stage, Stage::Interrupted(_)));
        if stops > 0 {
            running.shutdown();
        }
        receiver.stage = Stage::Running { handle: Box::new(running.control()), stops };
        Ok(())
    }

    /// The server did not start, with this error. A signal that came meanwhile has its former
    /// effect, or a program that tries again and again would never end.
    pub(super) fn failed(self, error: Error) -> Error {
        let interrupted = match lock(&self.receiver).stage {
            Stage::Interrupted(signal) => Some(signal),
            _ => None,
        };
        // No lock is held in what follows: a log that blocks must leave the next signal its effect.
        let ends =
            |signal: &i32| serving().known.as_ref().is_some_and(|known| known.ends_process.contains(signal));
        if let Some(signal) = interrupted.filter(ends) {
            let why = error.to_string();
            say_at_the_end(move || error!("{}: the start failed: {why}", name_of(signal)));
            let _ = low_level::emulate_default_handler(signal);
        }
        error
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        end_serving();
        self.handle.close();
        // The threads do not panic: their logging is guarded.
        let _ = self.thread.take().map(JoinHandle::join);
        if let Some((ending, thread)) = self.ends.take() {
            ending.is_over();
            let _ = thread.join();
        }
    }
}

fn lock(receiver: &Mutex<Receiver>) -> MutexGuard<'_, Receiver> {
    receiver.lock().unwrap_or_else(PoisonError::into_inner)
}

fn name_of(signal: i32) -> &'static str {
    low_level::signal_name(signal).unwrap_or("a signal")
}

impl Receiver {
    fn on_signal(&mut self, signal: i32) {
        match signal {
            SIGTERM if self.joined.is_some_and(|until| !until.is_over()) => {}
            SIGTERM => {
                self.joined = Some(Deadline::within(JOINED));
                self.on_stop(signal);
            }
            SIGHUP if !self.has_terminal => self.on_reload(),
            SIGINT | SIGHUP => self.on_stop(signal),
            _ => info!("{}: nothing is done for it", name_of(signal)),
        }
    }

    /// Takes effect before it logs: where the log no longer has a reader, writing to it may panic.
    fn on_stop(&mut self, signal: i32) {
        let name = name_of(signal);
        match &mut self.stage {
            Stage::Starting(interrupter) => {
                interrupter.interrupt();
                self.stage = Stage::Interrupted(signal);
                info!("{name}: stopped before it was ready");
            }
            Stage::Running { handle, stops: stops @ 0 } => {
                *stops = 1;
                handle.shutdown();
                info!("{name}: accepting no more, finishing replies; once more to stop at once");
            }
            // Shell and kernel both send one where a terminal is closed.
            Stage::Interrupted(_) | Stage::Running { .. } if signal == SIGHUP => {}
            Stage::Running { handle, stops: stops @ 1 } => {
                *stops = 2;
                handle.abort();
                handle.ending().exits();
                warn!("{name}: stopping at once");
            }
            Stage::Interrupted(_) | Stage::Running { .. } => end_process(name),
        }
    }

    /// Reads again what can be read again, certificates, and opens the files of the log again: this
    /// line is in the new one.
    fn on_reload(&self) {
        reopen();
        info!("SIGHUP: certificates are read again; lists are as their files change");
        if let Stage::Running { handle, .. } = &self.stage {
            self.reloads.ask(handle);
        }
    }
}

/// Without the log that ships no file is open.
#[cfg(not(feature = "log"))]
fn reopen() {}

/// Without the log that ships no line waits.
#[cfg(not(feature = "log"))]
fn flush(_at_most: Duration) {}

/// Readings of certificates, on a separate thread: a disk may hold one up for ever, and SIGTERM has
/// its effect then.
#[derive(Default)]
struct Reloads {
    /// Those that were asked for since the last one began; the thread is there while there are
    /// some.
    #[cfg(feature = "tls")]
    asked: Arc<AtomicU32>,
}

#[cfg(feature = "tls")]
impl Reloads {
    fn ask(&self, server: &ServerControl) {
        if self.asked.fetch_add(1, Ordering::SeqCst) > 0 {
            return;
        }
        let (server, asked) = (server.clone(), self.asked.clone());
        let reads = move || {
            let _handing = hand_over(None);
            loop {
                let seen = asked.load(Ordering::SeqCst);
                match guard(|| server.tls().reload()) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => warn!("TLS: the old certificates stay: {error}"),
                    Err(panicked) => warn!("TLS: the old certificates stay: {panicked}"),
                }
                if asked.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                    return;
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("ringserve-reload".into()).spawn(reads) {
            self.asked.store(0, Ordering::SeqCst);
            warn!("TLS: the old certificates stay: {error}");
        }
    }
}

#[cfg(not(feature = "tls"))]
impl Reloads {
    fn ask(&self, _server: &ServerControl) {}
}

/// Ends the process, whatever blocks. The line is written by a thread whose log is the program's.
pub(super) fn end_process(why: &'static str) -> ! {
    let says = thread::Builder::new().spawn(move || {
        say_at_the_end(move || error!("{why}: the process ends"));
    });
    let _ = says.map(JoinHandle::join);
    low_level::exit(1)
}

/// Writes the last line of the process, and waits for it a second or two at most.
fn say_at_the_end(line: impl FnOnce() + Send + 'static) {
    write_at_the_end(line);
    flush(Duration::from_secs(1));
}

fn serving() -> MutexGuard<'static, Serving> {
    SERVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The signals that a server takes. The first call arranges their effect after the last server.
fn signals_to_take() -> io::Result<Vec<i32>> {
    let mut serving = serving();
    if let Some(known) = &serving.known {
        return Ok(known.taken.clone());
    }
    let none_serves = Arc::new(AtomicBool::new(true));
    let (mut taken, mut ends_process) = (Vec::new(), Vec::new());
    for signal in STOPS.into_iter().chain(OTHERS) {
        let is = Disposition::of(signal);
        if is == Disposition::Default {
            signal_hook::flag::register_conditional_default(signal, none_serves.clone())?;
            ends_process.push(signal);
        }
        if is == Disposition::Default || is == Disposition::Handled && STOPS.contains(&signal) {
            taken.push(signal);
        }
    }
    serving.known = Some(Known { none_serves, taken: taken.clone(), ends_process });
    Ok(taken)
}

fn begin_serving() {
    let mut serving = serving();
    serving.servers += 1;
    serving.notify();
}

fn end_serving() {
    let mut serving = serving();
    serving.servers -= 1;
    serving.notify();
}

impl Serving {
    fn notify(&self) {
        if let Some(known) = &self.known {
            known.none_serves.store(self.servers == 0, Ordering::SeqCst);
        }
    }
}

/// The effect of a signal on the process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disposition {
    /// The signal ends the process.
    Default,
    /// The signal does nothing, as below `nohup`.
    Ignored,
    /// The signal calls the program's own handler; also the value where `/proc` does not tell.
    Handled,
}

impl Disposition {
    fn of(signal: i32) -> Disposition {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let has = |name: &str| {
            let mask = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(u64::from_str_radix(mask.trim(), 16).ok()? >> (signal - 1) & 1 == 1)
        };
        match (has("SigIgn:"), has("SigCgt:")) {
            (Some(true), _) => Disposition::Ignored,
            (Some(false), Some(false)) => Disposition::Default,
            _ => Disposition::Handled,
        }
    }
}
