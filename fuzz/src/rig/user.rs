//! The service's side: requests of the shard, frames, calls that continue.

use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Waker;

use ringserve_core::{
    CloseReason, ConnHead, ConnId, EndedConn, Frame, Lane, LaneId, Next, RefusedBy, Socket,
};

use super::{Batch, Command, Conn, Core, Model, Rig, Session};
use crate::framings::{Kind, Start};
use crate::rig::service::{Called, End, Flag, Task};
use crate::wire::Talk;

impl Lane for Model {
    fn begin(&mut self, shard: &mut Core) {
        match std::mem::replace(&mut self.order, Command::Serve) {
            Command::Serve => {}
            Command::Drain => shard.drain(),
            Command::Abort => shard.abort_all(),
        }
    }

    fn accepted(&mut self, shard: &mut Core, socket: Socket, _peer: Option<SocketAddr>, listener: u16) {
        let peer = socket.0 as usize;
        let opening = std::mem::take(&mut self.opening);
        if opening == 1 {
            return shard.refuse(socket, listener, RefusedBy::Admit);
        }
        let id = shard.admit::<Session>(socket, None, listener).expect("there is memory");
        let session = Session { peer, ..Session::default() };
        assert!(
            shard.shared(id).is_some_and(|head| head.fill(session).is_ok()),
            "a new connection has no session"
        );
        assert!(
            shard.connections(LaneId::FIRST) <= self.plan.connections_max,
            "more connections than there may be"
        );
        assert!(self.names.insert(id), "a name is used twice");
        self.open(shard, id, opening);
    }

    fn hand_off(&mut self, _core: &mut Core, socket: Socket, _peer: Option<SocketAddr>, _listener: u16) {
        assert!(self.plan.others);
        self.socket_leaves(socket);
        self.went += 1;
    }

    fn connected(&mut self, shard: &mut Core, id: ConnId) {
        let opening = std::mem::take(&mut self.opening);
        self.open(shard, id, opening);
    }

    /// Passes frames of one connection to the service, until there is none or a call fails.
    fn frames(&mut self, frames: &mut Batch<'_>) {
        let (id, shared) = (frames.id(), session_of(frames.shared()));
        let framing = self.framing.clone();
        let alive = self.live.get(&id).is_some_and(|known| *known == shared);
        assert!(alive, "{id} is gone, and has frames");
        loop {
            match frames.next_frame(&*framing) {
                Next::Nothing => return,
                Next::Bad(error) => {
                    let (kind, max) = (self.plan.kind, self.plan.limits.frame_bytes_max);
                    let talk = &mut self.talks[shared.body().peer];
                    let next = talk.next(kind, max);
                    assert!(matches!(next, Start::TooLarge | Start::Bad), "{next:?} is refused");
                    talk.bad = true;
                    self.reply(&shared, b"too large");
                    return frames.shard().finish(id, CloseReason::BadFrame(error));
                }
                Next::Frame(frame) => {
                    self.check_frame(&frame, &shared);
                    match self.call(&shared, frame) {
                        Called::ParkOutcome(task) => self.parked(frames, *task),
                        Called::Over(end) if settle(frames.shard(), id, end) => {}
                        Called::Over(_) => return,
                    }
                }
            }
        }
    }

    /// Asks for a sign of life, as the service.
    fn heartbeat(&mut self, _core: &mut Core, id: ConnId) {
        assert!(self.plan.limits.heartbeat_interval.is_some());
        let Some(shared) = self.live.get(&id).cloned() else { return };
        assert!(!shared.is_full(), "a heartbeat on top of a full outbox");
        self.reply(&shared, b"are you there?");
    }

    /// Handles the end of a peer whose connection the service holds open; every other such
    /// connection is closed.
    fn input_ended(&mut self, _core: &mut Core, id: ConnId) {
        let Some(shared) = self.live.get(&id).cloned() else { return };
        let (kind, peer) = (self.plan.kind, shared.body().peer);
        let talk = &mut self.talks[peer];
        assert!(self.plan.hold_open && !talk.input_end_notified, "told of the end twice");
        assert!(!matches!(talk.next(kind, usize::MAX), Start::Frame(..)), "told of the end before a frame");
        talk.input_end_notified = true;
        self.reply(&shared, b"that was all");
        if peer.is_multiple_of(2) {
            shared.close();
        }
    }

    fn wake(&mut self, _core: &mut Core, _id: ConnId, waker: Waker) {
        waker.wake();
    }

    fn ended(&mut self, _core: &mut Core, ended: EndedConn) {
        self.check_end(ended);
    }
}

impl Model {
    /// Opens a connection.
    fn open(&mut self, shard: &mut Core, id: ConnId, opening: u8) {
        let shared = shard.shared(id).map(session_of).expect("a new connection has a session");
        self.live.insert(id, shared.clone());
        let peer = shared.body().peer;
        self.talks[peer].heard = self.now;
        if self.plan.hold_open {
            shared.hold_open();
        }
        if !peer.is_multiple_of(2) {
            shared.body().gate.replace(Some(shared.gate()));
        }
        if opening & 4 != 0 {
            self.reply(&shared, b"welcome");
        }
        match opening & 3 {
            2 => shard.refused(id, RefusedBy::Open),
            3 => shard.abort(id, CloseReason::HandlerPanicked),
            _ => {
                self.talks[peer].opened = true;
                shard.opened(id);
            }
        }
    }

    /// Waiting calls of a connection.
    pub(super) fn calls<'a>(&'a self, shared: &'a Conn) -> impl Iterator<Item = &'a Task> {
        self.tasks.iter().flatten().filter(|task| task.shared == *shared)
    }

    fn check_frame(&mut self, frame: &Frame, shared: &Conn) {
        self.frames += 1;
        self.upstream_frames += u64::from(self.upstreams.contains_key(&shared.id()));
        let (kind, max) = (self.plan.kind, self.plan.limits.frame_bytes_max);
        let may = !shared.is_full() || shared.body().reads_on.get();
        assert!(may, "a frame is handed out although the outbox is full");
        let more = self.calls(shared).count() < self.plan.limits.calls_in_flight_max.into();
        assert!(more, "a frame is handed out while as many calls wait as may");
        let talk = &mut self.talks[shared.body().peer];
        assert!(talk.opened && talk.ended.is_none() && !talk.bad, "a frame of a connection that takes none");
        let wire = frame.wire();
        assert!(
            wire.len() <= max && talk.received[talk.cut..].starts_with(wire),
            "another's frame, or too much"
        );
        match talk.next(kind, max) {
            _ if kind == Kind::Raw => assert!(!wire.is_empty() && **frame == *wire),
            Start::Frame(payload, consumed) => assert_eq!((&**frame, wire.len()), (payload, consumed)),
            other => panic!("{other:?} is handed out as a frame"),
        }
        talk.cut += wire.len();
    }

    /// Notes that a call waits.
    fn parked(&mut self, frames: &mut Batch<'_>, mut task: Task) {
        let free = self.tasks.iter().position(Option::is_none).unwrap_or(self.tasks.len());
        if free == self.tasks.len() {
            self.tasks.push(None);
        }
        let parked = frames.park(free as u32, 100);
        let is_first = self.calls(&task.shared).next().is_none();
        assert_eq!(parked.next.is_none(), is_first, "calls before this one");
        if is_first {
            self.talks[task.shared.body().peer].waits_since = self.now;
        }
        (task.parked, task.since) = (parked, self.now);
        self.tasks[free] = Some(task);
    }

    /// Makes a handler wait for room.
    pub fn await_room(&self, shared: &Conn) -> Option<Arc<Flag>> {
        let outlet = &**shared;
        (outlet.is_full() && !outlet.is_gone()).then(|| {
            // Only the last waker is woken.
            let mut room = shared.body().room.borrow_mut();
            let flag = room.take_if(|flag| !flag.is_set()).unwrap_or_default();
            outlet.wake_when_ready(&flag.clone().into());
            room.insert(flag).clone()
        })
    }
}

impl Rig {
    /// Connects to an upstream.
    pub fn connect_upstream(&mut self) {
        let Rig { shard, model } = self;
        let peer = model.talks.len();
        let address = SocketAddr::from(([127, 0, 0, 1], 80)).into();
        let session = Session { peer, ..Session::default() };
        let Some(id) = shard.connect(model.lane, address, session) else { return };
        model.talks.push(Talk::default());
        model.upstreams.insert(id, peer);
        assert!(model.names.insert(id), "a name is used twice");
    }

    /// Continues a parked handler, which ends like this unless it parks again.
    pub fn resume(&mut self, index: usize, end: End) {
        let Rig { shard, model } = self;
        let Some(mut task) = model.tasks.get_mut(index).and_then(Option::take) else { return };
        let id = task.shared.id();
        if !model.go_on(&mut task) {
            model.tasks[index] = Some(task);
            return;
        }
        let mut before = None;
        let is_before = |other: &&mut Task| other.parked.next == Some(index as u32);
        if let Some(other) = model.tasks.iter_mut().flatten().find(is_before) {
            other.parked.next = task.parked.next;
            before = Some(other.parked.since);
        }
        let oldest = model.calls(&task.shared).map(|other| other.since).min();
        model.talks[task.shared.body().peer].waits_since = oldest.unwrap_or(model.now);
        let parked = task.parked;
        drop(task);
        shard.call_done(id, index as u32, parked, before);
        if settle(shard, id, end) {
            shard.run_frames(id, model);
        }
        shard.dispatch(model);
    }
}

/// The service's state of a connection: all lanes of the rig have sessions of one type.
pub(super) fn session_of(shared: &ConnHead) -> Conn {
    shared.downcast_ref().cloned().expect("every session is of one type")
}

/// Ends a call. True if the next frame may follow.
fn settle(shard: &mut Core, id: ConnId, end: End) -> bool {
    match end {
        End::Done => return true,
        End::Failed => shard.finish(id, CloseReason::HandlerError),
        End::Panicked => shard.abort(id, CloseReason::HandlerPanicked),
    }
    let gone = shard.shared(id).is_none_or(|shared| shared.is_gone());
    assert!(gone, "{id} is finished, and takes replies");
    false
}
