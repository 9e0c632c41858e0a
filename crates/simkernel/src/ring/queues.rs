//! Submission and completion queue.

use std::collections::VecDeque;
use std::ops::Deref;

use ringserve_core::CloseHow;
use ringserve_drivers::kernel::{RawCqe, RawOp, SentQuietly};

/// The submission queue.
#[derive(Debug)]
pub struct Submissions {
    ops: VecDeque<RawOp>,
    /// Entries that the operations take.
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
    /// Returns the operation if the queue is full.
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

    /// The number of used entries.
    pub fn entries(&self) -> usize {
        self.entries
    }
}

impl Deref for Submissions {
    type Target = VecDeque<RawOp>;

    fn deref(&self) -> &VecDeque<RawOp> {
        &self.ops
    }
}

/// A completion that was not reaped, and the note of its kernel.
#[derive(Debug)]
pub struct PostedCompletion<N> {
    /// The part that the driver sees.
    pub cqe: RawCqe,
    /// The part that it does not see.
    pub note: N,
}

/// The completion queue.
#[derive(Debug)]
pub struct Completions<N> {
    /// The entries in the queue.
    pub ready: VecDeque<PostedCompletion<N>>,
    /// The entries that wait for room in it.
    pub overflow: VecDeque<PostedCompletion<N>>,
    /// Sends that fitted, which are reported once every completion was reaped.
    pub quiet: VecDeque<SentQuietly>,
    max: usize,
}

impl<N> Completions<N> {
    pub(super) fn new(max: usize) -> Completions<N> {
        Completions { ready: VecDeque::new(), overflow: VecDeque::new(), quiet: VecDeque::new(), max }
    }

    /// Puts a completion into the queue. False if it is full: then the completion waits for room.
    pub fn post(&mut self, cqe: RawCqe, note: N) -> bool {
        let fits = !self.is_full();
        let queue = if fits { &mut self.ready } else { &mut self.overflow };
        queue.push_back(PostedCompletion { cqe, note });
        fits
    }

    /// Moves overflowed completions into the queue, as far as there is room.
    pub fn flush(&mut self) {
        let room = self.max - self.ready.len();
        self.ready.extend(self.overflow.drain(..room.min(self.overflow.len())));
    }

    /// True if the next completion overflows.
    pub fn is_full(&self) -> bool {
        self.ready.len() >= self.max || !self.overflow.is_empty()
    }

    /// All completions that were not reaped, in order.
    pub fn iter(&self) -> impl Iterator<Item = &PostedCompletion<N>> {
        self.ready.iter().chain(&self.overflow)
    }

    /// Takes the oldest send that fitted, once every completion was reaped.
    pub fn pop_quiet(&mut self) -> Option<SentQuietly> {
        if self.ready.is_empty() && self.overflow.is_empty() { self.quiet.pop_front() } else { None }
    }
}
