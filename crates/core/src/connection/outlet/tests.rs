//! Replies as user code queues them, and the consequences of those that fail.

extern crate std;

use alloc::sync::Arc;
use alloc::task::Wake;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::task::Waker;

use bytes::BufMut;

use super::*;
use crate::Limits;
use crate::bytes::{HELD_BYTES_MAX, Outbox};
use crate::connection::shared::ShardShared;
use crate::connection::shared_payload::SharedPayload;
use crate::framing::{Decode, EncodeError, Encoding, FrameError, Framing, LengthPrefix, Payload, Raw};
use crate::limits::Times;

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn outlet(encoding: Encoding, woken: &Arc<Woken>) -> (Rc<ShardShared>, Outlet) {
    outlet_with(encoding, woken, &Limits::default())
}

fn outlet_with(encoding: Encoding, woken: &Arc<Woken>, limits: &Limits) -> (Rc<ShardShared>, Outlet) {
    let shard = Rc::new(ShardShared::new(&crate::ServerLimits::default()));
    let lane = Rc::new(LaneShared::new(shard.clone(), encoding, limits, &Times::new(limits, None)));
    shard.wake_when_dirty(Waker::from(woken.clone()));
    (shard, Outlet::new(ConnId::new(1, 1), lane, None, 0))
}

fn queued(outlet: &Outlet) -> Vec<u8> {
    let bytes = outlet.take_pending().map_or(Vec::new(), |batch| batch.into_bytes());
    outlet.all_sent();
    bytes
}

#[test]
fn owned_piece_is_bounded_where_a_slow_peer_would_not_show() {
    const MARK: usize = 1000;
    let room = |limits: Limits, window: u64| {
        let limits = limits.outbox_bytes_low(0).outbox_bytes_high(MARK);
        let (_, outlet) = outlet_with(Rc::new(Raw).encoding(), &Arc::default(), &limits);
        outlet.write(&[0; 400]);
        outlet.owned_room(Duration::from_secs(window))
    };
    assert_eq!(room(Limits::default(), 10), 4 * MARK);
    assert_eq!(room(Limits::default().outbox_bytes_max(5 * MARK), 10), 4 * MARK);
    let below_the_mark = MARK + 1 - 400;
    assert_eq!(room(Limits::default().outbox_bytes_max(5 * MARK - 1), 10), below_the_mark);
    assert_eq!(room(Limits::default(), 9), below_the_mark, "a send is looked at each 10 s");
    let never_looked_at = Limits::default().write_stall_timeout(None).write_bytes_per_second_min(0);
    assert_eq!(room(never_looked_at, 3600), below_the_mark);
}

#[test]
fn push_that_panics_wakes_a_sleeping_shard() {
    let woken = Arc::new(Woken::default());
    let (shard, outlet) = outlet(Rc::new(Raw).encoding(), &woken);
    let push = || outlet.append::<1>(|_| panic!("planted: encoding panics"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(push)).is_err());
    assert!(outlet.abort_requested() && shard.has_dirty());
    assert_eq!(woken.0.load(Ordering::SeqCst), 1, "the shard sleeps on");
}

#[test]
fn reply_given_up_or_too_long_leaves_nothing_of_itself() {
    let (shard, outlet) = outlet(Rc::new(LengthPrefix::bytes(1)).encoding(), &Arc::default());
    outlet.reply_with(|out| out.put_slice(b"one"));
    let given_up = outlet.reply_with(|out| {
        out.put_slice(b"two");
        out.put_owned(alloc::vec![2; 40_000]);
        Err("no")
    });
    assert_eq!(given_up, Err("no"));
    assert_eq!((outlet.outbox_bytes(), shard.held_bytes(), outlet.has_requests()), (4, 4, false));
    outlet.reply_parts([&b"th"[..], b"ree"]);
    outlet.reply_with(|out| out.put_bytes(b'4', 256));
    assert!(outlet.not_framed() && !outlet.abort_requested());
    assert_eq!(queued(&outlet), b"\x03one\x05three");
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn panic_in_a_written_reply_resets_and_leaves_what_was_queued() {
    let (shard, outlet) = outlet(Rc::new(LengthPrefix::default()).encoding(), &Arc::default());
    outlet.reply(Payload::Bytes(b"one"));
    let panics = || {
        outlet.reply_with::<()>(|out| {
            out.put_owned(alloc::vec![2; 40_000]);
            out.put_u8(2);
            panic!("planted: a reply panics")
        })
    };
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    assert!(outlet.abort_requested());
    assert_eq!((outlet.outbox_bytes(), shard.held_bytes()), (7, 7));
    let nested = || outlet.reply_with(|_| outlet.write(b"inside"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(nested)).is_err());
    assert_eq!(queued(&outlet), b"\0\0\0\x03one");
}

/// The number of dirty connections.
fn dirty(shard: &ShardShared, outlet: &Outlet) -> usize {
    let mut all = Vec::new();
    shard.swap_dirty(&mut all);
    outlet.take_dirty_unless_plain();
    all.len()
}

/// Bytes of the next send.
fn next_send(outlet: &Outlet) -> Option<usize> {
    outlet.take_pending().map(|batch| batch.len())
}

#[test]
fn held_replies_wait_for_their_release_or_a_few_kib() {
    let (shard, outlet) = outlet(Rc::new(Raw).encoding(), &Arc::default());
    let dirty = || dirty(&shard, &outlet);
    let sends = || next_send(&outlet);
    outlet.write(b"one");
    assert!(outlet.hold_replies());
    assert_eq!((dirty(), sends()), (1, None));
    outlet.write(b" two");
    assert_eq!((dirty(), sends()), (1, None));
    outlet.release_replies();
    assert_eq!((dirty(), sends()), (1, Some(7)));
    outlet.all_sent();
    outlet.release_replies();
    outlet.write(b"one");
    assert_eq!(sends(), Some(3), "a release too many is none of the next hold");
    outlet.all_sent();
    outlet.write(b"one");
    assert!(outlet.hold_replies());
    outlet.write(&[0; HELD_BYTES_MAX - 3]);
    assert_eq!(sends(), None);
    outlet.write(b"x");
    assert_eq!(sends(), Some(HELD_BYTES_MAX + 1));
    outlet.all_sent();
    outlet.write(b"behind");
    assert_eq!(sends(), None, "the hold is for what follows, too");
    outlet.end_writing();
    assert_eq!(queued(&outlet), b"behind", "nothing can follow");
    assert!(!outlet.hold_replies());
}

#[test]
fn holds_of_replies_count_and_need_no_reply() {
    let (shard, outlet) = outlet(Rc::new(Raw).encoding(), &Arc::default());
    let dirty = || dirty(&shard, &outlet);
    let sends = || next_send(&outlet);
    assert!(outlet.hold_replies() && outlet.hold_replies());
    assert_eq!((dirty(), sends()), (0, None), "nothing is queued");
    outlet.write(b"one");
    assert_eq!((dirty(), sends()), (1, None));
    outlet.release_replies();
    outlet.write(b" two");
    assert_eq!(sends(), None, "the other guard lives");
    outlet.release_replies();
    assert_eq!(sends(), Some(7));
    outlet.all_sent();
    dirty();
    assert!(outlet.hold_replies());
    outlet.release_replies();
    assert_eq!((dirty(), sends(), outlet.has_more()), (1, None, false), "nothing is left of a hold");
    let nested = outlet.write_with(|out| {
        out.put_u8(1);
        (!outlet.hold_replies()).then_some(()).ok_or("held")
    });
    assert_eq!((nested, sends()), (Ok(()), Some(1)), "a reply that is being written leaves");
}

#[test]
fn gone_connection_has_no_reply_written() {
    let (_shard, outlet) = outlet(Rc::new(Raw).encoding(), &Arc::default());
    outlet.seal();
    assert_eq!(outlet.reply_with(|_| Err("asked")), Ok(()));
}

#[test]
fn blocks_that_grew_are_kept_up_to_a_bound() {
    let limits = crate::ServerLimits { held_bytes_max: 16 << 20, ..Default::default() };
    let shard = Rc::new(ShardShared::new(&limits));
    let limits = Limits::default();
    let lane =
        Rc::new(LaneShared::new(shard.clone(), Rc::new(Raw).encoding(), &limits, &Times::new(&limits, None)));
    let outlets: Vec<_> = (0..4).map(|n| Outlet::new(ConnId::new(n, 1), lane.clone(), None, 0)).collect();
    let round = || {
        outlets.iter().for_each(|outlet| outlet.write(&[7; 400_000]));
        let batches: Vec<_> = outlets.iter().filter_map(Outlet::take_pending).collect();
        let rooms = batches.iter().map(|batch| batch.copied.as_ptr()).collect::<Vec<_>>();
        for (outlet, batch) in outlets.iter().zip(batches) {
            outlet.all_sent();
            shard.recycle(batch);
        }
        rooms
    };
    let (first, second) = (round(), round());
    assert!(second.iter().filter(|room| first.contains(room)).count() >= 2, "blocks are used again");
    let kept = shard.kept_bytes();
    assert!((400_000..=1 << 20).contains(&kept), "{kept} bytes are kept of 1 MiB");
    shard.drop_spare();
    assert_eq!(shard.kept_bytes(), 0);
}
#[test]
fn small_reply_keeps_no_large_block() {
    let (shard, outlet) = outlet(Rc::new(Raw).encoding(), &Arc::default());
    outlet.write(&[7; 400_000]);
    let batch = outlet.take_pending().expect("it is queued");
    outlet.all_sent();
    shard.recycle(batch);
    outlet.write(b"little");
    let batch = outlet.take_pending().expect("it is queued");
    assert!(batch.held_bytes() <= crate::bytes::KEPT_BYTES_MAX, "{}", batch.held_bytes());
    assert_eq!(batch.into_bytes(), b"little");
}

/// A framing for which the system has no memory.
struct NoRoom;

impl Framing for NoRoom {
    fn decode(&self, bytes: &[u8], _: usize) -> Result<Decode, FrameError> {
        Ok(Decode::Frame { skip: 0, len: bytes.len(), consumed: bytes.len() })
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.batch.refused = true;
        out.payload(payload);
        Ok(())
    }
}

#[test]
fn shared_payload_without_memory_is_not_sent_in_part() {
    let (_shard, outlet) = outlet(Rc::new(NoRoom).encoding(), &Arc::default());
    outlet.reply_shared(&SharedPayload::new("hello"));
    assert!(outlet.abort_requested() && outlet.take_pending().is_none());
}

#[test]
fn shared_push_without_memory_resets() {
    let (_shard, outlet) = outlet(Rc::new(NoRoom).encoding(), &Arc::default());
    assert!(outlet.push_shared(&SharedPayload::new("hello")), "it has a frame");
    assert!(outlet.abort_requested() && outlet.take_pending().is_none());
}

#[test]
fn shared_payload_without_a_frame_leaves_the_connection_open() {
    let (shard, outlet) = outlet(Rc::new(LengthPrefix::bytes(1)).encoding(), &Arc::default());
    let (long, short) = (SharedPayload::new(alloc::vec![2; 256]), SharedPayload::new("two"));
    let pushed = [&short, &long, &long, &short].map(|payload| outlet.push_shared(payload));
    assert_eq!((pushed, outlet.has_requests()), ([true, false, false, true], false));
    assert_eq!((queued(&outlet), shard.held_bytes()), (b"\x03two\x03two".to_vec(), 0));
    outlet.reply_shared(&long);
    assert!(outlet.not_framed());
}
