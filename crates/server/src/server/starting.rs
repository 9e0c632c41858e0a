//! From the first shard's thread to the last one that is ready: how each says so, and what ends the wait before that.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::error::Error;

/// What happens while a server starts.
enum Progress {
    /// This shard has its service.
    Ready(usize),
    /// This shard will have none, and its thread ends.
    Failed(usize, Error),
    /// The server is told to stop.
    Interrupted,
}

/// The wait for all shards.
pub(super) struct Starting {
    sender: Sender<Progress>,
    receiver: Receiver<Progress>,
    gate: Arc<Gate>,
}

/// One shard's side of it.
pub(super) struct Ready {
    shard: usize,
    sender: Sender<Progress>,
    gate: Arc<Gate>,
}

/// Ends the wait from another thread.
pub(super) struct Interrupter {
    sender: Sender<Progress>,
}

/// How the wait went on for each shard: true for those that were heard of, whose threads end once they are told to. A
/// factory that waits may never return.
pub(super) struct Heard(Vec<bool>);

impl Starting {
    pub(super) fn new() -> Starting {
        let (sender, receiver) = channel();
        Starting { sender, receiver, gate: Arc::default() }
    }

    pub(super) fn ready(&self, shard: usize) -> Ready {
        Ready { shard, sender: self.sender.clone(), gate: self.gate.clone() }
    }

    /// To be opened once the wait is over, whatever came of it.
    pub(super) fn gate(&self) -> Arc<Gate> {
        self.gate.clone()
    }

    pub(super) fn interrupter(&self) -> Interrupter {
        Interrupter { sender: self.sender.clone() }
    }

    /// Waits until every one of `shards` is ready.
    ///
    /// # Errors
    /// The first shard's that fails, or [`Error::Interrupted`]; with those that were heard of until then.
    pub(super) fn wait(self, shards: usize) -> Result<(), (Error, Heard)> {
        let mut heard = vec![false; shards];
        while heard.contains(&false) {
            // There is a sender as long as this is.
            match self.receiver.recv().unwrap_or(Progress::Interrupted) {
                Progress::Ready(shard) => heard[shard] = true,
                Progress::Failed(shard, error) => {
                    heard[shard] = true;
                    return Err((error, Heard(heard)));
                }
                Progress::Interrupted => return Err((Error::Interrupted, Heard(heard))),
            }
        }
        Ok(())
    }
}

/// Holds every shard back until all are ready: the first message finds everybody there.
#[derive(Default)]
pub(super) struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub(super) fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_open {
            is_open = self.opened.wait(is_open).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Heard {
    /// True if this shard's thread ends once it is told to.
    pub(super) fn of(&self, shard: usize) -> bool {
        self.0[shard]
    }
}

impl Ready {
    /// Another one for the same shard.
    pub(super) fn again(&self) -> Ready {
        Ready { shard: self.shard, sender: self.sender.clone(), gate: self.gate.clone() }
    }

    /// Returns once the gate is open.
    pub(super) fn succeeded(self) {
        let _ = self.sender.send(Progress::Ready(self.shard));
        self.gate.pass();
    }

    /// Nothing happens if the shard was ready before.
    pub(super) fn failed(self, error: Error) {
        let _ = self.sender.send(Progress::Failed(self.shard, error));
    }
}

impl Interrupter {
    /// Nothing happens if every shard is ready.
    pub(super) fn interrupt(&self) {
        let _ = self.sender.send(Progress::Interrupted);
    }
}
