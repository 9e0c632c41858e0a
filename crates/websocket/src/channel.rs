//! One connection: bytes in, messages out, and back.
//!
//! ```text
//!   Head ── the request is answered ──▶ Open ── a close frame ──▶ Over
//!     └── refused ──────────────────────┴── broken rules ───────▶ Over
//! ```
//!
//! Messages that lie whole in the received bytes are unmasked in place, and passed on together. All
//! other state of a connection is in [`Busy`], which exists only in the middle of a handshake,
//! frame or message.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::mem;
use std::rc::Rc;

use ringserve_buf::{LeaseMut, try_box};
use ringserve_core::{Batch, CloseReason, Transport, TransportConn, TransportError, TransportEvent};

use crate::extension::{Extension, TOO_LARGE};
use crate::fragments::{FramePayload, NO_TEXT, PartialMessage, ReadError, kind_of};
use crate::frame::{CONTROL_BYTES_MAX, DecodeOutcome, HEADER_BYTES_MAX, Header, Opcode, put};
use crate::info::{Recent, WebSocketInfo};
use crate::messages::{Kind, MARK_BYTES, mark};
use crate::options::WebSocketOptions;
use crate::upgrade::{self, Reject};
use crate::utf8;
use crate::{close, mask};

/// Messages up to this size are moved, so that they are passed on together with those before: that
/// costs less than passing one on separately.
const MOVED_BYTES_MAX: usize = 512;

/// A target up to this size is about as large as the connection's other state, and is not counted
/// as held: counting it would take as much memory.
const TARGET_BYTES_MIN: usize = 128;

/// Puts WebSocket between the sockets of a listener and its service. One value per shard.
pub struct WebSocketTransport {
    common: Rc<Common>,
}

/// State shared by the channels of a shard.
struct Common {
    options: WebSocketOptions,
    /// Each message has a mark before it.
    marks: bool,
    extension: RefCell<Option<Box<dyn Extension>>>,
    recent: Recent,
}

impl WebSocketTransport {
    /// Creates a transport in which the payload bytes of all messages are one stream, like a
    /// socket's; bytes sent together are a message.
    pub fn stream(options: &WebSocketOptions) -> WebSocketTransport {
        WebSocketTransport::new(options, false)
    }

    /// Creates a transport for the framing [`Messages`](crate::Messages): each message is a frame,
    /// and each reply a message.
    pub fn messages(options: &WebSocketOptions) -> WebSocketTransport {
        WebSocketTransport::new(options, true)
    }

    fn new(options: &WebSocketOptions, marks: bool) -> WebSocketTransport {
        let extension = RefCell::new(options.make_extension());
        let (options, recent) = (options.clone(), Recent::default());
        WebSocketTransport { common: Rc::new(Common { options, marks, extension, recent }) }
    }
}

impl Transport for WebSocketTransport {
    fn begin(&self, _out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        let common = self.common.clone();
        let channel = WebSocketChannel {
            common,
            info: Cell::new(None),
            busy: None,
            stage: Stage::Head,
            compresses: false,
            shares_info: Cell::new(true),
        };
        try_box(channel).map(|channel| channel as Box<dyn TransportConn>)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Head,
    Open,
    /// The connection is over: received bytes are ignored.
    Over,
}

/// A WebSocket connection. There may be a million idle ones, so it is 32 bytes.
struct WebSocketChannel {
    common: Rc<Common>,
    /// Set once the connection is open.
    info: Cell<Option<Rc<WebSocketInfo>>>,
    busy: Option<Box<Busy>>,
    stage: Stage,
    compresses: bool,
    /// Other connections with the same request may share the info: it holds nothing but the
    /// request.
    shares_info: Cell<bool>,
}

/// State of a connection in the middle of a handshake, frame or message.
struct Busy {
    /// The start of a header, or of a control frame.
    kept: [u8; HEADER_BYTES_MAX + CONTROL_BYTES_MAX],
    kept_len: u8,
    /// The frame of a message whose payload has not completely arrived.
    frame: Option<FramePayload>,
    message: Option<PartialMessage>,
    /// The head of the request, or a message that is being put together, with room for its mark.
    gathered: Vec<u8>,
    /// The payload of the latest ping, until it is answered.
    pong: Option<Vec<u8>>,
    /// A ping has to be sent.
    asks: bool,
}

/// The result of looking at received bytes. `None` if there is nothing to pass on, and the next
/// bytes are to be read.
type Step = Result<Option<TransportEvent>, TransportError>;

const NO_MEMORY: TransportError = TransportError(CloseReason::MemoryLimit);

impl From<ReadError> for TransportError {
    fn from(error: ReadError) -> TransportError {
        match error {
            ReadError::Violation(violation) => violation.into(),
            ReadError::NoMemory => NO_MEMORY,
        }
    }
}

impl Busy {
    fn new() -> Option<Box<Busy>> {
        try_box(Busy {
            kept: [0; HEADER_BYTES_MAX + CONTROL_BYTES_MAX],
            kept_len: 0,
            frame: None,
            message: None,
            gathered: Vec::new(),
            pong: None,
            asks: false,
        })
    }

    fn kept(&self) -> &[u8] {
        &self.kept[..usize::from(self.kept_len)]
    }

    /// Keeps bytes from the front of `wire` until there are `until`. False if there are fewer.
    fn keep(&mut self, wire: &mut LeaseMut, until: usize) -> bool {
        let have = usize::from(self.kept_len);
        let count = until.saturating_sub(have).min(wire.len());
        self.kept[have..have + count].copy_from_slice(&wire[..count]);
        wire.advance(count);
        // At most 139.
        self.kept_len += count as u8;
        have + count >= until
    }

    /// True if the state need not be kept.
    fn is_over(&self) -> bool {
        self.kept_len == 0
            && self.frame.is_none()
            && self.message.is_none()
            && self.gathered.is_empty()
            && self.pong.is_none()
            && !self.asks
    }
}

impl WebSocketChannel {
    fn busy(&mut self) -> Result<&mut Busy, TransportError> {
        if self.busy.is_none() {
            self.busy = Busy::new();
        }
        self.busy.as_deref_mut().ok_or(NO_MEMORY)
    }

    /// Looks for the head of the request.
    fn upgrade(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        let gathers = self.busy.as_ref().is_some_and(|busy| !busy.gathered.is_empty());
        if wire.is_empty() {
            return TransportEvent::More;
        }
        if !gathers {
            match upgrade::find_end(wire, 0) {
                Ok(Some(end)) => {
                    let head = wire.split_to(end);
                    return self.answer(&head, out);
                }
                Ok(None) => {}
                Err(reject) => return self.refuse(&reject, false, out),
            }
        }
        let Ok(busy) = self.busy() else { return TransportEvent::Fault(NO_MEMORY) };
        let before = busy.gathered.len();
        if busy.gathered.try_reserve(wire.len()).is_err() {
            return TransportEvent::Fault(NO_MEMORY);
        }
        busy.gathered.extend_from_slice(wire);
        match upgrade::find_end(&busy.gathered, before) {
            Ok(Some(end)) => {
                // `end` lies after the bytes that were there before.
                wire.advance(end - before);
                let mut head = mem::take(&mut busy.gathered);
                self.busy = None;
                head.truncate(end);
                self.answer(&head, out)
            }
            Ok(None) => {
                wire.advance(wire.len());
                TransportEvent::More
            }
            Err(reject) => self.refuse(&reject, false, out),
        }
    }

    /// Decides on the request with this head.
    fn answer(&mut self, head: &[u8], out: &mut Vec<u8>) -> TransportEvent {
        let common = self.common.clone();
        let mut is_decided = false;
        let answered = upgrade::read(head, |upgrade, key| {
            is_decided = true;
            let accept = common.options.decide(upgrade)?;
            let extension = common.extension.borrow();
            let agreed = extension.as_ref().and_then(|extension| {
                let offers: Vec<&str> = upgrade.headers("sec-websocket-extensions").collect();
                extension.negotiate(&offers.join(", ")).filter(|_| !offers.is_empty())
            });
            accept.write(key, agreed.as_deref(), out);
            Ok((WebSocketInfo::new(upgrade, &accept), agreed.is_some()))
        });
        match answered {
            Ok((info, compresses)) => {
                (self.stage, self.compresses) = (Stage::Open, compresses);
                let (info, is_shared) = common.recent.share(info);
                self.info.set(Some(info));
                self.shares_info.set(is_shared);
                TransportEvent::Ready
            }
            Err(reject) => self.refuse(&reject, is_decided, out),
        }
    }

    /// Returns the info, which belongs to this connection alone from now on.
    fn info(&self) -> Option<Rc<WebSocketInfo>> {
        let mut info = self.info.take()?;
        if self.shares_info.replace(false) {
            info = Rc::new(info.fresh());
        }
        self.info.set(Some(info.clone()));
        Some(info)
    }

    fn refuse(&mut self, reject: &Reject, is_decided: bool, out: &mut Vec<u8>) -> TransportEvent {
        (self.stage, self.busy) = (Stage::Over, None);
        reject.write(out);
        TransportEvent::Fault(TransportError(match is_decided {
            true => CloseReason::Refused,
            false => CloseReason::UpgradeRefused(reject.status()),
        }))
    }

    /// Takes the next step with the received bytes, which may be empty only if a frame that has
    /// begun may lack nothing.
    fn step(&mut self, wire: &mut LeaseMut) -> Step {
        if let Some(busy) = &mut self.busy {
            if let Some(frame) = busy.frame {
                return self.go_on(frame, wire);
            }
            if busy.kept_len > 0 {
                return self.begin_kept(wire);
            }
        }
        let (header, size) = match Header::decode(wire)? {
            DecodeOutcome::Header(header, size) => (header, size),
            DecodeOutcome::Needs(_) => return self.keep_all(wire),
        };
        let mask = header.check_client(self.compresses)?;
        if header.opcode.is_control() {
            // At most 125.
            let end = size + header.len as usize;
            if wire.len() < end {
                return self.keep_all(wire);
            }
            let mut frame = wire.split_to(end);
            mask::apply(&mut frame[size..], mask);
            return self.control(header.opcode, &frame[size..]);
        }
        self.common.options.check_kind(kind_of(header.opcode))?;
        let is_message =
            header.fin && header.rsv == 0 && self.busy.as_ref().is_none_or(|busy| busy.message.is_none());
        let has_all = (wire.len() - size) as u64 >= header.len;
        if is_message && has_all && header.opcode != Opcode::Continuation {
            return self.whole(header, size, wire);
        }
        self.begin(header, mask, Some(size), wire)
    }

    /// Keeps the received bytes until there are more.
    fn keep_all(&mut self, wire: &mut LeaseMut) -> Step {
        let count = wire.len();
        self.busy()?.keep(wire, count);
        Ok(None)
    }

    /// Continues a header, or a control frame, of which the start is kept.
    fn begin_kept(&mut self, wire: &mut LeaseMut) -> Step {
        let compresses = self.compresses;
        let busy = self.busy()?;
        let (header, size) = loop {
            match Header::decode(busy.kept())? {
                DecodeOutcome::Header(header, size) => break (header, size),
                DecodeOutcome::Needs(until) if busy.keep(wire, until) => {}
                DecodeOutcome::Needs(_) => {
                    // A fault in it may show before it is whole.
                    Header::decode(busy.kept())?;
                    return Ok(None);
                }
            }
        };
        let mask = header.check_client(compresses)?;
        if !header.opcode.is_control() {
            busy.kept_len = 0;
            self.common.options.check_kind(kind_of(header.opcode))?;
            return self.begin(header, mask, None, wire);
        }
        // At most 139.
        let end = size + header.len as usize;
        if !busy.keep(wire, end) {
            return Ok(None);
        }
        let mut payload = [0; CONTROL_BYTES_MAX];
        let payload = &mut payload[..end - size];
        payload.copy_from_slice(&busy.kept[size..end]);
        busy.kept_len = 0;
        mask::apply(payload, mask);
        self.control(header.opcode, payload)
    }

    /// Takes the message that lies whole at the front of `wire`, and small ones that follow it.
    fn whole(&mut self, first: Header, size: usize, wire: &mut LeaseMut) -> Step {
        let marks = self.common.marks;
        let most = self.common.options.message_bytes_max as u64;
        if first.len > most {
            return Err(TOO_LARGE.into());
        }
        let room = if marks { MARK_BYTES } else { 0 };
        // It lies in the buffer.
        let end = size + first.len as usize;
        let kind = kind_of(first.opcode);
        let bytes = &mut wire[..];
        mask::apply(&mut bytes[size..end], first.mask.unwrap_or_default());
        if kind == Kind::Text && !utf8::is_text(&bytes[size..end]) {
            return Err(NO_TEXT.into());
        }
        let begins = size - room;
        if marks {
            bytes[begins..size].copy_from_slice(&mark(kind, end - size));
        }
        let (mut taken, mut written) = (end, end);
        // Anything else is decoded next, with all possible errors.
        while let Ok(DecodeOutcome::Header(next, size)) = Header::decode(&bytes[taken..])
            && let Ok(mask) = next.check_client(false)
            && next.fin
            && matches!(next.opcode, Opcode::Text | Opcode::Binary)
            && self.common.options.check_kind(kind_of(next.opcode)).is_ok()
            && next.len <= most.min(MOVED_BYTES_MAX as u64)
            && (bytes.len() - taken - size) as u64 >= next.len
        {
            let from = taken + size;
            let end = from + next.len as usize;
            let kind = kind_of(next.opcode);
            mask::apply(&mut bytes[from..end], mask);
            if kind == Kind::Text && !utf8::is_text(&bytes[from..end]) {
                mask::apply(&mut bytes[from..end], mask);
                break;
            }
            if marks {
                bytes[written..written + room].copy_from_slice(&mark(kind, end - from));
            }
            bytes.copy_within(from..end, written + room);
            (taken, written) = (end, written + room + (end - from));
        }
        let mut plain = wire.split_to(taken);
        plain.truncate(written);
        plain.advance(begins);
        Ok((!plain.is_empty()).then_some(TransportEvent::Plain(plain)))
    }

    /// Begins a frame of a message that is not whole, by its header: `size` bytes at the front of
    /// `wire`, or the kept bytes.
    fn begin(&mut self, header: Header, mask: [u8; 4], size: Option<usize>, wire: &mut LeaseMut) -> Step {
        let (marks, most) = (self.common.marks, self.common.options.message_bytes_max);
        let busy = self.busy()?;
        let message = PartialMessage::next(busy.message, &header, most)?;
        (busy.message, busy.frame) = (Some(message), Some(FramePayload::new(&header, mask)));
        let passes = is_passed_on(&message, marks);
        if !(passes && marks) {
            if !passes && !message.is_compressed && marks && busy.gathered.is_empty() {
                busy.gathered.try_reserve(MARK_BYTES).map_err(|_| NO_MEMORY)?;
                busy.gathered.extend_from_slice(&[0; MARK_BYTES]);
            }
            wire.advance(size.unwrap_or(0));
            return Ok(None);
        }
        // At most 1 GiB.
        let mark = mark(message.kind, header.len as usize);
        let Some(size) = size else {
            // The place of the header has no room for it.
            let plain = LeaseMut::try_copy_of(&mark).ok_or(NO_MEMORY)?;
            return Ok(Some(TransportEvent::Plain(plain)));
        };
        let mut plain = wire.split_to(size);
        plain.advance(size - MARK_BYTES);
        plain.copy_from_slice(&mark);
        Ok(Some(TransportEvent::Plain(plain)))
    }

    /// Takes the bytes of a frame that have arrived.
    fn go_on(&mut self, mut frame: FramePayload, wire: &mut LeaseMut) -> Step {
        let (marks, most) = (self.common.marks, self.common.options.message_bytes_max);
        let busy = self.busy()?;
        let Some(mut message) = busy.message else {
            busy.frame = None;
            return Ok(None);
        };
        let mut plain = wire.split_to(frame.part_of(wire.len()));
        frame.take(&mut plain);
        let is_over = frame.ends_message();
        message.check(&plain, is_over)?;
        busy.frame = Some(frame).filter(|frame| frame.left > 0);
        busy.message = Some(message).filter(|_| !is_over);
        if is_passed_on(&message, marks) {
            return Ok((!plain.is_empty()).then_some(TransportEvent::Plain(plain)));
        }
        busy.gathered.try_reserve(plain.len()).map_err(|_| NO_MEMORY)?;
        busy.gathered.extend_from_slice(&plain);
        drop(plain);
        if !is_over {
            return Ok(None);
        }
        let mut gathered = mem::take(&mut busy.gathered);
        let room = if marks { MARK_BYTES } else { 0 };
        if message.is_compressed {
            let mut extension = self.common.extension.borrow_mut();
            gathered = message.inflate(&gathered, most, room, extension.as_deref_mut())?;
        }
        // At most 1 GiB.
        let mark = mark(message.kind, gathered.len() - room);
        gathered[..room].copy_from_slice(&mark[..room]);
        let plain = LeaseMut::try_from_vec(gathered).ok_or(NO_MEMORY)?;
        Ok((!plain.is_empty()).then_some(TransportEvent::Plain(plain)))
    }

    /// Takes a control frame.
    fn control(&mut self, opcode: Opcode, payload: &[u8]) -> Step {
        match opcode {
            Opcode::Ping => {
                let busy = self.busy()?;
                let owed = busy.pong.get_or_insert_default();
                owed.clear();
                owed.try_reserve(payload.len()).map_err(|_| NO_MEMORY)?;
                owed.extend_from_slice(payload);
                Ok(Some(TransportEvent::Speaks))
            }
            Opcode::Close => {
                let said = close::parse(payload)?;
                if let Some(info) = self.info() {
                    info.peer_closed(said);
                }
                (self.stage, self.busy) = (Stage::Over, None);
                Ok(Some(TransportEvent::Closed))
            }
            // Any byte shows that the peer is there.
            _ => Ok(None),
        }
    }

    /// Ends the connection because of what the peer did, and informs it by a close frame.
    fn fault(&mut self, fault: TransportError, out: &mut Vec<u8>) -> TransportEvent {
        (self.stage, self.busy) = (Stage::Over, None);
        close::write(Some(close::code_of(fault.0)), "", out);
        TransportEvent::Fault(fault)
    }
}

/// True if a message is passed on as it arrives, and not put together first.
#[inline]
fn is_passed_on(message: &PartialMessage, marks: bool) -> bool {
    !message.is_compressed && (message.is_single || !marks)
}

impl TransportConn for WebSocketChannel {
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        match self.stage {
            Stage::Head => return self.upgrade(wire, out),
            Stage::Over => *wire = LeaseMut::empty(),
            Stage::Open => {}
        }
        loop {
            // An empty frame that has begun ends without a byte.
            let lacks_nothing = |busy: &Busy| busy.frame.is_some_and(|frame| frame.left == 0);
            if wire.is_empty() && !self.busy.as_deref().is_some_and(lacks_nothing) {
                self.busy.take_if(|busy| busy.is_over());
                return TransportEvent::More;
            }
            match self.step(wire) {
                Ok(Some(unsealed)) => return unsealed,
                Ok(None) => {}
                Err(fault) => return self.fault(fault, out),
            }
        }
    }

    fn work(&mut self, _out: &mut Vec<u8>) -> TransportEvent {
        TransportEvent::More
    }

    fn encode_in_place(&mut self, plain: &mut Batch) -> bool {
        if self.compresses {
            return false;
        }
        if !self.common.marks {
            plain.prepend(&self.replies().header(plain.len()));
        }
        true
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(plain.len()).map_err(|_| NO_MEMORY)?;
        plain.pieces().for_each(|piece| bytes.extend_from_slice(piece));
        // A compressed message is never longer.
        out.try_reserve(plain.len() + HEADER_BYTES_MAX).map_err(|_| NO_MEMORY)?;
        let mut extension = self.common.extension.borrow_mut();
        let mut put_message = |opcode: Opcode, payload: &[u8]| {
            let compressed =
                extension.as_mut().filter(|_| self.compresses).and_then(|of| of.compress(payload));
            let (rsv, payload) = compressed.map_or((0, payload), |compressed| (4, compressed));
            let header = Header { rsv, ..Header::whole(opcode, payload.len() as u64) };
            out.extend_from_slice(&header.encode());
            out.extend_from_slice(payload);
        };
        if !self.common.marks {
            put_message(self.replies().opcode(), &bytes);
            return Ok(());
        }
        // Each reply is a frame already.
        let mut rest = &bytes[..];
        while let Ok(DecodeOutcome::Header(header, size)) = Header::decode(rest)
            && matches!(header.opcode, Opcode::Text | Opcode::Binary)
            && header.fin
            && (rest.len() - size) as u64 >= header.len
        {
            let (frame, more) = rest.split_at(size + header.len as usize);
            put_message(header.opcode, &frame[size..]);
            rest = more;
        }
        // Bytes that the service wrote by itself.
        out.extend_from_slice(rest);
        Ok(())
    }

    fn write_control(&mut self, out: &mut Vec<u8>) {
        let Some(busy) = &mut self.busy else { return };
        if mem::take(&mut busy.asks) {
            put(Opcode::Ping, &[], out);
        }
        if let Some(pong) = busy.pong.take() {
            put(Opcode::Pong, &pong, out);
        }
        self.busy.take_if(|busy| busy.is_over());
    }

    fn on_heartbeat(&mut self) -> bool {
        // Without memory for it the peer is pinged next time.
        if let Ok(busy) = self.busy() {
            busy.asks = true;
        }
        true
    }

    fn on_close(&mut self, reason: CloseReason) {
        if let Some(info) = self.info() {
            info.ends_by(close::code_of(reason));
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if let Some(info) = self.info() {
            info.write_close(out);
        }
    }

    fn held_bytes(&self) -> usize {
        self.busy.as_ref().map_or(0, |busy| busy.gathered.capacity())
    }

    fn kept_bytes(&self) -> usize {
        let info = self.info.take();
        let bytes = info.as_ref().map_or(0, |info| info.target().len());
        self.info.set(info);
        if bytes > TARGET_BYTES_MIN { bytes } else { 0 }
    }

    fn is_mid_record(&self) -> bool {
        let gathers = |message| !is_passed_on(&message, self.common.marks);
        let is_mid = |busy: &Busy| busy.kept_len > 0 || busy.message.is_some_and(gathers);
        self.busy.as_deref().is_some_and(|busy| is_mid(busy) || !busy.gathered.is_empty())
    }

    fn wants_more(&self) -> bool {
        matches!(self.stage, Stage::Open) && self.busy.is_none()
    }

    fn eof_error(&self) -> Option<CloseReason> {
        let is_mid = self.busy.as_ref().is_some_and(|busy| busy.message.is_some() || busy.kept_len > 0);
        is_mid.then_some(CloseReason::PeerClosedMidFrame)
    }

    fn info_on_demand(&self) -> Option<Rc<dyn Any>> {
        self.info().map(|info| info as Rc<dyn Any>)
    }
}

impl WebSocketChannel {
    fn replies(&self) -> Kind {
        if self.common.options.text { Kind::Text } else { Kind::Binary }
    }
}
