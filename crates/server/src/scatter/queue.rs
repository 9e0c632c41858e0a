//! Replies that wait for shards, in the order of their requests.

use std::collections::VecDeque;
use std::mem;

use super::batch::{ANSWER_BYTES_MAX, Batch, SPARE_BYTES_MAX};
use super::{Answers, Merge};
use crate::parts::Parts;

/// Bytes that may wait for one connection before it begins no other request: unsent questions, texts, and due answers.
const QUEUE_BYTES_MAX: usize = 256 << 10;

/// Parts of replies that are due, in this order.
enum Due {
    /// This many bytes of the texts.
    Text(usize),
    /// The next answer of that shard.
    Answer(usize),
    /// One reply made of this many answers.
    Merged(usize),
}

/// The batch of one shard on its way, and the next one.
struct Way<Q> {
    now: Batch<Q>,
    next: Batch<Q>,
}

/// The replies that a connection waits for.
pub(super) struct Queue<A: Answers> {
    due: VecDeque<Due>,
    /// One for each shard; empty while no call carries the queue.
    ways: Vec<Way<A::Question>>,
    /// Memory of unsent questions.
    bytes: usize,
    texts: VecDeque<u8>,
    /// The merge in progress, with the number of answers that it lacks.
    merged: Option<(A::Merged, usize)>,
    /// Written bytes, whose memory is kept for the next time.
    written: Vec<u8>,
}

impl<A: Answers> Default for Queue<A> {
    fn default() -> Queue<A> {
        Queue::new(0)
    }
}

impl<A: Answers> Queue<A> {
    pub(super) fn new(shards: usize) -> Queue<A> {
        let ways = (0..shards).map(|_| Way { now: Batch::default(), next: Batch::default() }).collect();
        let (due, bytes, texts, written) = Default::default();
        Queue { due, ways, bytes, texts, merged: None, written }
    }

    pub(super) fn is_carried(&self) -> bool {
        !self.ways.is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.bytes + self.texts.len() + self.due.len() * size_of::<Due>() <= QUEUE_BYTES_MAX
    }

    pub(super) fn is_done(&self) -> bool {
        self.due.is_empty()
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.texts.extend(bytes);
        self.due.push_back(Due::Text(bytes.len()));
    }

    /// The next `answers` answers become one reply.
    pub(super) fn merge(&mut self, answers: usize) {
        self.due.push_back(Due::Merged(answers));
    }

    /// Asks a shard. `here` is this shard with its index: it answers at once, as long as its answers have room.
    pub(super) fn ask(&mut self, shard: usize, question: A::Question, parts: Parts<'_>, here: (&A, usize)) {
        let Way { now, next } = &mut self.ways[shard];
        if shard == here.1 && now.has_room() {
            debug_assert_eq!(now.left() + next.left(), 0, "what waits does so since there was no room");
            now.answer_now(here.0, question, parts);
        } else {
            self.bytes += next.ask(question, parts);
        }
        self.due.push_back(Due::Answer(shard));
    }

    /// The batches to be sent now, each with its shard.
    pub(super) fn take(&mut self) -> impl Iterator<Item = (usize, Batch<A::Question>)> {
        let Queue { ways, bytes, .. } = self;
        ways.iter_mut().enumerate().filter_map(|(shard, Way { now, next })| {
            if now.is_answered() {
                return None;
            }
            if now.left() > 0 {
                // Questions that did not fit into the last answer come first.
                now.ask_on();
            } else {
                now.clear();
                mem::swap(now, next);
                *bytes -= now.question_bytes();
            }
            (now.left() > 0).then(|| (shard, mem::take(now)))
        })
    }

    pub(super) fn answered(&mut self, shard: usize, batch: Batch<A::Question>) {
        self.ways[shard].now = batch;
    }

    /// Due replies that are answered: up to this many bytes and one reply. Their memory comes back by [`wrote`](Queue::wrote).
    pub(super) fn write(&mut self) -> Vec<u8> {
        let mut text = mem::take(&mut self.written);
        while text.len() < ANSWER_BYTES_MAX
            && let Some(due) = self.due.front()
        {
            match *due {
                Due::Text(len) => text.extend(self.texts.drain(..len)),
                Due::Answer(shard) => {
                    let Some(answer) = self.ways[shard].now.next() else { break };
                    match &mut self.merged {
                        None => text.extend_from_slice(answer),
                        Some((merged, left)) => {
                            merged.add(answer);
                            *left -= 1;
                        }
                    }
                }
                Due::Merged(answers) => self.merged = Some((A::Merged::default(), answers)),
            }
            if let Some((mut merged, _)) = self.merged.take_if(|(_, left)| *left == 0) {
                merged.write(&mut text);
            }
            self.due.pop_front();
        }
        text
    }

    pub(super) fn wrote(&mut self, mut text: Vec<u8>) {
        text.clear();
        self.written = text;
    }

    /// Gives large memory back when nothing is due.
    pub(super) fn rest(mut self) -> Queue<A> {
        for Way { now, next } in &mut self.ways {
            now.clear();
            next.clear();
        }
        // A request that panicked, or asked for fewer answers than it merges, leaves the merge behind.
        self.merged = None;
        if self.due.capacity() * size_of::<Due>() > SPARE_BYTES_MAX {
            self.due = VecDeque::new();
        }
        if self.written.capacity() > SPARE_BYTES_MAX {
            self.written = Vec::new();
        }
        if self.texts.capacity() > SPARE_BYTES_MAX {
            self.texts = VecDeque::new();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::parts::Span;
    use crate::sync::AskError;

    /// Answers a number with as many bytes, each the first one of the part.
    struct Fills;

    impl Answers for Fills {
        type Question = usize;
        type Merged = Vec<u8>;

        fn answer(&self, len: usize, parts: Parts<'_>, out: &mut Vec<u8>) {
            if len == PANICS {
                out.extend_from_slice(b"half of it");
                panic!("planted: an answer");
            }
            out.resize(out.len() + len, parts.get(0)[0]);
        }

        fn failed(&self, shard: usize, _: AskError, out: &mut Vec<u8>) {
            out.extend_from_slice(format!("!{shard}").as_bytes());
        }
    }

    const PANICS: usize = usize::MAX;

    fn ask(queue: &mut Queue<Fills>, shard: usize, len: usize, name: &[u8]) {
        queue.ask(shard, len, Parts::new(name, &[(0, name.len() as u32)]), (&Fills, 0));
    }

    /// All that is written until every shard has answered all.
    fn carried(queue: &mut Queue<Fills>) -> Vec<u8> {
        let mut all = Vec::new();
        while !queue.is_done() {
            let batches: Vec<_> = queue.take().collect();
            for (shard, mut batch) in batches {
                batch.answer(&Fills);
                queue.answered(shard, batch);
            }
            let text = queue.write();
            assert!(text.len() <= 2 * ANSWER_BYTES_MAX, "{} bytes at once", text.len());
            all.extend_from_slice(&text);
            queue.wrote(text);
        }
        all
    }

    #[test]
    fn pipelined_questions_are_one_batch_a_shard() {
        let mut queue = Queue::new(3);
        queue.put(b"<");
        for (n, name) in (0..).zip(b"abcdef") {
            ask(&mut queue, n % 3, 2, &[*name]);
        }
        queue.put(b">");
        let batches: Vec<_> = queue.take().collect();
        let asked: Vec<_> = batches.iter().map(|(shard, batch)| (*shard, batch.left())).collect();
        assert_eq!(asked, [(1, 2), (2, 2)], "this shard answered at once");
        assert!(queue.take().next().is_none(), "they are under way");
        let text = queue.write();
        assert_eq!(text, b"<aa", "and no further than what is answered");
        queue.wrote(text);
        for (shard, mut batch) in batches.into_iter().rev() {
            batch.answer(&Fills);
            queue.answered(shard, batch);
        }
        assert_eq!(queue.write(), b"bbccddeeff>");
        assert!(queue.is_done());
    }

    #[test]
    fn merged_answers_are_one_reply_also_of_none() {
        let mut queue = Queue::new(2);
        queue.merge(0);
        queue.merge(2);
        ask(&mut queue, 1, 1, b"a");
        ask(&mut queue, 0, 1, b"b");
        ask(&mut queue, 1, 1, b"c");
        assert_eq!(carried(&mut queue), b"abc");
    }

    #[test]
    fn reply_of_too_few_answers_swallows_none_of_the_next_user() {
        let mut queue = Queue::new(1);
        queue.merge(4);
        ask(&mut queue, 0, 1, b"a");
        assert_eq!(carried(&mut queue), b"");
        let mut queue = queue.rest();
        ask(&mut queue, 0, 1, b"b");
        assert_eq!(carried(&mut queue), b"b");
    }

    #[test]
    fn own_answer_that_panics_leaves_no_bytes() {
        let mut queue = Queue::new(1);
        ask(&mut queue, 0, 1, b"a");
        let asked = AssertUnwindSafe(|| ask(&mut queue, 0, PANICS, b"x"));
        catch_unwind(asked).expect_err("it panics");
        ask(&mut queue, 0, 1, b"b");
        assert_eq!(carried(&mut queue), b"ab");
    }

    #[test]
    fn long_answers_come_in_parts_and_in_order() {
        let mut queue = Queue::new(2);
        let mut expected = Vec::new();
        for n in 0..60_u8 {
            ask(&mut queue, usize::from(n) % 2, 40_000, &[n]);
            expected.resize(expected.len() + 40_000, n);
        }
        let mut own = queue.take().filter(|(shard, _)| *shard == 0);
        assert!(own.next().is_none(), "what this shard has answered is read first");
        drop(own);
        let mut queue = Queue::new(2);
        for n in 0..60_u8 {
            ask(&mut queue, usize::from(n) % 2, 40_000, &[n]);
        }
        assert!(carried(&mut queue) == expected);
    }

    #[test]
    fn own_question_waits_for_earlier_ones_of_this_shard() {
        let mut queue = Queue::new(1);
        for name in b"abc" {
            ask(&mut queue, 0, ANSWER_BYTES_MAX, &[*name]);
        }
        assert_eq!(queue.ways[0].now.left() + queue.ways[0].next.left(), 1, "two fill an answer");
        ask(&mut queue, 0, 1, b"d");
        let all = carried(&mut queue);
        assert_eq!((all.len(), all.last()), (3 * ANSWER_BYTES_MAX + 1, Some(&b'd')));
    }

    #[test]
    fn questions_have_room_up_to_their_bytes_and_again_when_asked() {
        let mut queue = Queue::new(2);
        let name = [b'x'; 1 << 10];
        while queue.has_room() {
            ask(&mut queue, 1, 1, &name);
        }
        let each = name.len() + size_of::<(usize, usize)>() + size_of::<Span>() + size_of::<Due>();
        assert_eq!(queue.due.len(), QUEUE_BYTES_MAX / each + 1);
        let batch = queue.take().next().unwrap();
        assert!(queue.has_room());
        queue.answered(1, Batch::failed(&Fills, batch.1.left(), 1, AskError::Gone));
        assert_eq!(carried(&mut queue), b"!1".repeat(QUEUE_BYTES_MAX / each + 1));
    }

    #[test]
    fn answers_without_bytes_take_no_more_memory_than_others() {
        let mut queue = Queue::new(2);
        let asks = |queue: &mut Queue<Fills>| {
            ask(queue, 1, 0, b"a");
            ask(queue, 0, 0, b"b");
        };
        // Without end, so that an answer of this shard is always behind a question to the other one.
        for _ in 0..100_000 {
            asks(&mut queue);
            let mut batches: Vec<_> = queue.take().collect();
            for (shard, batch) in &mut batches {
                batch.answer(&Fills);
                if *shard == 0 {
                    queue.answered(0, mem::take(batch));
                }
            }
            asks(&mut queue);
            batches
                .into_iter()
                .filter(|(shard, _)| *shard == 1)
                .for_each(|(_, batch)| queue.answered(1, batch));
            let text = queue.write();
            queue.wrote(text);
            assert!(queue.due.len() < 10, "{} are due", queue.due.len());
        }
        let bytes = queue.ways[0].now.memory_bytes();
        assert!(bytes <= 2 * ANSWER_BYTES_MAX, "{bytes} bytes");
    }

    #[test]
    fn texts_and_answers_without_bytes_take_room_until_written() {
        type Add = fn(&mut Queue<Fills>);
        let adds: [(Add, usize); 4] = [
            (|queue| queue.put(b"\n"), size_of::<Due>() + 1),
            (|queue| queue.merge(0), size_of::<Due>()),
            (|queue| ask(queue, 0, 0, b"a"), size_of::<Due>()),
            (
                |queue| queue.ask(1, 0, Parts::new(b"", &[]), (&Fills, 0)),
                size_of::<Due>() + size_of::<(usize, usize)>(),
            ),
        ];
        for (add, each) in adds {
            let mut queue = Queue::new(2);
            for _ in 0..QUEUE_BYTES_MAX / each {
                add(&mut queue);
            }
            assert!(queue.has_room(), "{each} bytes each");
            add(&mut queue);
            assert!(!queue.has_room(), "{each} bytes each");
            for (shard, batch) in queue.take().collect::<Vec<_>>() {
                queue.answered(shard, Batch::failed(&Fills, batch.left(), shard, AskError::Gone));
            }
            while !queue.is_done() {
                let text = queue.write();
                queue.wrote(text);
            }
            assert!(queue.has_room(), "{each} bytes each, that were written");
        }
    }

    #[test]
    fn questions_of_a_second_pipeline_take_no_new_memory() {
        let mut queue = Queue::new(2);
        let rest = |queue: &mut Queue<Fills>| {
            for n in 0..50_u8 {
                ask(queue, usize::from(n) % 2, 100, &[n]);
                queue.put(b"\n");
            }
            let all = carried(queue);
            assert_eq!(all.len(), 50 * 101);
            let Way { now, next } = &queue.ways[1];
            [now.memory(), next.memory()]
                .concat()
                .into_iter()
                .chain([queue.written.as_ptr() as usize])
                .collect()
        };
        let _: Vec<usize> = rest(&mut queue);
        // The two batches of a shard change places.
        let mut kept: Vec<usize> = rest(&mut queue);
        let mut again = rest(&mut queue);
        kept.sort_unstable();
        again.sort_unstable();
        assert_eq!(kept, again);
        let queue = queue.rest();
        assert!(queue.is_carried() && queue.is_done());
    }

    #[test]
    fn memory_of_long_replies_is_given_back() {
        let mut queue = Queue::new(1);
        ask(&mut queue, 0, 1 << 20, b"a");
        queue.put(&[b'b'; SPARE_BYTES_MAX + 1]);
        let text = queue.write();
        queue.wrote(text);
        let queue = queue.rest();
        assert_eq!((queue.written.capacity(), queue.texts.capacity()), (0, 0));
        assert_eq!(queue.ways[0].now.memory(), Batch::<usize>::default().memory());
    }

    #[test]
    fn memory_of_many_short_questions_is_given_back() {
        let mut queue = Queue::new(2);
        for n in 0..6000 {
            ask(&mut queue, n % 2, 0, b"a");
        }
        assert_eq!(carried(&mut queue), b"");
        let queue = queue.rest();
        assert_eq!(queue.due.capacity(), 0);
        for Way { now, next } in &queue.ways {
            assert_eq!((now.memory_bytes(), next.memory_bytes()), (0, 0));
        }
    }
}
