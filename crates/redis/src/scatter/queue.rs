//! Replies that wait for shards, in the order of their requests.

use std::collections::VecDeque;
use std::mem;

use ringserve_server::Cx;
use ringserve_server::limits::Reserved;

use super::batch::{ANSWERS_BYTES_MAX, Batch, LARGE_BYTES, SPARE_BYTES_MAX};
use super::{Merge, PIECE_BYTES, QuestionHandler};
use crate::FrameFields;
use ringserve_server::sync::Ask;

/// Bytes that may wait for one connection before it begins no other request: unsent questions,
/// texts, and due answers. As much more is under way to other shards.
const QUEUE_BYTES_MAX: usize = 128 << 10;

/// Parts of replies that are due, in this order.
enum Due {
    /// This many bytes of the texts.
    Text(usize),
    /// The next answers of that shard, and how many.
    Answers(u32, u32),
    /// One reply made of this many answers.
    Merged(usize),
}

/// The batch of one shard, and the next one. `None` while the first one is on its way.
struct Way<Q> {
    now: Option<Box<Batch<Q>>>,
    next: Box<Batch<Q>>,
}

/// Questions to another shard: its number, the number of questions, and the answers to be.
pub(super) type ShardQuestion<Q> = (usize, usize, Ask<Box<Batch<Q>>>);

/// The replies that a connection waits for.
pub(super) struct Queue<A: QuestionHandler> {
    due: VecDeque<Due>,
    /// The number of answers, texts and merges that are due.
    count: usize,
    /// One for each shard, and the bytes of answers that each may give at once.
    ways: Vec<Way<A::Question>>,
    answer_bytes_max: usize,
    /// Memory of unsent questions.
    bytes: usize,
    texts: VecDeque<u8>,
    /// The merge in progress, with the number of answers that it lacks.
    merged: Option<(A::Merged, usize)>,
    /// Written bytes and questions on their way, whose memory is kept for the next time.
    written: Vec<u8>,
    asked: Vec<ShardQuestion<A::Question>>,
    /// Bytes that count as held while the peer is waited for.
    held: Option<Reserved>,
}

impl<A: QuestionHandler> Queue<A> {
    pub(super) fn new(shards: usize) -> Queue<A> {
        let ways = (0..shards).map(|_| Way { now: Some(Box::default()), next: Box::default() }).collect();
        let (due, count, bytes, texts, written, asked, held) = Default::default();
        let answer_bytes_max = ANSWERS_BYTES_MAX / shards;
        Queue { due, count, ways, answer_bytes_max, bytes, texts, merged: None, written, asked, held }
    }

    pub(super) fn has_room(&self) -> bool {
        self.waiting_bytes() <= QUEUE_BYTES_MAX
    }

    /// True if there is room for many requests, where there was none.
    pub(super) fn has_room_again(&self) -> bool {
        self.waiting_bytes() <= QUEUE_BYTES_MAX / 2
    }

    fn waiting_bytes(&self) -> usize {
        self.bytes + self.texts.len() + self.count * size_of::<Due>()
    }

    pub(super) fn is_done(&self) -> bool {
        self.due.is_empty()
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.texts.extend(bytes);
        self.due.push_back(Due::Text(bytes.len()));
        self.count += 1;
    }

    /// The next `answers` answers become one reply.
    pub(super) fn merge(&mut self, answers: usize) {
        self.due.push_back(Due::Merged(answers));
        self.count += 1;
    }

    /// Asks a shard. `here` is this shard with its index: it answers at once, as long as its
    /// answers have room.
    pub(super) fn ask(
        &mut self,
        shard: usize,
        question: A::Question,
        parts: FrameFields<'_>,
        here: (&A, usize),
    ) {
        let Way { now, next } = &mut self.ways[shard];
        // What waits does so since there was no room, or no memory for a large answer.
        let max = self.answer_bytes_max;
        let is_next = |now: &&mut Box<Batch<A::Question>>| now.has_room(max) && now.left() + next.left() == 0;
        if shard == here.1
            && let Some(now) = now.as_mut().filter(is_next)
            && here.0.large_bytes(question, parts) < LARGE_BYTES
        {
            now.answer_now(here.0, question, parts);
        } else {
            self.bytes += next.ask(question, parts);
        }
        self.count += 1;
        let shard = shard as u32;
        match self.due.back_mut() {
            Some(Due::Answers(last, count)) if *last == shard => *count += 1,
            _ => self.due.push_back(Due::Answers(shard, 1)),
        }
    }

    /// The batches to be sent now, each with its shard.
    pub(super) fn take(&mut self) -> impl Iterator<Item = (usize, Box<Batch<A::Question>>)> {
        let Queue { ways, bytes, answer_bytes_max, .. } = self;
        ways.iter_mut().enumerate().filter_map(|(shard, Way { now: place, next })| {
            let now = place.as_mut().filter(|now| !now.is_answered() && now.wants().is_none())?;
            if now.left() > 0 {
                // Questions that did not fit into the last answer come first.
                now.ask_on();
            } else {
                now.clear();
                mem::swap(now, next);
                *bytes -= now.question_bytes();
            }
            now.answer_bytes_max = *answer_bytes_max;
            Some((shard, place.take_if(|now| now.left() > 0)?))
        })
    }

    pub(super) fn answered(&mut self, shard: usize, batch: Box<Batch<A::Question>>) {
        self.ways[shard].now = Some(batch);
    }

    /// The shard whose large answer is due, and the memory that it needs first.
    pub(super) fn wants(&self) -> Option<(usize, usize)> {
        let Some(Due::Answers(shard, _)) = self.due.front() else { return None };
        let shard = *shard as usize;
        let now = self.ways[shard].now.as_ref().filter(|now| !now.is_answered())?;
        Some((shard, now.wants()?))
    }

    /// The batch of a shard, to which it is [wanted](Queue::wants).
    pub(super) fn wanting(&mut self, shard: usize) -> &mut Batch<A::Question> {
        self.ways[shard].now.as_mut().expect("it is not on its way")
    }

    /// The peer is waited for, with `text` bytes in hand: what waits here counts as held for it. No
    /// request comes on top meanwhile.
    pub(super) fn hold<S: 'static>(&mut self, cx: &Cx<'_, S>, text: usize) {
        let ways = self.ways.iter().flat_map(|way| &way.now);
        let here = ways.map(|batch| batch.memory_bytes()).sum::<usize>() + text;
        self.held = Some(cx.hold_bytes(here + self.waiting_bytes()));
    }

    /// It is not waited for.
    pub(super) fn let_go(&mut self) {
        self.held = None;
    }

    /// Room for the questions on their way, which [`rest`](Queue::rest) takes back.
    pub(super) fn asked(&mut self) -> Vec<ShardQuestion<A::Question>> {
        mem::take(&mut self.asked)
    }

    /// Takes that room back.
    pub(super) fn keep_asked(&mut self, asked: Vec<ShardQuestion<A::Question>>) {
        debug_assert!(asked.is_empty());
        self.asked = asked;
    }

    /// Due replies that are answered: up to a piece and one reply. Their memory comes back by
    /// [`wrote`](Queue::wrote).
    pub(super) fn write(&mut self) -> Vec<u8> {
        let mut text = mem::take(&mut self.written);
        while text.len() < PIECE_BYTES
            && let Some(due) = self.due.front_mut()
        {
            let (done, is_over) = match due {
                Due::Text(len) => {
                    text.extend(self.texts.drain(..*len));
                    (1, true)
                }
                Due::Answers(shard, left) => {
                    let most = if self.merged.is_none() { *left as usize } else { 1 };
                    let Some(now) = &mut self.ways[*shard as usize].now else { break };
                    let Some(count) = read::<A>(now, most, &mut self.merged, &mut text) else { break };
                    *left -= count as u32;
                    (count, *left == 0)
                }
                Due::Merged(answers) => {
                    self.merged = Some((A::Merged::default(), *answers));
                    (1, true)
                }
            };
            if is_over {
                self.due.pop_front();
            }
            self.count -= done;
            if let Some((mut merged, _)) = self.merged.take_if(|(_, left)| *left == 0) {
                merged.write(&mut text);
            }
        }
        text
    }

    pub(super) fn wrote(&mut self, mut text: Vec<u8>) {
        text.clear();
        // A long answer was it.
        self.written = if text.capacity() > 2 * PIECE_BYTES { Vec::new() } else { text };
    }

    /// All that it holds here.
    #[cfg(test)]
    fn memory_bytes(&self) -> usize {
        let ways = self.ways.iter().flat_map(|way| way.now.iter().chain([&way.next]));
        ways.map(|batch| batch.memory_bytes()).sum::<usize>()
            + self.due.capacity() * size_of::<Due>()
            + self.texts.capacity()
            + self.written.capacity()
    }

    /// Gives large memory back when nothing is due.
    pub(super) fn rest(&mut self, asked: Vec<ShardQuestion<A::Question>>) {
        self.keep_asked(asked);
        for Way { now, next } in &mut self.ways {
            now.get_or_insert_default().clear();
            next.clear();
        }
        // A request that panicked, or asked for fewer answers than it merges, leaves the merge
        // behind.
        self.merged = None;
        self.held = None;
        if self.due.capacity() * size_of::<Due>() > SPARE_BYTES_MAX {
            self.due = VecDeque::new();
        }
        if self.written.capacity() > SPARE_BYTES_MAX {
            self.written = Vec::new();
        }
        if self.texts.capacity() > SPARE_BYTES_MAX {
            self.texts = VecDeque::new();
        }
    }
}

/// Reads answers into a text: as many as `most` and a piece has room for, or one. A long one is a
/// text by itself, and is not copied.
fn read<A: QuestionHandler>(
    now: &mut Batch<A::Question>,
    most: usize,
    merged: &mut Option<(A::Merged, usize)>,
    text: &mut Vec<u8>,
) -> Option<usize> {
    if merged.is_none() && now.is_long(PIECE_BYTES) {
        return text.is_empty().then(|| {
            now.take_long(text);
            1
        });
    }
    let (count, answers) = now.next(most, PIECE_BYTES.saturating_sub(text.len()))?;
    match merged {
        None => text.extend_from_slice(answers),
        Some((merged, left)) => {
            merged.add(answers);
            *left -= 1;
        }
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::Span;
    use ringserve_server::sync::AskError;

    /// Answers a number with as many bytes, each the first one of the part.
    struct Fills;

    impl QuestionHandler for Fills {
        type Question = usize;
        type Merged = Vec<u8>;

        fn answer(&self, len: usize, parts: FrameFields<'_>, out: &mut Vec<u8>) {
            if len == PANICS {
                out.extend_from_slice(b"half of it");
                panic!("planted: an answer");
            }
            out.resize(out.len() + len, parts.get(0)[0]);
        }

        fn large_bytes(&self, len: usize, _: FrameFields<'_>) -> usize {
            if len == LARGE { len } else { 0 }
        }

        fn failed(&self, shard: usize, _: AskError, out: &mut Vec<u8>) {
            out.extend_from_slice(format!("!{shard}").as_bytes());
        }
    }

    const PANICS: usize = usize::MAX;
    /// There has to be memory for as many.
    const LARGE: usize = 3 * PIECE_BYTES + 1;

    fn ask(queue: &mut Queue<Fills>, shard: usize, len: usize, name: &[u8]) {
        queue.ask(shard, len, FrameFields::new(name, &[(0, name.len() as u32)]), (&Fills, 0));
    }

    fn now_of(queue: &Queue<Fills>, shard: usize) -> &Batch<usize> {
        queue.ways[shard].now.as_ref().expect("it is not on its way")
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
            assert!(text.len() <= PIECE_BYTES + ANSWERS_BYTES_MAX, "{} bytes at once", text.len());
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

    /// Of all large answers only that is wanted which is due.
    #[test]
    fn large_answers_wait_for_memory_in_the_order_of_their_replies() {
        let mut queue = Queue::new(2);
        for (n, (shard, len)) in
            [(1, 1), (0, 2), (1, LARGE), (0, LARGE), (1, LARGE), (1, 3)].into_iter().enumerate()
        {
            ask(&mut queue, shard, len, &[b'a' + n as u8]);
        }
        let (mut all, mut wanted) = (Vec::new(), Vec::new());
        while !queue.is_done() {
            if let Some((shard, bytes)) = queue.wants() {
                wanted.push((shard, all.len()));
                assert_eq!(bytes, LARGE);
                // There is none for the second one.
                match wanted.len() {
                    2 => queue.wanting(shard).refuse(&Fills, shard),
                    _ => queue.wanting(shard).grant(bytes),
                }
            }
            for (shard, mut batch) in queue.take().collect::<Vec<_>>() {
                batch.answer(&Fills);
                queue.answered(shard, batch);
            }
            loop {
                let text = queue.write();
                let is_all = text.is_empty();
                all.extend_from_slice(&text);
                queue.wrote(text);
                if is_all {
                    break;
                }
            }
        }
        assert_eq!(wanted, [(1, 3), (0, 3 + LARGE), (1, 5 + LARGE)]);
        let large = |byte: u8| [byte].repeat(LARGE);
        assert!(all == [b"abb".as_slice(), &large(b'c'), b"!0", &large(b'e'), b"fff"].concat());
    }

    #[test]
    fn memory_is_granted_for_the_next_answer_alone() {
        let mut queue = Queue::new(2);
        ask(&mut queue, 1, 1, b"a");
        ask(&mut queue, 1, LARGE, b"b");
        let (shard, mut batch) = queue.take().next().unwrap();
        // It was large when memory for it was asked for.
        batch.grant(LARGE);
        batch.answer(&Fills);
        assert_eq!((batch.left(), batch.wants()), (1, Some(LARGE)));
        queue.answered(shard, batch);
        assert_eq!(queue.wants(), None, "what is answered is written first");
    }

    #[test]
    fn long_answer_is_a_text_without_a_copy() {
        let mut queue = Queue::new(1);
        ask(&mut queue, 0, 1, b"a");
        ask(&mut queue, 0, LARGE, b"b");
        let mut places = Vec::new();
        while !queue.is_done() {
            if let Some((shard, bytes)) = queue.wants() {
                queue.wanting(shard).grant(bytes);
            }
            for (shard, mut batch) in queue.take().collect::<Vec<_>>() {
                batch.answer(&Fills);
                places.push(batch.memory()[2]);
                queue.answered(shard, batch);
            }
            let text = queue.write();
            if text.len() == LARGE {
                assert_eq!(places.last(), Some(&(text.as_ptr() as usize)));
            }
            queue.wrote(text);
            assert!(queue.written.capacity() <= 2 * PIECE_BYTES);
        }
        assert_eq!(places.len(), 2);
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
        queue.rest(Vec::new());
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
    fn own_question_waits_for_earlier_ones_that_were_left() {
        let mut queue = Queue::new(1);
        // Each of the first ones fills an answer. The last two are left for one more.
        for (len, name) in [(ANSWERS_BYTES_MAX, b"abcd".as_slice()), (1, b"ef")] {
            name.iter().for_each(|name| ask(&mut queue, 0, len, &[*name]));
        }
        let (mut all, mut late) = (Vec::new(), vec![(b'e', b"h"), (b'c', b"g")]);
        while !queue.is_done() {
            for (shard, mut batch) in queue.take().collect::<Vec<_>>() {
                batch.answer(&Fills);
                queue.answered(shard, batch);
            }
            loop {
                let text = queue.write();
                // While the text waits for the peer another request goes along.
                if let Some((_, name)) = late.pop_if(|(at, _)| text.first() == Some(at)) {
                    ask(&mut queue, 0, 1, name);
                }
                let is_all = text.is_empty();
                all.extend_from_slice(&text);
                queue.wrote(text);
                if is_all {
                    break;
                }
            }
        }
        all.dedup();
        assert_eq!(all, b"abcdefgh");
    }

    #[test]
    fn own_question_waits_for_earlier_ones_of_this_shard() {
        let mut queue = Queue::new(1);
        for name in b"abc" {
            ask(&mut queue, 0, ANSWERS_BYTES_MAX, &[*name]);
        }
        assert_eq!(now_of(&queue, 0).left() + queue.ways[0].next.left(), 2, "one fills an answer");
        ask(&mut queue, 0, 1, b"d");
        let all = carried(&mut queue);
        assert_eq!((all.len(), all.last()), (3 * ANSWERS_BYTES_MAX + 1, Some(&b'd')));
    }

    #[test]
    fn questions_have_room_up_to_their_bytes_and_again_when_asked() {
        let mut queue = Queue::new(2);
        let name = [b'x'; 1 << 10];
        while queue.has_room() {
            ask(&mut queue, 1, 1, &name);
        }
        let each = name.len() + size_of::<(usize, usize)>() + size_of::<Span>() + size_of::<Due>();
        assert_eq!(queue.count, QUEUE_BYTES_MAX / each + 1);
        let batch = queue.take().next().unwrap();
        assert!(queue.has_room());
        queue.answered(1, Batch::failed(&Fills, batch.1.left(), 1, AskError::Gone).into());
        assert_eq!(carried(&mut queue), b"!1".repeat(QUEUE_BYTES_MAX / each + 1));
    }

    /// The most that a connection holds, whatever is asked: questions under way, those that wait
    /// after them, answers, and a piece of them.
    #[test]
    fn pipeline_without_an_end_holds_a_mebibyte() {
        for shards in [1, 2, 3, 8, 64] {
            for (len, name) in [(0, 1), (1, 7), (5, 20), (100, 30), (1000, 3), (10, 2000)] {
                let (mut queue, mut n, name) = (Queue::new(shards), 0, vec![b'x'; name]);
                let mut fill = |queue: &mut Queue<Fills>| {
                    while queue.has_room() {
                        ask(queue, n % shards, len, &name);
                        n += 1;
                    }
                };
                let mut most = 0;
                for _ in 0..20 {
                    fill(&mut queue);
                    let mut batches: Vec<_> = queue.take().collect();
                    // Others ask while these are under way.
                    fill(&mut queue);
                    batches.iter_mut().for_each(|(_, batch)| batch.answer(&Fills));
                    let away: usize = batches.iter().map(|(_, batch)| batch.memory_bytes()).sum();
                    most = most.max(queue.memory_bytes() + away);
                    for (shard, batch) in batches {
                        queue.answered(shard, batch);
                    }
                    loop {
                        let text = queue.write();
                        most = most.max(queue.memory_bytes() + text.capacity());
                        let is_all = text.is_empty();
                        queue.wrote(text);
                        if is_all {
                            break;
                        }
                    }
                }
                assert!(most <= 1 << 20, "{most} bytes, {shards} shards, answers of {len} bytes");
            }
        }
    }

    #[test]
    fn answers_without_bytes_take_no_more_memory_than_others() {
        let mut queue = Queue::new(2);
        let asks = |queue: &mut Queue<Fills>| {
            ask(queue, 1, 0, b"a");
            ask(queue, 0, 0, b"b");
        };
        // Without end, so that an answer of this shard is always behind a question to the other
        // one.
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
        let bytes = now_of(&queue, 0).memory_bytes();
        assert!(bytes <= 2 * ANSWERS_BYTES_MAX, "{bytes} bytes");
    }

    #[test]
    fn texts_and_answers_without_bytes_take_room_until_written() {
        type Add = fn(&mut Queue<Fills>);
        let adds: [(Add, usize); 4] = [
            (|queue| queue.put(b"\n"), size_of::<Due>() + 1),
            (|queue| queue.merge(0), size_of::<Due>()),
            (|queue| ask(queue, 0, 0, b"a"), size_of::<Due>()),
            (
                |queue| queue.ask(1, 0, FrameFields::new(b"", &[]), (&Fills, 0)),
                size_of::<Due>() + size_of::<(usize, usize)>(),
            ),
        ];
        for (add, each) in adds {
            // Of one shard, whose answers have all the room.
            let mut queue = Queue::new(if each == size_of::<Due>() { 1 } else { 2 });
            for _ in 0..QUEUE_BYTES_MAX / each {
                add(&mut queue);
            }
            assert!(queue.has_room(), "{each} bytes each");
            add(&mut queue);
            assert!(!queue.has_room(), "{each} bytes each");
            for (shard, batch) in queue.take().collect::<Vec<_>>() {
                queue.answered(shard, Batch::failed(&Fills, batch.left(), shard, AskError::Gone).into());
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
            [now_of(queue, 1).memory(), queue.ways[1].next.memory()]
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
        queue.rest(Vec::new());
        assert!(queue.is_done());
    }

    #[test]
    fn memory_of_long_replies_is_given_back() {
        let mut queue = Queue::new(1);
        ask(&mut queue, 0, 1 << 20, b"a");
        queue.put(&[b'b'; SPARE_BYTES_MAX + 1]);
        let text = queue.write();
        queue.wrote(text);
        queue.rest(Vec::new());
        assert_eq!((queue.written.capacity(), queue.texts.capacity()), (0, 0));
        assert_eq!(now_of(&queue, 0).memory(), Batch::<usize>::default().memory());
    }

    #[test]
    fn memory_of_many_short_questions_is_given_back() {
        let mut queue = Queue::new(2);
        for n in 0..6000 {
            ask(&mut queue, n % 2, 0, b"a");
        }
        assert_eq!(carried(&mut queue), b"");
        queue.rest(Vec::new());
        assert_eq!(queue.due.capacity(), 0);
        for (shard, Way { next, .. }) in queue.ways.iter().enumerate() {
            assert_eq!((now_of(&queue, shard).memory_bytes(), next.memory_bytes()), (0, 0));
        }
    }
}
