//! Rests of uploads that were answered before they were through.
//!
//! hyper resets a stream of HTTP/2 as soon as its answer is whole, wherever the body of its request
//! is; and what then comes of that body counts as the peer's errors, until the connection ends for
//! them. So both directions are read here as frames:
//!
//! ```text
//!   hyper ── RST_STREAM(NO_ERROR) ──▶ kept back, until the body ends (it never leaves then), 64 KiB came of it, or half a second
//!                                    passed
//!   peer  ── DATA of such a stream ──▶ dropped, and given back to the window of the connection
//!         ── HEADERS, its trailers ──▶ passed on, as hyper decodes what later ones refer to
//! ```
//!
//! Frames that are on their way once the reset leaves are dropped for another second, as with other
//! resets that are the server's wish.
//!
//! hyper knows a stream for a second after it reset it, and 50 of them at once: on one that it
//! knows it ignores HEADERS, and on one that it forgot they end the connection. So those of a
//! stream that it forgot are passed on as those of one that it knows.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Duration;

use hyper::rt::ReadBufCursor;
use ringserve_core::Time;

/// Bytes of a rest that are dropped before its stream is reset, and the time: a form or a small
/// file is through by then, and its sender sees the answer instead of a reset. Half of
/// [`KNOWN_TIME`], so that hyper knows the stream while its trailers may be on their way.
const BYTES_MAX: u32 = 64 << 10;
const TIME_MAX: Duration = Duration::from_millis(500);

/// Time in which bytes are on their way that left before a reset came.
const TOLD_TIME: Duration = Duration::from_secs(1);

/// Rests of a connection at once. Arbitrary: hyper counts them no longer among the streams that it
/// may have.
const RESTS_MAX: usize = 256;

/// The time for which hyper knows a stream that it reset, and their number. They are 50, and some
/// resets are seen here later than hyper counts them.
const KNOWN_TIME: Duration = Duration::from_secs(1);
const KNOWN_MAX: usize = 40;

/// Bytes that are given back to the window of the connection at once, so that small frames cost few
/// updates. The window is 64 KiB at least.
const GIVEN_BACK: u32 = 16 << 10;

/// The length of a client's preface, which precedes its first frame.
const PREFACE_BYTES: u32 = 24;

const HEADER_BYTES: usize = 9;
pub(super) const RESET_BYTES: usize = HEADER_BYTES + 4;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const PUSH_PROMISE: u8 = 5;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Reasons for which a server ends a stream that has done nothing wrong: what is on its way then is
/// no error either.
const NO_ERROR: u32 = 0;
const INTERNAL_ERROR: u32 = 2;
const REFUSED_STREAM: u32 = 7;
const CANCEL: u32 = 8;

/// A place in frames that follow each other.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// The start of a header.
    header: [u8; HEADER_BYTES],
    have: usize,
    /// Bytes up to the next one.
    left: u32,
    /// The frame at hand goes on in the next one, and none may come between them.
    goes_on: bool,
}

impl Place {
    fn is_between(&self) -> bool {
        self.have == 0 && self.left == 0 && !self.goes_on
    }

    /// Goes on over bytes, up to the end of a header or of a frame at most. Returns how many.
    fn step(&mut self, bytes: &[u8]) -> usize {
        if self.left > 0 {
            let count = bytes.len().min(self.left as usize);
            self.left -= count as u32;
            return count;
        }
        let count = bytes.len().min(HEADER_BYTES - self.have);
        self.header[self.have..self.have + count].copy_from_slice(&bytes[..count]);
        self.have += count;
        if self.have == HEADER_BYTES {
            self.have = 0;
            self.left = number(&self.header[..3]);
            let [.., kind, flags, _, _, _, _] = self.header;
            self.goes_on = matches!(kind, HEADERS | PUSH_PROMISE | CONTINUATION) && flags & END_HEADERS == 0;
        }
        count
    }

    fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = self.step(bytes);
            bytes = &bytes[count..];
        }
    }
}

/// Of at most 4 bytes.
fn number(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn stream_of(header: &[u8]) -> u32 {
    number(&header[5..HEADER_BYTES]) & 0x7fff_ffff
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    stream: u32,
    /// Bytes that may still be dropped.
    room: u32,
    since: Time,
}

/// The next step for the bytes that hyper writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Out {
    /// The front, of this length, which leaves.
    Pass(usize),
    /// The reset of this stream, which is kept back: [`RESET_BYTES`].
    Keep(u32),
}

/// The rests of one connection of HTTP/2.
#[derive(Debug)]
pub(super) struct Rests {
    out: Place,
    came: Place,
    /// Bytes of the header at hand that were passed on before it was whole, and those at its end
    /// that were not since.
    given: usize,
    held: usize,
    /// Bytes of a frame that are to be dropped.
    dropping: u32,
    /// Streams whose reset is kept back, and those whose reset left. The oldest first.
    kept: VecDeque<Rest>,
    told: VecDeque<Rest>,
    /// Streams that hyper reset and knows, and since when. The oldest first.
    known: VecDeque<(u32, Time)>,
    /// HEADERS at hand are passed on as those of this stream, up to their end.
    instead: Option<u32>,
    /// The most that may be on its way of a stream.
    window: u32,
    /// Bytes that were dropped and not given back.
    owed: u32,
    /// Frames that are to leave.
    says: Vec<u8>,
}

impl Rests {
    /// Of a connection whose streams have this window.
    pub(super) fn new(window: u32) -> Rests {
        Rests {
            out: Place::default(),
            came: Place { left: PREFACE_BYTES, ..Place::default() },
            given: 0,
            held: 0,
            dropping: 0,
            kept: VecDeque::new(),
            told: VecDeque::new(),
            known: VecDeque::new(),
            instead: None,
            window,
            owed: 0,
            says: Vec::new(),
        }
    }

    /// The next step for the front of the bytes that hyper writes.
    pub(super) fn next_out(&mut self, pieces: &[IoSlice<'_>], now: impl Fn() -> Time) -> Out {
        let (mut place, mut at) = (self.out, 0);
        for piece in pieces {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                if place.is_between()
                    && let Some(reset) = rest.first_chunk::<RESET_BYTES>()
                    && reset[3] == RST_STREAM
                {
                    let stream = stream_of(reset);
                    match number(&reset[HEADER_BYTES..]) {
                        NO_ERROR if at == 0 => return Out::Keep(stream),
                        NO_ERROR => return Out::Pass(at),
                        // It never took such a stream in.
                        REFUSED_STREAM => self.note_told(stream, now()),
                        INTERNAL_ERROR | CANCEL => {
                            self.note_known(stream, now());
                            self.note_told(stream, now());
                        }
                        _ => self.note_known(stream, now()),
                    }
                }
                let count = place.step(rest);
                (rest, at) = (&rest[count..], at + count);
            }
        }
        Out::Pass(at)
    }

    /// `count` bytes of the front left, or were kept back.
    pub(super) fn went(&mut self, pieces: &[IoSlice<'_>], mut count: usize) {
        for piece in pieces {
            let some = count.min(piece.len());
            self.out.pass(&piece[..some]);
            count -= some;
        }
    }

    /// Keeps the reset of a stream back.
    pub(super) fn keep(&mut self, stream: u32, now: Time) {
        self.note_known(stream, now);
        self.kept.push_back(Rest { stream, room: BYTES_MAX, since: now });
        if self.kept.len() > RESTS_MAX {
            self.tell(0, now);
        }
    }

    /// The front of the preface was passed on before.
    pub(super) fn replayed(&mut self, bytes: &[u8]) {
        self.came.pass(bytes);
    }

    /// Passes what the peer sent on, as far as there is room. Returns how much of it was taken.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        buf: &mut ReadBufCursor<'_>,
        now: impl Fn() -> Time,
    ) -> usize {
        if !self.filters() {
            let count = bytes.len().min(buf.remaining());
            buf.put_slice(&bytes[..count]);
            self.came.pass(&bytes[..count]);
            self.given = self.came.have;
            return count;
        }
        let mut at = 0;
        loop {
            self.give_held(buf);
            let rest = &bytes[at..];
            if rest.is_empty() || buf.remaining() == 0 {
                return at;
            }
            if self.dropping > 0 {
                let count = rest.len().min(self.dropping as usize);
                self.dropping -= count as u32;
                at += count;
            } else if self.came.left > 0 {
                let rest = &rest[..rest.len().min(buf.remaining())];
                let count = self.came.step(rest);
                buf.put_slice(&rest[..count]);
                at += count;
            } else {
                at += self.came.step(rest);
                if self.came.have == 0 {
                    self.judge(&now);
                }
            }
        }
    }

    /// Passes on what was held back until it was known whether its frame is dropped. To be asked
    /// before each reading: it may be the last that comes.
    pub(super) fn give_held(&mut self, buf: &mut ReadBufCursor<'_>) {
        let count = self.held.min(buf.remaining());
        let from = HEADER_BYTES - self.held;
        buf.put_slice(&self.came.header[from..from + count]);
        self.held -= count;
    }

    fn filters(&self) -> bool {
        let is_inside = self.held > 0 || self.dropping > 0 || self.instead.is_some();
        is_inside || self.came.have > self.given || self.has_some()
    }

    fn has_some(&self) -> bool {
        !(self.kept.is_empty() && self.told.is_empty())
    }

    /// A header is whole.
    fn judge(&mut self, now: impl Fn() -> Time) {
        let given = std::mem::take(&mut self.given);
        if given == 0 {
            self.pick_instead(now);
            if self.drops() {
                self.dropping = std::mem::take(&mut self.came.left);
                return;
            }
            if let Some(stream) = self.instead {
                self.came.header[5..].copy_from_slice(&stream.to_be_bytes());
                self.instead = self.instead.filter(|_| self.came.goes_on);
            }
        }
        self.held = HEADER_BYTES - given;
    }

    /// The frame at hand may be trailers of a stream that hyper forgot.
    fn pick_instead(&mut self, now: impl Fn() -> Time) {
        let stream = stream_of(&self.came.header);
        let is_rest = |rests: &VecDeque<Rest>| rests.iter().any(|rest| rest.stream == stream);
        if self.came.header[3] == HEADERS && (is_rest(&self.kept) || is_rest(&self.told)) {
            self.forget_known(now());
            let is_known = self.known.iter().any(|known| known.0 == stream);
            self.instead = self.known.back().filter(|_| !is_known).map(|known| known.0);
        }
    }

    /// hyper reset a stream.
    fn note_known(&mut self, stream: u32, now: Time) {
        self.forget_known(now);
        if self.known.len() < KNOWN_MAX {
            self.known.push_back((stream, now));
        }
    }

    fn forget_known(&mut self, now: Time) {
        while self.known.front().is_some_and(|known| known.1 + KNOWN_TIME <= now) {
            self.known.pop_front();
        }
    }

    /// True if the frame at hand is dropped.
    fn drops(&mut self) -> bool {
        let (header, len) = (&self.came.header, self.came.left);
        let (kind, stream) = (header[3], stream_of(header));
        let ends = matches!(kind, DATA | HEADERS) && header[4] & END_STREAM != 0;
        let of = |rests: &VecDeque<Rest>| rests.iter().position(|rest| rest.stream == stream);
        let (kept, told) = (of(&self.kept), of(&self.told));
        if ends || kind == RST_STREAM {
            // It is through: no reset leaves.
            _ = kept.map(|at| self.kept.remove(at));
            _ = told.map(|at| self.told.remove(at));
        }
        if kind != DATA || (kept.is_none() && told.is_none()) {
            return false;
        }
        if !ends {
            if let Some(at) = kept {
                let rest = &mut self.kept[at];
                match rest.room.checked_sub(len) {
                    Some(room) => rest.room = room,
                    None => {
                        let until = rest.since + TIME_MAX;
                        self.tell(at, until);
                    }
                }
            } else if let Some(at) = told {
                // More than may have been on its way is the peer's error.
                let Some(room) = self.told[at].room.checked_sub(len) else {
                    self.told.remove(at);
                    return false;
                };
                self.told[at].room = room;
            }
        }
        self.owed += len;
        if ends || self.owed >= GIVEN_BACK {
            self.give_back();
        }
        true
    }

    /// Lets the reset of a stream leave.
    fn tell(&mut self, at: usize, now: Time) {
        let Some(rest) = self.kept.remove(at) else { return };
        self.say(RST_STREAM, rest.stream, NO_ERROR);
        self.note_told(rest.stream, now);
    }

    fn note_told(&mut self, stream: u32, now: Time) {
        if self.told.iter().any(|rest| rest.stream == stream) {
            return;
        }
        if self.told.len() == RESTS_MAX {
            self.told.pop_front();
        }
        self.told.push_back(Rest { stream, room: self.window, since: now });
    }

    fn give_back(&mut self) {
        let owed = std::mem::take(&mut self.owed);
        if owed > 0 {
            self.say(WINDOW_UPDATE, 0, owed);
        }
    }

    /// A frame that consists of a number.
    fn say(&mut self, kind: u8, stream: u32, number: u32) {
        self.says.extend([0, 0, 4, kind, 0]);
        self.says.extend(stream.to_be_bytes());
        self.says.extend(number.to_be_bytes());
    }

    /// Frames that are to leave now: not in the middle of one of hyper's.
    pub(super) fn take_said(&mut self) -> Vec<u8> {
        if self.out.is_between() { std::mem::take(&mut self.says) } else { Vec::new() }
    }

    /// When there is something to do.
    pub(super) fn next(&self) -> Option<Time> {
        let kept = self.kept.front().map(|rest| rest.since + TIME_MAX);
        let told = self.told.front().map(|rest| rest.since + TOLD_TIME);
        kept.into_iter().chain(told).min()
    }

    /// Time went on.
    pub(super) fn pass_time(&mut self, now: Time) {
        let is_over =
            |rests: &VecDeque<Rest>, time| rests.front().is_some_and(|rest| rest.since + time <= now);
        while is_over(&self.told, TOLD_TIME) {
            self.told.pop_front();
        }
        while is_over(&self.kept, TIME_MAX) {
            self.tell(0, now);
        }
        if !self.has_some() {
            self.give_back();
        }
    }
}

#[cfg(test)]
mod tests;
