//! Cases that hardly any seed of the simulator meets. Everything else about a shard is tested
//! there.

mod connect;
mod drain;
mod held;
mod lanes;
mod large;
mod opening;
mod pages;
mod rate;
mod relief;
mod sealed;
mod starting;
mod timers;
mod work;

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::ops::{Deref, DerefMut};
use core::task::Waker;
use core::time::Duration;

use ringserve_buf::{LeaseMut, Pool, PoolConfig};

use super::{EndedConn, Frames, Lane, Next, ParkOutcome, Quota, Shard};
use crate::Page;
use crate::framing::{Encoding, Framing, LengthPrefix};
use crate::{
    AcceptEnd, Address, Batch, CloseHow, CloseReason, Completion, ConnId, ConnStats, Frame, LaneId, Limits,
    Op, Payload, SendEnd, ServerLimits, Socket, Time, Wait,
};

type Core = Shard;

/// An event that a lane received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    Accepted(Socket),
    HandOff(Socket),
    Proxied(ConnId, Option<SocketAddr>),
    Secured(ConnId),
    Connected(ConnId),
    Batch(ConnId),
    Frame(ConnId),
    Heartbeat(ConnId),
    InputEnded(ConnId),
    Wake(ConnId),
    Ended { id: ConnId, reason: CloseReason, opened: bool },
}

/// A call that waits.
#[derive(Debug)]
struct Call {
    id: ConnId,
    frame: Frame,
    parked: ParkOutcome,
}

/// Notes its events, admits every connection and takes every frame.
#[derive(Default)]
struct Recorder {
    heard: Vec<Heard>,
    /// Sockets wait for the test's answer.
    leaves_sockets: bool,
    /// Every `open` waits, and holds this many bytes.
    parks_open: Option<usize>,
    /// Every connection begins with a PROXY header.
    awaits_header: bool,
    /// Contents of the frames.
    taken: Vec<Vec<u8>>,
    /// Each frame gets a reply of this many bytes.
    replies: usize,
    /// Every call waits, and holds this many bytes.
    parks: Option<usize>,
    /// Calls that wait, each named by its place.
    calls: Vec<Call>,
    /// Names of calls that waited for connections that ended.
    dropped: Vec<u32>,
    /// Connections that were informed of a drain.
    told: Vec<ConnId>,
    /// By source: steps that it wants of pages; and the pages, each with its source and what it
    /// took.
    wants_steps: Vec<u32>,
    pages: Vec<(u32, u32)>,
}

/// The name of every waiting `open`.
const OPEN: u32 = 77;

impl Lane for Recorder {
    fn accepted(&mut self, shard: &mut Core, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        self.heard.push(Heard::Accepted(socket));
        if !self.leaves_sockets {
            let id = shard.admit::<()>(socket, peer, listener).unwrap();
            match self.awaits_header {
                true => shard.await_header(id),
                false => self.start(shard, id),
            }
        }
    }

    fn proxied(&mut self, shard: &mut Core, id: ConnId) {
        self.heard.push(Heard::Proxied(id, shard.shared(id).unwrap().peer()));
        self.start(shard, id);
    }

    fn secured(&mut self, shard: &mut Core, id: ConnId) {
        self.heard.push(Heard::Secured(id));
        self.open(shard, id);
    }

    fn hand_off(&mut self, _shard: &mut Core, socket: Socket, _peer: Option<SocketAddr>, _listener: u16) {
        self.heard.push(Heard::HandOff(socket));
    }

    fn connected(&mut self, shard: &mut Core, id: ConnId) {
        self.heard.push(Heard::Connected(id));
        shard.opened(id);
    }

    fn frames(&mut self, frames: &mut Frames<'_, ()>) {
        let id = frames.id();
        self.heard.push(Heard::Batch(id));
        loop {
            let frame = match frames.next_frame(&LengthPrefix::default()) {
                Next::Frame(frame) => frame,
                Next::Nothing => return,
                Next::Bad(error) => panic!("{error:?}"),
            };
            self.heard.push(Heard::Frame(id));
            self.taken.push(frame.to_vec());
            if self.replies > 0 {
                frames.shared().reply(Payload::Bytes(&vec![b'r'; self.replies]));
            }
            if let Some(bytes) = self.parks {
                let parked = frames.park(self.calls.len() as u32, bytes);
                self.calls.push(Call { id, frame, parked });
            }
        }
    }

    fn draining(&mut self, _shard: &mut Core, id: ConnId) {
        self.told.push(id);
    }

    fn heartbeat(&mut self, _shard: &mut Core, id: ConnId) {
        self.heard.push(Heard::Heartbeat(id));
    }

    fn input_ended(&mut self, _shard: &mut Core, id: ConnId) {
        self.heard.push(Heard::InputEnded(id));
    }

    fn wake(&mut self, _shard: &mut Core, id: ConnId, waker: Waker) {
        self.heard.push(Heard::Wake(id));
        waker.wake();
    }

    fn page(&mut self, shard: &mut Core, source: u32, page: &mut Page) -> bool {
        let left = &mut self.wants_steps[source as usize];
        while *left > 0 && page.take(0) {
            *left -= 1;
        }
        self.pages.push((source, page.taken()));
        // What it queues leaves in this turn.
        if let Some(shared) = shard.shared(ConnId::new(0, 0)) {
            shared.write(b"p");
        }
        *left > 0
    }

    fn ended(&mut self, _shard: &mut Core, ended: EndedConn) {
        let EndedConn { id, reason, opened, call, .. } = ended;
        self.dropped.extend(call);
        self.heard.push(Heard::Ended { id, reason, opened });
    }
}

impl Recorder {
    fn start(&mut self, shard: &mut Core, id: ConnId) {
        if !shard.begin_handshake(id) {
            self.open(shard, id);
        }
    }

    fn open(&mut self, shard: &mut Core, id: ConnId) {
        match self.parks_open {
            None => shard.opened(id),
            Some(bytes) => assert_eq!(shard.open_parked(id, OPEN, bytes), bytes),
        }
    }
}

/// The limits of the shard, and those of its first lane.
type Bounds = (ServerLimits, Limits);

impl From<Limits> for Bounds {
    fn from(first: Limits) -> Bounds {
        (ServerLimits::default(), first)
    }
}

impl From<ServerLimits> for Bounds {
    fn from(server: ServerLimits) -> Bounds {
        (server, Limits::default())
    }
}

/// A shard, and the lane above it.
struct Tested {
    shard: Core,
    lane: Recorder,
}

impl Tested {
    fn new(limits: impl Into<Bounds>, connections_max: usize, listeners: u16) -> Tested {
        let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
        let (server, first) = limits.into();
        let shard = Shard::new(server, first, connections_max, listeners, encoding(), pool, ());
        Tested { shard, lane: Recorder::default() }
    }

    /// Begins a turn at `now`, after one for each timer that is due before.
    fn begin(&mut self, now: Time, completions: usize) {
        while let Some(due) = self.shard.wheel.next()
            && due < now
        {
            self.begin_late(due, 0);
            self.end();
        }
        self.begin_late(now, completions);
    }

    /// Begins a turn at `now`, however long ago timers were due.
    fn begin_late(&mut self, now: Time, completions: usize) {
        self.shard.begin(now, completions, &mut self.lane);
    }

    fn complete(&mut self, completion: Completion) {
        self.shard.complete(completion, &mut self.lane);
    }

    fn end(&mut self) {
        self.shard.end(&mut self.lane);
    }

    /// A turn without completions.
    fn turn(&mut self, now: Time) {
        self.begin(now, 0);
        self.end();
    }

    /// Dispatches to the lane what the test itself caused.
    fn dispatch(&mut self) {
        self.shard.dispatch(&mut self.lane);
    }

    fn ops(&mut self) -> Vec<Op> {
        self.shard.take_ops().collect()
    }

    /// Events that the lane received since the last call of this.
    fn heard(&mut self) -> Vec<Heard> {
        core::mem::take(&mut self.lane.heard)
    }

    /// The connections of the frames among them, if there are no other events.
    fn handed(&mut self) -> Vec<ConnId> {
        let frame = |heard| match heard {
            Heard::Frame(id) => Some(id),
            Heard::Batch(_) => None,
            other => panic!("{other:?}"),
        };
        self.heard().into_iter().filter_map(frame).collect()
    }

    fn receive(&mut self, id: ConnId, bytes: &[u8]) {
        self.complete(Completion::Received { id, lease: LeaseMut::try_copy_of(bytes).unwrap() });
    }

    /// Receives bytes that complete no frame.
    fn receive_part(&mut self, id: ConnId, bytes: &[u8]) {
        let before = self.lane.heard.len();
        self.receive(id, bytes);
        assert!(!self.lane.heard[before..].contains(&Heard::Frame(id)), "a frame");
    }

    /// Ends the call that began last: the next frame follows.
    fn call_done(&mut self) -> Call {
        let call = self.lane.calls.pop().expect("a call waits");
        self.shard.call_done(call.id, self.lane.calls.len() as u32, call.parked, None);
        self.shard.run_frames(call.id, &mut self.lane);
        self.dispatch();
        call
    }
}

impl Deref for Tested {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.shard
    }
}

impl DerefMut for Tested {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.shard
    }
}

fn encoding() -> Encoding {
    Rc::new(LengthPrefix::default()).encoding()
}

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

/// A connection arrives. Returns its name.
fn accept(shard: &mut Tested, number: u64) -> ConnId {
    let socket = Socket(number);
    shard.complete(Completion::Accepted { listener: 0, socket, peer: None });
    assert_eq!(shard.heard(), [Heard::Accepted(socket)]);
    let adopted = |op| if let Op::Adopt { id, .. } = op { Some(id) } else { None };
    shard.ops().into_iter().find_map(adopted).expect("a connection")
}

/// A shard with one connection.
fn with_connection(limits: impl Into<Bounds>) -> (Tested, ConnId) {
    let (shard, ids) = with_connections(1, limits);
    (shard, ids[0])
}

/// A shard with `count` connections, each of which may be handed frames.
fn with_connections(count: usize, limits: impl Into<Bounds>) -> (Tested, Vec<ConnId>) {
    let mut shard = Tested::new(limits, count, 1);
    shard.begin(Time::ZERO, count);
    let ids = (0..count as u64).map(|number| accept(&mut shard, number)).collect();
    shard.end();
    // Nothing of it is left to do: the next turn comes after a wait.
    shard.turn(Time::ZERO);
    shard.ops();
    (shard, ids)
}

fn empty_frames(count: usize) -> Vec<u8> {
    vec![0; 4 * count]
}
