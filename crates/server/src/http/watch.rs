//! Bounds after the head of a request: the rates of bodies, the time of answers, connections
//! without requests.
//!
//! hyper has none of these. A connection counts what passes above and below hyper, and looks at the
//! counts now and then:
//!
//! ```text
//!   service ──▶ Watched: a `Watching` for each request ──▶ Tracked, Piece: bytes of its answer that hyper still holds
//!   hyper
//!   stream  ──▶ Replayed: bytes read and written, and whether hyper waits for bytes of the peer
//!
//!   tick ──▶ Watch::tick: which request, or which connection, is beyond its bounds
//! ```
//!
//! The timer runs while a request does; with HTTP/2 always. Nothing is allocated for a piece of a
//! body and no clock is read.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::Waker;
use std::time::Duration;

use hyper::body::Bytes;
use ringserve_core::{Reservation, Time};

use farewell::Farewell;
pub(super) use farewell::request_bytes;
pub(super) use memory::SeedBytes;

use super::options::HttpOptions;
use super::rests::Rests;
use super::tunnel::Seed;
use crate::client_info::ClientInfo;
use crate::shard::face::reserve::WAIT_MAX;
use crate::stream::byte_stream::Stream;
use crate::stream::fate::Fate;

/// Ticks in the window of a rate: a peer is seen to be too slow at most a fifth of the window late.
const TICKS: u32 = 5;

/// Entries that are looked at for one that is free, before another is made: with as many free ones
/// as used ones that is usually enough.
const LOOKS: usize = 4;

/// [`HttpOptions`] in ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) tick: Duration,
    /// The time over which a rate is measured, and its ticks.
    rate_window: Duration,
    window: u32,
    /// Bytes that have to pass in a window; 0 is no bound.
    window_bytes: u64,
    /// The same in a second.
    bytes_per_second: f64,
    /// Bytes in one tick with which a request body counts as being sent.
    tick_bytes: u64,
    /// `u32::MAX`, which takes centuries, is no bound here.
    answer: u32,
    request: u32,
    idle: u32,
    memory: u32,
    /// Bytes of responses that hyper holds for a connection of HTTP/2.
    held_bytes_max: usize,
    /// The most that hyper holds of what a peer sent: with HTTP/1.1, and with HTTP/2.
    received_max: [u64; 2],
    /// The window of a stream of HTTP/2.
    stream_window: u32,
}

impl Bounds {
    pub(super) fn new(options: &HttpOptions) -> Bounds {
        let limits = [options.response_timeout, options.request_timeout, options.http2_idle_timeout];
        let window = options.rate_window;
        let tick =
            limits.into_iter().flatten().fold(window / TICKS, Duration::min).max(Duration::from_millis(1));
        let ticks =
            |time: Duration| u32::try_from(time.as_nanos().div_ceil(tick.as_nanos())).unwrap_or(u32::MAX);
        let bytes = |time: Duration| (options.body_bytes_per_second_min as f64 * time.as_secs_f64()) as u64;
        Bounds {
            tick,
            rate_window: window,
            window: ticks(window),
            window_bytes: bytes(window),
            bytes_per_second: options.body_bytes_per_second_min as f64,
            tick_bytes: bytes(tick).max(1),
            answer: options.response_timeout.map_or(u32::MAX, ticks),
            request: options.request_timeout.map_or(u32::MAX, ticks),
            idle: options.http2_idle_timeout.map_or(u32::MAX, ticks),
            memory: ticks(WAIT_MAX),
            held_bytes_max: options.connection_send_bytes_max,
            received_max: [
                options.buffer_bytes_max as u64,
                u64::from(options.connection_window_bytes) + u64::from(options.header_bytes_max),
            ],
            stream_window: options.stream_window_bytes,
        }
    }
}

/// The continuation of a connection that hyper has left, with the bytes that hyper had read of it.
pub(super) type Begin = Box<dyn FnOnce(Stream, Bytes) -> Pin<Box<dyn Future<Output = ()>>>>;

/// The bound that was exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Excess {
    /// The peer sent the body of its request too slowly.
    RequestBody,
    /// The peer took the body of its answer too slowly.
    ResponseBody,
    /// The service had no answer.
    Answer,
    /// Memory for more of its answer was used up for too long.
    Memory,
    /// The request with its answer took too long.
    Request,
    /// No request ran for too long, and the peer did not end the connection when GOAWAY asked for
    /// it.
    Idle,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Excess::RequestBody => {
                "the peer sent its request body below HttpOptions::body_bytes_per_second_min"
            }
            Excess::ResponseBody => "the peer took its response below HttpOptions::body_bytes_per_second_min",
            Excess::Answer => "the service gave no response within HttpOptions::response_timeout",
            Excess::Memory => "memory for more of the response was used up for 5 s",
            Excess::Request => "the request took longer than HttpOptions::request_timeout",
            Excess::Idle => {
                "the peer kept a connection without requests beyond HttpOptions::http2_idle_timeout"
            }
        })
    }
}

/// The next step of a connection after a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Looks again after a tick.
    GoOn,
    /// Looks no more until a request begins.
    Pause,
    /// Ends as at a shutdown, and looks again.
    ShutDown,
    /// Ends at once.
    Abort(Excess),
}

/// The bytes that passed while a side waited.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    /// Ticks at whose end it waited.
    ticks: u32,
    from: u64,
}

impl Rate {
    /// It waits at the end of one more tick, and `total` passed until now. True if that was too
    /// little in a window.
    fn is_low(&mut self, total: u64, bounds: &Bounds) -> bool {
        if self.ticks == 0 {
            // When it began to wait is not known, so the window begins here.
            *self = Rate { ticks: 1, from: total };
            return false;
        }
        self.ticks += 1;
        if self.ticks <= bounds.window {
            return false;
        }
        let passed = total.saturating_sub(self.from);
        *self = Rate { ticks: 1, from: total };
        passed < bounds.window_bytes
    }
}

/// The counts of one connection.
pub(super) struct Watch {
    bounds: Bounds,
    /// The connection whose bytes are counted.
    fate: Option<Fate>,
    /// The offset up to which hyper can no longer hold bytes.
    held_from: Cell<u64>,
    /// The offset at which the last read began.
    read_from: Cell<u64>,
    /// The latest request of HTTP/1.1 has a body.
    has_body: Cell<bool>,
    /// Bytes that the connection counts as held by hyper.
    counted: Cell<usize>,
    http2: Cell<bool>,
    /// True exactly when hyper's last read found nothing: it waits for the peer.
    reading: Cell<bool>,
    /// Bytes given to hyper, and taken from it.
    read: Cell<u64>,
    written: Cell<u64>,
    /// A request began since the timer was last asked for.
    began: Cell<bool>,
    /// The same, since the time for heads was.
    headed: Cell<bool>,
    /// The time, where it was read since then.
    time: Cell<Option<Time>>,
    /// Those that run, and entries that are free: those that only this list holds.
    requests: RefCell<Vec<Rc<Watching>>>,
    /// The index at which the search for a free one begins.
    cursor: Cell<usize>,
    /// The request that hyper makes a task for next.
    next: Cell<Option<Rc<Watching>>>,
    /// Bytes of all responses that hyper holds, without what HTTP/1.1 copied to its own buffer.
    held: Cell<usize>,
    /// Of those that the services of requests may be given in place of hyper's upgrades.
    seeds: Cell<usize>,
    /// Pieces of responses that hyper holds, if they are large and their bytes can be shared.
    shared: RefCell<Vec<Bytes>>,
    /// True if a response is held back, since that is too much.
    holds_back: Cell<bool>,
    /// `read` at the last tick.
    read_before: Cell<u64>,
    input: Cell<Rate>,
    output: Cell<Rate>,
    idle: Cell<u32>,
    /// The bound that the last request beyond its bounds exceeded.
    found: Cell<Option<Excess>>,
    /// With HTTP/1.1: the body of an answer failed.
    is_cut_off: Cell<bool>,
    farewell: Farewell,
    /// With HTTP/2.
    rests: RefCell<Option<Box<Rests>>>,
    /// Bytes held of what came on streams that speak something else than HTTP.
    upgraded_held: Cell<usize>,
    /// The continuation of the connection when hyper leaves it.
    upgrade: RefCell<Option<Begin>>,
}

/// One request.
pub(super) struct Watching {
    connection: Weak<Watch>,
    http2: bool,
    has_body: bool,
    /// Bytes that were read before its head, or before what may be unread of its body.
    read_from: Cell<u64>,
    /// True once the service answered.
    answered: Cell<bool>,
    /// True while a task of HTTP/2 runs, whose end resets the stream.
    task: Cell<bool>,
    waker: Cell<Option<Waker>>,
    age: Cell<u32>,
    answering: Cell<u32>,
    /// Bytes of the response's body that hyper holds, and that left it.
    held: Cell<usize>,
    sent: Cell<u64>,
    /// True while no more of its body is made, since hyper holds too much.
    held_back: Cell<bool>,
    rate: Cell<Rate>,
    excess: Cell<Option<Excess>>,
    /// The memory that its body waits for.
    memory: Cell<Option<Reservation>>,
    /// Ticks for which it waited.
    memory_ticks: Cell<u32>,
    /// The stream speaks something else, as long as it likes.
    upgraded: Cell<bool>,
}

impl Watch {
    pub(super) fn new(bounds: Bounds, fate: Option<Fate>) -> Rc<Watch> {
        Rc::new(Watch {
            bounds,
            fate,
            held_from: Cell::default(),
            read_from: Cell::default(),
            has_body: Cell::default(),
            counted: Cell::default(),
            http2: Cell::default(),
            reading: Cell::default(),
            read: Cell::default(),
            written: Cell::default(),
            began: Cell::default(),
            headed: Cell::default(),
            time: Cell::default(),
            requests: RefCell::default(),
            cursor: Cell::default(),
            next: Cell::default(),
            held: Cell::default(),
            seeds: Cell::default(),
            shared: RefCell::default(),
            holds_back: Cell::default(),
            read_before: Cell::default(),
            input: Cell::default(),
            output: Cell::default(),
            idle: Cell::default(),
            found: Cell::default(),
            is_cut_off: Cell::default(),
            farewell: Farewell::default(),
            rests: RefCell::default(),
            upgraded_held: Cell::default(),
            upgrade: RefCell::default(),
        })
    }

    /// The connection speaks HTTP/2.
    pub(super) fn set_http2(&self) {
        self.http2.set(true);
        self.began.set(true);
    }

    /// The time in which progress of a send has to show.
    pub(super) fn rate_window(&self) -> Duration {
        self.bounds.rate_window
    }

    /// hyper read `bytes`, and waits for more if it found nothing.
    pub(super) fn read(&self, bytes: usize, waits: bool) {
        self.reading.set(waits);
        if bytes == 0 {
            return;
        }
        let read = self.read.get();
        self.read_from.set(read);
        self.read.set(read + bytes as u64);
        if self.http2.get() && self.received_held() >= self.received_max() / 2 {
            self.find_oldest(&self.requests.borrow());
        }
        self.count();
    }

    /// With the rests of uploads of a connection of HTTP/2.
    pub(super) fn with_rests<R>(&self, then: impl FnOnce(&mut Rests) -> R) -> R {
        let mut rests = self.rests.borrow_mut();
        then(rests.get_or_insert_with(|| Box::new(Rests::new(self.bounds.stream_window))))
    }

    /// Sends what is to be said of them.
    pub(super) fn say_rests(&self) {
        let says = self.with_rests(Rests::take_said);
        if !says.is_empty()
            && let Some(fate) = &self.fate
        {
            fate.queue(&says);
            self.written(says.len());
        }
    }

    /// The facts of the connection.
    pub(super) fn client_info(&self, shard: usize) -> Option<ClientInfo> {
        Some(self.fate.as_ref()?.client_info(shard))
    }

    /// True if its peer is to see that an answer is not whole: one without a length ends where the
    /// connection does.
    pub(super) fn is_cut_off(&self) -> bool {
        self.is_cut_off.get()
    }

    /// Counts a request that was shed.
    pub(super) fn count_shed(&self) {
        if let Some(fate) = &self.fate {
            fate.count_shed();
        }
    }

    pub(super) fn written(&self, bytes: usize) {
        self.written.set(self.written.get() + bytes as u64);
    }

    /// A request begins.
    pub(super) fn begin(self: &Rc<Watch>, has_body: bool) -> Rc<Watching> {
        let http2 = self.http2.get();
        self.began.set(true);
        self.headed.set(true);
        self.input.set(Rate::default());
        if !http2 {
            // The one before it is over.
            self.held_from.set(self.read_from.get());
            self.has_body.set(has_body);
        }
        let watching = self.entry(http2, has_body);
        if http2 {
            self.next.set(Some(watching.clone()));
        }
        watching
    }

    fn entry(self: &Rc<Watch>, http2: bool, has_body: bool) -> Rc<Watching> {
        let mut requests = self.requests.borrow_mut();
        for _ in 0..LOOKS.min(requests.len()) {
            let cursor = match self.cursor.get() + 1 {
                cursor if cursor < requests.len() => cursor,
                _ => 0,
            };
            self.cursor.set(cursor);
            if let Some(free) = Rc::get_mut(&mut requests[cursor]) {
                free.begin_anew(has_body, self.read_from.get());
                return requests[cursor].clone();
            }
        }
        let watching = Rc::new(Watching {
            connection: Rc::downgrade(self),
            http2,
            has_body,
            read_from: self.read_from.clone(),
            answered: Cell::default(),
            task: Cell::default(),
            waker: Cell::default(),
            age: Cell::default(),
            answering: Cell::default(),
            held: Cell::default(),
            sent: Cell::default(),
            held_back: Cell::default(),
            rate: Cell::default(),
            excess: Cell::default(),
            memory: Cell::default(),
            memory_ticks: Cell::default(),
            upgraded: Cell::default(),
        });
        requests.push(watching.clone());
        watching
    }

    /// The request whose task hyper spawns now, if it is one's.
    pub(super) fn take_next(&self) -> Option<Rc<Watching>> {
        self.next.take()
    }

    /// True if a request began since this was last asked, for which a timer has to run.
    pub(super) fn take_began(&self) -> bool {
        self.began.take()
    }

    /// True if a request of HTTP/1.1 began since this was last asked.
    pub(super) fn take_headed(&self) -> bool {
        self.headed.take()
    }

    /// The time was read.
    pub(super) fn note_time(&self, now: Time) {
        self.time.set(Some(now));
    }

    /// The time, if it was read since this was last asked.
    pub(super) fn take_time(&self) -> Option<Time> {
        self.time.take()
    }

    /// True if a connection of HTTP/1.1 waits for the head of a request.
    pub(super) fn awaits_head(&self) -> bool {
        self.reading.get() && self.is_quiet()
    }

    /// All that was read until now.
    pub(super) fn bytes_read(&self) -> u64 {
        self.read.get()
    }

    /// True if the rest of a body, of a request of HTTP/1.1 that was answered, came in the last
    /// `time`, in which what is after the first `from` bytes was read, or as much of it as its
    /// rate asks for.
    pub(super) fn body_came(&self, from: u64, time: Duration) -> bool {
        let enough = (self.bounds.bytes_per_second * time.as_secs_f64()) as u64;
        self.has_body.get() && self.farewell.body_came(from, self.read.get(), enough.max(1))
    }

    /// Sets what the connection becomes when hyper leaves it, if anything.
    pub(super) fn set_upgrade(&self, begin: Option<Begin>) {
        // Its drop is user code.
        let before = self.upgrade.replace(begin);
        drop(before);
    }

    /// The continuation of the connection, now that hyper left it and holds nothing of it.
    pub(super) fn take_upgrade(&self) -> Option<Begin> {
        let begin = self.upgrade.take()?;
        if let Some(fate) = &self.fate {
            fate.set_held(0);
        }
        Some(begin)
    }

    /// The bound that a request of HTTP/1.1 exceeded, if one did.
    pub(super) fn exceeded(&self) -> Option<Excess> {
        self.found.get().filter(|_| !self.http2.get())
    }

    /// Looks at the counts, where the kernel has yet to take `outbox` bytes.
    pub(super) fn tick(&self, outbox: usize) -> Next {
        let (bounds, http2) = (&self.bounds, self.http2.get());
        let read = self.read.get();
        let came = read - self.read_before.replace(read);
        self.began.set(false);

        let mut output = self.output.take();
        if outbox > 0 {
            let taken = self.written.get().saturating_sub(outbox as u64);
            if output.is_low(taken, bounds) {
                return Next::Abort(Excess::ResponseBody);
            }
            self.output.set(output);
        }

        let mut requests = self.requests.borrow_mut();
        requests.retain(|request| Rc::strong_count(request) > 1);
        if requests.is_empty() && came == 0 {
            // At most the start of a head is held, which was counted when it came.
            self.held_from.set(read);
            self.count();
        } else if http2 {
            self.find_oldest(&requests);
            self.count();
        }
        // Whose bytes came is not known, so they have to be enough for every body that may be on
        // its way.
        let bodies = requests.iter().filter(|request| request.has_body && !request.answered.get()).count();
        let enough = came >= bounds.tick_bytes.saturating_mul(bodies as u64);
        for request in requests.iter() {
            let uploads = request.has_body && enough;
            let Some(excess) = self.check(request, uploads, outbox) else { continue };
            self.found.set(Some(excess));
            // A second time: whatever was to end it did not.
            let again = request.excess.replace(Some(excess)).is_some();
            if again || (request.answered.get() && !request.task.get()) {
                return Next::Abort(excess);
            }
            if let Some(waker) = request.waker.take() {
                // A task of the shard's: this only notes that it is to be polled.
                _ = ringserve_base::guard::wake(waker);
            }
        }
        if !requests.is_empty() || !http2 {
            self.idle.set(0);
            // Once more behind the last bytes, which then count no longer.
            let rests = requests.is_empty() && outbox == 0 && came == 0;
            return if rests { Next::Pause } else { Next::GoOn };
        }
        let idle = self.idle.get().saturating_add(1);
        self.idle.set(idle);
        // `idle` ticks are over when one more was seen: the first was not a whole one.
        match idle.checked_sub(bounds.idle) {
            Some(1) => Next::ShutDown,
            Some(more) if more > bounds.window => Next::Abort(Excess::Idle),
            _ => Next::GoOn,
        }
    }

    /// One more tick of `request`, whose body comes if it `uploads`.
    fn check(&self, request: &Watching, uploads: bool, outbox: usize) -> Option<Excess> {
        let bounds = &self.bounds;
        let count = |ticks: &Cell<u32>| {
            ticks.set(ticks.get().saturating_add(1));
            ticks.get()
        };
        if !request.upgraded.get() && count(&request.age) > bounds.request {
            return Some(Excess::Request);
        }
        if !request.answered.get() && !uploads && count(&request.answering) > bounds.answer {
            return Some(Excess::Answer);
        }
        if request.waits_for_memory_now() && count(&request.memory_ticks) > bounds.memory {
            return Some(Excess::Memory);
        }
        if !request.http2 {
            let mut input = self.input.get();
            let low = request.has_body && self.reading.get() && input.is_low(self.read.get(), bounds);
            self.input.set(input);
            return low.then_some(Excess::RequestBody);
        }
        // While TCP holds bytes back they are that side's, and so is the rate.
        if request.held.get() == 0 {
            request.rate.set(Rate::default());
        } else if outbox == 0 {
            let mut rate = request.rate.get();
            let low = rate.is_low(request.sent.get(), bounds);
            request.rate.set(rate);
            return low.then_some(Excess::ResponseBody);
        }
        None
    }
}

impl Watching {
    /// Another request of the same connection, written over the one before where they differ: most
    /// of it is as it was.
    fn begin_anew(&mut self, has_body: bool, read_from: u64) {
        self.has_body = has_body;
        self.read_from = Cell::new(read_from);
        (self.answered, self.task, self.held_back, self.upgraded) = Default::default();
        (self.age, self.answering, self.held, self.sent) = Default::default();
        (self.rate, self.excess, self.memory_ticks) = Default::default();
        if self.waker.get_mut().is_some() {
            ringserve_base::guard::discard(self.waker.take());
        }
        if self.memory.get_mut().is_some() {
            self.memory.set(None);
        }
    }

    pub(super) fn is_http2(&self) -> bool {
        self.http2
    }

    pub(super) fn excess(&self) -> Option<Excess> {
        self.excess.get()
    }

    /// The body of its answer failed.
    #[cold]
    pub(super) fn cut_off(&self) {
        if let Some(connection) = self.connection.upgrade().filter(|_| !self.http2) {
            connection.is_cut_off.set(true);
        }
    }

    pub(super) fn is_answered(&self) -> bool {
        self.answered.get()
    }

    pub(super) fn set_answered(&self) {
        self.answered.set(true);
    }

    pub(super) fn begin_task(&self) {
        self.task.set(true);
    }

    /// The task is over, or dropped. Its body waits for nothing.
    pub(super) fn end_task(&self) {
        self.task.set(false);
        self.memory.set(None);
    }

    /// Wakes this one when the request is to end.
    pub(super) fn keep_waker(&self, waker: &Waker) {
        let kept = self.waker.take().filter(|kept| kept.will_wake(waker));
        self.waker.set(Some(kept.unwrap_or_else(|| waker.clone())));
    }

    /// The next task of hyper's is of this stream.
    pub(super) fn await_task(self: &Rc<Watching>) {
        if let Some(connection) = self.connection.upgrade() {
            connection.next.set(Some(self.clone()));
        }
    }

    /// Resets the stream, although something of it has not left.
    #[cfg(feature = "websocket")]
    pub(super) fn reset(&self) {
        self.excess.set(Some(Excess::ResponseBody));
        if let Some(waker) = self.waker.take() {
            _ = ringserve_base::guard::wake(waker);
        }
    }

    /// The stream speaks something else than HTTP.
    pub(super) fn set_upgraded(&self) {
        self.upgraded.set(true);
    }

    /// All that came on this stream until now was taken; of what was read last the rest may be on
    /// its way.
    #[cfg(feature = "websocket")]
    pub(super) fn all_read(&self) {
        if let Some(connection) = self.connection.upgrade() {
            self.read_from.set(connection.read_from.get());
        }
    }

    /// The connection goes on with `seed` once hyper leaves it, unless something else begins then.
    pub(super) fn begins(&self, seed: Seed) {
        if let Some(connection) = self.connection.upgrade()
            && connection.upgrade.borrow().is_none()
        {
            connection.set_upgrade(Some(Box::new(move |stream, read| Box::pin(seed.carry(stream, read)))));
        }
    }

    /// The answer is not what an upgrade begins with.
    pub(super) fn forget_upgrade(&self) {
        if let Some(connection) = self.connection.upgrade() {
            connection.set_upgrade(None);
        }
    }
}

mod farewell;
mod memory;
#[cfg(test)]
mod tests;
