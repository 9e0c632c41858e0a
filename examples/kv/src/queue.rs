//! Replies that wait for shards, in the order of their requests.
//!
//! The first call that needs a shard carries the queue: it asks each shard once for all that was pipelined, writes what is answered,
//! and ends when nothing is left. Calls behind it leave their requests in the queue.

use std::collections::VecDeque;
use std::vec::IntoIter;
use std::{iter, mem};

use ringserve::sync::AskError;
use smallvec::SmallVec;

use crate::commands::{Command, To};
use crate::resp::{Args, Merged, Out, Span, number};

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
    resp3: bool,
    bytes: Vec<u8>,
    spans: Vec<Span>,
    /// Requests without a reply, each with the count of its arguments, and where these begin.
    asked: VecDeque<(&'static Command, usize)>,
    at: usize,
    /// Replies, the length of each that is not read, and where they begin.
    replies: Vec<u8>,
    lens: VecDeque<usize>,
    read: usize,
}

impl Batch {
    fn ask(&mut self, command: &'static Command, args: Args<'_>) {
        for arg in args.from(0) {
            let from = self.bytes.len() as u32;
            self.bytes.extend_from_slice(arg);
            self.spans.push((from, self.bytes.len() as u32));
        }
        self.asked.push_back((command, args.len()));
    }

    /// Has `run` answer as many requests as one answer holds.
    pub fn answer(&mut self, mut run: impl FnMut(&'static Command, Args<'_>, &mut Out<'_, '_>)) {
        while self.replies.len() <= ANSWER_BYTES_MAX
            && let Some((command, count)) = self.asked.pop_front()
        {
            let spans = &self.spans[self.at..][..count];
            let (args, before) = (Args { bytes: &self.bytes, spans, frame: None }, self.replies.len());
            run(command, args, &mut Out::text(&mut self.replies, self.resp3));
            self.lens.push_back(self.replies.len() - before);
            self.at += count;
        }
    }

    /// Stands for the answers of a shard that gave none to this many requests.
    pub fn failed(requests: usize, shard: usize, why: AskError) -> Batch {
        let mut line = Vec::new();
        let _ = Out::text(&mut line, false).error(&match why {
            AskError::Full => format!("TRYAGAIN shard {shard} has too many requests waiting"),
            AskError::Gone => format!("ERR shard {shard} has ended"),
            // The request may have been worked on.
            _ => format!("ERR shard {shard} gave no answer"),
        });
        let lens = (0..requests).map(|_| line.len()).collect();
        Batch { replies: line.repeat(requests), lens, ..Batch::default() }
    }

    /// Requests without a reply.
    pub fn left(&self) -> usize {
        self.asked.len()
    }

    /// The next reply.
    fn next(&mut self) -> Option<&[u8]> {
        let from = self.read;
        self.read += self.lens.pop_front()?;
        Some(&self.replies[from..self.read])
    }

    /// Forgets all, and keeps its memory unless that is large.
    fn clear(&mut self) {
        if self.bytes.capacity() + self.replies.capacity() > SPARE_BYTES_MAX {
            return *self = Batch::default();
        }
        self.bytes.clear();
        self.spans.clear();
        self.replies.clear();
        (self.at, self.read) = (0, 0);
    }
}

/// A reply that is due.
enum Due {
    Text(Vec<u8>),
    /// What that shard says.
    One(usize),
    /// What these shards say, and before that what others said.
    Merged(IntoIter<usize>, Merged),
}

/// What one shard is asked and answers now, and what it is asked then.
#[derive(Default)]
struct Way {
    now: Batch,
    next: Batch,
}

/// The replies that a connection waits for.
#[derive(Default)]
pub struct Queue {
    due: VecDeque<Due>,
    /// None while no call carries it.
    ways: Vec<Way>,
    bytes: usize,
}

impl Queue {
    pub fn new(shards: usize) -> Queue {
        Queue { ways: (0..shards).map(|_| Way::default()).collect(), ..Queue::default() }
    }

    pub fn is_carried(&self) -> bool {
        !self.ways.is_empty()
    }

    pub fn has_room(&self) -> bool {
        self.bytes <= QUEUE_BYTES_MAX
    }

    pub fn is_done(&self) -> bool {
        self.due.is_empty()
    }

    /// Asks the shards that a command is about. `owner` tells whose a key is, and `run` answers for this shard at once, if it can.
    pub fn ask(
        &mut self,
        command: &'static Command,
        args: Args<'_>,
        resp3: bool,
        owner: impl Fn(&[u8]) -> usize,
        here: usize,
        run: impl Fn(&'static Command, Args<'_>, &mut Out<'_, '_>),
    ) {
        let shards = self.ways.len();
        let mut ask = |shard: usize, args: Args<'_>| {
            let Way { now, next } = &mut self.ways[shard];
            if shard == here && now.left() + next.left() == 0 && now.replies.len() <= ANSWER_BYTES_MAX {
                let before = now.replies.len();
                run(command, args, &mut Out::text(&mut now.replies, resp3));
                now.lens.push_back(now.replies.len() - before);
                return shard;
            }
            let batch = next;
            let before = batch.bytes.len();
            batch.resp3 = resp3;
            batch.ask(command, args);
            self.bytes += batch.bytes.len() - before;
            shard
        };
        let step = match command.to {
            To::Each(step) => step,
            To::Values => 1,
            To::Key => return self.due.push_back(Due::One(ask(owner(args.get(1)), args))),
            To::Cursor => {
                let cursor = number(args.get(1)).unwrap_or_default() as usize;
                return self.due.push_back(Due::One(ask(cursor % shards, args)));
            }
            To::All | To::Client => {
                let asked: Vec<usize> = (0..shards).map(|shard| ask(shard, args)).collect();
                return self.due.push_back(Due::Merged(asked.into_iter(), Merged::default()));
            }
        };
        let keys = (1..args.len()).step_by(step).map(|n| {
            // Without the name, which no command on keys looks at that reaches several.
            let spans: SmallVec<[Span; 3]> =
                iter::once((0, 0)).chain(args.spans[n..n + step].iter().copied()).collect();
            ask(owner(args.get(n)), Args { spans: &spans, ..args })
        });
        let asked: Vec<usize> = keys.collect();
        if command.to == To::Values {
            let mut text = Vec::new();
            let _ = Out::text(&mut text, resp3).array(asked.len());
            self.due.push_back(Due::Text(text));
            self.due.extend(asked.into_iter().map(Due::One));
        } else {
            self.due.push_back(Due::Merged(asked.into_iter(), Merged::default()));
        }
    }

    /// What is to be asked now, each with its shard.
    pub fn take(&mut self) -> Vec<(usize, Batch)> {
        let mut batches = Vec::new();
        for (shard, Way { now, next }) in self.ways.iter_mut().enumerate() {
            if !now.lens.is_empty() {
                continue;
            }
            if now.left() > 0 {
                // What did not fit into the answer comes first.
                now.replies.clear();
                now.read = 0;
            } else {
                now.clear();
                mem::swap(now, next);
                self.bytes -= now.bytes.len();
            }
            if now.left() > 0 {
                batches.push((shard, mem::take(now)));
            }
        }
        batches
    }

    pub fn answered(&mut self, shard: usize, batch: Batch) {
        self.ways[shard].now = batch;
    }

    /// What is due and answered: this many bytes and one reply at most.
    pub fn write(&mut self) -> Vec<u8> {
        let mut text = Vec::new();
        while text.len() < ANSWER_BYTES_MAX
            && let Some(due) = self.due.front_mut()
        {
            match due {
                Due::Text(reply) => text.append(reply),
                Due::One(shard) => match self.ways[*shard].now.next() {
                    Some(reply) => text.extend_from_slice(reply),
                    None => break,
                },
                Due::Merged(shards, merged) => {
                    while let Some(shard) = shards.as_slice().first() {
                        let Some(reply) = self.ways[*shard].now.next() else { return text };
                        merged.add(reply);
                        shards.next();
                    }
                    let _ = merged.write(&mut text);
                }
            }
            self.due.pop_front();
        }
        text
    }

    /// Nothing is due: memory that is large is given back.
    pub fn rest(mut self) -> Queue {
        self.ways.iter_mut().for_each(|way| way.now.clear());
        self
    }
}
