//! Target `framing`: any bytes, cut anywhere, under any limit.
//!
//! ```text
//!   kind  limits  options  count  cuts (2 bytes each) ...  stream
//! ```
//!
//! The stream goes through a shard piece by piece, to a service that echoes. The frames must equal
//! those of a naive reading of the whole stream, and the connection must end for the reason that
//! this reading gives.

use std::time::Duration;

use ringserve_core::{CloseReason, Limits, ReceiveEnd, ServerLimits};

use crate::framings::{Kind, Start};
use crate::input::Input;
use crate::rig::service::End;
use crate::rig::{Plan, Rig};

/// Small limits, to be reached; those around the widths of a length, the first look ahead of 1024
/// bytes, and a buffer; the largest limit possible, for which nothing may be allocated before it
/// arrives.
const FRAME_BYTES_MAX: [usize; 14] = [1, 2, 4, 5, 8, 9, 64, 255, 257, 1024, 1025, 4096, 1 << 20, 1 << 30];

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let kind = Kind::draw(&mut input);
    let frame_bytes_max = input.pick(&FRAME_BYTES_MAX);
    let receive_buffer_bytes = input.pick(&[64, 100, 4096, 16384]);
    let options = input.byte();
    let buffers = 4;
    let limits = Limits::default()
        .frame_bytes_max(frame_bytes_max)
        .inbox_bytes_high(if options & 1 == 0 { 64 << 10 } else { 10 })
        .first_frame_timeout(None)
        .idle_timeout(None)
        .write_stall_timeout(None)
        .write_bytes_per_second_min(0)
        .handler_timeout(None)
        .read_bytes_per_second_min(0)
        .linger_timeout(Duration::from_millis(20));
    let server_limits = ServerLimits::default()
        .receive_buffer_bytes(receive_buffer_bytes)
        .receive_bytes_max(buffers * receive_buffer_bytes)
        .with_room_for(&limits);
    if !kind.works_with(&limits) {
        return;
    }
    let plan = Plan {
        kind,
        limits,
        server_limits,
        buffers,
        large: options & 2 == 0,
        copy_frames: options & 4 != 0,
        connections_max: 1,
        listeners: 1,
        echo_only: options & 8 == 0,
        hold_open: false,
        others: false,
    };
    let cuts: Vec<usize> = (0..input.byte() % 32).map(|_| input.wide()).collect();
    let stream = input.rest();
    let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut % (stream.len() + 1)).collect();
    ends.push(stream.len());
    ends.sort_unstable();

    let mut rig = Rig::new(plan);
    rig.next_turn(Duration::ZERO);
    rig.accept(0);
    rig.next_turn(Duration::ZERO);
    let mut start = 0;
    for end in ends {
        if let Some(wire) = rig.model.wires.first_mut() {
            wire.unread.extend(&stream[start..end]);
        }
        start = end;
        while rig.model.wires.first().is_some_and(|wire| !wire.unread.is_empty() && wire.receive.armed) {
            let left = rig.model.wires[0].unread.len();
            if options & 16 != 0 {
                rig.deliver_copy(0);
            }
            // A receive into a block takes no copy.
            let is_stuck = rig.model.wires.first().is_some_and(|wire| wire.unread.len() == left);
            if is_stuck && !rig.deliver(0, usize::MAX) {
                break;
            }
        }
        settle(&mut rig);
    }
    // Each round takes 1024 frames off the rest.
    for _ in 0..100 {
        if rig.model.wires.is_empty() {
            break;
        }
        rig.end_receive(0, Some(ReceiveEnd::Eof));
        settle(&mut rig);
    }
    if rig.model.plan.echo_only {
        compare(&rig, kind, frame_bytes_max, stream);
    }
    rig.finish(true);
}

/// Ends a turn's work: sends complete, and calls continue.
fn settle(rig: &mut Rig) {
    rig.next_turn(Duration::ZERO);
    rig.answer_all(true);
    for task in 0..rig.model.tasks.len() {
        rig.resume(task, End::Done);
    }
}

fn compare(rig: &Rig, kind: Kind, max: usize, stream: &[u8]) {
    let reason = match rig.model.ends.as_slice() {
        [(0, reason)] => *reason,
        other => panic!("the stream is over, and the connection ended as {other:?}"),
    };
    let (mut cut, mut frames) = (0, 0);
    while kind != Kind::Raw
        && let Start::Frame(_, consumed) = kind.start(&stream[cut..], max)
    {
        cut += consumed;
        frames += 1;
    }
    if kind == Kind::Raw {
        assert!(stream.is_empty() || rig.model.frames > 0);
        assert_eq!((rig.model.talks[0].cut, reason), (stream.len(), CloseReason::PeerClosed));
        return;
    }
    assert_eq!((rig.model.frames, rig.model.talks[0].cut), (frames, cut), "frames of the stream as a whole");
    match kind.start(&stream[cut..], max) {
        Start::TooLarge | Start::Bad => assert!(matches!(reason, CloseReason::BadFrame(_)), "{reason}"),
        Start::Part if cut < stream.len() => assert_eq!(reason, CloseReason::PeerClosedMidFrame),
        _ => assert_eq!(reason, CloseReason::PeerClosed),
    }
}
