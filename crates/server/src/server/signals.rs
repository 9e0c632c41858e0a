//! SIGINT and SIGTERM while a server runs in [`serve`](crate::Server::serve), and as they were before and after.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use tracing::{info, warn};

use super::starting::Interrupter;
use crate::error::Error;
use crate::guard::guard;
use crate::running::{Running, Stopper};

const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Servers in [`serve`](crate::Server::serve) in this process. A handler of the process cannot be taken out again, so ours stays
/// when the last one returns, and then does what the signal did before: it ends the process, unless the program handled or
/// ignored the signal itself.
struct Serving {
    servers: usize,
    /// True while there is none. `None` before the first one.
    none_serves: Option<Arc<AtomicBool>>,
}

static SERVING: Mutex<Serving> = Mutex::new(Serving { servers: 0, none_serves: None });

/// Takes the signals of this process for a server until it is dropped.
pub(super) struct StopSignals {
    stage: Arc<Mutex<Stage>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// Whom a signal is for.
enum Stage {
    Starting(Interrupter),
    /// It was interrupted.
    Interrupted,
    Running {
        stopper: Stopper,
        /// A signal came before.
        again: bool,
    },
}

impl StopSignals {
    pub(super) fn take(interrupter: Interrupter) -> Result<StopSignals, Error> {
        begin_serving().map_err(Error::Signals)?;
        let signals = Signals::new(SIGNALS).map_err(Error::Signals);
        let mut signals = signals.inspect_err(|_| end_serving())?;
        let (handle, stage) = (signals.handle(), Arc::new(Mutex::new(Stage::Starting(interrupter))));
        let for_thread = stage.clone();
        let thread = thread::Builder::new().name("ringserve-signals".into()).spawn(move || {
            for signal in signals.forever() {
                obey(&mut stage_of(&for_thread), if signal == SIGINT { "SIGINT" } else { "SIGTERM" });
            }
        });
        let thread = thread.map_err(Error::Thread).inspect_err(|_| end_serving())?;
        Ok(StopSignals { stage, handle, thread: Some(thread) })
    }

    /// From now on signals are for this server, and so is one that came before.
    pub(super) fn stop(&self, running: &Running) {
        let stage = &mut *stage_of(&self.stage);
        let again = matches!(stage, Stage::Interrupted);
        if again {
            running.shutdown();
        }
        *stage = Stage::Running { stopper: running.stopper(), again };
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        self.handle.close();
        // It does not panic: what it logs is guarded.
        let _ = self.thread.take().map(JoinHandle::join);
        end_serving();
    }
}

fn stage_of(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// First what the signal is for: where the log has no reader any more, writing to it may panic.
fn obey(stage: &mut Stage, name: &str) {
    match stage {
        Stage::Starting(interrupter) => {
            interrupter.interrupt();
            *stage = Stage::Interrupted;
            guard(|| info!("{name}: stopped before it was ready"));
        }
        Stage::Interrupted => {}
        Stage::Running { stopper, again } if !*again => {
            *again = true;
            stopper.shutdown();
            guard(|| info!("{name}: accepting no more, finishing replies; once more to stop at once"));
        }
        Stage::Running { stopper, .. } => {
            stopper.force();
            guard(|| warn!("{name}: stopping at once"));
        }
    }
}

fn begin_serving() -> io::Result<()> {
    let mut serving = SERVING.lock().unwrap_or_else(PoisonError::into_inner);
    if serving.none_serves.is_none() {
        let none_serves = Arc::new(AtomicBool::new(true));
        for signal in SIGNALS.into_iter().filter(|signal| is_default(*signal)) {
            signal_hook::flag::register_conditional_default(signal, none_serves.clone())?;
        }
        serving.none_serves = Some(none_serves);
    }
    serving.servers += 1;
    serving.tell();
    Ok(())
}

fn end_serving() {
    let mut serving = SERVING.lock().unwrap_or_else(PoisonError::into_inner);
    serving.servers -= 1;
    serving.tell();
}

impl Serving {
    fn tell(&self) {
        if let Some(none_serves) = &self.none_serves {
            none_serves.store(self.servers == 0, Ordering::SeqCst);
        }
    }
}

/// True if a signal ends the process: the program neither ignores nor handles it.
fn is_default(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let has = |name: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        mask >> (signal - 1) & 1 == 1
    };
    !has("SigIgn:") && !has("SigCgt:")
}
