//! The way of a connection through a server as a row of stages, each of which is calm, short of
//! room, or the cause of what peers feel. A pure function of figures of now and of a while ago.
//!
//! ```text
//!   SYN queue ▶ accept queue ▶ table ▶ first frame ▶ handler ▶ outbox ▶ peer        machine, below all of it
//! ```
//!
//! A loss shows where there is no room, which is rarely where its cause is: an accept queue
//! overflows because a handler blocks its shard. So each stage asks first whether another one
//! explains what it sees, and is not the cause then.

mod figures;
mod machine;
#[cfg(test)]
mod tests;

use std::time::Duration;

use ringserve_report::{Stage, StageName, State};

use crate::stats::StallCause;

pub(crate) use figures::{
    ClosedFigures, FunnelFigures, MachineFigures, OutboxFigures, QueueFigures, ShardFigures, StallFigures,
    WaitingFigures,
};

/// A call that waits for longer is worth a sentence: peers that ask one thing after the other
/// notice.
const LONG_CALL: Duration = Duration::from_secs(1);

/// A peer that takes nothing for longer is worth one.
const LONG_STALL: Duration = Duration::from_secs(1);

/// A stall that is shorter is felt only where connections were lost meanwhile.
const BRIEF_STALL: Duration = Duration::from_millis(100);

/// Shares of a second for which others had the CPU: worth a sentence, and the cause of losses.
const STARVED: f64 = 0.3;

/// The stages at `now`, with what happened since `before`.
pub(crate) fn funnel(now: &FunnelFigures, before: &FunnelFigures) -> Vec<Stage> {
    let seen = Seen { now, before };
    vec![
        machine::syn_queue(&seen),
        seen.accept_queue(),
        seen.table(),
        seen.first_frame(),
        seen.handler(),
        seen.outbox(),
        seen.peer(),
        machine::machine(&seen),
    ]
}

/// Figures of two moments.
struct Seen<'a> {
    now: &'a FunnelFigures,
    before: &'a FunnelFigures,
}

impl Seen<'_> {
    /// The time between both.
    fn window(&self) -> Duration {
        self.now.at.saturating_sub(self.before.at)
    }

    /// The growth of a total.
    fn grew(&self, of: impl Fn(&FunnelFigures) -> u64) -> u64 {
        of(self.now).saturating_sub(of(self.before))
    }

    /// The time between both as text.
    fn recently(&self) -> String {
        format!("in the last {}", seconds(self.window()))
    }

    /// Packets that a queue lost since `before`.
    fn lost(&self, number: usize) -> u64 {
        let queue = &self.now.queues[number];
        // Queues that were closed since are gone.
        let same = |other: &&QueueFigures| other.shard == queue.shard && other.listener == queue.listener;
        let before = self.before.queues.iter().find(same).map_or(queue.lost, |before| before.lost);
        queue.lost.saturating_sub(before)
    }

    /// The stage that keeps a shard from accepting, if one does; of any shard, for a queue from
    /// which all accept.
    fn obstacle(&self, shard: Option<usize>) -> Option<StageName> {
        let its = |number: usize| shard.is_none_or(|shard| shard == number);
        let mut shards =
            (0..).zip(&self.now.shards).filter(|(number, _)| its(*number)).map(|(_, shard)| shard);
        if shards.clone().any(|shard| self.is_blocked(shard)) {
            return Some(StageName::Handler);
        }
        if machine::is_throttled(self) || shards.any(|shard| shard.starved >= STARVED) {
            return Some(StageName::Machine);
        }
        self.is_full().then_some(StageName::Table)
    }

    /// Code of the program blocks a shard, or did a moment ago: no lack of CPU explains it.
    fn is_blocked(&self, shard: &ShardFigures) -> bool {
        let lacks_cpu = machine::is_throttled(self) || shard.starved >= STARVED;
        shard.stall.as_ref().is_some_and(|stall| match stall.cause {
            StallCause::Lock | StallCause::Read | StallCause::Sleep => true,
            StallCause::Starved => false,
            _ => !lacks_cpu,
        })
    }

    fn is_full(&self) -> bool {
        let FunnelFigures { connections, connections_max, .. } = *self.now;
        (connections_max > 0 && connections >= connections_max) || self.grew(|now| now.accept_paused) > 0
    }

    fn accept_queue(&self) -> Stage {
        let queues = &self.now.queues;
        let lost_recently = (0..queues.len()).map(|number| self.lost(number)).sum();
        let stage = Stage {
            now: queues.iter().map(|queue| queue.waiting).sum(),
            capacity: (!queues.is_empty()).then(|| queues.iter().map(|queue| queue.capacity).sum()),
            lost_total: queues.iter().map(|queue| queue.lost).sum(),
            lost_recently,
            ..calm(StageName::AcceptQueue, "connections")
        };
        let of_one = |number: usize| Figure {
            now: queues[number].waiting,
            capacity: Some(queues[number].capacity),
            unit: "connections",
        };
        let losing = (0..queues.len()).filter(|number| self.lost(*number) > 0);
        let explained = |number: &usize| self.obstacle(queues[*number].shard);
        let worst = losing.clone().filter(|number| explained(number).is_none()).max_by_key(|n| self.lost(*n));
        if let Some(number) = worst {
            let QueueFigures { capacity, .. } = queues[number];
            let why = format!(
                "{} packets of new connections were dropped {} at {}, whose queue takes {capacity}: raise \
                 SocketOptions::backlog and net.core.somaxconn to what comes within the longest pause of a shard",
                self.lost(number),
                self.recently(),
                of_queue(&queues[number]),
            );
            return of_one(number).on(Stage { state: State::Lost, why, ..stage });
        }
        if let Some((number, by)) = losing.filter_map(|n| Some((n, explained(&n)?))).next() {
            let why = format!(
                "{} packets were dropped {} at {}, since its shard does not accept: see the stage {by}",
                self.lost(number),
                self.recently(),
                of_queue(&queues[number]),
            );
            return of_one(number).on(Stage { state: State::Warn, why, ..stage });
        }
        let full = queues.iter().position(|queue| queue.waiting > 0 && queue.waiting * 2 >= queue.capacity);
        match full {
            Some(number) => {
                let queue = &queues[number];
                let why = format!(
                    "{} connections wait at {}, whose queue takes {}: when it is full their packets are dropped",
                    queue.waiting,
                    of_queue(queue),
                    queue.capacity
                );
                of_one(number).on(Stage { state: State::Warn, why, ..stage })
            }
            None => stage,
        }
    }

    fn table(&self) -> Stage {
        let FunnelFigures { connections, connections_max, connections_wanted, newcomers, waited, .. } =
            *self.now;
        let paused = self.grew(|now| now.accept_paused);
        let stage = Stage {
            now: connections,
            capacity: Some(connections_max),
            lost_total: waited,
            lost_recently: self.grew(|now| now.waited),
            ..calm(StageName::Table, "connections")
        };
        let queued: u64 = self.now.queues.iter().map(|queue| queue.waiting).sum();
        let waiting = queued + newcomers;
        let MachineFigures { descriptors, descriptors_max, .. } = self.now.machine;
        let of_descriptors = "raise RLIMIT_NOFILE (ulimit -n, LimitNOFILE= in systemd)";
        if connections_max > 0 && connections >= connections_max {
            let fix = if connections_wanted > connections_max {
                let limit = descriptors_max.map_or_else(String::new, |max| format!(" {max}"));
                format!(
                    "the limit of{limit} descriptors (open files) allows no more: {of_descriptors}; \
                     ServerLimits::connections_max is {connections_wanted}"
                )
            } else {
                "raise ServerLimits::connections_max, or close idle ones sooner by Limits::idle_timeout"
                    .to_owned()
            };
            let felt = waiting > 0 || paused > 0 || stage.lost_recently > 0;
            let state = if felt { State::Lost } else { State::Warn };
            let why = format!(
                "{connections} connections fill the table of {connections_max}, and {waiting} wait for a place: {fix}"
            );
            return Stage { state, why, ..stage };
        }
        if paused > 0 {
            let stage = Stage { state: State::Lost, ..stage };
            if let Some(max) = descriptors_max.filter(|max| descriptors + 1 >= *max) {
                let why = format!(
                    "accepting stopped {paused} times {}: {descriptors} of {max} descriptors are open; {of_descriptors}",
                    self.recently()
                );
                let figure = Figure { now: descriptors, capacity: Some(max), unit: "descriptors" };
                return figure.on(Stage { why, ..stage });
            }
            let why = format!(
                "accepting stopped {paused} times {}, at a limit that is not that of connections: \
                 ServerLimits::handshakes_max, memory, or files of the system (fs.file-max)",
                self.recently()
            );
            return Figure { now: paused, capacity: None, unit: "pauses" }.on(Stage { why, ..stage });
        }
        if connections * 10 >= connections_max * 9 && connections > 0 {
            let why = format!(
                "{connections} of {connections_max} connections: further ones will wait to be accepted soon"
            );
            return Stage { state: State::Warn, why, ..stage };
        }
        stage
    }

    fn first_frame(&self) -> Stage {
        let FunnelFigures { buffers, buffers_max, .. } = *self.now;
        let silent = self.grew(|now| now.closed.first_frame);
        let parked = self.grew(|now| now.receives_parked);
        let stage = Stage {
            now: buffers,
            capacity: Some(buffers_max),
            lost_total: self.now.closed.first_frame,
            lost_recently: silent,
            ..calm(StageName::FirstFrame, "buffers")
        };
        // The buffers of a ring are fewer at first than there may be: a burst that finds none costs
        // a moment.
        if parked > 0 && self.now.buffers_full {
            let dry = format!(
                "receives found no memory {parked} times {}: there may be {buffers_max} buffers, of which {buffers} \
                 hold bytes now",
                self.recently()
            );
            return if self.now.shards.iter().any(|shard| self.is_blocked(shard)) {
                let why = format!("{dry}, since a shard does not go on: see the stage handler");
                Stage { state: State::Warn, why, ..stage }
            } else {
                let fix = "raise ServerLimits::receive_bytes_max, or let handlers drop their frames sooner";
                Stage { state: State::Lost, why: format!("{dry}; {fix}"), ..stage }
            };
        }
        let opened = self.grew(|now| now.opened);
        if silent >= 10 && silent * 10 >= opened {
            let why = format!(
                "{silent} connections were closed {} without a whole frame, of {opened} that were opened: scanners, \
                 or clients that speak another protocol (Limits::first_frame_timeout)",
                self.recently()
            );
            return Stage { state: State::Warn, why, ..stage };
        }
        stage
    }

    /// The call that has waited for longest is one of a peer that takes nothing, so it may well
    /// wait for that.
    fn waits_for_its_peer(&self) -> bool {
        let OutboxFigures { held_back, idle, peer, .. } = &self.now.outboxes;
        *held_back > 0 && *idle >= LONG_STALL && *peer == self.now.waiting.peer
    }

    fn handler(&self) -> Stage {
        let ClosedFigures { handler_timeout, panicked, .. } = self.now.closed;
        let timed_out = self.grew(|now| now.closed.handler_timeout);
        let panics = self.grew(|now| now.closed.panicked);
        let WaitingFigures { calls, oldest, paused, in_flight_max, timeout, .. } = self.now.waiting;
        let stage = Stage {
            now: calls,
            lost_total: handler_timeout + panicked,
            lost_recently: timed_out + panics,
            ..calm(StageName::Handler, "calls")
        };
        let stalls =
            (0..).zip(&self.now.shards).filter_map(|(n, shard)| Some((n, shard, shard.stall.as_ref()?)));
        let worst =
            stalls.max_by_key(|(_, shard, stall)| (self.is_blocked(shard), stall.ongoing, stall.lasted));
        if let Some((number, shard, stall)) = worst {
            let is_cause = self.is_blocked(shard);
            let lost = (0..self.now.queues.len()).any(|queue| self.lost(queue) > 0);
            let is_felt = is_cause && (stall.lasted >= BRIEF_STALL || lost);
            let state = if is_felt { State::Lost } else { State::Warn };
            let why = if is_cause {
                blocked(number, stall)
            } else {
                format!(
                    "shard {number} went on after {} only, for lack of CPU: see the stage host",
                    seconds(stall.lasted)
                )
            };
            let figure = Figure { now: millis(stall.lasted), capacity: None, unit: "ms blocked" };
            return figure.on(Stage { state, why, ..stage });
        }
        if panics > 0 {
            let why = format!(
                "{panics} connections ended {} by a panic of the service: the log has its text",
                self.recently()
            );
            return Stage { state: State::Lost, why, ..stage };
        }
        if timed_out > 0 {
            let why = format!(
                "{timed_out} calls took longer than Limits::handler_timeout {}, and their connections were closed: see what \
                 they wait for",
                self.recently()
            );
            return Stage { state: State::Lost, why, ..stage };
        }
        if let Some(timeout) = timeout
            && oldest >= LONG_CALL
        {
            let waited = Figure { now: millis(oldest), capacity: Some(millis(timeout)), unit: "ms waited" };
            if self.waits_for_its_peer() {
                let why = format!(
                    "a call of {} has waited for {}, and its peer does not read: see the stage peer",
                    self.now.waiting.peer,
                    seconds(oldest)
                );
                return waited.on(Stage { state: State::Warn, why, ..stage });
            }
            let state = if paused || oldest * 2 >= timeout { State::Lost } else { State::Warn };
            let why = format!(
                "a call of {} has waited for {}, and further frames of its connection behind it \
                 (Limits::calls_in_flight_max is {in_flight_max}): see what it waits for, or allow more at once; it ends \
                 after {}",
                self.now.waiting.peer,
                seconds(oldest),
                seconds(timeout)
            );
            return waited.on(Stage { state, why, ..stage });
        }
        stage
    }

    fn outbox(&self) -> Stage {
        let ClosedFigures { outbox_full, memory, .. } = self.now.closed;
        let full = self.grew(|now| now.closed.outbox_full);
        let no_memory = self.grew(|now| now.closed.memory);
        let OutboxFigures { bytes, largest, largest_max, .. } = self.now.outboxes;
        let stage = Stage {
            now: bytes,
            lost_total: outbox_full + memory,
            lost_recently: full + no_memory,
            ..calm(StageName::Outbox, "bytes")
        };
        if full > 0 {
            let why = format!(
                "{full} connections were closed {}, since the service queued more than Limits::outbox_bytes_max for \
                 them: await Cx::ready before more is queued, or drop what is old",
                self.recently()
            );
            return Stage { state: State::Lost, why, ..stage };
        }
        if no_memory > 0 {
            let why = format!(
                "{no_memory} connections were closed {}, since their shard held more than \
                 ServerLimits::held_bytes_max: lower Limits::outbox_bytes_high, or raise it if there is memory",
                self.recently()
            );
            return Stage { state: State::Lost, why, ..stage };
        }
        if largest_max > 0 && largest * 2 >= largest_max {
            let why = format!(
                "{largest} bytes wait for {}, which is closed at {largest_max} (Limits::outbox_bytes_max)",
                self.now.outboxes.peer
            );
            let figure = Figure { now: largest, capacity: Some(largest_max), unit: "bytes" };
            return figure.on(Stage { state: State::Warn, why, ..stage });
        }
        stage
    }

    fn peer(&self) -> Stage {
        let closed = self.grew(|now| now.closed.peer);
        let OutboxFigures { held_back, largest, idle, stall_timeout, .. } = self.now.outboxes;
        let stage = Stage {
            now: held_back,
            lost_total: self.now.closed.peer,
            lost_recently: closed,
            ..calm(StageName::Peer, "connections")
        };
        // Less than one in a hundred is what networks lose anyway.
        let many = closed * 100 >= self.now.connections + closed;
        if closed > 0 {
            let why = format!(
                "{closed} connections were closed {}, since their peers read nothing or too slowly \
                 (Limits::write_stall_timeout, write_bytes_per_second_min): see their network, or send them less",
                self.recently()
            );
            return Stage { state: if many { State::Lost } else { State::Warn }, why, ..stage };
        }
        if held_back > 0 && idle >= LONG_STALL {
            let ends = stall_timeout.map_or_else(
                || "Limits::write_stall_timeout is off: set it".to_owned(),
                |time| {
                    format!(
                        "it is closed after {} without a byte taken (Limits::write_stall_timeout)",
                        seconds(time)
                    )
                },
            );
            let why = format!(
                "{} does not read: {largest} bytes have waited for it for {}, and its frames are held back; {ends}",
                self.now.outboxes.peer,
                seconds(idle)
            );
            return Stage { state: State::Warn, why, ..stage };
        }
        stage
    }
}

/// The figure that a stage's sentence is about, where the stage usually shows another one.
#[derive(Clone, Copy)]
struct Figure {
    now: u64,
    capacity: Option<u64>,
    unit: &'static str,
}

impl Figure {
    fn on(self, stage: Stage) -> Stage {
        let Figure { now, capacity, unit } = self;
        Stage { now, capacity, unit: unit.to_owned(), ..stage }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A stage at which nothing is wrong.
fn calm(name: StageName, unit: &str) -> Stage {
    Stage { name, state: State::Calm, unit: unit.to_owned(), ..Stage::default() }
}

fn of_queue(queue: &QueueFigures) -> String {
    match queue.shard {
        Some(shard) => format!("{} on shard {shard}", queue.listener),
        None => queue.listener.clone(),
    }
}

/// The sentence about a shard that code of the program blocks.
fn blocked(number: usize, stall: &StallFigures) -> String {
    let (does, fix) = match stall.cause {
        StallCause::Lock => (
            "waits for a lock or a channel",
            "use one of ringserve::sync, for which a call waits without its thread, or hold it for less",
        ),
        StallCause::Read => ("reads from a file or a socket that blocks", "use Shard::spawn_blocking"),
        StallCause::Sleep => ("sleeps", "await Cx::sleep instead"),
        StallCause::Cpu => ("computes", "use Shard::spawn_blocking, or divide the work by awaits"),
        _ => ("does not return", "await, or use Shard::spawn_blocking"),
    };
    let kernel = stall.waits_in.as_ref().map_or_else(String::new, |place| format!(" in {place}"));
    let since = if stall.ongoing { "for" } else { "and then went on, after" };
    format!(
        "shard {number} is blocked by {}, which {does}{kernel}, {since} {}: {fix}",
        stall.work,
        seconds(stall.lasted)
    )
}

/// A time as it is read: three digits at most matter.
fn seconds(time: Duration) -> String {
    let millis = time.as_millis();
    match millis {
        0..1000 => format!("{millis} ms"),
        1000..10_000 => format!("{:.1} s", time.as_secs_f64()),
        _ => format!("{} s", time.as_secs()),
    }
}
