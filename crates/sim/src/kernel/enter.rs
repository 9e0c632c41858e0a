//! The one system call: submit, post what is ready, block.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ringserve_core::Wait;
use ringserve_drivers::kernel::{Kind, RawCqe};
use ringserve_simkernel::ring::PostedCompletion;

use super::State;
use crate::faults::{Arm, Fault};
use crate::plan::NEVER;

/// The most actions of others within one wait of the shard: 40 peers that read 16 KiB byte by byte.
const LOOKS_MAX: u32 = 1_000_000;

impl State {
    /// Posts completions that have become ready, in any order. Unless `all`, some may be held back.
    pub(super) fn work(&mut self, all: bool) {
        let mut index = 0;
        while index < self.late.len() {
            if self.late[index].0 <= self.now {
                let (_, PostedCompletion { cqe, note }) = self.late.swap_remove(index);
                self.post_with(cqe, note);
            } else {
                index += 1;
            }
        }
        self.wake_due |= self.woken.0.swap(false, Ordering::Acquire);
        if self.wake_due && self.ring.wake_armed {
            (self.wake_due, self.ring.wake_armed) = (false, false);
            self.post(RawCqe::new(Kind::Wake.with(0), 8, 0), Arm::Wake);
        }
        self.work_connects();
        if self.rng.one_in(2) {
            self.work_accepts();
            self.work_sends(all);
            self.work_receives(all);
        } else {
            self.work_receives(all);
            self.work_accepts();
            self.work_sends(all);
        }
    }

    /// Time of the next event without the server.
    pub(super) fn next_event(&self) -> u64 {
        let late = self.late.iter().map(|(due, _)| *due).min().unwrap_or(NEVER);
        late.min(self.peers_at).min(self.alarm).min(self.next_connect())
    }

    /// Blocks until there are `wait_for` completions.
    pub(super) fn block(&mut self, wait_for: usize, deadline: u64) -> Result<(), i32> {
        let waits_for_more = wait_for > 1;
        for looks in 0u32.. {
            assert!(looks < LOOKS_MAX, "peers keep busy for ever while the shard sleeps");
            self.work(true);
            // Overflowed completions wait for the next enter.
            if self.ring.completions.ready.len() >= wait_for || !self.ring.completions.overflow.is_empty() {
                if waits_for_more {
                    self.cover.arm(Arm::CameTogether);
                }
                return Ok(());
            }
            if self.strikes(Fault::EnterInterrupted) {
                self.cut_short = true;
                return Err(libc::EINTR);
            }
            if looks == 0 && self.ring.completions.ready.is_empty() {
                self.check_blocked(deadline);
            }
            if self.ring.is_ending_something() {
                self.pass(10_000);
                continue;
            }
            let next = self.next_event();
            if deadline <= next && deadline != NEVER {
                let passed = deadline.saturating_sub(self.now);
                self.pass(passed);
                self.work(true);
                if !self.ring.completions.ready.is_empty() {
                    if waits_for_more {
                        self.cover.arm(Arm::CameTogether);
                    }
                    return Ok(());
                }
                self.cover.arm(if waits_for_more { Arm::MoreTimeout } else { Arm::Timeout });
                return Err(libc::ETIME);
            }
            if next == NEVER {
                // All peers wait for the server, and the server waits for none of them.
                assert!(self.drain_deadline.is_none(), "the shard waits for ever, and was told to drain");
                assert!(!self.quiet_world, "the shard was woken and did not notice");
                self.quiet_world = true;
                self.wake_due = true;
                continue;
            }
            let passed = next.saturating_sub(self.now);
            if self.alarm <= next {
                self.alarm = NEVER;
                self.wake_due = true;
            }
            self.pass(passed);
        }
        Ok(())
    }

    pub(super) fn enter(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        self.cut_short = true;
        self.log(|| format!("enter, wait for {wait_for}, {timeout:?}"));
        if !self.ring.completions.overflow.is_empty() && self.strikes(Fault::EnterBusy) {
            return Err(libc::EBUSY);
        }
        if !self.ring.submissions.is_empty() && self.strikes(Fault::EnterAgain) {
            return Err(libc::EAGAIN);
        }
        if !self.ring.submissions.is_empty() && self.strikes(Fault::EnterNoMemory) {
            return Err(libc::ENOMEM);
        }
        self.ring.completions.flush();
        let all = self.submit_all();
        self.work(false);
        self.ring.completions.flush();
        if wait_for == 0 || !all {
            if wait_for == 0 && self.strikes(Fault::EnterInterrupted) {
                return Err(libc::EINTR);
            }
            self.cut_short = !all;
            return Ok(());
        }
        self.cut_short = false;
        self.check_wait(wait_for, timeout);
        let wait_for = (wait_for as usize).min(self.plan.completions);
        if self.ring.completions.ready.len() < wait_for {
            let deadline = timeout.map_or(NEVER, |time| self.now + time.as_nanos() as u64);
            return self.block(wait_for, deadline);
        }
        Ok(())
    }

    /// Checks that the driver waits no longer than the shard allows, and for more than one
    /// completion no longer than requested.
    fn check_wait(&self, wait_for: u32, timeout: Option<Duration>) {
        let longest = timeout.unwrap_or(Duration::MAX);
        let may = match self.may_wait {
            Wait::No => Duration::ZERO,
            Wait::For(time) => time,
            Wait::Forever => Duration::MAX,
        };
        assert!(longest <= may, "it waits for {longest:?} where the shard may for {may:?}");
        let coalesce = self.plan.coalesce;
        let ends = wait_for <= 1 || longest <= coalesce;
        assert!(ends, "it waits for {wait_for} completions for {longest:?}, and may for {coalesce:?}");
    }

    /// True if an enter would bring a completion.
    pub(super) fn has_work(&self) -> bool {
        self.late.iter().any(|(due, _)| *due <= self.now)
            || (self.wake_due && self.ring.wake_armed)
            || self
                .listeners
                .iter()
                .zip(&self.ring.accepts)
                .any(|(listener, accept)| accept.is_some() && !listener.backlog.is_empty())
            || self
                .ring
                .receives
                .iter()
                .any(|receive| self.finds_something(receive) || receive.cancels.is_ending())
            || self.ring.sends.iter().any(|send| self.can_send(send))
            || self.has_connected()
    }
}
