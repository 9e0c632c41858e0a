//! Writes of user code to a connection: replies, and bytes as they are.

use alloc::boxed::Box;

use ringserve_buf::ReplyWriter;

use super::{ABORT, ACCOUNTED, DIRTY, GATED, GONE, NO_MEMORY, NOT_FRAMED, OVER_HIGH, Outlet, WRITING_ENDED};
use crate::Batch;
use crate::bytes::{LEND_BYTES_MIN, Outbox};
use crate::connection::shared::Wakes;
use crate::connection::shared_payload::SharedPayload;
use crate::framing::{EncodeError, Framing, InPlace, Payload, WriteResult};

/// The outcome of a reply in an outbox.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AppendOutcome {
    Whole,
    /// It has no frame.
    NotFramed,
    /// User code gave it up.
    Nothing,
}

impl Outlet {
    /// Queues one frame. Does nothing once the connection is gone. A payload that cannot be framed
    /// closes it.
    #[inline(always)]
    pub fn reply(&self, payload: Payload<'_>) {
        // Where this is inlined the kind of the payload is known. What is copied anyway goes on as
        // bytes: it is neither moved nor asked for its kind again.
        match payload {
            Payload::Bytes(bytes) => self.reply_bytes(bytes),
            Payload::Frame(frame) if frame.len() < LEND_BYTES_MIN => self.reply_bytes(&frame),
            Payload::Frame(frame) => self.reply_payload(Payload::Frame(frame)),
            Payload::Owned(owned) => self.reply_payload(Payload::Owned(owned)),
        }
    }

    #[inline(never)]
    fn reply_bytes(&self, bytes: &[u8]) {
        self.append::<1>(|out| match self.lane.encoding().encode_bytes(bytes, out) {
            Ok(()) => AppendOutcome::Whole,
            Err(_) => AppendOutcome::NotFramed,
        });
    }

    #[inline(never)]
    fn reply_payload(&self, payload: Payload<'_>) {
        self.append::<1>(|out| match self.lane.encoding().encode(payload, out) {
            Ok(()) => AppendOutcome::Whole,
            Err(_) => AppendOutcome::NotFramed,
        });
    }

    /// Queues one frame whose payload `write` writes, unless its result says that nothing is to be
    /// sent: then no part of it is. `write` is not called once the connection is gone. If it
    /// panics, the panic goes on and the connection is reset, as it is if `write` calls back into
    /// this connection.
    pub fn reply_with<R: WriteResult>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        let mut result = R::unsent();
        self.append::<1>(|out| {
            let encoding = self.lane.encoding();
            let mut place = InPlace::begin(out.batch, encoding.header_room());
            result = place.write(write);
            if !result.is_written() {
                return AppendOutcome::Nothing;
            }
            let framed = encoding.encode_written(&mut place);
            place.finish();
            if framed.is_ok() { AppendOutcome::Whole } else { AppendOutcome::NotFramed }
        });
        result
    }

    /// Queues one frame whose payload comes in parts.
    pub fn reply_parts<'p, P: Into<Payload<'p>>>(&self, parts: impl IntoIterator<Item = P>) {
        let lends = self.lane.shard().lends();
        self.reply_with(|out| parts.into_iter().for_each(|part| part.into().write_to(out, lends)));
    }

    /// Queues one frame with a framing that is not the lane's. Does nothing once the connection is
    /// gone.
    ///
    /// # Errors
    /// The framing's. Nothing is queued then; a framing that had written a part of the frame closes
    /// the connection.
    pub fn reply_by(&self, framing: &impl Framing, payload: Payload<'_>) -> Result<(), EncodeError> {
        let mut encoded = Ok(());
        self.append::<1>(|out| {
            let before = out.len();
            encoded = framing.encode(payload, out);
            match encoded {
                Ok(()) => AppendOutcome::Whole,
                Err(_) if out.len() == before => AppendOutcome::Nothing,
                Err(_) => AppendOutcome::NotFramed,
            }
        });
        encoded
    }

    /// Queues bytes as they are.
    pub fn write(&self, bytes: &[u8]) {
        self.append::<0>(|out| {
            out.put(bytes);
            AppendOutcome::Whole
        });
    }

    /// Queues bytes as they are, without a copy where that is possible.
    pub fn write_payload(&self, payload: Payload<'_>) {
        self.append::<0>(|out| {
            out.payload(payload);
            AppendOutcome::Whole
        });
    }

    /// Queues bytes after a header, as one frame: for code that frames its replies one by one.
    pub fn write_headed(&self, header: &[u8], payload: Payload<'_>) {
        self.append::<1>(|out| {
            out.put(header);
            out.payload(payload);
            AppendOutcome::Whole
        });
    }

    /// Queues bytes that `write` writes in place, as they are; otherwise as
    /// [`reply_with`](Outlet::reply_with).
    pub fn write_with<R: WriteResult>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        let mut result = R::unsent();
        self.append::<0>(|out| {
            result = InPlace::begin(out.batch, 0).write(write);
            if result.is_written() { AppendOutcome::Whole } else { AppendOutcome::Nothing }
        });
        result
    }

    /// Queues one frame that other connections of the shard get too: encoded at the first push of
    /// each lane.
    pub fn reply_shared(&self, shared: &SharedPayload) {
        self.append::<1>(|out| match shared.wire_for(&self.lane, out) {
            Some(wire) => {
                out.shared(&wire);
                AppendOutcome::Whole
            }
            None => AppendOutcome::NotFramed,
        });
    }

    /// As [`reply_shared`](Outlet::reply_shared), but leaves the connection open if the payload has
    /// no frame there. False then: nothing is queued.
    pub fn push_shared(&self, shared: &SharedPayload) -> bool {
        let mut is_framed = true;
        self.append::<1>(|out| match shared.wire_for(&self.lane, out) {
            Some(wire) => {
                out.shared(&wire);
                AppendOutcome::Whole
            }
            None => {
                is_framed = out.batch.is_refused();
                AppendOutcome::Nothing
            }
        });
        is_framed
    }

    /// Holds what is queued, and what follows, until [`release_replies`](Outlet::release_replies),
    /// so that all of it leaves in one send. It leaves earlier if it grows beyond a few KiB, or if
    /// the connection or its writing ends. Calls count: each that returns true must be followed by
    /// one release. False if there is nothing to hold: the connection takes no more bytes, one of
    /// its replies is being written, or the system has no memory.
    pub fn hold_replies(&self) -> bool {
        let Ok(mut pending) = self.pending.try_borrow_mut() else { return false };
        match &mut *pending {
            _ if self.has(GONE | WRITING_ENDED | NO_MEMORY) => false,
            Some(batch) => {
                batch.holds = batch.holds.saturating_add(1);
                true
            }
            empty => {
                let batch = self.held_batch(1);
                *empty = batch;
                empty.is_some()
            }
        }
    }

    /// Takes one hold back. After the last one, replies leave together with those queued in this
    /// turn.
    pub fn release_replies(&self) {
        // While a reply is being written, as when its panic drops the guards, the reply leaves by
        // itself or not at all.
        let Ok(mut pending) = self.pending.try_borrow_mut() else { return };
        let Some(batch) = pending.as_mut().filter(|batch| batch.holds > 0) else { return };
        batch.holds -= 1;
        let is_last = batch.holds == 0;
        drop(pending);
        if is_last {
            self.mark_dirty();
        }
    }

    /// True if held replies leave nevertheless: they are many, or nothing can follow them. In the
    /// first case an empty batch takes over the holds.
    #[cold]
    pub(super) fn take_held(&self, pending: &mut Option<Box<Batch>>) -> Option<Box<Batch>> {
        let ends = self.has(GONE | WRITING_ENDED);
        let mut batch = pending.take_if(|batch| ends || !batch.is_short())?;
        let holds = core::mem::take(&mut batch.holds);
        if !ends {
            *pending = self.held_batch(holds);
        }
        Some(batch)
    }

    /// An empty batch that waits for as many releases. The connection is not dirty for it. `None`
    /// if the system has no memory.
    #[cold]
    fn held_batch(&self, holds: u16) -> Option<Box<Batch>> {
        let (mut batch, _) = self.lane.shard().begin_batch(self.id, true)?;
        batch.holds = holds;
        Some(batch)
    }

    /// Queues the bytes that `write` writes, as this many frames.
    #[inline]
    pub(super) fn append<const FRAMES: u64>(&self, write: impl FnOnce(&mut Outbox<'_>) -> AppendOutcome) {
        let flags = self.flags.get();
        if flags & (GONE | WRITING_ENDED | NO_MEMORY) != 0 {
            return;
        }
        let (lane, shard) = (&*self.lane, self.lane.shard());
        let mut wakes = Wakes::No;
        // Dropped after everything below: nothing is borrowed then.
        let mut unfinished = WriteGuard { outlet: self, before: 0 };
        let mut pending = self.pending.borrow_mut();
        let batch = match &mut *pending {
            Some(batch) => batch,
            empty => {
                let Some((batch, wakes_shard)) = shard.begin_batch(self.id, flags & DIRTY != 0) else {
                    drop(pending);
                    core::mem::forget(unfinished);
                    return self.refuse();
                };
                wakes = wakes_shard;
                self.flags.set(flags | DIRTY);
                empty.insert(batch)
            }
        };
        let before = batch.len();
        unfinished.before = before;
        let appended = write(&mut Outbox::new(batch, shard.lends()));
        if appended != AppendOutcome::Whole || batch.is_refused() {
            let flag = match appended {
                _ if batch.is_refused() => NO_MEMORY | ABORT,
                AppendOutcome::NotFramed => NOT_FRAMED,
                AppendOutcome::Whole | AppendOutcome::Nothing => 0,
            };
            batch.roll_back(before);
            self.set(flag);
        }
        let len = batch.len();
        drop(pending);
        core::mem::forget(unfinished);
        shard.hold(len - before);
        if len + self.in_flight.get() as usize > lane.outbox_bytes_high() {
            self.set(OVER_HIGH);
        }
        if self.flags.get() & (GATED | DIRTY | ACCOUNTED) != DIRTY {
            self.update_gate();
            self.mark_dirty();
            if FRAMES > 0 && self.has(ACCOUNTED) && len > before {
                self.count(|account| account.frames_sent += FRAMES);
            }
        }
        if wakes == Wakes::Yes {
            shard.wake_for_dirty();
        }
    }

    /// The system has no memory for a reply, without which the peer cannot go on, or for a
    /// deadline.
    #[cold]
    pub(super) fn refuse(&self) {
        self.set(NO_MEMORY | ABORT);
        self.update_gate();
        self.mark_dirty();
    }
}

/// Guards a write of user code into an outbox. If it panics, what it wrote is taken back, and the
/// connection is reset: part of a frame must neither leave nor count, and a peer that misses one
/// cannot go on.
struct WriteGuard<'a> {
    outlet: &'a Outlet,
    /// Bytes that were queued before.
    before: usize,
}

impl Drop for WriteGuard<'_> {
    #[cold]
    fn drop(&mut self) {
        if let Ok(mut pending) = self.outlet.pending.try_borrow_mut()
            && let Some(batch) = &mut *pending
        {
            batch.roll_back(self.before);
        }
        self.outlet.panicked();
        // The connection became dirty before the panic, and nothing else informs a shard that
        // sleeps.
        self.outlet.lane.shard().wake_for_dirty();
    }
}
