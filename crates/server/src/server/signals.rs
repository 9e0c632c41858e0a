//! SIGINT and SIGTERM during [`serve`](crate::Server::serve), and their former effect before and after.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::control::ServerControl;
use super::error::Error;
use super::running::ServerHandle;
use super::starting::Interrupter;
use crate::guard::guard;
use crate::log::lines::{info, warn};
use crate::log_thread::hand_over;

const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// The servers in [`serve`](crate::Server::serve) in this process. A handler of the process cannot be removed, so ours stays
/// when the last server returns, and then does what the signal did before: it ends the process, unless the program handled the
/// signal itself when the first server began. An ignored signal is left alone.
struct Serving {
    servers: usize,
    /// Set when the first server begins.
    known: Option<Known>,
}

struct Known {
    /// True while there is no server.
    none_serves: Arc<AtomicBool>,
    /// The signals that are not ignored.
    taken: Vec<i32>,
}

static SERVING: Mutex<Serving> = Mutex::new(Serving { servers: 0, known: None });

/// Takes the signals of this process for a server until it is dropped.
pub(super) struct StopSignals {
    stage: Arc<Mutex<Stage>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// The receiver of a signal.
enum Stage {
    Starting(Interrupter),
    /// The start was interrupted.
    Interrupted,
    Running {
        handle: ServerControl,
        /// A signal came before.
        again: bool,
    },
}

impl StopSignals {
    pub(super) fn take(interrupter: Interrupter) -> Result<StopSignals, Error> {
        // The order matters: a signal always has either its former effect or this server.
        let wanted = signals_to_take().map_err(Error::Signals)?;
        let mut signals = Signals::new(wanted).map_err(Error::Signals)?;
        begin_serving();
        let (handle, stage) = (signals.handle(), Arc::new(Mutex::new(Stage::Starting(interrupter))));
        let for_thread = stage.clone();
        let thread = thread::Builder::new().name("ringserve-signals".into()).spawn(move || {
            let _handing = hand_over(None);
            for signal in signals.forever() {
                on_signal(&mut stage_of(&for_thread), if signal == SIGINT { "SIGINT" } else { "SIGTERM" });
            }
        });
        let thread = thread.map_err(Error::Thread).inspect_err(|_| end_serving())?;
        Ok(StopSignals { stage, handle, thread: Some(thread) })
    }

    /// Sends signals to this server from now on, and a signal that came before.
    pub(super) fn stop(&self, running: &ServerHandle) {
        let stage = &mut *stage_of(&self.stage);
        let again = matches!(stage, Stage::Interrupted);
        if again {
            running.shutdown();
        }
        *stage = Stage::Running { handle: running.control(), again };
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        end_serving();
        self.handle.close();
        // The thread does not panic: its logging is guarded.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn stage_of(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The effect of the signal comes first: where the log has no reader any more, writing to it may panic.
fn on_signal(stage: &mut Stage, name: &str) {
    match stage {
        Stage::Starting(interrupter) => {
            interrupter.interrupt();
            *stage = Stage::Interrupted;
            let _ = guard(|| info!("{name}: stopped before it was ready"));
        }
        Stage::Interrupted => {}
        Stage::Running { handle, again } if !*again => {
            *again = true;
            handle.shutdown();
            let _ =
                guard(|| info!("{name}: accepting no more, finishing replies; once more to stop at once"));
        }
        Stage::Running { handle, .. } => {
            handle.abort();
            let _ = guard(|| warn!("{name}: stopping at once"));
        }
    }
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
    let mut taken = Vec::new();
    for signal in SIGNALS {
        let is = Disposition::of(signal);
        if is == Disposition::Default {
            signal_hook::flag::register_conditional_default(signal, none_serves.clone())?;
        }
        if is != Disposition::Ignored {
            taken.push(signal);
        }
    }
    serving.known = Some(Known { none_serves, taken: taken.clone() });
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
