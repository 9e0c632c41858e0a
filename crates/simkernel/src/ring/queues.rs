//! Submission and completion queue.

use std::collections::VecDeque;

use ringserve_core::CloseHow;
use ringserve_drivers::kernel::{RawCqe, RawOp, SentQuietly};

/// The submission queue.
#[derive(Debug)]
pub struct Submissions {
    ops: VecDeque<RawOp>,
    /// Entries they take.
    entries: usize,
    entries_max: usize,
}

impl Submissions {
    pub(super) fn new(entries_max: usize) -> Submissions {
        Submissions { ops: VecDeque::new(), entries: 0, entries_max }
    }

    fn entries_of(op: &RawOp) -> usize {
        match op {
            RawOp::Install { .. } | RawOp::Close { how: CloseHow::Abort, .. } => 2,
            _ => 1,
        }
    }

    /// Queues an operation.
    ///
    /// # Errors
    /// It comes back if the queue is full.
    pub fn push(&mut self, op: RawOp) -> Result<(), RawOp> {
        let entries = self.entries + Self::entries_of(&op);
        if entries > self.entries_max {
            return Err(op);
        }
        self.entries = entries;
        self.ops.push_back(op);
        Ok(())
    }

    /// Takes the oldest operation.
    pub fn pop(&mut self) -> Option<RawOp> {
        let op = self.ops.pop_front()?;
        self.entries -= Self::entries_of(&op);
        Some(op)
    }

    /// How many entries are used.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// How many operations are queued.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// True if none is queued.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// What is queued.
    pub fn iter(&self) -> impl Iterator<Item = &RawOp> {
        self.ops.iter()
    }
}

/// A completion that was not reaped, and what its kernel keeps with it.
#[derive(Debug)]
pub struct Posted<N> {
    /// What the driver sees.
    pub cqe: RawCqe,
    /// What it does not.
    pub note: N,
}

/// The completion queue, what overflowed it, and sends that fitted and have no completion.
#[derive(Debug)]
pub struct Completions<N> {
    ready: VecDeque<Posted<N>>,
    overflow: VecDeque<Posted<N>>,
    quiet: VecDeque<SentQuietly>,
    max: usize,
}

impl<N> Completions<N> {
    pub(super) fn new(max: usize) -> Completions<N> {
        Completions { ready: VecDeque::new(), overflow: VecDeque::new(), quiet: VecDeque::new(), max }
    }

    /// Puts a completion into the queue. False if it is full: then it waits for room.
    pub fn post(&mut self, cqe: RawCqe, note: N) -> bool {
        let fits = !self.is_full();
        let queue = if fits { &mut self.ready } else { &mut self.overflow };
        queue.push_back(Posted { cqe, note });
        fits
    }

    /// Moves what overflowed into the queue, as far as there is room.
    pub fn flush(&mut self) {
        let room = self.max - self.ready.len();
        self.ready.extend(self.overflow.drain(..room.min(self.overflow.len())));
    }

    /// Takes the oldest one that is in the queue.
    pub fn pop(&mut self) -> Option<Posted<N>> {
        self.ready.pop_front()
    }

    /// How many are in the queue.
    pub fn len(&self) -> usize {
        self.ready.len()
    }

    /// True if none is in the queue.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// True if the next one overflows.
    pub fn is_full(&self) -> bool {
        self.ready.len() >= self.max || self.is_overflowing()
    }

    /// True if some wait for room.
    pub fn is_overflowing(&self) -> bool {
        !self.overflow.is_empty()
    }

    /// All that were not reaped, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Posted<N>> {
        self.ready.iter().chain(&self.overflow)
    }

    /// Notes a send that fitted and whose completion waits for another.
    pub fn post_quietly(&mut self, sent: SentQuietly) {
        self.quiet.push_back(sent);
    }

    /// Takes the oldest of those, once every completion was reaped.
    pub fn pop_quiet(&mut self) -> Option<SentQuietly> {
        if self.ready.is_empty() && self.overflow.is_empty() { self.quiet.pop_front() } else { None }
    }

    /// The sends that fitted and were not told of.
    pub fn quiet(&self) -> impl ExactSizeIterator<Item = &SentQuietly> {
        self.quiet.iter()
    }
}
