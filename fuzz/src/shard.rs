//! Target `shard`: a script of the driver's completions and the service's actions.
//!
//! The first bytes set limits; each one after that is a step, followed by its operands. When they
//! are used up the shard drains, and must end.

use std::time::Duration;

use ringserve_core::{AcceptEnd, CloseReason, Limits, ReceiveEnd, SendEnd, ServerLimits, Wait};

use crate::framings::Kind;
use crate::input::Input;
use crate::rig::service::End;
use crate::rig::{Command, ECANCELED, Plan, Rig};

/// The most connections: enough to have others in addition to the one of a step.
const CONNECTIONS_MAX: usize = 6;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let what = input.byte();
    let plan = plan(what, &mut input);
    if !plan.kind.works_with(&plan.limits) {
        return;
    }
    let mut rig = Rig::new(plan);
    rig.next_turn(Duration::ZERO);
    while let Some(what) = input.next_byte() {
        step(&mut rig, what, &mut input);
    }
    rig.finish(what & 1 == 0);
}

fn plan(what: u8, input: &mut Input<'_>) -> Plan {
    let has = |bit: u8| what & bit != 0;
    let kind = Kind::draw(input);
    let ms = Duration::from_millis;
    let receive_buffer_bytes = input.pick(&[64, 4096, 300, 16384]);
    let buffers = 1 + usize::from(input.byte()) % 8;
    let outbox_bytes_high = input.pick(&[1, 100, 5000, 256 << 10]);
    let outbox_bytes_max = outbox_bytes_high * input.pick(&[1, 3, 1000]);
    let frame_bytes_max = input.pick(&[1 << 20, 1, 9, 300, 5000]);
    let inbox_bytes_high = input.pick(&[64 << 10, 1, 100, 5000]);
    let needed = outbox_bytes_max.max(frame_bytes_max).max(inbox_bytes_high);
    let limits = Limits::default()
        .frame_bytes_max(frame_bytes_max)
        .outbox_bytes_high(outbox_bytes_high)
        .outbox_bytes_low((outbox_bytes_high / input.pick(&[1, 4])).max(1))
        .outbox_bytes_max(outbox_bytes_max)
        .inbox_bytes_high(inbox_bytes_high);
    let server_limits = ServerLimits::default()
        .connections_max(CONNECTIONS_MAX)
        .held_bytes_max(needed * input.pick(&[1000, 1, 2]))
        .receive_bytes_max(buffers * receive_buffer_bytes)
        .receive_buffer_bytes(receive_buffer_bytes)
        .connect_timeout(ms(if has(2) { 100 } else { 5000 }))
        .upstreams_max(0);
    let limits = limits
        .first_frame_timeout(input.pick(&[None, Some(ms(20)), Some(ms(3000))]))
        .idle_counts(ringserve_core::IdleActivity::Either)
        .idle_timeout(input.pick(&[None, Some(ms(50)), Some(ms(5000))]))
        .write_stall_timeout(input.pick(&[None, Some(ms(30)), Some(ms(1000))]))
        .handler_timeout(has(2).then_some(ms(200)))
        .heartbeat_interval(has(4).then_some(ms(40)))
        .heartbeats_missed_max(2)
        .write_bytes_per_second_min(if has(8) { 240 } else { 0 })
        .read_bytes_per_second_min(if has(8) { 240 } else { 0 })
        .calls_in_flight_max([1, 2, 3, 9][usize::from(what >> 4 & 3)]);
    let server_limits =
        server_limits.drain_timeout(input.pick(&[ms(2000), ms(20), ms(300)])).drain_delay(Duration::ZERO);
    let limits = limits.linger_timeout(input.pick(&[ms(100), ms(20), ms(4000)]));
    let options = input.byte();
    Plan {
        kind,
        limits,
        server_limits,
        buffers,
        large: options & 1 == 0,
        copy_frames: options & 2 != 0,
        connections_max: 1 + usize::from(options >> 2) % CONNECTIONS_MAX,
        listeners: 1 + u16::from(options >> 7),
        echo_only: false,
        hold_open: has(64),
        others: has(128),
    }
}

fn step(rig: &mut Rig, what: u8, input: &mut Input<'_>) {
    let listeners = rig.model.plan.listeners;
    // The connection, for steps that have one.
    let wire = usize::from(what >> 5) % rig.model.wires.len().max(1);
    match what % 32 {
        0 | 1 => {
            speak(rig, wire, input);
            rig.deliver(wire, usize::MAX);
        }
        2 => speak(rig, wire, input),
        3 => {
            let count = input.wide();
            rig.deliver(wire, count);
        }
        4 => {
            let count = usize::from(input.byte());
            let bytes = input.take(count % 64);
            if let Some(wire) = rig.model.wires.get_mut(wire) {
                wire.unread.extend(bytes);
            }
            rig.deliver(wire, usize::MAX);
        }
        5 => rig.end_receive(wire, Some(ReceiveEnd::Eof)),
        6 => rig.end_receive(wire, Some(ReceiveEnd::Error(input.pick(&[104, 32, 5])))),
        7 => rig.end_receive(wire, None),
        8 => rig.end_send(wire, SendEnd::Done),
        9 => {
            let count = input.wide();
            rig.take_bytes(wire, count);
        }
        10 => {
            let errno = input.pick(&[104, 32, 12]);
            rig.end_connect(wire, Err(errno));
            rig.end_send(wire, SendEnd::Error(errno));
        }
        11 => {
            rig.end_connect(wire, Err(ECANCELED));
            rig.end_send(wire, SendEnd::Stopped);
        }
        12 => {
            rig.end_connect(wire, Ok(()));
            rig.end_shutdown(wire);
        }
        13 => rig.end_close(wire),
        14 => {
            rig.answer_all(false);
        }
        15 => {
            rig.answer_all(true);
        }
        16 => rig.next_turn(Duration::ZERO),
        17 => {
            let pause = Duration::from_nanos(1 << (input.byte() % 36));
            rig.next_turn(pause);
        }
        18 => rig.sleep(),
        19 => {
            let how = input.byte();
            rig.model.opening = how % 8;
            let listener = u16::from(what >> 5) % listeners;
            match how {
                0..128 => rig.accept(listener),
                128..192 => rig.accept_elsewhere(listener),
                192.. => rig.connect_upstream(),
            }
        }
        20 => {
            for _ in 0..what >> 5 {
                rig.accept(u16::from(what >> 5) % listeners);
            }
        }
        21 => {
            let end = input.pick(&[AcceptEnd::Descriptors, AcceptEnd::SystemFiles, AcceptEnd::Error(103)]);
            rig.end_accept(u16::from(what >> 5) % listeners, Some(end));
        }
        22 => rig.end_accept(u16::from(what >> 5) % listeners, None),
        23 => rig.resume(usize::from(what >> 5), End::Done),
        24 => {
            let end = if input.byte().is_multiple_of(2) { End::Failed } else { End::Panicked };
            rig.resume(usize::from(what >> 5), end);
        }
        25 => {
            let size = input.byte();
            if let Some(shared) = rig.model.live.values().nth(wire).cloned() {
                rig.model.say(&shared, size, size >= 128);
            }
        }
        26 => {
            let wish = input.byte();
            if let Some(shared) = rig.model.live.values().nth(wire) {
                if wish.is_multiple_of(2) { shared.close() } else { shared.abort() }
            }
        }
        27 => stale(rig, wire),
        28 => {
            if let Some(shared) = rig.model.live.values().nth(wire) {
                shared.body().kept.borrow_mut().clear();
                shared.body().gate.replace(Some(shared.gate()));
            }
        }
        29 => rig.order(Command::Drain),
        30 => rig.order(Command::Abort),
        // Like a server that has nothing else to do: everything answers, then it sleeps.
        _ => {
            rig.next_turn(Duration::ZERO);
            rig.answer_all(true);
            if rig.shard.wait() != Wait::No {
                rig.sleep();
            }
        }
    }
}

/// Sends a frame of the peer whose first byte orders an action of the service.
fn speak(rig: &mut Rig, wire: usize, input: &mut Input<'_>) {
    let head = [input.byte(), input.byte()];
    let len = input.pick(&[2, 0, 1, 30, 100, 254, 1100, 4100, 9000]);
    let payload: Vec<u8> =
        head.into_iter().chain((2..len).map(|n| b'a' + (n % 23) as u8)).take(len).collect();
    let Some(frame) = rig.model.plan.kind.frame(&payload) else { return };
    if let Some(wire) = rig.model.wires.get_mut(wire) {
        wire.unread.extend(frame);
    }
}

/// Uses the name of a connection that is gone, as the service.
fn stale(rig: &mut Rig, which: usize) {
    let Some(shared) = rig.model.old.get(which).cloned() else { return };
    let (outlet, id) = (&*shared, shared.id());
    rig.model.say(&shared, 2, false);
    assert_eq!((outlet.outbox_bytes(), outlet.is_gone()), (0, true));
    outlet.close();
    outlet.abort();
    let parked = rig.shard.call_parked(id, 7, 100);
    assert_eq!((parked.next, parked.bytes), (None, 0));
    rig.shard.call_done(id, 7, parked, None);
    rig.shard.finish(id, CloseReason::Closed);
    rig.shard.abort(id, CloseReason::Aborted);
    rig.shard.run_frames(id, &mut rig.model);
    if which.is_multiple_of(2) {
        rig.model.old.remove(which);
    }
}
