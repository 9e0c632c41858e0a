//! One payload for many connections.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::fmt;

use bytes::Bytes;

use super::shared::LaneShared;
use crate::Batch;
use crate::bytes::{Outbox, Payload};

/// A payload for many connections of a shard. It is encoded once, for the first connection of a
/// service: each further connection gets a copy of that frame, or from 32 KiB on shares it.
pub struct SharedPayload {
    payload: Bytes,
    /// The frame for each lane that sent it, `None` if it has no frame there. Usually one lane.
    wires: RefCell<Vec<(Rc<LaneShared>, Option<Bytes>)>>,
}

impl SharedPayload {
    /// A payload that is not encoded yet.
    pub fn new(payload: impl Into<Bytes>) -> SharedPayload {
        SharedPayload { payload: payload.into(), wires: RefCell::default() }
    }

    /// The payload.
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// The frame for connections of `lane`. `None` if the payload has no frame there, or if the
    /// system has no memory for it: `out` is refused then.
    pub(crate) fn wire_for(&self, lane: &Rc<LaneShared>, out: &mut Outbox<'_>) -> Option<Bytes> {
        let known = |wires: &[(Rc<LaneShared>, Option<Bytes>)]| {
            wires.iter().find(|(of, _)| Rc::ptr_eq(of, lane)).map(|(_, wire)| wire.clone())
        };
        if let Some(wire) = known(&self.wires.borrow()) {
            return wire;
        }
        // A framing is user code: nothing is borrowed meanwhile.
        let mut batch = Batch::new();
        let framed =
            lane.encoding().encode(Payload::Bytes(&self.payload), &mut Outbox::new(&mut batch, false));
        if batch.is_refused() {
            out.batch.refused = true;
            return None;
        }
        let wire = framed.ok().map(|()| Bytes::from(batch.into_bytes()));
        let mut wires = self.wires.borrow_mut();
        wires.reserve_exact(1);
        wires.push((lane.clone(), wire.clone()));
        wire
    }
}

impl fmt::Debug for SharedPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedPayload({} bytes)", self.payload.len())
    }
}
