//! A client of the whole servers: it knows which replies are owed, and checks that no others come.

use std::collections::{BTreeSet, VecDeque};
use std::error::Error;
use std::io;
use std::time::Duration;

use ringserve_server::framing::{Decode, Framing};
use ringserve_server::testing::{ClientResult, Net};

use super::cover::Cover;
use super::layered::Way;
use super::plan::{ClientPlan, Leave, Verb};
use super::service::{BIG_BYTES, request};
use crate::toy::PeerStream;

/// The default linger time of a server.
const LINGERS: Duration = Duration::from_secs(2);

/// The replies owed to a client.
struct Owed {
    /// Replies, in order.
    replies: VecDeque<u32>,
    /// Replies come in the order of their requests.
    in_order: bool,
    pushes: BTreeSet<u32>,
    big_bytes: usize,
}

impl Owed {
    fn heard(&mut self, payload: &[u8]) {
        let number = || -> u32 {
            let text = std::str::from_utf8(&payload[1..]).expect("a reply is text");
            text.parse().expect("a reply has a number")
        };
        match payload.first() {
            Some(b'=') => {
                let number = number();
                let at = self.replies.iter().position(|owed| *owed == number);
                let at = at.unwrap_or_else(|| panic!("reply {number} is not owed"));
                assert!(at == 0 || !self.in_order, "reply {number} comes before {:?}", self.replies[0]);
                self.replies.remove(at);
            }
            Some(b'+') => assert!(self.pushes.remove(&number()), "push {} is not owed", number()),
            Some(b'.') => {
                let left = self.big_bytes.checked_sub(payload.len());
                self.big_bytes = left.expect("a large reply is larger than asked for");
            }
            Some(b'?') => {}
            _ => panic!("{payload:?} is no reply"),
        }
    }
}

/// One connection of a plan, from its start to its end.
pub async fn run<F: Framing>(
    net: Net,
    way: Way,
    framing: F,
    plan: ClientPlan,
    in_order: bool,
    cover: Cover,
) -> ClientResult {
    net.sleep(plan.starts).await;
    let mut me = Talk {
        stream: way.connect(&net).await?,
        framing,
        bytes: Vec::new(),
        owed: Owed { replies: VecDeque::new(), in_order, pushes: BTreeSet::new(), big_bytes: 0 },
    };
    let mut requests: VecDeque<(u32, Verb)> = (plan.first..).zip(plan.requests.iter().copied()).collect();
    if let Leave::With(verb) = plan.leave {
        requests.push_back((plan.first + requests.len() as u32, verb));
    }
    while !requests.is_empty() {
        let ahead: Vec<_> = requests.drain(..plan.ahead.min(requests.len())).collect();
        let mut bytes = Vec::new();
        for &(number, verb) in &ahead {
            bytes.extend(request(&me.framing, verb, number, plan.padding));
            me.owed.replies.push_back(number);
            match verb {
                Verb::Spawn | Verb::Mesh => drop(me.owed.pushes.insert(number)),
                Verb::Big => me.owed.big_bytes += BIG_BYTES,
                _ => {}
            }
        }
        let is_last = requests.is_empty();
        for piece in bytes.chunks(plan.piece.unwrap_or(bytes.len())) {
            match me.stream.send(piece).await {
                // Bytes of a layer after the last request may meet the reset for which that asked.
                Err(error) if is_last && plan.leave.resets() && is_reset(&error) => return Ok(()),
                sent => sent?,
            }
            if plan.piece.is_some() && net.random().is_multiple_of(8) {
                net.sleep(plan.pause).await;
            }
        }
        match plan.leave {
            Leave::FinishEarly | Leave::Close | Leave::Reset | Leave::With(_) if is_last => break,
            _ => {
                // A push that does not come is lost: the service tries until there is room.
                while !me.owed.replies.is_empty() || !me.owed.pushes.is_empty() {
                    me.hear().await?;
                }
            }
        }
        net.sleep(plan.pause).await;
    }
    let asked = net.now();
    cover.count("leave", format!("{:?}", plan.leave));
    match plan.leave {
        Leave::Close => Ok(()),
        Leave::Reset => {
            me.stream.reset();
            Ok(())
        }
        Leave::Finish | Leave::FinishEarly => {
            me.stream.finish().await?;
            me.hear_to_the_end().await?;
            if me.owed.replies.is_empty() && me.owed.big_bytes == 0 {
                cover.count("client", "heard every reply");
                return Ok(());
            }
            Err(format!("{} replies did not come before the end", me.owed.replies.len()).into())
        }
        Leave::With(verb) => {
            let end = me.hear_to_the_end().await;
            // From then on a server that closed may have stopped waiting for a client to read the
            // rest.
            let is_late = net.now() >= asked + LINGERS;
            let (&last, rest) = (me.owed.replies.back().unwrap_or(&u32::MAX), me.owed.replies.len());
            // The last request ends the connection, with those that still wait; the first ones of a
            // call at a time were answered.
            match (verb, end) {
                (Verb::Close | Verb::PanicInClose | Verb::PanicInDrop, Ok(())) if in_order && rest > 0 => {
                    Err(format!("reply {last} did not come before the end").into())
                }
                (Verb::Fail, Ok(())) if in_order && rest > 1 => {
                    Err(format!("{rest} replies are missing though only one call failed").into())
                }
                (
                    Verb::Abort
                    | Verb::PanicInCall
                    | Verb::PanicAfterWait
                    | Verb::PanicInEncode
                    | Verb::PanicInDecode
                    | Verb::PanicInPush,
                    Ok(()),
                ) => Err("a connection that is aborted ends with FIN".into()),
                (_, Ok(())) => Ok(()),
                (Verb::Close | Verb::Fail, Err(error)) if !is_late => Err(error),
                // A reset, which must or may come.
                (_, Err(error)) => match error.downcast::<io::Error>() {
                    Ok(error) if is_reset(&error) => Ok(()),
                    Ok(error) => Err(error.into()),
                    Err(error) => Err(error),
                },
            }
        }
    }
}

fn is_reset(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// A connection whose bytes are frames.
struct Talk<F> {
    stream: PeerStream,
    framing: F,
    bytes: Vec<u8>,
    owed: Owed,
}

impl<F: Framing> Talk<F> {
    /// Receives the next piece. False at the end of the stream, which cuts no frame.
    async fn fill(&mut self) -> Result<bool, Box<dyn Error>> {
        let piece = self.stream.some().await?;
        self.bytes.extend_from_slice(&piece);
        while !self.bytes.is_empty() {
            match self.framing.decode(&self.bytes, 0).expect("the server keeps its framing") {
                Decode::More(_) => break,
                Decode::Frame { skip, len, consumed } => {
                    self.owed.heard(&self.bytes[skip..skip + len]);
                    self.bytes.drain(..consumed);
                }
            }
        }
        Ok(!piece.is_empty())
    }

    async fn hear(&mut self) -> ClientResult {
        if self.fill().await? { Ok(()) } else { Err("the stream ends while replies are owed".into()) }
    }

    async fn hear_to_the_end(&mut self) -> ClientResult {
        while self.fill().await? {}
        if self.bytes.is_empty() { Ok(()) } else { Err("a frame is cut by the end".into()) }
    }
}
