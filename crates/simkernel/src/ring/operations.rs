//! Operations in flight, and the cancels for them.

use ringserve_core::{Batch, ConnId};

/// Cancels in a row that find nothing though the operation lives: it is between two states.
const MISSED_MAX: u8 = 3;

/// The effect of cancels on an operation in flight.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cancels {
    /// Cancels that answered `ENOENT` though the operation lives. The driver makes another.
    pub missed: u8,
    /// True once a cancel found it.
    pub found: bool,
    /// After a cancel that answered `EALREADY`, the number of checks until it ends by itself; else
    /// 0.
    pub checks_left: u8,
}

impl Cancels {
    /// True if the next cancel may miss it too.
    pub fn may_miss(&self) -> bool {
        self.missed < MISSED_MAX
    }

    /// True if it will end by itself.
    pub fn is_ending(&self) -> bool {
        self.checks_left > 0
    }

    /// Checks the operation. True if it has to end now.
    pub fn check(&mut self) -> bool {
        let ends = self.checks_left == 1;
        self.checks_left = self.checks_left.saturating_sub(1);
        ends
    }
}

/// An operation of a connection.
#[derive(Debug)]
pub struct Operation<F, T> {
    /// The connection.
    pub id: ConnId,
    /// The file of the operation, which stays open while it is in flight.
    pub file: F,
    /// The effect of cancels on it.
    pub cancels: Cancels,
    /// The fields of its kind.
    pub of: T,
}

impl<F, T> Operation<F, T> {
    /// Creates an operation that no cancel looked for.
    pub fn new(id: ConnId, file: F, of: T) -> Operation<F, T> {
        Operation { id, file, cancels: Cancels::default(), of }
    }
}

/// A send: its batch, and how many bytes of it were sent.
#[derive(Debug)]
pub struct SendProgress {
    /// The batch as it was given.
    pub batch: Box<Batch>,
    /// Bytes that were sent.
    pub sent: usize,
}

impl SendProgress {
    /// The next `len` bytes, in pieces.
    pub fn next_pieces(&self, len: usize) -> impl Iterator<Item = &[u8]> {
        let (mut skip, mut wanted) = (self.sent, len);
        self.batch.pieces().map(move |piece| {
            let from = skip.min(piece.len());
            let to = piece.len().min(from + wanted);
            (skip, wanted) = (skip - from, wanted - (to - from));
            &piece[from..to]
        })
    }
}

/// All operations of one kind, in the order in which they were armed unless a front end changes it.
pub type Operations<F, T> = Vec<Operation<F, T>>;

/// The index of a connection's operation.
pub fn find<F, T>(operations: &[Operation<F, T>], id: ConnId) -> Option<usize> {
    operations.iter().position(|operation| operation.id == id)
}
