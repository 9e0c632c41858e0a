//! Frames whose bytes are received straight into their blocks.

use ringserve_buf::Block;

use super::*;
use crate::ReceiveEnd;

/// A shard with one connection, which has sent the head of a frame of `bytes` bytes and the first
/// 16 KiB of it.
fn begun(limits: impl Into<Bounds>, bytes: usize) -> (Tested, ConnId) {
    let mut shard = Tested::new(limits, 1, 1);
    shard.begin(Time::ZERO, 1);
    let id = accept(&mut shard, 3);
    shard.receive(id, &wire(bytes)[..16 << 10]);
    shard.end();
    (shard, id)
}

fn wire(bytes: usize) -> Vec<u8> {
    [&(bytes as u32).to_be_bytes()[..], &vec![7; bytes]].concat()
}

/// The operation that receives into a block.
#[track_caller]
fn into_block(ops: Vec<Op>) -> (Box<Block>, usize) {
    let into = ops.into_iter().find_map(|op| match op {
        Op::ReceiveInto { block, most, .. } => Some((block, most as usize)),
        _ => None,
    });
    into.expect("a receive into a block")
}

/// The driver receives `bytes` into the block.
fn fill(shard: &mut Tested, id: ConnId, mut block: Box<Block>, bytes: usize) {
    block.spare(bytes).fill(7);
    block.advance(bytes);
    shard.complete(Completion::Filled { id, block, bytes, end: ReceiveEnd::Stopped });
}

#[test]
fn rest_of_a_large_frame_comes_without_the_drivers_buffers() {
    let (mut shard, id) = begun(Limits::default(), 300_000);
    // The armed receive would go on.
    assert!(matches!(shard.ops()[..], [.., Op::ReceiveStop { .. }]));
    shard.begin(at(1), 1);
    shard.heard();
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
    shard.end();
    let (mut block, mut most) = into_block(shard.ops());
    let mut times = 0;
    while block.len() + most < 300_004 {
        assert!(block.held_bytes() <= 2 * block.len(), "memory follows the bytes: {block:?}");
        assert_eq!(shard.held_bytes(), block.held_bytes());
        shard.begin(at(1), 1);
        fill(&mut shard, id, block, most);
        shard.end();
        (block, most) = into_block(shard.ops());
        times += 1;
    }
    assert!((3..=8).contains(&times), "{times} receives");
    assert_eq!(shard.heard(), [], "no frame is whole");
    shard.begin(at(1), 1);
    fill(&mut shard, id, block, most);
    shard.end();
    assert_eq!(shard.heard(), [Heard::Batch(id), Heard::Frame(id)]);
    assert!(
        matches!(shard.ops()[..], [Op::ReceiveOnce { several: false, .. }]),
        "the next one may be large too"
    );
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn kept_block_is_taken_with_the_first_buffer_of_a_frame() {
    let (mut shard, id) = begun(Limits::default(), 300_000);
    shard.begin(at(1), 1);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
    shard.end();
    let mut times = Vec::new();
    shard.heard();
    for turn in 1..4 {
        times.push(0);
        while shard.heard().is_empty() {
            let (block, most) = into_block(shard.ops());
            shard.begin(at(turn), 1);
            fill(&mut shard, id, block, most);
            shard.end();
            times[turn as usize - 1] += 1;
        }
        shard.begin(at(turn), 2);
        shard.receive(id, &wire(300_000)[..16 << 10]);
        shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
        shard.end();
        shard.heard();
        assert_eq!(shard.held_bytes(), 300_004, "all of it, of which a buffer came");
    }
    assert!(times[0] > 3 && times[1..] == [1, 1], "receives into a block for each frame: {times:?}");
}

#[test]
fn head_that_lies_about_its_length_costs_what_came() {
    let limits = Limits::default().frame_bytes_max(1 << 30);
    let (mut shard, id) = begun(limits, 512 << 20);
    shard.begin(at(1), 1);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
    shard.end();
    let (block, most) = into_block(shard.ops());
    assert!(most <= 16 << 10 && block.held_bytes() <= 32 << 10, "{most} bytes into {block:?}");
    assert_eq!(shard.held_bytes(), block.held_bytes());
    // Nothing more comes, and the peer goes.
    shard.begin(at(2), 1);
    shard.heard();
    shard.complete(Completion::Filled { id, block, bytes: 0, end: ReceiveEnd::Eof });
    shard.end();
    let reason = CloseReason::PeerClosedMidFrame;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn connection_that_ends_leaves_its_block_with_the_driver() {
    let (mut shard, id) = begun(Limits::default(), 300_000);
    shard.begin(at(1), 1);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
    shard.end();
    let (block, most) = into_block(shard.ops());
    shard.begin(at(2), 0);
    shard.shard.abort(id, CloseReason::Aborted);
    shard.dispatch();
    shard.end();
    let ops = shard.ops();
    assert!(matches!(ops[..], [Op::ShutdownInput { .. }]), "not closed under its receive: {ops:?}");
    shard.begin(at(3), 1);
    fill(&mut shard, id, block, most);
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::Close { how: CloseHow::Abort, .. }]));
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn block_that_the_driver_lost_ends_its_connection() {
    let (mut shard, id) = begun(Limits::default(), 300_000);
    for turn in 1..=2 {
        shard.begin(at(turn), 1);
        shard.heard();
        shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
        shard.end();
    }
    let heard = shard.heard();
    assert!(matches!(heard[..], [Heard::Ended { reason: CloseReason::System(5), .. }]), "{heard:?}");
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn operations_and_completions_are_no_larger_for_their_blocks() {
    // They are moved with each reply and each frame.
    assert!(size_of::<Op>() <= 24, "{}", size_of::<Op>());
    let lease = size_of::<(ConnId, LeaseMut)>();
    assert!(size_of::<(ConnId, Box<Block>, usize, ReceiveEnd)>() <= lease);
}
