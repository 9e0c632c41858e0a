//! A simulated NATS with subjects and JetStream as the bridge uses them, which does what a test
//! says.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use ringserve::testing::{ClientStream, Net, Sim};

pub const ADDR: &str = "10.0.0.21:4222";

/// The behaviour of the broker.
#[derive(Default)]
pub struct Script {
    /// No port is open, and connections are reset.
    pub is_down: Cell<bool>,
    /// It has no JetStream.
    pub is_plain: Cell<bool>,
    /// Bytes of a piece that it sends; 0 for all.
    pub piece: Cell<usize>,
    /// One of this number of republished messages is lost; 0 for none.
    pub loses: Cell<u64>,
    /// One of this number of answers of the stream is none, or says nonsense; 0 for none.
    pub lies: Cell<u64>,
    /// Subscriptions to subjects that begin so are refused; none if it is empty.
    pub refuses: RefCell<&'static str>,
    /// The stream says that it has a bound of bytes.
    pub has_bound: Cell<bool>,
}

/// A message that the stream keeps.
#[derive(Clone)]
pub struct Kept {
    /// The number that nodes derive from the time when the stream was made.
    pub epoch: u64,
    pub seq: u64,
    pub subject: String,
    headers: String,
    pub payload: String,
}

/// A stream.
#[derive(Default)]
struct Stream {
    created: String,
    entries: usize,
    last: u64,
    kept: Vec<Kept>,
    ids: BTreeMap<String, u64>,
}

#[derive(Default)]
pub struct Broker {
    pub script: Script,
    streams: RefCell<BTreeMap<String, Stream>>,
    connections: RefCell<BTreeMap<usize, Rc<Connection>>>,
    accepted: Cell<usize>,
    made: Cell<u64>,
    /// All that the stream `push` ever took.
    pub taken: RefCell<Vec<Kept>>,
}

#[derive(Default)]
struct Connection {
    out: RefCell<Vec<u8>>,
    waker: Cell<Option<Waker>>,
    is_over: Cell<bool>,
    has_echo: Cell<bool>,
    subs: RefCell<BTreeMap<u64, String>>,
}

impl Connection {
    fn say(&self, bytes: impl AsRef<[u8]>) {
        self.out.borrow_mut().extend_from_slice(bytes.as_ref());
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// An operation of a client.
struct Published<'a> {
    subject: &'a str,
    reply: &'a str,
    headers: &'a str,
    payload: &'a str,
}

impl Broker {
    pub fn start(sim: &Sim) -> Rc<Broker> {
        let broker = Rc::new(Broker::default());
        let this = broker.clone();
        sim.background(ADDR, async move |net| {
            loop {
                while this.script.is_down.get() {
                    net.sleep(Duration::from_millis(20)).await;
                }
                let mut listener = net.listen(ADDR)?;
                while !this.script.is_down.get() {
                    if let Ok(stream) = net.timeout(Duration::from_millis(20), listener.accept()).await {
                        net.spawn(this.clone().serve(net.clone(), stream));
                    }
                }
            }
        });
        broker
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for connection in self.connections.borrow().values() {
            connection.is_over.set(true);
            connection.say("");
        }
    }

    /// Says bytes on all connections.
    pub fn say(&self, bytes: &str) {
        self.connections.borrow().values().for_each(|connection| connection.say(bytes));
    }

    /// Forgets all streams.
    pub fn forget(&self) {
        self.streams.borrow_mut().clear();
    }

    /// Loses the newest messages of the stream `push`, as a server without power does.
    pub fn lose(&self, count: u64) {
        let mut streams = self.streams.borrow_mut();
        let stream = streams.get_mut("push").unwrap();
        stream.last -= count;
        let last = stream.last;
        stream.kept.retain(|kept| kept.seq <= last);
        stream.ids.retain(|_, seq| *seq <= last);
    }

    /// Publishes as another program does.
    pub fn publish(&self, net: &Net, subject: &str, headers: &str, payload: &str) {
        let message = Published { subject, reply: "", headers, payload };
        self.published(
            net,
            &message,
            &Rc::new(Connection { has_echo: Cell::new(true), ..Default::default() }),
        );
    }

    fn refuses(&self, subject: &str) -> bool {
        let refused = *self.script.refuses.borrow();
        !refused.is_empty() && subject.starts_with(refused)
    }

    /// The subjects to which clients subscribe.
    pub fn subjects(&self) -> BTreeSet<String> {
        let connections = self.connections.borrow();
        connections.values().flat_map(|of| of.subs.borrow().values().cloned().collect::<Vec<_>>()).collect()
    }

    async fn serve(self: Rc<Broker>, net: Net, mut stream: ClientStream) {
        let number = self.accepted.get();
        self.accepted.set(number + 1);
        let connection = Rc::new(Connection::default());
        connection
            .say("INFO {\"server_id\":\"X\",\"version\":\"2\",\"headers\":true,\"max_payload\":4000}\r\n");
        self.connections.borrow_mut().insert(number, connection.clone());
        self.talk(&net, &mut stream, &connection).await;
        self.connections.borrow_mut().remove(&number);
        if self.script.is_down.get() || net.random().is_multiple_of(2) {
            stream.reset();
        }
    }

    async fn talk(self: &Rc<Broker>, net: &Net, stream: &mut ClientStream, connection: &Rc<Connection>) {
        let mut unread = Vec::new();
        while !connection.is_over.get() && !self.script.is_down.get() {
            let out = connection.out.take();
            if !out.is_empty() {
                let piece = match self.script.piece.get() {
                    0 => out.len(),
                    most => 1 + net.random() as usize % most,
                };
                for bytes in out.chunks(piece) {
                    if connection.is_over.get() || stream.send(bytes).await.is_err() {
                        return;
                    }
                }
                continue;
            }
            let read = {
                let mut some = pin!(stream.some());
                poll_fn(|task| {
                    if let Poll::Ready(read) = some.as_mut().poll(task) {
                        return Poll::Ready(Some(read));
                    }
                    connection.waker.set(Some(task.waker().clone()));
                    let is_woken = connection.is_over.get() || !connection.out.borrow().is_empty();
                    if is_woken { Poll::Ready(None) } else { Poll::Pending }
                })
                .await
            };
            match read {
                None => continue,
                Some(Err(_)) => return,
                Some(Ok(bytes)) if bytes.is_empty() => return,
                Some(Ok(bytes)) => unread.extend(bytes),
            }
            while self.operation(net, &mut unread, connection) {}
        }
    }

    /// Takes one operation. False if there is no whole one.
    fn operation(&self, net: &Net, unread: &mut Vec<u8>, connection: &Rc<Connection>) -> bool {
        let Some(end) = unread.windows(2).position(|two| two == b"\r\n") else { return false };
        let line = String::from_utf8(unread[..end].to_vec()).expect("a client sends text");
        let words: Vec<&str> = line.split(' ').collect();
        let mut taken = end + 2;
        match words[0] {
            "CONNECT" => connection.has_echo.set(!line.contains("\"echo\":false")),
            "PING" => connection.say("PONG\r\n"),
            "PONG" => {}
            "SUB" if self.refuses(words[1]) => {
                let subject = words[1];
                connection.say(format!("-ERR 'Permissions Violation for Subscription to \"{subject}\"'\r\n"));
            }
            "SUB" => {
                let sid = words.last().unwrap().parse().unwrap();
                connection.subs.borrow_mut().insert(sid, words[1].to_owned());
            }
            "UNSUB" => drop(connection.subs.borrow_mut().remove(&words[1].parse().unwrap())),
            "PUB" | "HPUB" => {
                let size: usize = words.last().unwrap().parse().unwrap();
                if unread.len() < taken + size + 2 {
                    return false;
                }
                let is_headed = words[0] == "HPUB";
                let header_bytes: usize = if is_headed { words[words.len() - 2].parse().unwrap() } else { 0 };
                let reply = if words.len() == 4 + usize::from(is_headed) { words[2] } else { "" };
                let text = String::from_utf8(unread[taken..taken + size].to_vec()).unwrap();
                taken += size + 2;
                let (headers, payload) = text.split_at(header_bytes);
                let subject = words[1];
                self.published(net, &Published { subject, reply, headers, payload }, connection);
            }
            _ => panic!("no operation of a client: {line:?}"),
        }
        unread.drain(..taken);
        true
    }

    /// Gives a message to all that subscribed.
    fn give(&self, subject: &str, reply: &str, headers: &str, payload: &str, but: Option<&Rc<Connection>>) {
        for connection in self.connections.borrow().values() {
            if but.is_some_and(|but| Rc::ptr_eq(but, connection)) {
                continue;
            }
            let mut out = String::new();
            for (sid, pattern) in &*connection.subs.borrow() {
                if !fits(pattern, subject) {
                    continue;
                }
                let reply = if reply.is_empty() { String::new() } else { format!("{reply} ") };
                out += &match headers.len() {
                    0 => format!("MSG {subject} {sid} {reply}{}\r\n{payload}\r\n", payload.len()),
                    of => format!(
                        "HMSG {subject} {sid} {reply}{of} {}\r\n{headers}{payload}\r\n",
                        of + payload.len()
                    ),
                };
            }
            connection.say(out);
        }
    }

    fn published(&self, net: &Net, message: &Published<'_>, by: &Rc<Connection>) {
        let Published { subject, reply, headers, payload } = *message;
        if let Some(order) = subject.strip_prefix("$JS.API.") {
            let answered = !self.script.is_plain.get() && self.order(net, order, reply, payload);
            if !answered {
                self.give(reply, "", "NATS/1.0 503\r\n\r\n", "", None);
            }
            return;
        }
        self.give(subject, reply, headers, payload, Some(by).filter(|by| !by.has_echo.get()));
        let name = match subject.split('.').nth(1) {
            Some("t") => "push",
            Some("count") => "push-counts",
            _ => return,
        };
        let kept = self.streams.borrow_mut().get_mut(name).map(|stream| stream.take(message));
        match kept {
            None if reply.is_empty() => {}
            None => self.give(reply, "", "NATS/1.0 503\r\n\r\n", "", None),
            Some((seq, news)) => {
                if let Some((kept, before)) = news.filter(|_| name == "push") {
                    self.taken.borrow_mut().push(kept.clone());
                    let loses = self.script.loses.get();
                    if loses == 0 || !net.random().is_multiple_of(loses) {
                        let live = subject.replacen(".t.", ".live.", 1);
                        self.give(&live, "", &kept.headers(&[("Nats-Last-Sequence", before)]), payload, None);
                    }
                }
                if !reply.is_empty() {
                    self.give(reply, "", "", &format!("{{\"stream\":\"{name}\",\"seq\":{seq}}}"), None);
                }
            }
        }
    }

    /// Answers JetStream's API. False where it has no answer.
    fn order(&self, net: &Net, order: &str, reply: &str, question: &str) -> bool {
        let (order, name) = order.rsplit_once('.').unwrap();
        let asked: serde_json::Value = serde_json::from_str(question).unwrap();
        let lies = self.script.lies.get();
        if lies > 0 && net.random().is_multiple_of(lies) {
            match net.random() % 4 {
                0 => return false,
                1 => self.give(reply, "", "", "{\"error\":{\"code\":500,\"description\":\"lies\"}}", None),
                2 => self.give(reply, "", "NATS/1.0\r\nNats-Sequence: x\r\n\r\n", "x", None),
                // It says nothing.
                _ => {}
            }
            return true;
        }
        let mut streams = self.streams.borrow_mut();
        match order {
            "STREAM.CREATE" if !streams.contains_key(name) => {
                self.made.set(self.made.get() + 1);
                let entries = asked["max_msgs_per_subject"].as_u64().unwrap() as usize;
                let created = format!("2026-01-01T00:00:{:02}Z", self.made.get());
                streams.insert(name.into(), Stream { created, entries, ..Stream::default() });
            }
            "STREAM.INFO" | "STREAM.CREATE" => {}
            "DIRECT.GET" => {
                let Some(stream) = streams.get(name) else { return false };
                self.get(net, stream, reply, &asked);
                return true;
            }
            _ => panic!("{order}"),
        }
        let answer = match streams.get(name) {
            None => "{\"error\":{\"code\":404,\"description\":\"stream not found\"}}".into(),
            Some(stream) => format!(
                "{{\"created\":\"{}\",\"config\":{{\"max_msgs_per_subject\":{},\"max_bytes\":{},\"allow_direct\":true,\
                 \"republish\":{{\"src\":\"push.t.>\",\"dest\":\"push.live.>\"}}}},\"state\":{{\"first_seq\":{},\"last_seq\":{}}}}}",
                stream.created,
                stream.entries,
                if self.script.has_bound.get() { 1 << 30 } else { -1 },
                stream.kept.first().map_or(stream.last + 1, |first| first.seq),
                stream.last,
            ),
        };
        self.give(reply, "", "", &answer, None);
        true
    }

    fn get(&self, net: &Net, stream: &Stream, reply: &str, asked: &serde_json::Value) {
        let found: Vec<&Kept> = match asked["next_by_subj"].as_str() {
            Some(subject) => {
                let from = asked["seq"].as_u64().unwrap();
                stream.kept.iter().filter(|kept| kept.subject == subject && kept.seq >= from).collect()
            }
            None => {
                let pattern = asked["multi_last"][0].as_str().unwrap();
                stream.kept.iter().filter(|kept| fits(pattern, &kept.subject)).collect()
            }
        };
        if found.is_empty() {
            return self.give(reply, "", "NATS/1.0 404 Message Not Found\r\n\r\n", "", None);
        }
        // Fewer than are asked for, so that clients ask for the rest.
        let most = 1 + net.random() as usize % 40;
        for kept in found.iter().take(most) {
            self.give(reply, "", &kept.headers(&[]), &kept.payload, None);
        }
        let left = found.len().saturating_sub(most);
        let end = format!("NATS/1.0 204 EOB\r\nNats-Num-Pending: {left}\r\n\r\n");
        self.give(reply, "", &end, "", None);
    }
}

impl Kept {
    /// Its headers, with those of a stream behind them, as servers of NATS add them.
    fn headers(&self, more: &[(&str, u64)]) -> String {
        let own = self.headers.strip_suffix("\r\n").unwrap_or("NATS/1.0\r\n");
        let more: String = more.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let Kept { seq, subject, .. } = self;
        format!("{own}Nats-Stream: push\r\nNats-Subject: {subject}\r\nNats-Sequence: {seq}\r\n{more}\r\n")
    }
}

impl Stream {
    /// A message as it is kept under the newest number.
    fn kept(&self, message: &Published<'_>) -> Kept {
        Kept {
            epoch: hash(&self.created),
            seq: self.last,
            subject: message.subject.into(),
            headers: message.headers.into(),
            payload: message.payload.into(),
        }
    }

    /// Takes a message. Its number, and as what it is kept with the number of the one before of its
    /// subject, unless it is a repeat.
    fn take(&mut self, message: &Published<'_>) -> (u64, Option<(Kept, u64)>) {
        let id = message.headers.split("\r\n").find_map(|line| line.strip_prefix("Nats-Msg-Id: "));
        if let Some(seq) = id.and_then(|id| self.ids.get(id)) {
            return (*seq, None);
        }
        self.last += 1;
        if let Some(id) = id {
            self.ids.insert(id.into(), self.last);
        }
        let of_subject = |kept: &&Kept| kept.subject == message.subject;
        let before = self.kept.iter().rev().find(of_subject).map_or(0, |kept| kept.seq);
        if self.kept.iter().filter(of_subject).count() >= self.entries
            && let Some(at) = self.kept.iter().position(|kept| kept.subject == message.subject)
        {
            self.kept.remove(at);
        }
        let kept = self.kept(message);
        self.kept.push(kept.clone());
        (self.last, Some((kept, before)))
    }
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn fits(pattern: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for part in pattern.split('.') {
        match (part, tokens.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (part, token) if token == Some(part) => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}
