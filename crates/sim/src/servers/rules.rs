//! Services whose bytes are cut by a rule that calls and hooks switch, in pieces, and by a codec
//! that receives the peer's end. A client knows the meaning of each of its bytes, whatever comes
//! together.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::codec::{CodecCx, CodecService, WithCodec};
use ringserve_server::framing::{
    AsFramingState, Cut, EncodeError, FrameError, Framing, FramingState, LengthPrefix, Lines, Outbox,
    Payload, TypedFraming,
};
use ringserve_server::testing::{ClientResult, Net, Sim, SimServer};
use ringserve_server::{CloseCx, CloseReason, Cx, Frame, Service, with_heads};
use tokio_util::codec::{LinesCodec, LinesCodecError};

use super::cover::Cover;
use super::layered::Way;
use super::plan::{ClientPlan, Leave, Plan};
use super::{ADDR, server, with_deeds};
use crate::toy::PeerStream;

/// Interval of a silent peer's heartbeats, if limits end none.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// By lines the start of one, by lengths whole frames: the bytes after a hook has switched.
const HOOKED: &[u8] = b"\0\0\0\x05hello\0\0\0\x05lines";

/// The word that switches back to lines.
const BACK: &[u8] = b"lines";

/// The meaning of the next bytes.
#[derive(Clone, Copy, Debug, Default)]
enum Rule {
    #[default]
    Lines,
    /// A body of this number of bytes, in pieces.
    Body(usize),
    /// Frames with a length of four bytes.
    Lengths,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Line,
    Piece,
    /// The end of a body.
    Last,
    Frame,
}

#[derive(Clone)]
struct Rules;

impl TypedFraming for Rules {
    type State = Rule;
    type Head = Part;

    fn cut(&self, rule: &mut Rule, bytes: &[u8], scanned: usize) -> Result<Cut<Part>, FrameError> {
        match *rule {
            Rule::Lines => Ok(Lines::default().decode(bytes, scanned)?.with_head(Part::Line)),
            Rule::Lengths => Ok(LengthPrefix::bytes(4).decode(bytes, scanned)?.with_head(Part::Frame)),
            Rule::Body(left) if left > bytes.len() => {
                *rule = Rule::Body(left - bytes.len());
                let len = bytes.len();
                Ok(Cut::Piece { skip: 0, len, consumed: len, head: Part::Piece })
            }
            Rule::Body(left) => {
                *rule = Rule::Lines;
                Ok(Cut::Frame { skip: 0, len: left, consumed: left, head: Part::Last })
            }
        }
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        Lines::default().encode(payload, out)
    }
}

#[derive(Default)]
struct Session {
    rule: FramingState<Rule>,
    /// Checksum of the current body.
    sum: Cell<u32>,
    /// The next heartbeat switches to lengths.
    is_armed: Cell<bool>,
    /// The switch happened, and the bytes that came then are whole frames.
    is_whole: Cell<bool>,
}

impl AsFramingState<Rule> for Session {
    fn framing_state(&self) -> &FramingState<Rule> {
        &self.rule
    }
}

fn sum_of(before: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(before, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)))
}

/// Switches as lines request, and reports the bytes that came.
struct Switching(Cover);

impl Switching {
    fn switch(&self, cx: &Cx<'_, Session>, to: Rule, how: &str) {
        self.0.count("rule", how);
        cx.set_framing_state(to);
    }
}

impl Service<Part> for Switching {
    type Session = Session;
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame<Part>) -> Result<(), Infallible> {
        let session = cx.session();
        // Slow calls meet bytes that come meanwhile.
        let waits = cx.shard().random().is_multiple_of(8);
        match frame.head() {
            Part::Line => {
                let text = std::str::from_utf8(&frame).expect("a line is text").to_owned();
                drop(frame);
                if waits {
                    cx.sleep(Duration::from_micros(cx.shard().random() % 30_000)).await;
                    self.0.count("rule", "switch after a wait");
                }
                let (what, number) = text.split_at(1);
                match (what, number.parse().expect("a number")) {
                    ("e", number) => cx.reply(format!("={number}")),
                    ("b", bytes) => {
                        session.sum.set(0);
                        self.switch(cx, Rule::Body(bytes), "switch to a body");
                    }
                    ("f", _) => self.switch(cx, Rule::Lengths, "switch to lengths"),
                    ("h", _) => session.is_armed.set(true),
                    _ => panic!("{text:?} is no line of a client"),
                }
            }
            Part::Frame if *frame == *BACK => {
                session.is_whole.set(false);
                self.switch(cx, Rule::Lines, "switch to lines");
            }
            Part::Frame => cx.reply(format!("{} in a frame", sum_of(0, &frame))),
            part @ (Part::Piece | Part::Last) => {
                session.sum.set(sum_of(session.sum.get(), &frame));
                if *part == Part::Piece {
                    self.0.count("rule", "piece");
                }
                if waits {
                    cx.sleep(Duration::from_millis(5)).await;
                }
                if *part == Part::Last {
                    cx.reply(format!("{} in a body", session.sum.get()));
                }
            }
        }
        Ok(())
    }

    fn heartbeat(&self, cx: &Cx<'_, Session>) {
        if cx.session().is_armed.replace(false) {
            cx.session().is_whole.set(true);
            self.switch(cx, Rule::Lengths, "switch in a hook");
        }
    }

    fn close(&self, closed: &CloseCx<'_, Session>) {
        let is_cut = closed.reason() == CloseReason::PeerClosedMidFrame;
        assert!(!closed.session().is_whole.get() || !is_cut, "bytes are not cut by the rule switched to");
    }
}

/// Sends bytes in the portions of the plan.
async fn send(me: &mut PeerStream, of: &ClientPlan, bytes: &[u8]) -> io::Result<()> {
    for piece in bytes.chunks(of.piece.unwrap_or(bytes.len()).max(1)) {
        me.send(piece).await?;
    }
    Ok(())
}

/// Receives the owed replies, in order unless calls of a connection overtake each other.
async fn hear(me: &mut PeerStream, owed: &mut VecDeque<String>, in_order: bool) -> ClientResult {
    while let Some(next) = owed.front() {
        let Some(line) = me.line().await? else {
            return Err(format!("{next:?} did not come before the end").into());
        };
        let at = owed.iter().position(|owed| *owed == line);
        let at = at.unwrap_or_else(|| panic!("{line:?} is not owed: what was cut is not what was sent"));
        assert!(at == 0 || !in_order, "{line:?} comes before {next:?}");
        owed.remove(at);
    }
    Ok(())
}

/// The server of a run.
#[derive(Clone, Default)]
struct Place(Rc<RefCell<Option<SimServer>>>);

impl Place {
    /// Sleeps for longer than the time to the next heartbeat, during which no shard runs: later
    /// bytes meet it in one turn.
    async fn stall(&self, net: &Net, shards: usize) {
        net.sleep(HEARTBEAT / 2).await;
        if let Some(server) = self.0.borrow().as_ref().filter(|server| !server.is_done()) {
            (0..shards).for_each(|shard| server.stall(shard, HEARTBEAT));
        }
        net.sleep(HEARTBEAT * 3 / 4).await;
    }
}

/// A client of [`Switching`].
struct Switcher {
    net: Net,
    of: ClientPlan,
    cover: Cover,
    place: Place,
    shards: usize,
    way: Way,
    owed: VecDeque<String>,
}

impl Switcher {
    /// Bytes of each rule look like those of others.
    fn any(&self, most: usize) -> Vec<u8> {
        let len = self.net.random() as usize % (most + 1);
        (0..len).map(|_| b"\nf10\0\xFFl."[self.net.random() as usize % 8]).collect()
    }

    /// Adds bytes to send. True if a hook has to switch before all of them can be cut.
    fn add(&mut self, number: usize, bytes: &mut Vec<u8>) -> bool {
        // The service gets no heartbeat of a client that answers pings.
        let verbs = if self.way.is_pinged() { 7 } else { 8 };
        match self.net.random() % verbs {
            0..3 => {
                bytes.extend(format!("e{number}\n").bytes());
                self.owed.push_back(format!("={number}"));
            }
            3..5 => {
                let body = [&b"."[..], &self.any(self.of.padding + 100)].concat();
                bytes.extend(format!("b{}\n", body.len()).bytes());
                bytes.extend(&body);
                self.owed.push_back(format!("{} in a body", sum_of(0, &body)));
            }
            5..7 => {
                bytes.extend(b"f0\n");
                for _ in 0..self.net.random() % 3 {
                    // None that switches back.
                    let body = [&b"."[..], &self.any(self.of.padding / 4 + 10)].concat();
                    bytes.extend((body.len() as u32).to_be_bytes());
                    bytes.extend(&body);
                    self.owed.push_back(format!("{} in a frame", sum_of(0, &body)));
                }
                bytes.extend((BACK.len() as u32).to_be_bytes());
                bytes.extend(BACK);
            }
            _ => {
                bytes.extend(b"h0\n");
                self.owed.push_back(format!("{} in a frame", sum_of(0, b"hello")));
                return true;
            }
        }
        false
    }

    async fn run(mut self) -> ClientResult {
        self.net.sleep(self.of.starts).await;
        let mut me = self.way.connect(&self.net).await?;
        let mut left = self.of.requests.len();
        while left > 0 {
            let (mut bytes, mut is_armed) = (Vec::new(), false);
            for _ in 0..self.of.ahead.min(left) {
                left -= 1;
                is_armed = self.add(left, &mut bytes);
                if is_armed {
                    break;
                }
            }
            let is_last = left == 0 && self.of.leave != Leave::Finish;
            let mut behind = &HOOKED[HOOKED.len()..];
            if is_armed {
                // Some of the bytes meet the hook, and some come right after it, before the end of
                // the input if that is next.
                let before = match self.net.random() % 3 {
                    0 => 1 + self.net.random() as usize % (HOOKED.len() - 1),
                    _ => HOOKED.len(),
                };
                bytes.extend(&HOOKED[..before]);
                behind = &HOOKED[before..];
            }
            send(&mut me, &self.of, &bytes).await?;
            if self.of.leave == Leave::Reset && is_last {
                me.reset();
                return Ok(());
            }
            if is_armed && (is_last || !behind.is_empty()) {
                self.place.stall(&self.net, self.shards).await;
                send(&mut me, &self.of, behind).await?;
            }
            if is_last {
                if is_armed {
                    // The end may have come before a heartbeat after all.
                    self.owed.pop_back();
                }
                break;
            }
            hear(&mut me, &mut self.owed, true).await?;
            self.net.sleep(self.of.pause).await;
        }
        me.finish().await?;
        hear(&mut me, &mut self.owed, true).await?;
        me.closed().await?;
        self.cover.count("rule", "client heard all");
        Ok(())
    }
}

/// Answers each line, including a last one without its end.
struct Codec(Cover);

impl CodecService for Codec {
    type Codec = LinesCodec;
    type Session = ();
    type Error = LinesCodecError;

    fn codec(&self) -> LinesCodec {
        LinesCodec::new()
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
        if cx.shard().random().is_multiple_of(8) {
            cx.sleep(Duration::from_micros(cx.shard().random() % 30_000)).await;
        }
        let (number, padding) = line.split_once(' ').expect("a line of a client");
        if padding.ends_with("last") {
            self.0.count("codec", "last line without its end");
        }
        cx.reply(format!("{number} {}", padding.len()))
    }
}

/// A client of [`Codec`].
async fn lines(net: Net, way: Way, of: &ClientPlan, in_order: bool, cover: &Cover) -> ClientResult {
    net.sleep(of.starts).await;
    let mut me = way.connect(&net).await?;
    let (mut owed, mut left) = (VecDeque::new(), of.requests.len());
    while left > 0 {
        let mut bytes = Vec::new();
        for _ in 0..of.ahead.min(left) {
            left -= 1;
            let padding = net.random() as usize % (of.padding + 10);
            bytes.extend(format!("{left} {}\n", "x".repeat(padding)).bytes());
            owed.push_back(format!("{left} {padding}"));
        }
        send(&mut me, of, &bytes).await?;
        if left == 0 && of.leave != Leave::Finish {
            break;
        }
        hear(&mut me, &mut owed, in_order).await?;
        net.sleep(of.pause).await;
    }
    match of.leave {
        Leave::Close => return Ok(()),
        Leave::Reset => {
            me.reset();
            return Ok(());
        }
        _ => {
            let last = format!("{} {}last", of.first, "x".repeat(of.padding));
            send(&mut me, of, last.as_bytes()).await?;
            owed.push_back(format!("{} {}", of.first, of.padding + 4));
        }
    }
    me.finish().await?;
    hear(&mut me, &mut owed, in_order).await?;
    me.closed().await?;
    cover.count("codec", "client heard all");
    Ok(())
}

/// A run of [`Switching`].
pub fn play_switching(sim: &Sim, plan: &Plan, cover: &Cover) {
    let mut limits = plan.limits.clone().calls_in_flight_max(1);
    if !plan.limits_bite {
        limits = limits.heartbeat_interval(Some(HEARTBEAT)).heartbeats_missed_max(255);
    }
    let place = Place::default();
    let start = || {
        let cover = cover.clone();
        let server = server(plan, None).framing(Rules).limits(limits.clone());
        let server = sim.start(server, move |_shard| with_heads(Switching(cover.clone())));
        let server = server.expect("it starts");
        place.0.replace(Some(server.clone()));
        server
    };
    let client = |number: usize, of: &ClientPlan| {
        let (of, cover, place, shards) = (of.clone(), cover.clone(), place.clone(), plan.shards);
        let (way, owed) = (Way::of(plan, ADDR, of.first, &cover), VecDeque::new());
        let run = async move |net| Switcher { net, of, cover, place, shards, way, owed }.run().await;
        sim.client(format!("c{number}"), run)
    };
    with_deeds(sim, plan, cover, &start, &client);
}

/// A run of [`Codec`].
pub fn play_codec(sim: &Sim, plan: &Plan, cover: &Cover) {
    let start = || {
        let cover = cover.clone();
        let server = server(plan, None);
        sim.start(server, move |_shard| WithCodec::new(Codec(cover.clone()))).expect("it starts")
    };
    let client = |number: usize, of: &ClientPlan| {
        let (of, cover, way) = (of.clone(), cover.clone(), Way::of(plan, ADDR, of.first, cover));
        let in_order = plan.limits.calls_in_flight_max == 1;
        sim.client(format!("c{number}"), async move |net| lines(net, way, &of, in_order, &cover).await)
    };
    with_deeds(sim, plan, cover, &start, &client);
}
