//! Replies of a connection with a channel, on their way to the peer.

use alloc::boxed::Box;
use core::time::Duration;

use super::PANICKED;
use crate::bytes::KEPT_BYTES_MAX;
use crate::connection::{Conn, SlowPathFlags, State, TransportError};
use crate::shard::Shard;
use crate::{Batch, CloseReason, ConnId, Observer};

/// The overhead of a seal for which room is made in advance: a part of the bytes, plus some.
/// Records of 4 KiB and more add less.
const ADDED_PART: usize = 64;
const ADDED_BYTES: usize = 512;

/// A connection that sent nothing for this time has rested:
/// [`on_send_pause`](crate::TransportConn::on_send_pause).
const REST: Duration = Duration::from_secs(1);

impl<O: Observer> Shard<O> {
    /// True if a connection has to send more than what is queued: bytes of its channel's own, or
    /// the closing message.
    pub(in crate::shard) fn owes_sealed(&self, id: ConnId, draining: bool) -> bool {
        let owes = |conn: &Conn| conn.may_seal() && (draining || conn.aside.says(SlowPathFlags::SPEAKS));
        self.channels.out_bytes(id) > 0 || self.conns.get(id).is_some_and(owes)
    }

    /// Sends what is queued, sealed, after the channel's own bytes, and before its closing message
    /// if nothing follows. No send is in flight.
    #[inline(never)]
    pub(in crate::shard) fn start_sealed(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        let Some(shared) = conn.shared.clone() else { return };
        let is_draining = conn.state == State::Draining;
        let reason = conn.reason.as_deref().copied();
        let has_rested = conn.send_at.age(self.stamp) >= REST;
        let half_closes = shared.half_closes();
        let seals = conn.may_seal();
        let speaks = seals && conn.aside.says(SlowPathFlags::SPEAKS);
        let out_bytes = self.channels.out_bytes(id);
        let plain = if seals { shared.take_pending() } else { None };
        let ends = seals && (is_draining || half_closes);
        if plain.is_none() && out_bytes == 0 && !ends && !speaks {
            if half_closes {
                self.end_writing(id);
            }
            return;
        }
        let batch = self.shared.begin_batch(id, true).map(|(batch, _)| batch);
        let with_room = batch.and_then(|mut batch| {
            batch.copied.try_reserve(out_bytes + ADDED_BYTES).ok()?;
            Some(batch)
        });
        let Some(mut batch) = with_room else { return self.abort(id, CloseReason::MemoryLimit) };
        if out_bytes > 0 {
            batch.copied.append(&mut self.channels.take_out(id));
            self.shared.release(out_bytes);
        }
        if speaks {
            self.note_aside(id, SlowPathFlags::SPEAKS, false);
            self.call_channel_out(id, &mut batch.copied, |channel, out| channel.write_control(out));
        }
        let fault = plain.and_then(|plain| self.seal(id, &mut batch, plain, has_rested).err());
        if ends && fault.is_none() {
            self.seal_end(id, &mut batch, reason);
        }
        if batch.is_refused() {
            self.shared.recycle(batch);
            return self.abort(id, CloseReason::MemoryLimit);
        }
        batch.recount();
        if batch.room() > KEPT_BYTES_MAX {
            batch.trim();
        }
        shared.sealed(batch.len());
        if batch.is_empty() {
            self.shared.recycle(batch);
            match fault {
                Some(fault) => self.abort(id, fault.0),
                None if half_closes => self.end_writing(id),
                None => {}
            }
            return;
        }
        shared.lane().moved.sends.add(1);
        self.send_and_watch(id, batch);
        if let Some(fault) = fault {
            self.seal_failed(id, fault.0);
        }
    }

    /// Seals what is queued after the content of the batch. Wrapped bytes are sent as they are.
    fn seal(
        &mut self,
        id: ConnId,
        batch: &mut Box<Batch>,
        mut plain: Box<Batch>,
        has_rested: bool,
    ) -> Result<(), TransportError> {
        let is_wrapped = self.call_channel_out(id, &mut batch.copied, |channel, out| {
            if has_rested {
                channel.on_send_pause();
            }
            if channel.encode_in_place(&mut plain) {
                return Ok(true);
            }
            let room = plain.len() + plain.len() / ADDED_PART + ADDED_BYTES;
            out.try_reserve(room).map_err(|_| TransportError(CloseReason::MemoryLimit))?;
            channel.encode(&plain, out).map(|()| false)
        });
        let is_wrapped = is_wrapped.unwrap_or(Err(PANICKED));
        if let Ok(true) = is_wrapped {
            plain.prepend(&batch.copied);
            core::mem::swap(batch, &mut plain);
        }
        self.shared.recycle(plain);
        is_wrapped.map(drop)
    }

    /// Adds the closing message of a channel.
    fn seal_end(&mut self, id: ConnId, batch: &mut Batch, reason: Option<CloseReason>) {
        self.note_aside(id, SlowPathFlags::FINISHED, true);
        if let Some(reason) = reason {
            self.call_channel(id, |channel| channel.on_close(reason));
        }
        if batch.copied.try_reserve(ADDED_BYTES).is_err() {
            batch.refused = true;
        } else {
            self.call_channel_out(id, &mut batch.copied, |channel, out| channel.finish(out));
        }
    }

    fn note_aside(&mut self, id: ConnId, of_channel: u8, holds: bool) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.aside.note(of_channel, holds);
        }
    }

    /// Handles a channel that can seal nothing more: its last bytes are sent, and nothing after
    /// them.
    #[cold]
    fn seal_failed(&mut self, id: ConnId, reason: CloseReason) {
        if let Some(conn) = self.conns.get_mut(id)
            && conn.state == State::Draining
        {
            conn.reason = Some(Box::new(reason));
        }
        self.fault(id, reason);
    }
}
