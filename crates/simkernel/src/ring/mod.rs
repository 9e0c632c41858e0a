//! One model of a ring, for simulated kernels above it: submission and completion queue, buffer
//! ring, file table, and operations in flight. The layer above has the sockets, time and faults.
//!
//! ```text
//!   kernel in this crate        a network, real or virtual time, faults of a network, an adversary
//!   kernel of a campaign        scripted peers, oracles, every fault that io_uring may show
//!   ────────────────────        readiness, faults, times
//!   Ring                        legal requests, operations in flight, contents of answers
//! ```
//!
//! A request that no driver may make is a panic: a slot installed twice, two receives or two sends
//! of one connection, a close during either, a buffer that is provided twice or not lent, a buffer
//! ring replaced during a receive.

mod buffers;
mod files;
mod operations;
mod queues;

pub use buffers::Buffers;
pub use files::{Descriptors, Files};
pub use operations::{Cancels, Operation, Operations, SendProgress, find};
pub use queues::{Completions, PostedCompletion, Submissions};

use std::collections::HashMap;

use ringserve_buf::{Block, KernelSide};
use ringserve_core::{Batch, ConnId};
use ringserve_drivers::kernel::{Kind, RawOp};

/// Sizes of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Entries of the submission queue.
    pub submissions: usize,
    /// Entries of the completion queue, beyond which it overflows.
    pub completions: usize,
    /// Entries of the buffer ring.
    pub buffers: usize,
    /// Bytes of each provided buffer.
    pub buffer_bytes: usize,
    /// Slots of the file table.
    pub slots: usize,
    /// Listeners.
    pub listeners: usize,
}

/// A ring whose file table holds `F`, whose completions carry a note `N` until they are reaped, and
/// whose receives and connects keep `R` and `C` while they are in flight.
#[derive(Debug)]
pub struct Ring<F, N, R, C> {
    sizes: Sizes,
    /// The operations that the next enter submits.
    pub submissions: Submissions,
    /// The completions that were not reaped.
    pub completions: Completions<N>,
    /// Provided buffers.
    pub buffers: Buffers,
    /// Connections, by slot.
    pub files: Files<F>,
    /// Armed receives.
    pub receives: Operations<F, R>,
    /// One-shot receives among them, with the block and the most bytes, or `None` for a buffer.
    singles: HashMap<ConnId, Option<(Box<Block>, usize)>>,
    /// Blocks of receives whose completion was posted, and which were not taken.
    blocks: HashMap<ConnId, (Box<Block>, usize)>,
    /// Sends that wait for room.
    pub sends: Operations<F, SendProgress>,
    /// Connects that wait for their peer.
    pub connects: Operations<F, C>,
    /// For each listener, `Some` while an accept is armed there.
    pub accepts: Vec<Option<Cancels>>,
    /// True while the read of the wake-up is armed.
    pub wake_armed: bool,
}

impl<F: Copy, N, R, C> Ring<F, N, R, C> {
    /// Creates a ring with nothing in flight.
    pub fn new(sizes: Sizes) -> Ring<F, N, R, C> {
        Ring {
            sizes,
            submissions: Submissions::new(sizes.submissions),
            completions: Completions::new(sizes.completions),
            buffers: Buffers::new(sizes.buffers, sizes.buffer_bytes),
            files: Files::new(sizes.slots),
            receives: Vec::new(),
            singles: HashMap::new(),
            blocks: HashMap::new(),
            sends: Vec::new(),
            connects: Vec::new(),
            accepts: vec![None; sizes.listeners],
            wake_armed: false,
        }
    }

    /// The sizes of the ring.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Arms an accept.
    pub fn arm_accept(&mut self, listener: u16) {
        let old = self.accepts[usize::from(listener)].replace(Cancels::default());
        assert!(old.is_none(), "a listener has two accepts");
    }

    /// Arms a receive, after the others. False for a connection that has no file: `EBADF`.
    pub fn arm_receive(&mut self, id: ConnId, of: R) -> bool {
        assert!(find(&self.receives, id).is_none(), "two receives on {id}");
        let file = self.files.get(id);
        file.inspect(|file| self.receives.push(Operation::new(id, *file, of))).is_some()
    }

    /// Does [`arm_receive`](Ring::arm_receive) once only, into a block if there is one: at most as
    /// many bytes.
    pub fn arm_single(&mut self, id: ConnId, of: R, into: Option<(Box<Block>, usize)>) -> bool {
        assert!(!self.blocks.contains_key(&id), "the block of {id} was not taken");
        if let Some((block, most)) = &into {
            assert!((1..=block.room()).contains(most), "{most} bytes into {block:?}");
        }
        if self.arm_receive(id, of) {
            self.singles.insert(id, into);
            return true;
        }
        self.blocks.extend(into.map(|into| (id, into)));
        false
    }

    /// True if the receive of a connection is one-shot.
    pub fn is_single(&self, id: ConnId) -> bool {
        self.singles.contains_key(&id)
    }

    /// The block of a connection's receive, and the most bytes.
    pub fn block_of(&mut self, id: ConnId) -> Option<&mut (Box<Block>, usize)> {
        self.singles.get_mut(&id)?.as_mut()
    }

    /// Ends the receive at this place of the list. Returns the kind of its last completion.
    pub fn end_receive(&mut self, index: usize) -> Kind {
        let id = self.receives.remove(index).id;
        match self.singles.remove(&id).flatten() {
            Some(into) => {
                self.blocks.insert(id, into);
                Kind::ReceiveInto
            }
            None => Kind::Receive,
        }
    }

    /// Returns the block of a receive that ended.
    pub fn take_block(&mut self, id: ConnId) -> Option<(Box<Block>, usize)> {
        self.blocks.remove(&id)
    }

    /// The file of a send. `None` for a connection that has none: `EBADF`.
    pub fn begin_send(&self, id: ConnId, batch: &Batch) -> Option<F> {
        assert!(!batch.is_empty(), "an empty send on {id}");
        assert!(find(&self.sends, id).is_none(), "two sends in flight on {id}");
        self.files.get(id)
    }

    /// Takes a connection out of the file table. `None` if it was not there: `EBADF`.
    pub fn close(&mut self, id: ConnId) -> Option<F> {
        assert!(find(&self.receives, id).is_none(), "{id} is closed under its receive");
        assert!(find(&self.sends, id).is_none(), "{id} is closed under its send");
        self.files.take(id)
    }

    /// Arms the read of the wake-up.
    pub fn arm_wake(&mut self) {
        assert!(!self.wake_armed, "the wake-up is read twice");
        self.wake_armed = true;
    }

    /// The effect of earlier cancels on the operation with this `user_data`, if it is in flight.
    pub fn cancelled(&mut self, user_data: u64) -> Option<&mut Cancels> {
        fn of<F, T>(operations: &mut Operations<F, T>, user_data: u64) -> Option<&mut Cancels> {
            let index = find(operations, ConnId::from_bits(user_data))?;
            Some(&mut operations[index].cancels)
        }
        match Kind::of(user_data) {
            Some(Kind::CancelAccept) => self.accepts[usize::from(user_data as u16)].as_mut(),
            Some(Kind::CancelReceive) => of(&mut self.receives, user_data),
            Some(Kind::CancelSend) => of(&mut self.sends, user_data),
            Some(Kind::CancelConnect) => of(&mut self.connects, user_data),
            kind => panic!("{kind:?} is no cancel"),
        }
    }

    /// True if an operation has not ended whose cancel answered `EALREADY`.
    pub fn is_ending_something(&self) -> bool {
        self.receives.iter().any(|receive| receive.cancels.is_ending())
            || self.sends.iter().any(|send| send.cancels.is_ending())
            || self.connects.iter().any(|connect| connect.cancels.is_ending())
            || self.accepts.iter().flatten().any(Cancels::is_ending)
    }

    /// Checks that the buffer ring may be replaced: no receive is armed or submitted, and no
    /// completion with a buffer waits to be reaped.
    pub fn check_renewable(&self) {
        let is_receive = |op: &RawOp| matches!(op, RawOp::Receive { .. } | RawOp::ReceiveOnce { .. });
        let selects = |receive: &Operation<F, R>| !matches!(self.singles.get(&receive.id), Some(Some(_)));
        let armed = self.receives.iter().any(selects) || self.submissions.iter().any(is_receive);
        assert!(!armed, "the buffer ring is replaced while a receive is in flight");
        let used = self.completions.iter().any(|posted| posted.cqe.buffer().is_some());
        assert!(!used, "the buffer ring is replaced before what it brought was reaped");
    }

    /// Everything open or in flight, one line each, without the wake-up.
    pub fn held(&self) -> Vec<String> {
        let of = |what: &str, ids: Vec<ConnId>| (!ids.is_empty()).then(|| format!("{what} of {ids:?}"));
        let accepts = self.accepts.iter().flatten().count();
        [
            of("the descriptors", self.files.iter().map(|(id, _)| id).collect()),
            of("receives", self.receives.iter().map(|receive| receive.id).collect()),
            of("blocks", self.blocks.keys().copied().collect()),
            of("sends", self.sends.iter().map(|send| send.id).collect()),
            of("connects", self.connects.iter().map(|connect| connect.id).collect()),
            (accepts > 0).then(|| format!("{accepts} accepts in flight")),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Ends everything, without completions, and takes every buffer back.
    pub fn finish(&mut self, side: &mut KernelSide) {
        *self = Ring::new(self.sizes);
        for buffer in 0..side.pool().buffers_max() as u16 {
            if side.is_lent(buffer) {
                side.take_back(buffer);
            }
        }
    }
}
