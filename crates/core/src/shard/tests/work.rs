//! The work of a turn: batches, what is left over, tasks.

use super::*;

#[test]
fn a_frame_waits_for_one_batch_of_each_other_connection() {
    let (mut shard, mut ids) = with_connections(501, Limits::default());
    let pinger = ids.pop().unwrap();
    let mut handed = Vec::new();
    shard.begin_turn(at(1), 500);
    for &id in &ids {
        receive_later(&mut shard, id, &empty_frames(2000));
        while let Some(event) = shard.next_event() {
            let Event::Frames(of) = event else { panic!("{event:?}") };
            frames_of(&mut shard, of, &mut handed);
        }
    }
    shard.end_turn();
    assert!(handed.len() <= 4096, "{} calls in a turn", handed.len());
    let mut pinged = false;
    // It comes in the second turn, when the driver has no more news than the ping.
    for turn in -1.. {
        if turn == 0 {
            handed.clear();
        }
        assert_eq!(shard.wait(), Wait::No);
        shard.begin_turn(at(2), usize::from(turn == 0));
        let before = handed.len();
        let mut work_off = |shard: &mut Tested| {
            while let Some(event) = shard.next_event() {
                let Event::Frames(of) = event else { panic!("{event:?}") };
                frames_of(shard, of, &mut handed);
                pinged |= of == pinger && handed.last() == Some(&pinger);
            }
        };
        work_off(&mut shard);
        if turn == 0 {
            receive_later(&mut shard, pinger, &empty_frames(1));
            work_off(&mut shard);
        }
        shard.end_turn();
        assert!(handed.len() - before <= 4096, "{} calls in a turn", handed.len() - before);
        if pinged {
            break;
        }
    }
    // Those that had a batch in the turn in which it came are behind it, those that had none are before it.
    assert!(handed.len() <= (500 + 256) * 16, "{} calls before it", handed.len());
    for id in ids {
        let batches = handed.iter().filter(|of| **of == id).count();
        assert!((16..=32).contains(&batches), "{batches} of {id}");
    }
}

#[test]
fn connections_left_over_leave_the_turn_to_news() {
    let (mut shard, ids) = with_connections(500, Limits::default());
    let mut handed = Vec::new();
    let mut turn = |shard: &mut Tested, completions, receives: &[ConnId]| {
        handed.clear();
        shard.begin_turn(at(1), completions);
        let mut work_off = |shard: &mut Tested| {
            while let Some(event) = shard.next_event() {
                let Event::Frames(of) = event else { panic!("{event:?}") };
                frames_of(shard, of, &mut handed);
            }
        };
        work_off(shard);
        for &id in receives {
            receive_later(shard, id, &empty_frames(4096));
            work_off(shard);
        }
        shard.end_turn();
        handed.len()
    };
    // 16 KiB each: 1 MiB of 64 connections is as much as a turn may bring, as are 256 completions.
    assert_eq!(turn(&mut shard, 64, &ids[..64]), 64 * 64);
    assert_eq!(turn(&mut shard, 0, &[]), 256);
    assert_eq!(turn(&mut shard, 0, &[]), 4096);
    assert_eq!(turn(&mut shard, 256, &[]), 256);
}

#[test]
fn a_connection_alone_has_its_frames_in_one_row() {
    let (mut shard, ids) = with_connections(1, Limits::default());
    let mut handed = Vec::new();
    shard.begin_turn(at(1), 1);
    receive_later(&mut shard, ids[0], &empty_frames(1024));
    assert_eq!(shard.take_frames(), Some(ids[0]));
    frames_of(&mut shard, ids[0], &mut handed);
    shard.end_turn();
    assert_eq!((handed.len(), shard.wait() == Wait::No), (1024, false));
}

#[test]
fn an_end_behind_exactly_one_batch_is_heard() {
    for frames in [31, 32, 33, 64] {
        let (mut shard, ids) = with_connections(1, Limits::default());
        let id = ids[0];
        let mut handed = Vec::new();
        shard.bound_turn(32, 32);
        shard.begin_turn(at(1), 2);
        // A call waits while the rest arrives.
        receive_later(&mut shard, id, &empty_frames(1));
        assert_eq!(shard.take_frames(), Some(id));
        assert!(matches!(shard.next_frame(id), Next::Frame(..)));
        shard.handler_parked(id, 7, 0);
        assert!(matches!(shard.next_frame(id), Next::Nothing));
        receive_later(&mut shard, id, &empty_frames(frames));
        shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof });
        shard.end_turn();
        shard.begin_turn(at(2), 0);
        shard.handler_done(id, 7, None, 0);
        frames_of(&mut shard, id, &mut handed);
        shard.end_turn();
        for _ in 0..4 {
            shard.begin_turn(at(2), 0);
            while let Some(event) = shard.next_event() {
                if let Event::Frames(of) = event {
                    frames_of(&mut shard, of, &mut handed);
                }
            }
            shard.end_turn();
        }
        assert_eq!(handed.len(), frames);
        assert_eq!(shard.counters().closed_for(CloseReason::PeerClosed), 1, "after {frames} frames");
    }
}

#[test]
fn tasks_have_their_part_of_each_turn_whatever_peers_send() {
    let (mut shard, ids) = with_connections(8, Limits::default());
    let mut tasks = Vec::new();
    for turn in 0..20 {
        shard.begin_turn(at(2), 8 * usize::from(turn == 0));
        let mut handed = Vec::new();
        if turn == 0 {
            for id in &ids {
                receive_later(&mut shard, *id, &empty_frames(15_000));
                while let Some(Event::Frames(id)) = shard.next_event() {
                    frames_of(&mut shard, id, &mut handed);
                }
            }
        }
        while let Some(Event::Frames(id)) = shard.next_event() {
            frames_of(&mut shard, id, &mut handed);
        }
        tasks.push((0..100).take_while(|_| shard.take_call()).count());
        shard.end_turn();
        shard.take_ops().for_each(drop);
    }
    assert!(tasks.iter().all(|polled| *polled == 100), "{tasks:?}");
}
