//! Questions to one shard, and its answers.

use super::QuestionHandler;
use crate::{FrameFields, Span};
use ringserve_server::sync::AskError;

/// Bytes of the answers of all shards that a connection has at once; at most one more answer of
/// each goes with them. The rest is asked for when these are written. Each shard has its part.
pub(super) const ANSWERS_BYTES_MAX: usize = 96 << 10;
/// Bytes of an answer from which on there has to be memory for it before it is made.
pub(super) const LARGE_BYTES: usize = 32 << 10;
/// Bytes of a batch that are kept for the next one.
pub(super) const SPARE_BYTES_MAX: usize = 16 << 10;

/// The questions of one shard to another and their answers: the message of a
/// [`Scatter`](super::Scatter)'s mesh.
pub struct Batch<Q> {
    /// Parts of questions, with their places.
    bytes: Vec<u8>,
    spans: Vec<Span>,
    /// Questions, each with the number of its parts; how many are answered, and the place of the
    /// first part of the others.
    asked: Vec<(Q, usize)>,
    answered: usize,
    at: usize,
    /// Answers, with the end of each; how many are read, and the place of the first other one.
    answers: Vec<u8>,
    ends: Vec<usize>,
    read: usize,
    read_to: usize,
    /// Bytes of answers that it takes, and the last one more.
    pub(super) answer_bytes_max: usize,
    /// Bytes of the large answer that is next, and those for which there is memory.
    wanted: usize,
    granted: usize,
}

/// Takes back the bytes that an answer wrote before it panicked.
struct UndoGuard<'a> {
    answers: &'a mut Vec<u8>,
    len: usize,
}

impl Drop for UndoGuard<'_> {
    fn drop(&mut self) {
        self.answers.truncate(self.len);
    }
}

impl<Q> Default for Batch<Q> {
    fn default() -> Batch<Q> {
        let (bytes, spans, asked, answered, at, answers, ends, read, read_to) = Default::default();
        let [answer_bytes_max, wanted, granted] = [0; 3];
        Batch {
            bytes,
            spans,
            asked,
            answered,
            at,
            answers,
            ends,
            read,
            read_to,
            answer_bytes_max,
            wanted,
            granted,
        }
    }
}

impl<Q: Copy> Batch<Q> {
    /// Adds a question, and returns the bytes that it takes.
    pub(super) fn ask(&mut self, question: Q, parts: FrameFields<'_>) -> usize {
        let before = self.bytes.len();
        parts.copy_to(&mut self.bytes, &mut self.spans);
        self.asked.push((question, parts.len()));
        self.bytes.len() - before + size_of_val(parts.spans()) + size_of::<(Q, usize)>()
    }

    /// Answers a question at once.
    pub(super) fn answer_now<A: QuestionHandler<Question = Q>>(
        &mut self,
        shard: &A,
        question: Q,
        parts: FrameFields<'_>,
    ) {
        let len = self.answers.len();
        let mut kept = UndoGuard { answers: &mut self.answers, len };
        shard.answer(question, parts, kept.answers);
        kept.len = kept.answers.len();
        drop(kept);
        self.ends.push(self.answers.len());
    }

    /// Answers questions until an answer is full, or the next one is large: that is an answer by
    /// itself, once there is memory for it.
    pub(super) fn answer<A: QuestionHandler<Question = Q>>(&mut self, shard: &A) {
        let mut granted = std::mem::take(&mut self.granted);
        self.wanted = 0;
        while self.has_room(self.answer_bytes_max)
            && let Some(&(question, count)) = self.asked.get(self.answered)
        {
            let parts = FrameFields::new(&self.bytes, &self.spans[self.at..][..count]);
            let bytes = shard.large_bytes(question, parts);
            if bytes >= LARGE_BYTES.max(granted + 1) {
                self.wanted = bytes;
                return;
            }
            let is_large = bytes >= LARGE_BYTES;
            if is_large {
                // With its frame, so that it does not grow by as much again.
                self.answers.reserve_exact(bytes + 64);
            }
            shard.answer(question, parts, &mut self.answers);
            self.is_answered_to(count);
            if is_large {
                return;
            }
            granted = 0;
        }
    }

    /// The next question, which has that many parts, is answered.
    fn is_answered_to(&mut self, count: usize) {
        self.ends.push(self.answers.len());
        self.answered += 1;
        self.at += count;
    }

    /// Memory that it needs for its next answer.
    pub(super) fn wants(&self) -> Option<usize> {
        (self.wanted > self.granted).then_some(self.wanted)
    }

    /// There is as much memory for its next answer.
    pub(super) fn grant(&mut self, bytes: usize) {
        self.granted = bytes;
    }

    /// There is none: adds a substitute for its next answer.
    pub(super) fn refuse<A: QuestionHandler<Question = Q>>(&mut self, here: &A, shard: usize) {
        self.ask_on();
        self.wanted = 0;
        if let Some(&(_, count)) = self.asked.get(self.answered) {
            here.failed(shard, AskError::NoMemory, &mut self.answers);
            self.is_answered_to(count);
        }
    }

    /// Adds substitutes for the answers of a shard that failed this many questions.
    pub(super) fn failed<A: QuestionHandler<Question = Q>>(
        here: &A,
        asked: usize,
        shard: usize,
        why: AskError,
    ) -> Batch<Q> {
        let mut batch = Batch::default();
        for _ in 0..asked {
            here.failed(shard, why, &mut batch.answers);
            batch.ends.push(batch.answers.len());
        }
        batch
    }

    /// The number of unanswered questions.
    pub(super) fn left(&self) -> usize {
        self.asked.len() - self.answered
    }

    /// True if there are unread answers.
    pub(super) fn is_answered(&self) -> bool {
        self.read < self.ends.len()
    }

    /// True if less than this many bytes of answers and of their ends are there.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.answers.len() + size_of_val(&*self.ends) <= bytes
    }

    /// Memory of the unanswered questions and of all parts.
    pub(super) fn question_bytes(&self) -> usize {
        self.bytes.len() + self.spans.len() * size_of::<Span>() + self.left() * size_of::<(Q, usize)>()
    }

    /// The next answers and how many they are: at most `count`, and one or as many as `bytes` have
    /// room for.
    pub(super) fn next(&mut self, count: usize, bytes: usize) -> Option<(usize, &[u8])> {
        let unread = self.ends.get(self.read..).filter(|unread| !unread.is_empty())?;
        let count = count.min(unread.len());
        let (count, end) = match unread[count - 1] {
            end if end - self.read_to <= bytes => (count, end),
            _ => (1, unread[0]),
        };
        self.read += count;
        let from = std::mem::replace(&mut self.read_to, end);
        Some((count, &self.answers[from..end]))
    }

    /// True if it has one answer alone, of more than `bytes`.
    pub(super) fn is_long(&self, bytes: usize) -> bool {
        self.read == 0 && self.ends.len() == 1 && self.answers.len() > bytes
    }

    /// Exchanges that answer for an empty text.
    pub(super) fn take_long(&mut self, text: &mut Vec<u8>) {
        std::mem::swap(&mut self.answers, text);
        self.ask_on();
    }

    /// Removes the answers, which were read.
    pub(super) fn ask_on(&mut self) {
        self.answers.clear();
        self.ends.clear();
        (self.read, self.read_to) = (0, 0);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.bytes.capacity()
            + self.spans.capacity() * size_of::<Span>()
            + self.asked.capacity() * size_of::<(Q, usize)>()
            + self.answers.capacity()
            + self.ends.capacity() * size_of::<usize>()
    }

    /// Removes everything, and keeps its memory unless that is large.
    pub(super) fn clear(&mut self) {
        if self.memory_bytes() > SPARE_BYTES_MAX {
            return *self = Batch::default();
        }
        self.bytes.clear();
        self.spans.clear();
        self.asked.clear();
        self.ask_on();
        (self.answered, self.at, self.wanted, self.granted) = (0, 0, 0, 0);
    }

    /// Addresses of its buffers.
    #[cfg(test)]
    pub(super) fn memory(&self) -> [usize; 3] {
        [self.bytes.as_ptr() as usize, self.spans.as_ptr() as usize, self.answers.as_ptr() as usize]
    }
}
