//! Resources of a running drill on the machine, which a signal that ends it has to remove: Ctrl-C
//! runs no destructors.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::client::Failure;

static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

/// Attempts to remove a group: a process that was killed leaves its control group a moment later.
const TRIES: u32 = 100;
const EACH: Duration = Duration::from_millis(20);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// The number of a child that was not waited for.
    Process(u32),
    /// A control group, whose processes are among these.
    Group(PathBuf),
    /// A directory with all its content.
    Folder(PathBuf),
}

impl Left {
    fn remove(&self) {
        match self {
            Left::Process(number) => {
                let number = i32::try_from(*number).ok().and_then(Pid::from_raw);
                number.map(|number| kill_process(number, Signal::KILL));
            }
            Left::Group(path) => {
                let is_there = |error: &std::io::Error| error.kind() != ErrorKind::NotFound;
                for _ in 0..TRIES {
                    if !fs::remove_dir(path).is_err_and(|error| is_there(&error)) {
                        break;
                    }
                    thread::sleep(EACH);
                }
            }
            Left::Folder(path) => _ = fs::remove_dir_all(path),
        }
    }
}

fn left() -> MutexGuard<'static, Vec<Left>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a signal remove it from now on.
pub(super) fn add(what: Left) {
    left().push(what);
}

/// Leaves its removal to its owner.
pub(super) fn take(what: &Left) {
    left().retain(|other| other != what);
}

/// Makes a signal remove these resources and end the process from now on.
pub(super) fn remove_at_signals() -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        // Locked until the end, so that nothing is added, and no child is waited for.
        let mut left = left();
        // Processes first: they are in the groups, and have the folders open.
        left.sort_by_key(|what| !matches!(what, Left::Process(_)));
        left.iter().for_each(Left::remove);
        std::process::exit(128 + signal)
    });
    Ok(())
}
