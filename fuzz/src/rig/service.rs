//! A service that follows the first byte of a frame.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use ringserve_core::{Frame, ParkOutcome, Payload, Time};

use super::{Conn, Model};

/// Reply sizes: around the sizes that are copied and lent, the maximum of a one-byte length, and
/// the limits in use.
const SIZES: [usize; 8] = [0, 1, 70, 255, 256, 1500, 4096, 9000];

/// Bytes after which the text of replies repeats: a prime, so that no size in use divides it.
const SAID_REPEATS: usize = 251;

/// The text of replies. A table, since making it byte by byte takes most of the time under a
/// sanitizer.
static SAID: [u8; SAID_REPEATS + 9000] = {
    let mut said = [0; SAID_REPEATS + 9000];
    let mut n = 0;
    while n < said.len() {
        said[n] = (n % SAID_REPEATS) as u8;
        n += 1;
    }
    said
};

/// The result of a call.
#[derive(Debug)]
pub enum Called {
    /// It is over.
    Over(End),
    /// It goes on later.
    ParkOutcome(Box<Task>),
}

/// The end of a call.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// It is done.
    Done,
    /// It failed.
    Failed,
    /// It panicked.
    Panicked,
}

/// A call that waits.
#[derive(Debug)]
pub struct Task {
    /// Its connection.
    pub shared: Conn,
    /// The frame with which it replies when it goes on.
    frame: Option<Frame>,
    /// Replies left to stream.
    left: u8,
    /// Set when the outbox has room, if it waits for that.
    pub room: Option<Arc<Flag>>,
    /// The shard's count of it, and the next listed call.
    pub parked: ParkOutcome,
    /// Time at which it began to wait.
    pub since: Time,
}

/// A waker that remembers.
#[derive(Debug, Default)]
pub struct Flag(AtomicBool);

impl Flag {
    /// True once it was woken.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Flag>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// False once no more bytes are accepted for sending.
fn takes_replies(shared: &Conn) -> bool {
    !shared.is_gone() && !shared.body().writing_ended.get()
}

impl Model {
    /// Replies with a frame, and notes the bytes owed to the peer.
    pub fn reply<'a>(&mut self, shared: &Conn, payload: impl Into<Payload<'a>>) {
        let payload = payload.into();
        if takes_replies(shared)
            && let Some(wire) = self.plan.kind.frame(payload.bytes())
        {
            self.talks[shared.body().peer].owed.extend_from_slice(&wire);
        }
        shared.reply(payload);
    }

    /// Replies with `len` bytes that encode their position.
    pub fn say(&mut self, shared: &Conn, size: u8, raw: bool) {
        let start = self.talks[shared.body().peer].owed.len();
        let len = SIZES[usize::from(size) % SIZES.len()];
        let bytes = &SAID[start % SAID_REPEATS..][..len];
        if !raw {
            return self.reply(shared, bytes);
        }
        if takes_replies(shared) {
            self.talks[shared.body().peer].owed.extend_from_slice(bytes);
        }
        shared.write(bytes);
    }

    /// Calls the service.
    pub fn call(&mut self, shared: &Conn, frame: Frame) -> Called {
        if self.plan.echo_only {
            self.reply(shared, frame);
            return Called::Over(End::Done);
        }
        let what = frame.first().copied().unwrap_or_default();
        let size = frame.get(1).copied().unwrap_or_default();
        match what % 20 {
            4 => {
                shared.read_on();
                shared.body().reads_on.set(true);
            }
            5 => {
                self.reply(shared, frame);
                shared.end_writing();
                shared.body().writing_ended.set(true);
            }
            6 => self.say(shared, size, false),
            7 => self.say(shared, size, true),
            8 => return self.park(shared, Some(frame), 0),
            9 => return self.park(shared, None, size),
            10 => return Called::Over(End::Failed),
            11 => return Called::Over(End::Panicked),
            12 => shared.close(),
            13 => shared.abort(),
            14 => shared.body().kept.borrow_mut().push(frame),
            15 => shared.body().kept.borrow_mut().clear(),
            16 => {
                self.reply(shared, frame.clone());
                self.reply(shared, frame);
            }
            17 => {
                self.reply(shared, frame);
                shared.close();
                self.say(shared, size, false);
            }
            18 => {
                self.reply(shared, frame);
                return Called::Over(End::Failed);
            }
            19 => return self.park(shared, None, 0),
            _ => self.reply(shared, frame),
        }
        Called::Over(End::Done)
    }

    fn park(&mut self, shared: &Conn, frame: Option<Frame>, left: u8) -> Called {
        let room = self.await_room(shared);
        Called::ParkOutcome(Box::new(Task {
            shared: shared.clone(),
            frame,
            left: left % 32,
            room,
            parked: ParkOutcome::default(),
            since: Time::ZERO,
        }))
    }

    /// Continues a parked call. True if it is done.
    pub fn go_on(&mut self, task: &mut Task) -> bool {
        if task.room.as_ref().is_some_and(|flag| !flag.is_set()) {
            return false;
        }
        let shared = task.shared.clone();
        if let Some(frame) = task.frame.take() {
            self.reply(&shared, frame);
        }
        while task.left > 0 {
            task.room = self.await_room(&shared);
            if task.room.is_some() {
                return false;
            }
            task.left -= 1;
            self.say(&shared, task.left, false);
        }
        true
    }
}
