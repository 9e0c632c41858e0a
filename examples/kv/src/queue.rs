//! Replies that wait for shards, in the order of their requests.
//!
//! The first call that needs another shard carries the queue: it asks each shard once for all that was pipelined, writes what is
//! answered, and ends when nothing is left. Calls behind it leave their requests in the queue.

use std::collections::VecDeque;
use std::mem;
use std::vec::IntoIter;

use ringserve::sync::AskError;

use crate::commands::{Command, Merge};
use crate::resp::{Args, Out, Part, Span};

/// Bytes of requests of one connection that wait, beyond which it begins no other call.
const QUEUE_BYTES_MAX: usize = 256 << 10;
/// Bytes of replies that one shard sends another at once, beyond which at most one more goes with them. The rest is asked for when
/// these are written, so this is what a connection of a slow reader keeps in memory for each shard.
const ANSWER_BYTES_MAX: usize = 256 << 10;

/// Bytes of a batch that are kept for the next one.
const SPARE_BYTES_MAX: usize = 16 << 10;

/// Requests to one shard, and its replies.
#[derive(Default)]
pub struct Batch {
    pub resp3: bool,
    bytes: Vec<u8>,
    spans: Vec<Span>,
    /// Each with the end of its arguments, and whether its reply is made of what several shards say.
    asked: Vec<(Command, usize, bool)>,
    replies: Vec<u8>,
    /// Where each reply ends, and what it counts: -1 if it is an error.
    told: Vec<(usize, i64)>,
    /// Replies that were read, and where the next one begins.
    read: (usize, usize),
}

impl Batch {
    fn ask(&mut self, command: Command, args: Args<'_>, is_part: bool) {
        for arg in args.from(0) {
            let from = self.bytes.len() as u32;
            self.bytes.extend_from_slice(arg);
            self.spans.push((from, self.bytes.len() as u32));
        }
        self.asked.push((command, self.spans.len(), is_part));
    }

    /// Has `run` answer a request at once, as it answers others.
    pub fn tell(&mut self, is_part: bool, run: impl FnOnce(&mut Vec<u8>) -> i64) {
        let count = run(&mut self.replies);
        self.asked.push((Command::Get, self.spans.len(), is_part));
        self.told.push((self.replies.len(), count));
    }

    /// Forgets all, and keeps its memory unless that is large.
    fn clear(mut self) -> Option<Batch> {
        self.bytes.clear();
        self.spans.clear();
        self.asked.clear();
        self.replies.clear();
        self.told.clear();
        self.read = (0, 0);
        (self.bytes.capacity() + self.replies.capacity() < SPARE_BYTES_MAX).then_some(self)
    }

    /// Has `run` answer as many requests as one answer holds: it appends a reply, and returns what that counts.
    pub fn answer(&mut self, mut run: impl FnMut(Command, Args<'_>, &mut Vec<u8>, bool) -> i64) {
        while let Some((command, to, is_part)) = self.asked.get(self.told.len()).copied()
            && self.replies.len() <= ANSWER_BYTES_MAX
        {
            let from = self.told.len().checked_sub(1).map_or(0, |before| self.asked[before].1);
            let args = Args { bytes: &self.bytes, spans: &self.spans[from..to], frame: None };
            let count = run(command, args, &mut self.replies, is_part);
            self.told.push((self.replies.len(), count));
        }
    }

    /// What stands for the answers of a shard that gives none.
    pub fn fail(left: usize, resp3: bool, shard: usize, why: AskError) -> Batch {
        let mut batch = Batch { asked: vec![(Command::Get, 0, false); left], ..Batch::default() };
        batch.answer(|_, _, replies, _| {
            replies.part(Part::Error(unanswered(shard, why)), resp3);
            -1
        });
        batch
    }

    /// Requests without a reply.
    pub fn left(&self) -> usize {
        self.asked.len() - self.told.len()
    }
}

/// A shard gave no answer.
pub fn unanswered(shard: usize, why: AskError) -> String {
    match why {
        AskError::Full => format!("TRYAGAIN shard {shard} has too many requests waiting"),
        AskError::Gone => format!("ERR shard {shard} has ended"),
        // The request may have been worked on.
        _ => format!("ERR shard {shard} gave no answer"),
    }
}

/// A reply that is due.
enum Due {
    One(usize),
    Error(String),
    /// The start of an array, whose elements follow.
    Array(usize),
    /// What these shards say, and before that what others counted and wrote.
    Merged(Merge, IntoIter<usize>, i64, Vec<u8>),
}

/// What one shard is asked, and what it answered.
#[derive(Default)]
struct Way {
    asked: Option<Batch>,
    answered: Option<Batch>,
    spare: Option<Batch>,
}

/// The replies that a connection waits for.
pub struct Queue {
    /// What the client understands. It says nothing else before all that is due is written.
    pub resp3: bool,
    due: VecDeque<Due>,
    ways: Vec<Way>,
    bytes: usize,
}

impl Queue {
    pub fn new(shards: usize) -> Queue {
        Queue {
            resp3: false,
            due: VecDeque::new(),
            ways: (0..shards).map(|_| Way::default()).collect(),
            bytes: 0,
        }
    }

    pub fn is_full(&self) -> bool {
        self.bytes > QUEUE_BYTES_MAX
    }

    /// A reply of that shard, which was asked.
    pub fn one(&mut self, shard: usize) {
        self.due.push_back(Due::One(shard));
    }

    /// Asks nothing.
    pub fn error(&mut self, error: String) {
        self.due.push_back(Due::Error(error));
    }

    pub fn array(&mut self, len: usize) {
        self.due.push_back(Due::Array(len));
    }

    /// Shards that were asked say the parts of one reply.
    pub fn merged(&mut self, merge: Merge, shards: Vec<usize>) {
        self.due.push_back(Due::Merged(merge, shards.into_iter(), 0, Vec::new()));
    }

    pub fn ask(&mut self, shard: usize, command: Command, args: Args<'_>, is_part: bool) {
        let (resp3, way) = (self.resp3, &mut self.ways[shard]);
        let batch = way.asked.get_or_insert_with(|| way.spare.take().unwrap_or_default());
        let before = batch.bytes.len();
        batch.resp3 = resp3;
        batch.ask(command, args, is_part);
        self.bytes += batch.bytes.len() - before;
    }

    /// The answers of a shard, if nothing is asked of it that comes first, and there is room for one more.
    pub fn answers(&mut self, shard: usize) -> Option<&mut Batch> {
        let way = &mut self.ways[shard];
        let batch = way.answered.get_or_insert_with(|| way.spare.take().unwrap_or_default());
        (way.asked.is_none() && batch.left() == 0 && batch.replies.len() <= ANSWER_BYTES_MAX).then_some(batch)
    }

    /// Forgets what was read.
    pub fn tidy(&mut self) {
        for way in &mut self.ways {
            let is_read = |batch: &mut Batch| batch.read.0 == batch.told.len() && batch.left() == 0;
            way.spare = way.answered.take_if(is_read).and_then(Batch::clear).or(way.spare.take());
        }
    }

    /// What is to be asked now, each with its shard.
    pub fn take(&mut self) -> Vec<(usize, Batch)> {
        self.tidy();
        let mut batches = Vec::new();
        for (shard, way) in self.ways.iter_mut().enumerate() {
            // What did not fit into the answer comes first.
            if let Some(mut batch) = way.answered.take_if(|batch| batch.read.0 == batch.told.len()) {
                batch.replies.clear();
                batch.read.1 = 0;
                batches.push((shard, batch));
            } else if way.answered.is_none()
                && let Some(batch) = way.asked.take()
            {
                self.bytes -= batch.bytes.len();
                batches.push((shard, batch));
            }
        }
        batches
    }

    pub fn answered(&mut self, shard: usize, batch: Batch) {
        self.ways[shard].answered = Some(batch);
    }

    /// Writes what is due and answered, up to `bytes` and one reply. `None` if no more is, and otherwise what has to be written in
    /// pieces.
    pub fn write(&mut self, out: &mut impl Out, random: u64) -> Option<Vec<u8>> {
        let mut written = 0;
        while written < ANSWER_BYTES_MAX {
            match self.due.front_mut()? {
                Due::One(shard) => {
                    let (reply, _) = next(&mut self.ways[*shard])?;
                    out.put_slice(reply);
                    written += reply.len();
                }
                Due::Error(error) => out.part(Part::Error(mem::take(error)), self.resp3),
                Due::Array(len) => out.part(Part::Array(*len), self.resp3),
                Due::Merged(merge, shards, sum, text) => {
                    while let Some(shard) = shards.as_slice().first() {
                        let (reply, count) = next(&mut self.ways[*shard])?;
                        shards.next();
                        match (*merge, count) {
                            _ if *sum < 0 => {}
                            // The first error is the reply.
                            (_, ..=-1) => (*sum, *text) = (count, reply.to_vec()),
                            (Merge::Any, 1..) if !random.is_multiple_of(*sum as u64 + 1) => *sum += 1,
                            (Merge::Any, 1..) => (*sum, *text) = (*sum + 1, reply.to_vec()),
                            (..) => {
                                *sum += count;
                                text.extend_from_slice(reply);
                            }
                        }
                    }
                    match merge {
                        _ if *sum < 0 => {}
                        Merge::Sum => out.part(Part::Int(*sum), self.resp3),
                        Merge::Ok => out.part(Part::Ok, self.resp3),
                        Merge::Array => out.part(Part::Array(*sum as usize), self.resp3),
                        Merge::Any if *sum == 0 => out.part(Part::Null, self.resp3),
                        Merge::Any => {}
                    }
                    let text = mem::take(text);
                    self.due.pop_front();
                    return Some(text);
                }
            }
            self.due.pop_front();
        }
        Some(Vec::new())
    }

    pub fn is_done(&self) -> bool {
        self.due.is_empty()
    }
}

/// The next reply of a shard, and what it counts.
fn next(way: &mut Way) -> Option<(&[u8], i64)> {
    let Batch { read, told, replies, .. } = way.answered.as_mut()?;
    let (to, count) = *told.get(read.0)?;
    let from = mem::replace(&mut read.1, to);
    read.0 += 1;
    Some((&replies[from..to], count))
}
