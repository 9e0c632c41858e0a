//! Ten causes as figures show them: each is found at its stage, whatever else shows its effects.

use super::*;

/// A server with two shards and room for everything, ten seconds after `before`.
fn calm_server() -> FunnelFigures {
    let queue = |shard| QueueFigures {
        listener: "127.0.0.1:7000".to_owned(),
        shard: Some(shard),
        capacity: 4096,
        ..QueueFigures::default()
    };
    FunnelFigures {
        at: Duration::from_secs(110),
        connections: 100,
        connections_max: 1000,
        connections_wanted: 1000,
        opened: 500,
        queues: vec![queue(0), queue(1)],
        shards: vec![ShardFigures { busy: 0.1, ..ShardFigures::default() }; 2],
        buffers: 10,
        buffers_max: 4096,
        machine: MachineFigures {
            descriptors: 50,
            descriptors_max: Some(20_000),
            conntrack: Some((100, 65_536)),
            tcp_bytes: Some((40_960, 400_000_000)),
            ..MachineFigures::default()
        },
        ..FunnelFigures::default()
    }
}

/// The stages after a change to a calm server.
fn after(change: impl FnOnce(&mut FunnelFigures)) -> Vec<Stage> {
    let before = FunnelFigures { at: Duration::from_secs(100), ..calm_server() };
    let mut now = calm_server();
    change(&mut now);
    funnel(&now, &before)
}

/// The stage that is the cause, and its sentence.
fn cause_of(change: impl FnOnce(&mut FunnelFigures)) -> (StageName, State, String) {
    let stages = after(change);
    let first = |state| stages.iter().find(|stage| stage.state == state);
    let stage = first(State::Lost).or_else(|| first(State::Warn)).expect("something is wrong");
    (stage.name, stage.state, stage.why.clone())
}

#[track_caller]
fn is_cause(name: StageName, state: State, words: &[&str], change: impl FnOnce(&mut FunnelFigures)) {
    let (found, how, why) = cause_of(change);
    assert_eq!((found, how), (name, state), "{why}");
    for word in words {
        assert!(why.contains(word), "{word} is not in: {why}");
    }
}

fn stall(cause: StallCause, ongoing: bool) -> Option<StallFigures> {
    Some(StallFigures {
        ongoing,
        lasted: Duration::from_millis(4200),
        cause,
        work: "a call for 10.1.2.3:5511".to_owned(),
        waits_in: (cause == StallCause::Lock).then(|| "futex_do_wait".to_owned()),
    })
}

/// The overflow of a queue wherever a shard does not accept.
fn queue_overflows(now: &mut FunnelFigures) {
    (now.queues[0].waiting, now.queues[0].lost) = (4097, 12);
}

#[test]
fn calm_server_has_no_red_stage() {
    let stages = after(|_| ());
    assert_eq!(stages.iter().map(|stage| stage.name).collect::<Vec<_>>(), StageName::ALL);
    for stage in stages {
        assert_eq!(
            (stage.state, stage.why.as_str(), stage.lost_recently),
            (State::Calm, "", 0),
            "{}",
            stage.name
        );
    }
}

#[test]
fn first_figures_of_a_server_are_calm_too() {
    let calm = funnel(&FunnelFigures::default(), &FunnelFigures::default());
    assert!(calm.iter().all(|stage| stage.state == State::Calm), "{calm:?}");
}

#[test]
fn losses_of_long_ago_are_no_cause_now() {
    let mut old = calm_server();
    (old.queues[0].lost, old.waited, old.accept_paused, old.receives_parked) = (9, 9, 9, 9);
    old.closed = ClosedFigures {
        handler_timeout: 1,
        panicked: 1,
        outbox_full: 1,
        memory: 1,
        peer: 9,
        first_frame: 50,
    };
    old.machine = MachineFigures {
        conntrack_drops: 5,
        throttled: Duration::from_secs(60),
        handshakes_dropped: 1,
        cookies: 1,
        softnet_drops: 1,
        device_drops: 1,
        ..old.machine
    };
    let before = FunnelFigures { at: Duration::from_secs(100), ..old.clone() };
    let stages = funnel(&old, &before);
    assert!(stages.iter().all(|stage| stage.state == State::Calm && stage.lost_recently == 0), "{stages:?}");
    assert_eq!(stages[1].lost_total, 9);
}

#[test]
fn backlog_of_one_is_found_at_the_accept_queue() {
    let words = ["7 packets", "127.0.0.1:7000 on shard 1", "takes 1", "backlog"];
    is_cause(StageName::AcceptQueue, State::Lost, &words, |now| {
        now.queues.iter_mut().for_each(|queue| queue.capacity = 1);
        now.queues[1].lost = 7;
        now.machine.cookies = 3;
    });
}

#[test]
fn full_table_is_found_at_the_table() {
    let words = ["1000 connections fill the table of 1000", "connections_max"];
    is_cause(StageName::Table, State::Lost, &words, |now| {
        now.connections = 1000;
        now.waited = 40;
        queue_overflows(now);
    });
    // A burst was accepted before accepting stopped, so that no queue holds it.
    is_cause(StageName::Table, State::Lost, &["184 wait for a place"], |now| {
        (now.connections, now.newcomers) = (1000, 184);
    });
    let quiet = cause_of(|now| now.connections = 1000);
    assert_eq!((quiet.0, quiet.1), (StageName::Table, State::Warn));
}

#[test]
fn descriptors_that_bound_the_table_are_found_either_way() {
    let words = ["descriptors", "RLIMIT_NOFILE", "1000000"];
    is_cause(StageName::Table, State::Lost, &words, |now| {
        (now.connections, now.connections_wanted, now.waited) = (1000, 1_000_000, 1);
        queue_overflows(now);
    });
    is_cause(StageName::Table, State::Lost, &["64 of 64 descriptors", "RLIMIT_NOFILE"], |now| {
        (now.machine.descriptors, now.machine.descriptors_max) = (64, Some(64));
        now.accept_paused = 3;
        queue_overflows(now);
    });
    is_cause(StageName::Table, State::Lost, &["handshakes_max"], |now| now.accept_paused = 3);
}

#[test]
fn full_conntrack_is_found_at_the_machine() {
    let words = ["tracks 65536 connections of 65536", "dropped 12 packets", "nf_conntrack_max=131072"];
    is_cause(StageName::Machine, State::Lost, &words, |now| {
        now.machine.conntrack = Some((65_536, 65_536));
        now.machine.conntrack_drops = 12;
    });
    is_cause(StageName::Machine, State::Warn, &["nf_conntrack_max"], |now| {
        now.machine.conntrack = Some((55_000, 65_536));
    });
    // Nothing was dropped yet.
    is_cause(StageName::Machine, State::Lost, &["63000 connections of 65536", "of others beyond:"], |now| {
        now.machine.conntrack = Some((63_000, 65_536));
    });
    // More than there may be: it was lowered.
    is_cause(StageName::Machine, State::Lost, &["drops packets", "nf_conntrack_max=256"], |now| {
        now.machine.conntrack = Some((128, 64));
    });
}

#[test]
fn lock_in_a_handler_is_found_at_the_handler() {
    let words =
        ["shard 0 is blocked by a call for 10.1.2.3:5511", "futex_do_wait", "4.2 s", "ringserve::sync"];
    is_cause(StageName::Handler, State::Lost, &words, |now| {
        now.shards[0].stall = stall(StallCause::Lock, true);
        now.receives_parked = 2;
        queue_overflows(now);
    });
}

#[test]
fn loop_in_a_handler_is_found_at_the_handler() {
    is_cause(StageName::Handler, State::Lost, &["computes", "spawn_blocking"], |now| {
        now.shards[0] =
            ShardFigures { busy: 1.0, stall: stall(StallCause::Cpu, false), ..ShardFigures::default() };
        queue_overflows(now);
    });
}

#[test]
fn brief_stall_is_felt_only_where_connections_were_lost() {
    let brief = |now: &mut FunnelFigures| {
        let long = stall(StallCause::Cpu, false).unwrap();
        now.shards[0].stall = Some(StallFigures { lasted: Duration::from_millis(30), ..long });
    };
    is_cause(StageName::Handler, State::Warn, &["30 ms"], brief);
    is_cause(StageName::Handler, State::Lost, &["30 ms"], |now| {
        brief(now);
        queue_overflows(now);
    });
}

#[test]
fn cpu_quota_is_found_at_the_machine() {
    is_cause(StageName::Machine, State::Lost, &["8.0 s", "0.20 CPUs", "cpu.max"], |now| {
        now.machine.throttled = Duration::from_secs(8);
        now.machine.quota = Some(0.2);
        now.shards[0].stall = stall(StallCause::Cpu, true);
        now.shards[1].stall = stall(StallCause::Starved, false);
        queue_overflows(now);
    });
}

#[test]
fn quota_is_not_laid_to_others() {
    // It was used up for most of the last second, which is little of the ten that are looked at.
    let held_back = |now: &mut FunnelFigures, starved: [f64; 2], millis| {
        now.shards.iter_mut().zip(starved).for_each(|(shard, share)| shard.starved = share);
        now.machine.throttled = Duration::from_millis(millis);
        now.share_throttling(&FunnelFigures { at: Duration::from_secs(109), ..calm_server() });
    };
    for (starved, millis) in [([0.8, 0.0], 800), ([0.7, 0.8], 1500), ([0.4, 0.4], 900)] {
        is_cause(StageName::Machine, State::Lost, &["quota", "cpu.max"], |now| {
            held_back(now, starved, millis);
            // By the share of all ten seconds it is a warning at most.
            now.machine.throttled = now.machine.throttled.max(Duration::from_secs(1));
        });
    }
    is_cause(StageName::Machine, State::Warn, &["quota"], |now| held_back(now, [0.8, 0.0], 790));
    // The time that others took is reported with it.
    is_cause(StageName::Machine, State::Lost, &["shard 1", "70 %", "others"], |now| {
        held_back(now, [0.0, 0.8], 100);
    });
}

#[test]
fn packets_of_other_namespaces_are_no_affair_of_this_server() {
    let stages = after(|now| now.machine.softnet_drops = 9);
    assert!(stages.iter().all(|stage| stage.state == State::Calm && stage.lost_recently == 0), "{stages:?}");
    is_cause(StageName::Machine, State::Warn, &["4 packets"], |now| {
        (now.machine.softnet_drops, now.machine.device_drops) = (9, 4);
    });
    let stages = after(|now| now.machine.device_drops = 9);
    assert!(stages.iter().all(|stage| stage.state == State::Calm), "frames of a protocol that nothing takes");
}

#[test]
fn lock_is_the_cause_below_a_quota_too() {
    let (name, ..) = cause_of(|now| {
        now.machine.throttled = Duration::from_secs(8);
        now.shards[0].stall = stall(StallCause::Lock, true);
    });
    assert_eq!(name, StageName::Handler);
}

#[test]
fn noisy_neighbour_is_found_at_the_machine() {
    is_cause(StageName::Machine, State::Lost, &["shard 1", "80 %"], |now| {
        now.shards[1].starved = 0.8;
        now.shards[1].stall = stall(StallCause::Starved, false);
        (now.queues[1].waiting, now.queues[1].lost) = (4097, 2);
    });
}

#[test]
fn peer_that_does_not_read_is_found_at_the_peer() {
    let held = |now: &mut FunnelFigures| {
        now.outboxes = OutboxFigures {
            bytes: 300_000,
            held_back: 1,
            largest: 300_000,
            largest_max: 64 << 20,
            peer: "10.1.2.3:5511".to_owned(),
            idle: Duration::from_secs(3),
            stall_timeout: Some(Duration::from_secs(30)),
        };
    };
    let words = ["10.1.2.3:5511 does not read", "300000 bytes", "3.0 s", "write_stall_timeout"];
    is_cause(StageName::Peer, State::Warn, &words, held);
    is_cause(StageName::Peer, State::Lost, &["2 connections", "write_stall_timeout"], |now| {
        now.closed.peer = 2;
    });
    is_cause(StageName::Peer, State::Warn, &["2 connections"], |now| {
        (now.connections, now.connections_max, now.closed.peer) = (9000, 90_000, 2);
    });
}

#[test]
fn slow_handler_is_found_at_the_handler() {
    let waits = |now: &mut FunnelFigures| {
        now.waiting = WaitingFigures {
            calls: 3,
            oldest: Duration::from_secs(5),
            peer: "10.1.2.3:5511".to_owned(),
            paused: true,
            in_flight_max: 1,
            timeout: Some(Duration::from_secs(60)),
        };
    };
    let words = ["a call of 10.1.2.3:5511 has waited for 5.0 s", "calls_in_flight_max is 1", "60 s"];
    is_cause(StageName::Handler, State::Lost, &words, waits);
    let brief = |now: &mut FunnelFigures| {
        waits(now);
        now.waiting.paused = false;
    };
    is_cause(StageName::Handler, State::Warn, &["calls_in_flight_max"], brief);
    let of_a_slow_reader = |now: &mut FunnelFigures, peer: &str| {
        waits(now);
        let peer = peer.to_owned();
        now.outboxes =
            OutboxFigures { held_back: 1, peer, idle: Duration::from_secs(2), ..OutboxFigures::default() };
    };
    is_cause(StageName::Handler, State::Warn, &["see the stage peer"], |now| {
        of_a_slow_reader(now, "10.1.2.3:5511");
    });
    is_cause(StageName::Handler, State::Lost, &["calls_in_flight_max"], |now| {
        of_a_slow_reader(now, "10.9.9.9:5511");
    });
    is_cause(StageName::Handler, State::Lost, &["handler_timeout"], |now| now.closed.handler_timeout = 1);
    is_cause(StageName::Handler, State::Lost, &["panic"], |now| now.closed.panicked = 1);
    let long_polls = after(|now| {
        waits(now);
        now.waiting.timeout = None;
    });
    assert!(long_polls.iter().all(|stage| stage.state == State::Calm), "calls that may wait for ever");
}

#[test]
fn dry_receive_memory_is_found_at_the_first_frame() {
    let words = ["37 times", "4096 buffers, of which 4096 hold", "receive_bytes_max"];
    is_cause(StageName::FirstFrame, State::Lost, &words, |now| {
        (now.receives_parked, now.buffers, now.buffers_full) = (37, 4096, true);
    });
}

#[test]
fn burst_before_receive_memory_grew_is_no_loss() {
    let burst = after(|now| (now.receives_parked, now.buffers) = (37, 32));
    assert!(burst.iter().all(|stage| stage.state == State::Calm), "{burst:?}");
}

#[test]
fn silent_peers_are_a_warning_at_the_first_frame() {
    is_cause(StageName::FirstFrame, State::Warn, &["40 connections", "of 50"], |now| {
        (now.closed.first_frame, now.opened) = (40, 550);
    });
    let few = after(|now| (now.closed.first_frame, now.opened) = (40, 1500));
    assert!(few.iter().all(|stage| stage.state == State::Calm), "as on any public port");
}

#[test]
fn service_that_queues_without_end_is_found_at_the_outbox() {
    is_cause(StageName::Outbox, State::Lost, &["outbox_bytes_max", "Cx::ready"], |now| {
        now.closed.outbox_full = 1
    });
    is_cause(StageName::Outbox, State::Lost, &["held_bytes_max"], |now| now.closed.memory = 1);
}

#[test]
fn flood_of_handshakes_is_found_at_the_syn_queue() {
    let words = ["5 first packets", "tcp_syncookies"];
    is_cause(StageName::SynQueue, State::Lost, &words, |now| now.machine.handshakes_dropped = 5);
    is_cause(StageName::SynQueue, State::Warn, &["cookies"], |now| now.machine.cookies = 5);
}

#[test]
fn one_queue_of_all_shards_is_explained_by_any_of_them() {
    let (name, ..) = cause_of(|now| {
        now.queues.truncate(1);
        now.queues[0].shard = None;
        now.shards[1].stall = stall(StallCause::Sleep, true);
        queue_overflows(now);
    });
    assert_eq!(name, StageName::Handler);
}

#[test]
fn blocked_shard_explains_no_loss_of_another_one() {
    let stages = after(|now| {
        now.shards[1].stall = stall(StallCause::Sleep, true);
        queue_overflows(now);
    });
    let state = |name| stages.iter().find(|stage| stage.name == name).unwrap().state;
    assert_eq!((state(StageName::AcceptQueue), state(StageName::Handler)), (State::Lost, State::Lost));
}

/// The figures that the stage shows which is the cause: now, capacity and unit.
fn figure_of(change: impl FnOnce(&mut FunnelFigures)) -> (u64, Option<u64>, String) {
    let stages = after(change);
    let stage = stages.iter().find(|stage| stage.state != State::Calm).expect("something is wrong");
    (stage.now, stage.capacity, stage.unit.clone())
}

#[test]
fn stage_shows_the_figure_that_its_sentence_is_about() {
    let is = |change: fn(&mut FunnelFigures), now: u64, capacity: Option<u64>, unit: &str| {
        assert_eq!(figure_of(change), (now, capacity, unit.to_owned()));
    };
    let queue = |now: &mut FunnelFigures| {
        queue_overflows(now);
        now.queues[1].waiting = 7;
    };
    is(queue, 4097, Some(4096), "connections");
    let descriptors = |now: &mut FunnelFigures| {
        now.accept_paused = 3;
        (now.machine.descriptors, now.machine.descriptors_max) = (64, Some(64));
    };
    is(descriptors, 64, Some(64), "descriptors");
    is(|now| now.accept_paused = 3, 3, None, "pauses");
    is(|now| now.shards[1].stall = stall(StallCause::Lock, true), 4200, None, "ms blocked");
    let waits = |now: &mut FunnelFigures| {
        now.waiting.calls = 5;
        (now.waiting.oldest, now.waiting.timeout) =
            (Duration::from_millis(2500), Some(Duration::from_secs(30)));
    };
    is(waits, 2500, Some(30_000), "ms waited");
    let outbox = |now: &mut FunnelFigures| {
        (now.outboxes.bytes, now.outboxes.largest, now.outboxes.largest_max) = (90, 60, 100);
    };
    is(outbox, 60, Some(100), "bytes");
    is(|now| now.machine.conntrack = Some((128, 128)), 128, Some(128), "tracked");
    is(|now| now.machine.throttled = Duration::from_secs(8), 8000, Some(10_000), "ms held back");
    is(|now| now.machine.tcp_bytes = Some((400, 300)), 400, Some(300), "bytes");
    is(|now| now.shards[1].starved = 0.8, 80, Some(100), "% starved");
    let dropped = |now: &mut FunnelFigures| (now.machine.softnet_drops, now.machine.device_drops) = (9, 10);
    is(dropped, 9, None, "packets dropped");
    is(|now| now.machine.descriptors = 19_000, 19_000, Some(20_000), "descriptors");
}
