//! Two transports, one above the other: WebSocket above TLS.
//!
//! ```text
//!   socket ── wire ──▶ lower ── its plain bytes ──▶ upper ── plain ──▶ framing
//!          ◀─ out ───        ◀─ what upper says ──        ◀─ wrap, seal ──
//! ```

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::any::Any;
use core::mem;

use ringserve_buf::{LeaseMut, try_box};

use super::transport::{Transport, TransportConn, TransportError, TransportEvent};
use crate::{Batch, CloseReason};

/// A transport whose bytes go through another one, as WebSocket's through TLS. Its handshake is
/// both handshakes, one after the other, and [their facts](facts_as) are looked up as those of one.
pub struct Stack {
    lower: Rc<dyn Transport>,
    upper: Rc<dyn Transport>,
}

impl Stack {
    /// `lower` is next to the socket.
    pub fn new(lower: Rc<dyn Transport>, upper: Rc<dyn Transport>) -> Stack {
        Stack { lower, upper }
    }
}

impl Transport for Stack {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        let lower = self.lower.begin(out)?;
        let upper = Upper::Awaits(self.upper.clone());
        let channel = StackChannel {
            lower,
            upper,
            plain: LeaseMut::empty(),
            has_more: false,
            is_wrapped: false,
            is_ready: false,
            is_finished: false,
        };
        try_box(channel).map(|channel| channel as Box<dyn TransportConn>)
    }
}

/// Facts from the handshakes of two transports.
struct Both {
    lower: Option<Rc<dyn Any>>,
    upper: Option<Rc<dyn Any>>,
}

/// Facts of a connection's transport, if their type is `T`; of a [`Stack`], those of either.
pub fn facts_as<T: 'static>(facts: Rc<dyn Any>) -> Option<Rc<T>> {
    match facts.downcast::<Both>() {
        Ok(both) => {
            let of = |facts: &Option<Rc<dyn Any>>| facts.clone().and_then(facts_as);
            of(&both.upper).or_else(|| of(&both.lower))
        }
        Err(facts) => facts.downcast().ok(),
    }
}

struct StackChannel {
    lower: Box<dyn TransportConn>,
    upper: Upper,
    /// Plain bytes of the lower one that the upper one has not taken.
    plain: LeaseMut,
    /// The upper one has not asked for more.
    has_more: bool,
    /// The bytes to be sealed next were wrapped by the upper one.
    is_wrapped: bool,
    /// The handshakes of both are done.
    is_ready: bool,
    /// The lower one sent its closing message.
    is_finished: bool,
}

enum Upper {
    /// The handshake of the lower one is not done.
    Awaits(Rc<dyn Transport>),
    Begun(Box<dyn TransportConn>),
}

const NO_MEMORY: TransportError = TransportError(CloseReason::MemoryLimit);

impl StackChannel {
    fn upper(&self) -> Option<&dyn TransportConn> {
        match &self.upper {
            Upper::Begun(upper) => Some(&**upper),
            Upper::Awaits(_) => None,
        }
    }

    fn upper_mut(&mut self) -> Option<&mut Box<dyn TransportConn>> {
        match &mut self.upper {
            Upper::Begun(upper) => Some(upper),
            Upper::Awaits(_) => None,
        }
    }

    /// Seals bytes that the upper channel sends by itself.
    fn say(&mut self, said: &[u8], out: &mut Vec<u8>) -> Result<(), TransportError> {
        if said.is_empty() || self.is_finished {
            return Ok(());
        }
        let mut batch = Batch::new();
        batch.put(said);
        if batch.is_refused() {
            return Err(NO_MEMORY);
        }
        self.lower.encode(&batch, out)
    }

    fn finish_lower(&mut self, out: &mut Vec<u8>) {
        if !mem::replace(&mut self.is_finished, true) {
            self.lower.finish(out);
        }
    }

    /// Begins the upper handshake once the lower one is done.
    fn begin_upper(&mut self, out: &mut Vec<u8>) -> Result<(), TransportError> {
        let Upper::Awaits(transport) = &self.upper else { return Ok(()) };
        let mut said = Vec::new();
        let upper = transport.begin(&mut said).ok_or(NO_MEMORY)?;
        (self.upper, self.has_more) = (Upper::Begun(upper), true);
        self.say(&said, out)
    }

    /// Decodes plain bytes of the lower one with the upper one. `None` if it needs more.
    fn open_upper(&mut self, out: &mut Vec<u8>) -> Result<Option<TransportEvent>, TransportError> {
        let mut said = Vec::new();
        let Upper::Begun(upper) = &mut self.upper else { return Ok(None) };
        let mut unsealed = upper.decode(&mut self.plain, &mut said);
        while matches!(unsealed, TransportEvent::Work) {
            // Its steps are done at once: expensive ones occur only in the lower one.
            unsealed = upper.work(&mut said);
        }
        self.say(&said, out)?;
        self.has_more = !matches!(unsealed, TransportEvent::More);
        self.is_ready |= matches!(unsealed, TransportEvent::Ready);
        if let TransportEvent::Fault(TransportError(reason)) = unsealed {
            // After the closing message of the upper one.
            self.lower.on_close(reason);
            self.finish_lower(out);
        }
        Ok(Some(unsealed).filter(|_| self.has_more))
    }

    /// Goes on with the lower one's answer, if it was asked.
    fn go_on(
        &mut self,
        mut answered: Option<TransportEvent>,
        wire: &mut LeaseMut,
        out: &mut Vec<u8>,
    ) -> Result<TransportEvent, TransportError> {
        loop {
            match answered.take() {
                None => {}
                Some(TransportEvent::Plain(plain)) => (self.plain, self.has_more) = (plain, true),
                Some(TransportEvent::Ready) => self.begin_upper(out)?,
                Some(other) => return Ok(other),
            }
            if self.has_more
                && let Some(unsealed) = self.open_upper(out)?
            {
                return Ok(unsealed);
            }
            answered = Some(self.lower.decode(wire, out));
        }
    }
}

impl TransportConn for StackChannel {
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        self.go_on(None, wire, out).unwrap_or_else(TransportEvent::Fault)
    }

    fn work(&mut self, out: &mut Vec<u8>) -> TransportEvent {
        let answered = self.lower.work(out);
        self.go_on(Some(answered), &mut LeaseMut::empty(), out).unwrap_or_else(TransportEvent::Fault)
    }

    fn on_send_pause(&mut self) {
        if let Some(upper) = self.upper_mut() {
            upper.on_send_pause();
        }
        self.lower.on_send_pause();
    }

    fn encode_in_place(&mut self, plain: &mut Batch) -> bool {
        self.is_wrapped = self.upper_mut().is_some_and(|upper| upper.encode_in_place(plain));
        self.is_wrapped && self.lower.encode_in_place(plain)
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        if mem::take(&mut self.is_wrapped) {
            return self.lower.encode(plain, out);
        }
        let mut said = Vec::new();
        let sealed = self.upper_mut().map_or(Ok(()), |upper| upper.encode(plain, &mut said));
        self.say(&said, out)?;
        sealed
    }

    fn write_control(&mut self, out: &mut Vec<u8>) {
        self.lower.write_control(out);
        let mut said = Vec::new();
        if let Some(upper) = self.upper_mut() {
            upper.write_control(&mut said);
        }
        // If nothing can be sealed any longer, the next seal reports it.
        let _ = self.say(&said, out);
    }

    fn on_heartbeat(&mut self) -> bool {
        self.upper_mut().is_some_and(|upper| upper.on_heartbeat()) || self.lower.on_heartbeat()
    }

    fn on_close(&mut self, reason: CloseReason) {
        if let Some(upper) = self.upper_mut() {
            upper.on_close(reason);
        }
        self.lower.on_close(reason);
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        let mut said = Vec::new();
        if let Some(upper) = self.upper_mut() {
            upper.finish(&mut said);
        }
        if self.say(&said, out).is_ok() {
            self.finish_lower(out);
        }
    }

    fn held_bytes(&self) -> usize {
        let upper = self.upper().map_or(0, |upper| upper.held_bytes());
        self.lower.held_bytes() + self.plain.len() + upper
    }

    fn kept_bytes(&self) -> usize {
        self.lower.kept_bytes() + self.upper().map_or(0, |upper| upper.kept_bytes())
    }

    fn is_mid_record(&self) -> bool {
        self.lower.is_mid_record() || self.upper().is_some_and(|upper| upper.is_mid_record())
    }

    fn wants_more(&self) -> bool {
        self.plain.is_empty()
            && self.lower.wants_more()
            && self.upper().is_some_and(|upper| upper.wants_more())
    }

    fn eof_error(&self) -> Option<CloseReason> {
        self.lower.eof_error().or_else(|| self.upper()?.eof_error())
    }

    fn info(&self) -> Option<Rc<dyn Any>> {
        let of = |channel: &dyn TransportConn| channel.info().or_else(|| channel.info_on_demand());
        let both = || Both { lower: of(&*self.lower), upper: self.upper().and_then(of) };
        self.is_ready.then(|| Rc::new(both()) as Rc<dyn Any>)
    }
}
