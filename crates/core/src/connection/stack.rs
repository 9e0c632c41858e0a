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

use super::transport::{Channel, Fault, Transport, Unsealed};
use crate::{Batch, CloseReason};

/// A transport whose bytes go through another one, as WebSocket's through TLS. Its handshake is both, one after the other, and
/// [what they found out](facts_as) is asked for as that of one.
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
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn Channel>> {
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
        try_box(channel).map(|channel| channel as Box<dyn Channel>)
    }
}

/// What the handshakes of two transports found out.
struct Both {
    lower: Option<Rc<dyn Any>>,
    upper: Option<Rc<dyn Any>>,
}

/// What a transport found out of a connection, if that is a `T`; of a [`Stack`], what either did.
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
    lower: Box<dyn Channel>,
    upper: Upper,
    /// What the lower one made clear and the upper one has not taken.
    plain: LeaseMut,
    /// The upper one has not said that it wants more.
    has_more: bool,
    /// What is to be sealed next was wrapped by the upper one.
    is_wrapped: bool,
    /// The handshakes of both are done.
    is_ready: bool,
    /// The lower one said its last word.
    is_finished: bool,
}

enum Upper {
    /// The handshake of the lower one is not done.
    Awaits(Rc<dyn Transport>),
    Begun(Box<dyn Channel>),
}

const NO_MEMORY: Fault = Fault(CloseReason::MemoryLimit);

impl StackChannel {
    fn upper(&self) -> Option<&dyn Channel> {
        match &self.upper {
            Upper::Begun(upper) => Some(&**upper),
            Upper::Awaits(_) => None,
        }
    }

    fn upper_mut(&mut self) -> Option<&mut Box<dyn Channel>> {
        match &mut self.upper {
            Upper::Begun(upper) => Some(upper),
            Upper::Awaits(_) => None,
        }
    }

    /// Seals what the upper channel said.
    fn say(&mut self, said: &[u8], out: &mut Vec<u8>) -> Result<(), Fault> {
        if said.is_empty() || self.is_finished {
            return Ok(());
        }
        let mut batch = Batch::new();
        batch.put(said);
        if batch.is_refused() {
            return Err(NO_MEMORY);
        }
        self.lower.seal(&batch, out)
    }

    fn finish_lower(&mut self, out: &mut Vec<u8>) {
        if !mem::replace(&mut self.is_finished, true) {
            self.lower.finish(out);
        }
    }

    /// The handshake of the lower one is done.
    fn begin_upper(&mut self, out: &mut Vec<u8>) -> Result<(), Fault> {
        let Upper::Awaits(transport) = &self.upper else { return Ok(()) };
        let mut said = Vec::new();
        let upper = transport.begin(&mut said).ok_or(NO_MEMORY)?;
        (self.upper, self.has_more) = (Upper::Begun(upper), true);
        self.say(&said, out)
    }

    /// What the upper one makes of what the lower one made clear. `None` if it wants more.
    fn open_upper(&mut self, out: &mut Vec<u8>) -> Result<Option<Unsealed>, Fault> {
        let mut said = Vec::new();
        let Upper::Begun(upper) = &mut self.upper else { return Ok(None) };
        let mut unsealed = upper.open(&mut self.plain, &mut said);
        while matches!(unsealed, Unsealed::Work) {
            // Its steps are done at once: those that cost much are the lower one's.
            unsealed = upper.work(&mut said);
        }
        self.say(&said, out)?;
        self.has_more = !matches!(unsealed, Unsealed::More);
        self.is_ready |= matches!(unsealed, Unsealed::Ready);
        if let Unsealed::Fault(Fault(reason)) = unsealed {
            // Behind the last words of the upper one.
            self.lower.ends(reason);
            self.finish_lower(out);
        }
        Ok(Some(unsealed).filter(|_| self.has_more))
    }

    /// Goes on with what the lower one answered, if it was asked.
    fn go_on(
        &mut self,
        mut answered: Option<Unsealed>,
        wire: &mut LeaseMut,
        out: &mut Vec<u8>,
    ) -> Result<Unsealed, Fault> {
        loop {
            match answered.take() {
                None => {}
                Some(Unsealed::Plain(plain)) => (self.plain, self.has_more) = (plain, true),
                Some(Unsealed::Ready) => self.begin_upper(out)?,
                Some(other) => return Ok(other),
            }
            if self.has_more
                && let Some(unsealed) = self.open_upper(out)?
            {
                return Ok(unsealed);
            }
            answered = Some(self.lower.open(wire, out));
        }
    }
}

impl Channel for StackChannel {
    fn open(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> Unsealed {
        self.go_on(None, wire, out).unwrap_or_else(Unsealed::Fault)
    }

    fn work(&mut self, out: &mut Vec<u8>) -> Unsealed {
        let answered = self.lower.work(out);
        self.go_on(Some(answered), &mut LeaseMut::empty(), out).unwrap_or_else(Unsealed::Fault)
    }

    fn rested(&mut self) {
        if let Some(upper) = self.upper_mut() {
            upper.rested();
        }
        self.lower.rested();
    }

    fn wrap(&mut self, plain: &mut Batch) -> bool {
        self.is_wrapped = self.upper_mut().is_some_and(|upper| upper.wrap(plain));
        self.is_wrapped && self.lower.wrap(plain)
    }

    fn seal(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), Fault> {
        if mem::take(&mut self.is_wrapped) {
            return self.lower.seal(plain, out);
        }
        let mut said = Vec::new();
        let sealed = self.upper_mut().map_or(Ok(()), |upper| upper.seal(plain, &mut said));
        self.say(&said, out)?;
        sealed
    }

    fn speak(&mut self, out: &mut Vec<u8>) {
        self.lower.speak(out);
        let mut said = Vec::new();
        if let Some(upper) = self.upper_mut() {
            upper.speak(&mut said);
        }
        // Where nothing can be sealed any more, what is sealed next says so.
        let _ = self.say(&said, out);
    }

    fn asks(&mut self) -> bool {
        self.upper_mut().is_some_and(|upper| upper.asks()) || self.lower.asks()
    }

    fn ends(&mut self, reason: CloseReason) {
        if let Some(upper) = self.upper_mut() {
            upper.ends(reason);
        }
        self.lower.ends(reason);
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

    fn cut_off(&self) -> Option<CloseReason> {
        self.lower.cut_off().or_else(|| self.upper()?.cut_off())
    }

    fn facts(&self) -> Option<Rc<dyn Any>> {
        let of = |channel: &dyn Channel| channel.facts().or_else(|| channel.facts_on_demand());
        let both = || Both { lower: of(&*self.lower), upper: self.upper().and_then(of) };
        self.is_ready.then(|| Rc::new(both()) as Rc<dyn Any>)
    }
}
