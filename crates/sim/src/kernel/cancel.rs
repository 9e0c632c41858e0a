//! Cancels: they miss operations that live, come too late, and are answered before or after the
//! ends that they cause.

use ringserve_drivers::kernel::{RawCqe, RawOp};

use super::State;
use crate::faults::{Arm, Fault};

/// The fault by which a cancel misses a live operation, and the completions of the driver for a
/// cancel that is done, finds nothing, or finds that the operation is ending already.
fn answers(op: &RawOp) -> (Fault, [Arm; 3]) {
    use Arm::*;
    match op {
        RawOp::CancelAccept { .. } => {
            (Fault::AcceptMissed, [CancelAcceptDone, CancelAcceptNone, CancelAcceptAlready])
        }
        RawOp::CancelConnect { .. } => {
            (Fault::ConnectMissed, [CancelConnectDone, CancelConnectNone, CancelConnectAlready])
        }
        RawOp::CancelReceive { .. } => {
            (Fault::ReceiveMissed, [CancelReceiveDone, CancelReceiveNone, CancelReceiveAlready])
        }
        RawOp::CancelSend { .. } => (Fault::SendMissed, [CancelSendDone, CancelSendNone, CancelSendAlready]),
        other => panic!("{other:?} is no cancel"),
    }
}

impl State {
    pub(super) fn cancel(&mut self, op: &RawOp) {
        let user_data = op.user_data();
        let answer = |res: i32| RawCqe::new(user_data, res, 0);
        let (missed, [done, none, already]) = answers(op);
        // The answer to an earlier cancel, perhaps of the slot's former connection, may arrive just
        // now.
        let met = matches!(op, RawOp::CancelReceive { id } if self.answer_late_cancels(*id));
        let Some(cancels) = self.ring.cancelled(user_data).copied() else {
            return self.post_or_late(answer(-libc::ENOENT), none, Fault::CancelLate);
        };
        let misses = cancels.may_miss() && self.strikes(missed);
        let goes_on = !misses && (met && self.rng.one_in(2) || self.strikes(Fault::CancelAlready));
        let checks_left = if goes_on { self.rng.range(1, 3) as u8 } else { cancels.checks_left };
        if let Some(cancels) = self.ring.cancelled(user_data) {
            cancels.missed += u8::from(misses);
            cancels.found |= !misses;
            cancels.checks_left = checks_left;
        }
        if misses {
            return self.post_or_late(answer(-libc::ENOENT), none, Fault::CancelLate);
        }
        match op {
            RawOp::CancelAccept { .. } | RawOp::CancelConnect { .. } if goes_on => {
                self.post(answer(-libc::EALREADY), already);
            }
            _ if goes_on => self.post_or_late(answer(-libc::EALREADY), already, Fault::CancelLate),
            RawOp::CancelAccept { listener } => {
                self.answer_around(answer(0), done, |state| state.stop_accept(*listener));
            }
            RawOp::CancelConnect { id } => {
                let raced = self.strikes(Fault::CancelRace);
                self.answer_around(answer(0), done, |state| state.stop_connect(*id, raced));
            }
            RawOp::CancelReceive { id } if self.strikes(Fault::CancelRace) && !self.race_cancel(*id) => {
                self.post_or_late(answer(-libc::ENOENT), none, Fault::CancelLate);
            }
            RawOp::CancelReceive { id } => {
                self.answer_around(answer(0), done, |state| state.stop_receive(*id));
            }
            RawOp::CancelSend { id } => {
                let send = self.take_for_cancel(*id);
                self.answer_around(answer(0), done, |state| state.end_stopped(send, libc::ECANCELED));
            }
            other => panic!("{other:?} is no cancel"),
        }
    }

    /// Posts the answer of a cancel before or after the end that it causes.
    fn answer_around(&mut self, cqe: RawCqe, arm: Arm, end: impl FnOnce(&mut State)) {
        if self.rng.one_in(2) {
            self.post(cqe, arm);
            end(self);
        } else {
            end(self);
            self.post_or_late(cqe, arm, Fault::CancelLate);
        }
    }
}
