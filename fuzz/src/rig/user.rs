//! The service's side: events worked off, frames handed out, calls that go on.

use std::rc::Rc;
use std::sync::Arc;

use ringserve_core::{CloseReason, ConnId, Event, Frame, Next, Socket};

use super::{Conn, Rig, Session};
use crate::framings::{Kind, Start};
use crate::service::{Called, Flag, Task};
use crate::wire::Talk;

impl Rig {
    pub(super) fn work_off(&mut self) {
        while let Some(event) = self.shard.next_event() {
            match event {
                Event::Frames(id) => self.run_frames(id),
                Event::Accepted { socket, .. } => self.answer_accepted(socket),
                Event::Wake(_, waker) => waker.wake(),
                Event::Connected(id) => {
                    let block = self.enter(id);
                    self.open(id, &block);
                }
                Event::Heartbeat(id) => self.beat(id),
                Event::InputEnded(id) => self.input_ended(id),
                Event::Elsewhere { socket, .. } => {
                    assert!(self.plan.others);
                    self.socket_leaves(socket);
                    self.went += 1;
                }
                Event::Ended { id, block, reason, opened, handler } => {
                    self.ended(id, block, reason, opened, handler);
                }
            }
        }
    }

    fn answer_accepted(&mut self, socket: Socket) {
        let peer = socket.0 as usize;
        let opening = std::mem::take(&mut self.opening);
        if opening == 1 {
            return self.shard.refuse(socket);
        }
        let session = Session { peer, ..Session::default() };
        let id = self.shard.admit(socket, None, 0, session).expect("there is memory");
        assert!(self.shard.connections() <= self.plan.connections_max, "more connections than there may be");
        assert!(self.names.insert(id), "a name is used twice");
        let block = self.enter(id);
        self.open_as(id, &block, opening);
    }

    /// A connection is there.
    fn enter(&mut self, id: ConnId) -> Conn {
        let block = self.shard.block(id).cloned().expect("a new connection has a block");
        self.live.insert(id, block.clone());
        block
    }

    /// The service connects to an upstream.
    pub fn connect_upstream(&mut self) {
        let peer = self.talks.len();
        let address = core::net::SocketAddr::from(([127, 0, 0, 1], 80)).into();
        let session = Session { peer, ..Session::default() };
        let Some(id) = self.shard.connect(address, session) else { return };
        self.talks.push(Talk::default());
        self.upstreams.insert(id, peer);
        assert!(self.names.insert(id), "a name is used twice");
    }

    fn open(&mut self, id: ConnId, block: &Conn) {
        let opening = std::mem::take(&mut self.opening);
        self.open_as(id, block, opening);
    }

    fn open_as(&mut self, id: ConnId, block: &Conn, opening: u8) {
        let peer = block.session.peer;
        self.talks[peer].heard = self.now;
        if self.plan.hold_open {
            block.link.hold_open();
        }
        if !peer.is_multiple_of(2) {
            block.session.reach.replace(Some(block.link.reach()));
        }
        if opening & 4 != 0 {
            self.reply(block, b"welcome");
        }
        match opening & 3 {
            2 => self.shard.refused(id),
            3 => self.shard.abort(id, CloseReason::HandlerPanicked),
            _ => {
                self.talks[peer].opened = true;
                self.shard.opened(id);
            }
        }
    }

    /// The service asks for a sign of life.
    fn beat(&mut self, id: ConnId) {
        assert!(self.plan.limits.heartbeat.is_some());
        let Some(block) = self.live.get(&id).cloned() else { return };
        assert!(!block.link.is_full(), "a heartbeat on top of a full outbox");
        self.reply(&block, b"are you there?");
    }

    /// The service hears of the end of a peer whose connection it holds open, and closes every other one.
    fn input_ended(&mut self, id: ConnId) {
        let Some(block) = self.live.get(&id).cloned() else { return };
        let (kind, peer) = (self.plan.kind, block.session.peer);
        let talk = &mut self.talks[peer];
        assert!(self.plan.hold_open && !talk.input_end_told, "told of the end twice");
        assert!(!matches!(talk.next(kind, usize::MAX), Start::Frame(..)), "told of the end before a frame");
        talk.input_end_told = true;
        self.reply(&block, b"that was all");
        if peer.is_multiple_of(2) {
            block.link.close();
        }
    }

    /// Calls of a connection that wait.
    pub(super) fn calls<'a>(&'a self, block: &'a Conn) -> impl Iterator<Item = &'a Task> {
        self.tasks.iter().flatten().filter(|task| Rc::ptr_eq(&task.block, block))
    }

    /// Hands frames of one connection to the service, until there is none or a call waits.
    pub fn run_frames(&mut self, id: ConnId) {
        loop {
            match self.shard.next_frame(id) {
                Next::Nothing => return,
                Next::Bad(error, block) => {
                    let (kind, max) = (self.plan.kind, self.plan.limits.frame_bytes_max);
                    let talk = &mut self.talks[block.session.peer];
                    let next = talk.next(kind, max);
                    assert!(matches!(next, Start::TooLarge | Start::Bad), "{next:?} is refused");
                    talk.bad = true;
                    self.reply(&block, b"too large");
                    return self.shard.finish(id, CloseReason::BadFrame(error));
                }
                Next::Frame(frame, block) => {
                    self.check_frame(&frame, &block);
                    let called = self.call(&block, frame);
                    if !self.settle(id, called) {
                        return;
                    }
                }
            }
        }
    }

    fn check_frame(&mut self, frame: &Frame, block: &Conn) {
        self.frames += 1;
        let (kind, max) = (self.plan.kind, self.plan.limits.frame_bytes_max);
        let may = !block.link.is_full() || block.session.reads_on.get();
        assert!(may, "a frame is handed out although the outbox is full");
        let more = self.calls(block).count() < self.plan.limits.calls_in_flight_max.into();
        assert!(more, "a frame is handed out while as many calls wait as may");
        let talk = &mut self.talks[block.session.peer];
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

    /// True if the next frame may follow.
    fn settle(&mut self, id: ConnId, called: Called) -> bool {
        match called {
            Called::Done => return true,
            Called::Failed => self.shard.finish(id, CloseReason::HandlerError),
            Called::Panicked => self.shard.abort(id, CloseReason::HandlerPanicked),
            Called::Parked(mut task) => {
                let free = self.tasks.iter().position(Option::is_none).unwrap_or(self.tasks.len());
                if free == self.tasks.len() {
                    self.tasks.push(None);
                }
                let block = task.block.clone();
                let parked = self.shard.handler_parked(id, free as u32, 100);
                let next = parked.next;
                assert_eq!(next.is_some(), self.calls(&block).next().is_some(), "calls before this one");
                if next.is_none() {
                    self.talks[block.session.peer].waits_since = self.now;
                }
                (task.next, task.bytes) = (next, parked.bytes);
                self.tasks[free] = Some(*task);
                return true;
            }
        }
        let gone = self.shard.block(id).is_none_or(|block| block.link.is_gone());
        assert!(gone, "{id} is finished, and takes replies");
        false
    }

    /// A parked handler goes on, and ends like this unless it parks again.
    pub fn resume(&mut self, index: usize, end: Called) {
        let Some(mut task) = self.tasks.get_mut(index).and_then(Option::take) else { return };
        let id = task.block.link.id();
        if !self.go_on(&mut task) {
            self.tasks[index] = Some(task);
            return;
        }
        if let Some(before) = self.tasks.iter_mut().flatten().find(|other| other.next == Some(index as u32)) {
            before.next = task.next;
        }
        self.talks[task.block.session.peer].waits_since = self.now;
        let (next, bytes) = (task.next, task.bytes);
        drop(task);
        self.shard.handler_done(id, index as u32, next, bytes);
        if self.settle(id, end) {
            self.run_frames(id);
        }
        self.work_off();
    }

    /// Tells a handler when there is room.
    pub fn await_room(&self, block: &Conn) -> Option<Arc<Flag>> {
        let link = &block.link;
        (link.is_full() && !link.is_gone()).then(|| {
            // Only the waker given last is woken.
            let mut room = block.session.room.borrow_mut();
            let flag = room.take_if(|flag| !flag.is_set()).unwrap_or_default();
            link.wake_when_ready(&flag.clone().into());
            room.insert(flag).clone()
        })
    }
}
