//! Operations in flight, and the cancels that look for them.

use ringserve_core::{Batch, ConnId};

/// Cancels in a row that find nothing though what they are for lives: it is between two states.
const MISSED_MAX: u8 = 3;

/// The effect of cancels on an operation in flight.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cancels {
    /// The number that answered `ENOENT` though it lives. The driver makes another.
    pub missed: u8,
    /// True once one found it.
    pub found: bool,
    /// After one that answered `EALREADY`, the number of looks at which it ends by itself; else 0.
    pub checks_left: u8,
}

impl Cancels {
    /// True if the next one may miss it too.
    pub fn may_miss(&self) -> bool {
        self.missed < MISSED_MAX
    }

    /// True if it will end by itself.
    pub fn is_ending(&self) -> bool {
        self.checks_left > 0
    }

    /// Looks at it. True if it is to end now.
    pub fn check(&mut self) -> bool {
        let ends = self.checks_left == 1;
        self.checks_left = self.checks_left.saturating_sub(1);
        ends
    }
}

/// One of a connection.
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
    /// One that no cancel looked for.
    pub fn new(id: ConnId, file: F, of: T) -> Operation<F, T> {
        Operation { id, file, cancels: Cancels::default(), of }
    }
}

/// A send: its batch, and how many bytes of it left.
#[derive(Debug)]
pub struct Sending {
    /// The given bytes.
    pub batch: Box<Batch>,
    /// Bytes that left.
    pub sent: usize,
}

impl Sending {
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

/// All of one kind, in the order in which they were armed unless a front end changes it.
pub type Operations<F, T> = Vec<Operation<F, T>>;

/// The index of a connection's.
pub fn find<F, T>(operations: &[Operation<F, T>], id: ConnId) -> Option<usize> {
    operations.iter().position(|operation| operation.id == id)
}
