//! Target `switching`: any bytes, cut anywhere, under a framing whose rule calls switch, also late.
//!
//! ```text
//!   limits  options  count  cuts (2 bytes each) ...  stream
//! ```
//!
//! The first byte of a frame selects the rule for the bytes after it. The frames, pieces and the
//! end of the connection must equal those of a naive reading of the whole stream, and all held
//! bytes must be received ones that were not passed on.

use std::net::SocketAddr;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use ringserve_buf::{LeaseMut, Pool, PoolConfig};
use ringserve_core::framing::{
    Cut, EncodeError, FrameError, Framing, FramingState, LengthPrefix, Lines, Raw, TypedFraming,
};
use ringserve_core::{
    CloseReason, Completion, ConnHead, ConnId, EndedConn, Frames, Lane, Limits, Next, Op, Outbox,
    ParkOutcome, Payload, ReceiveEnd, SendEnd, ServerLimits, Shard, Socket, Time,
};

use crate::input::Input;

/// The meaning of the next bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reads {
    Lines,
    Lengths,
    /// An upload of this number of bytes, in pieces.
    Upload(u32),
}

/// Whether a frame is a piece, which is the only information about one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct IsPiece(bool);

struct Switching;

impl TypedFraming for Switching {
    type State = Reads;
    type Head = IsPiece;

    fn cut(&self, reads: &mut Reads, bytes: &[u8], scanned: usize) -> Result<Cut<IsPiece>, FrameError> {
        assert!(scanned <= bytes.len() && !bytes.is_empty(), "the framing was shown nothing");
        let found = match *reads {
            Reads::Lines => Lines::default().decode(bytes, scanned)?,
            Reads::Lengths => LengthPrefix::bytes(2).decode(bytes, scanned)?,
            Reads::Upload(left) => {
                let len = bytes.len().min(left as usize);
                let (left, skip, consumed) = (left - len as u32, 0, len);
                *reads = if left == 0 { Reads::Lines } else { Reads::Upload(left) };
                return Ok(match left {
                    0 => Cut::Frame { skip, len, consumed, head: IsPiece(true) },
                    _ => Cut::Piece { skip, len, consumed, head: IsPiece(true) },
                });
            }
        };
        // A change of the framing's state counts only if it returns a frame.
        let kept = std::mem::replace(reads, Reads::Upload(1));
        if matches!(found, ringserve_core::framing::Decode::Frame { .. }) {
            *reads = kept;
        }
        Ok(found.with_head(IsPiece(false)))
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        Raw.encode(payload, out)
    }
}

/// The rule after a frame, if the frame names one, to which a call of it switches.
fn switch_to(frame: &[u8]) -> Option<Reads> {
    match frame {
        [b'l', ..] => Some(Reads::Lines),
        [b'n', ..] => Some(Reads::Lengths),
        [b'u', a, b, ..] => Some(Reads::Upload(u32::from(*a) << 8 | u32::from(*b) | 1)),
        _ => None,
    }
}

/// Reads a stream as a whole: its frames, those passed on in pieces as one, and its end.
fn read_all(mut stream: &[u8], max: usize) -> (Vec<Vec<u8>>, Option<bool>) {
    let (mut frames, mut reads) = (Vec::new(), Reads::Lines);
    loop {
        let (frame, consumed) = match reads {
            Reads::Upload(left) => {
                let len = stream.len().min(left as usize);
                frames.push(stream[..len].to_vec());
                stream = &stream[len..];
                if len < left as usize {
                    return (frames, Some(true));
                }
                reads = Reads::Lines;
                continue;
            }
            Reads::Lines => match stream.iter().position(|byte| *byte == b'\n') {
                Some(end) if end < max => {
                    let line = &stream[..end];
                    (line.strip_suffix(b"\r").unwrap_or(line), end + 1)
                }
                _ if stream.len() >= max => return (frames, None),
                _ => return (frames, Some(!stream.is_empty())),
            },
            Reads::Lengths => {
                let Some(&[a, b]) = stream.first_chunk() else { return (frames, Some(!stream.is_empty())) };
                let consumed = 2 + (usize::from(a) << 8 | usize::from(b));
                if consumed > max {
                    return (frames, None);
                }
                let Some(frame) = stream.get(2..consumed) else { return (frames, Some(true)) };
                (frame, consumed)
            }
        };
        reads = switch_to(frame).unwrap_or(reads);
        frames.push(frame.to_vec());
        stream = &stream[consumed..];
    }
}

/// A call that waits before it switches.
struct Call {
    parked: ParkOutcome,
    to: Option<Reads>,
}

/// Notes the frames that it gets.
struct User {
    state: Rc<FramingState<Reads>>,
    frames: Vec<Vec<u8>>,
    /// The last frame continues.
    in_pieces: bool,
    piece_bytes_max: usize,
    /// One in this many calls waits; none if 0.
    waits: usize,
    calls: usize,
    call: Option<Call>,
    shared: Option<ConnHead>,
    ended: Option<CloseReason>,
}

impl User {
    fn switch(&self, to: Option<Reads>) {
        if let (Some(to), Some(shared)) = (to, &self.shared) {
            self.state.set(to);
            shared.switched();
        }
    }

    /// Ends the call that waits.
    fn resume(&mut self, shard: &mut Shard, id: ConnId) {
        let Some(Call { parked, to }) = self.call.take() else { return };
        self.switch(to);
        shard.call_done(id, 0, parked, None);
        shard.run_frames(id, self);
        shard.dispatch(self);
    }
}

impl Lane for User {
    fn accepted(&mut self, shard: &mut Shard, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let id = shard.admit::<()>(socket, peer, listener).expect("there is memory");
        self.shared = shard.shared(id).cloned();
        shard.opened(id);
    }

    fn hand_off(&mut self, _: &mut Shard, _: Socket, _: Option<SocketAddr>, _: u16) {
        unreachable!("there is no other shard");
    }

    fn connected(&mut self, _: &mut Shard, _: ConnId) {
        unreachable!("nothing connects");
    }

    fn frames(&mut self, frames: &mut Frames<'_, ()>) {
        loop {
            let state = self.state.clone();
            let before = state.get();
            match frames.next_typed(&Switching, &state) {
                Next::Nothing => {
                    assert_eq!(state.get(), before, "the state changed without a frame");
                    return;
                }
                Next::Bad(error) => {
                    assert_eq!(state.get(), before, "the state changed with an error");
                    return frames.finish(CloseReason::BadFrame(error));
                }
                Next::Frame(frame) => {
                    self.piece_bytes_max = self.piece_bytes_max.max(frame.wire().len());
                    let is_piece = frame.head().0;
                    match self.frames.last_mut().filter(|_| self.in_pieces) {
                        Some(last) => last.extend_from_slice(&frame),
                        None => self.frames.push(frame.to_vec()),
                    }
                    self.in_pieces = matches!(state.get(), Reads::Upload(_)) && is_piece;
                    let to = if is_piece { None } else { switch_to(&frame) };
                    self.calls += 1;
                    if self.waits > 0 && self.calls.is_multiple_of(self.waits) {
                        let parked = frames.park(0, 0);
                        self.call = Some(Call { parked, to });
                    } else {
                        self.switch(to);
                    }
                }
            }
        }
    }

    fn heartbeat(&mut self, _: &mut Shard, _: ConnId) {}

    fn input_ended(&mut self, _: &mut Shard, _: ConnId) {}

    fn wake(&mut self, _: &mut Shard, _: ConnId, waker: Waker) {
        waker.wake();
    }

    fn ended(&mut self, _: &mut Shard, ended: EndedConn) {
        self.ended = Some(ended.reason);
    }
}

/// A shard with one connection.
struct Rig {
    shard: Shard,
    user: User,
    id: Option<ConnId>,
    now: Time,
    receives: bool,
}

impl Rig {
    fn turn(&mut self, completions: Vec<Completion>) {
        let mut completions = completions;
        loop {
            self.now = self.now + Duration::from_micros(1);
            self.shard.turn(self.now, &mut completions, &mut self.user);
            let ops: Vec<Op> = self.shard.take_ops().collect();
            for op in ops {
                match op {
                    Op::Adopt { id, .. } => self.id = Some(id),
                    Op::Receive { .. } => self.receives = true,
                    Op::ReceiveStop { id } | Op::ShutdownInput { id } if self.receives => {
                        self.receives = false;
                        completions.push(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
                    }
                    Op::Send { id, mut batch } => {
                        batch.advance(batch.len());
                        completions.push(Completion::Sent { id, batch, end: SendEnd::Done });
                    }
                    Op::Shutdown { id } => completions.push(Completion::ShutDown { id }),
                    Op::Close { id, .. } => completions.push(Completion::Closed { id }),
                    _ => {}
                }
            }
            let settled = completions.is_empty() && self.shard.next_turn().is_none_or(|next| next > self.now);
            if settled {
                return;
            }
        }
    }

    fn settle(&mut self) {
        self.turn(Vec::new());
        while let Some(id) = self.id.filter(|_| self.user.call.is_some() && self.user.ended.is_none()) {
            self.user.resume(&mut self.shard, id);
            self.turn(Vec::new());
        }
    }
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let max = input.pick(&[8, 64, 257, 1025, 4096]);
    let options = input.byte();
    let limits = Limits::default()
        .frame_bytes_max(max)
        .inbox_bytes_high(if options & 1 == 0 { 64 << 10 } else { 10 })
        .linger_timeout(Duration::from_millis(20));
    let cuts: Vec<usize> = (0..input.byte() % 32).map(|_| input.wide()).collect();
    let stream = input.rest();
    let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut % (stream.len() + 1)).collect();
    ends.push(stream.len());
    ends.sort_unstable();

    let (pool, _side) = Pool::new(PoolConfig::default()).expect("there is memory");
    let (server, raw) = (ServerLimits::default(), Rc::new(Switching).reply_encoding());
    let user = User {
        state: Rc::new(FramingState::new(Reads::Lines)),
        frames: Vec::new(),
        in_pieces: false,
        piece_bytes_max: 0,
        waits: usize::from(options >> 1 & 3),
        calls: 0,
        call: None,
        shared: None,
        ended: None,
    };
    let shard = Shard::new(server, limits, 1, 1, raw, pool, ());
    let mut rig = Rig { shard, user, id: None, now: Time::ZERO, receives: false };
    rig.turn(vec![Completion::Accepted { listener: 0, socket: Socket(1), peer: None }]);
    let id = rig.id.expect("a connection");
    let mut start = 0;
    for end in ends {
        if start < end && rig.receives {
            let lease = LeaseMut::try_copy_of(&stream[start..end]).unwrap();
            rig.turn(vec![Completion::Received { id, lease }]);
            start = end;
        }
        if options & 8 == 0 || !rig.receives {
            rig.settle();
        }
    }
    rig.settle();
    if start < stream.len() && rig.receives {
        rig.turn(vec![Completion::Received { id, lease: LeaseMut::try_copy_of(&stream[start..]).unwrap() }]);
        rig.settle();
    }
    assert!(rig.shard.held_bytes() <= 2 * max + 1024, "{} bytes are held", rig.shard.held_bytes());
    if rig.receives {
        rig.receives = false;
        rig.turn(vec![Completion::ReceiveEnded { id, end: ReceiveEnd::Eof }]);
        rig.settle();
    }
    let (mut frames, mid_frame) = read_all(stream, max);
    let found = rig.user.frames;
    // An upload of which nothing arrived has no piece.
    if mid_frame == Some(true) && frames.len() == found.len() + 1 && frames.last().is_some_and(Vec::is_empty)
    {
        frames.pop();
    }
    assert_eq!(found, frames, "frames of the stream as a whole");
    assert!(rig.user.piece_bytes_max <= max, "a piece of {} bytes", rig.user.piece_bytes_max);
    match (mid_frame, rig.user.ended) {
        (None, Some(CloseReason::BadFrame(_))) => {}
        (Some(true), Some(CloseReason::PeerClosedMidFrame | CloseReason::PeerClosed)) => {}
        (Some(false), Some(CloseReason::PeerClosed)) => {}
        (expected, ended) => panic!("in the middle of a frame: {expected:?}; the end: {ended:?}"),
    }
}
