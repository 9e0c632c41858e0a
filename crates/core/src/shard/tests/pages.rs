//! Pages: work that no peer asked for in a turn.

use super::*;

/// A shard with this number of connections, and sources that want `wants` steps and have asked for
/// pages.
fn with_sources(connections: usize, wants: &[u32]) -> (Tested, Vec<ConnId>) {
    let (mut shard, ids) = with_connections(connections, Limits::default());
    shard.lane.wants_steps = wants.to_vec();
    for _ in wants {
        let source = shard.all_share().add_page_source();
        shard.all_share().ask_page(source);
    }
    (shard, ids)
}

fn pages(shard: &mut Tested) -> Vec<(u32, u32)> {
    core::mem::take(&mut shard.lane.pages)
}

#[test]
fn sources_share_the_room_of_a_turn_and_take_turns() {
    let (mut shard, _) = with_sources(1, &[1000, 10, 1000, 0]);
    assert_eq!(shard.wait(), Wait::No);
    shard.turn(at(1));
    // What one leaves is for those behind it.
    assert_eq!(pages(&mut shard), [(0, 32), (1, 10), (2, 43), (3, 0)]);
    shard.turn(at(1));
    assert_eq!(pages(&mut shard), [(0, 64), (2, 64)]);
    shard.all_share().ask_page(0);
    shard.all_share().ask_page(1);
    shard.lane.wants_steps[1] = 1;
    shard.turn(at(1));
    assert_eq!(pages(&mut shard), [(0, 43), (2, 43), (1, 1)], "one that waits already waits once");
    while shard.wait() == Wait::No {
        shard.turn(at(1));
    }
    assert_eq!(shard.lane.wants_steps, [0; 4]);
    pages(&mut shard);
    shard.turn(at(1));
    assert_eq!(pages(&mut shard), [], "a page is asked for");
}

#[test]
fn more_sources_than_steps_wait_for_their_turns() {
    let (mut shard, _) = with_sources(1, &[2; 300]);
    let mut seen = Vec::new();
    for _ in 0..6 {
        shard.turn(at(1));
        let of_turn = pages(&mut shard);
        assert!(of_turn.iter().map(|(_, steps)| steps).sum::<u32>() <= 128);
        seen.extend(of_turn.into_iter().map(|(source, _)| source));
    }
    let expected: Vec<u32> = (0..300).chain(0..300).collect();
    assert_eq!(seen, expected);
    assert_ne!(shard.wait(), Wait::No);
}

#[test]
fn page_is_short_while_completions_wait_or_calls_fill_the_turn() {
    let (mut shard, ids) = with_sources(300, &[10_000]);
    shard.begin(at(1), 256);
    shard.end();
    assert_eq!(pages(&mut shard), [(0, 16)], "the driver may have more");
    shard.begin(at(1), 255);
    shard.end();
    assert_eq!(pages(&mut shard), [(0, 128)]);
    shard.begin(at(1), 255);
    ids[..255].iter().for_each(|id| shard.receive(*id, &empty_frames(2000)));
    shard.end();
    shard.turn(at(1));
    pages(&mut shard);
    shard.turn(at(1));
    assert_eq!(pages(&mut shard), [(0, 16)], "nearly each call of the turn is taken");
}

#[test]
fn page_is_halved_by_long_turns_and_leaves_with_replies() {
    let (mut shard, _) = with_sources(1, &[10_000]);
    let mut now = at(1);
    let mut turn = |shard: &mut Tested, took: Duration| {
        shard.begin_late(now, 0);
        shard.end();
        now = now + took;
        let sends = shard.ops().iter().filter(|op| matches!(op, Op::Send { .. })).count();
        (pages(shard)[0].1, sends)
    };
    let (long, short) = (Duration::from_millis(7), Duration::from_millis(1));
    assert_eq!(turn(&mut shard, long), (128, 1), "a page leaves with its turn");
    let steps: Vec<u32> = [long, long, short, short].iter().map(|took| turn(&mut shard, *took).0).collect();
    assert_eq!(steps, [64, 32, 16, 32]);
}

#[test]
fn bytes_count_as_steps_of_a_page() {
    let mut page = Page::new(10);
    assert!(page.take(0) && page.take(2047) && page.take(4096));
    assert_eq!(page.taken(), 5);
    assert!(page.take(1 << 40), "the last one may be larger");
    assert!(page.is_full() && !page.take(0));
    assert_eq!(page.taken(), 10);
}
