//! A driver without a kernel: every turn brings the same bytes on one connection, and sends
//! complete at once.

use std::os::fd::OwnedFd;
use std::task::Waker;
use std::time::{Duration, Instant};

use ringserve::framing::Framing;
use ringserve::{Limits, Service};
use ringserve_buf::{KernelSide, Pool, PoolConfig};
use ringserve_core::{Budget, Completion, ConnId, Driver, DriverStats, Op, SendEnd, Socket, Wait};

/// Ends the run when all turns were taken.
const DONE: i32 = -1;

pub struct Loopback<'a> {
    pool: Pool,
    side: KernelSide,
    received: &'a [u8],
    turns_left: u64,
    id: Option<ConnId>,
    receiving: bool,
    accepted: bool,
    completions: Vec<Completion>,
    started: &'a mut Option<Instant>,
}

impl Driver for Loopback<'_> {
    type Descriptor = OwnedFd;

    fn submit(&mut self, op: Op) {
        match op {
            Op::Adopt { id, .. } => self.id = Some(id),
            Op::Receive { .. } => self.receiving = true,
            Op::Send { id, mut batch } => {
                batch.advance(batch.len());
                self.completions.push(Completion::Sent { id, batch, end: SendEnd::Done });
            }
            _ => {}
        }
    }

    fn turn(&mut self, _: Wait, _: Budget, completions: &mut Vec<Completion>) -> Result<(), i32> {
        completions.append(&mut self.completions);
        if !self.accepted {
            self.accepted = true;
            completions.push(Completion::Accepted { listener: 0, socket: Socket(0), peer: None });
            return Ok(());
        }
        let (true, Some(id)) = (self.receiving, self.id) else { return Ok(()) };
        self.started.get_or_insert_with(Instant::now);
        if self.turns_left == 0 {
            return Err(DONE);
        }
        self.turns_left -= 1;
        let buffer = self.side.lend().ok_or(DONE)?;
        self.side.spare(buffer)[..self.received.len()].copy_from_slice(self.received);
        let lease = self.side.received(buffer, self.received.len());
        completions.push(Completion::Received { id, lease });
        Ok(())
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn stats(&self) -> DriverStats {
        DriverStats::default()
    }

    fn connections_max(&self) -> usize {
        1
    }

    fn waker(&self) -> Waker {
        // No turn blocks.
        Waker::noop().clone()
    }

    fn hand_over(&mut self, _: Socket) -> Option<OwnedFd> {
        None
    }

    fn take_over(&mut self, _: OwnedFd) -> Socket {
        unreachable!("there is no other shard")
    }

    fn readiness(&mut self) -> Result<OwnedFd, i32> {
        Err(DONE)
    }

    fn begin(&mut self) -> Result<bool, i32> {
        Ok(true)
    }
}

/// Runs `turns` turns, each bringing `received`, and returns the time they took.
pub fn run<S: Service, F: Framing>(
    service: S,
    framing: F,
    limits: Limits,
    received: &[u8],
    turns: u64,
) -> Duration {
    let mut started = None;
    let (pool, side) = Pool::new(PoolConfig::default()).expect("the default sizes are sound");
    let driver = Loopback {
        pool,
        side,
        received,
        turns_left: turns,
        id: None,
        receiving: false,
        accepted: false,
        completions: Vec::new(),
        started: &mut started,
    };
    let ended = ringserve_server::internals::run_on(driver, service, framing, limits);
    assert_eq!(ended.err(), Some(DONE));
    started.map_or(Duration::ZERO, |started| started.elapsed())
}
