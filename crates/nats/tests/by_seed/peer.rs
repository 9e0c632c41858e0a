//! Simulated servers of NATS, which do what a test says.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use ringserve::testing::{ClientStream, Net, Sim};

/// The behaviour of a server.
#[derive(Default)]
pub struct Script {
    /// No port is open, and connections are reset.
    pub is_down: Cell<bool>,
    /// It reads, and says nothing.
    pub is_silent: Cell<bool>,
    /// The text that it sends in the place of the first PONG.
    pub refuses: RefCell<Option<&'static str>>,
    /// It takes no messages with headers.
    pub has_no_headers: Cell<bool>,
    /// Further fields of INFO, each with a comma before it.
    pub info: RefCell<String>,
    /// Subjects to which none may subscribe.
    pub forbids: RefCell<Option<&'static str>>,
    /// Bytes of a piece that it sends; 0 for all.
    pub piece: Cell<usize>,
}

/// The operations that a server, and those of its cluster, received.
#[derive(Default)]
pub struct Heard {
    pub connects: RefCell<Vec<String>>,
    /// Subject, reply and payload with its headers.
    pub published: RefCell<Vec<(String, String, String)>>,
    pub unsubscribed: Cell<usize>,
}

pub struct Peer {
    pub script: Script,
    pub heard: Heard,
    connections: RefCell<BTreeMap<usize, Rc<Connection>>>,
    accepted: Cell<usize>,
    /// Answers what is published to subjects that begin with `ask.`, by what the test says.
    pub answers: RefCell<Option<Answers>>,
}

/// Answers to a question, each after a time.
pub type Answers = Box<dyn Fn(&Net, &str) -> Vec<(Duration, String)>>;

#[derive(Default)]
struct Connection {
    out: RefCell<Vec<u8>>,
    waker: Cell<Option<Waker>>,
    is_over: Cell<bool>,
    is_reset: Cell<bool>,
    subs: RefCell<BTreeMap<u64, (String, Option<u64>)>>,
}

impl Connection {
    fn say(&self, bytes: impl AsRef<[u8]>) {
        self.out.borrow_mut().extend_from_slice(bytes.as_ref());
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Peer {
    pub fn start(sim: &Sim, addr: &'static str) -> Rc<Peer> {
        let peer = Rc::new(Peer {
            script: Script::default(),
            heard: Heard::default(),
            connections: RefCell::default(),
            accepted: Cell::new(0),
            answers: RefCell::default(),
        });
        let this = peer.clone();
        sim.background(addr, async move |net| {
            loop {
                while this.script.is_down.get() {
                    net.sleep(Duration::from_millis(20)).await;
                }
                let mut listener = net.listen(addr)?;
                while !this.script.is_down.get() {
                    if let Ok(stream) = net.timeout(Duration::from_millis(20), listener.accept()).await {
                        net.spawn(this.clone().serve(net.clone(), stream));
                    }
                }
            }
        });
        peer
    }

    /// Connections that were accepted, and those that are there.
    pub fn accepted(&self) -> usize {
        self.accepted.get()
    }

    pub fn connections(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Ends all connections, with a reset or a FIN.
    pub fn cut(&self, is_reset: bool) {
        for connection in self.connections.borrow().values() {
            connection.is_reset.set(is_reset);
            connection.is_over.set(true);
            connection.wake();
        }
    }

    /// Says bytes on all connections.
    pub fn say(&self, bytes: impl AsRef<[u8]>) {
        self.connections.borrow().values().for_each(|connection| connection.say(bytes.as_ref()));
    }

    /// Publishes a message to those who subscribed.
    pub fn publish(&self, subject: &str, payload: &str) {
        for connection in self.connections.borrow().values() {
            let mut out = Vec::new();
            connection.subs.borrow_mut().retain(|sid, (pattern, left)| {
                if fits(pattern, subject) {
                    out.extend_from_slice(
                        format!("MSG {subject} {sid} {}\r\n{payload}\r\n", payload.len()).as_bytes(),
                    );
                    *left = left.map(|left| left - 1);
                }
                *left != Some(0)
            });
            if !out.is_empty() {
                connection.say(out);
            }
        }
    }

    pub fn info(&self) -> String {
        format!(
            "INFO {{\"server_id\":\"X\",\"version\":\"2\",\"headers\":{},\"max_payload\":1000{}}}\r\n",
            !self.script.has_no_headers.get(),
            self.script.info.borrow()
        )
    }

    async fn serve(self: Rc<Peer>, net: Net, mut stream: ClientStream) {
        let number = self.accepted.get();
        self.accepted.set(number + 1);
        let connection = Rc::new(Connection::default());
        if !self.script.is_silent.get() {
            connection.say(self.info());
        }
        self.connections.borrow_mut().insert(number, connection.clone());
        self.talk(&net, &mut stream, &connection).await;
        self.connections.borrow_mut().remove(&number);
        if connection.is_reset.get() || self.script.is_down.get() {
            stream.reset();
        }
    }

    async fn talk(self: &Rc<Peer>, net: &Net, stream: &mut ClientStream, connection: &Rc<Connection>) {
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
                    if piece < out.len() {
                        net.sleep(Duration::from_micros(net.random() % 2000)).await;
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
            if !self.script.is_silent.get() {
                while self.operation(net, &mut unread, connection) {}
            }
        }
    }

    /// Takes one operation. False if there is no whole one.
    fn operation(self: &Rc<Peer>, net: &Net, unread: &mut Vec<u8>, connection: &Rc<Connection>) -> bool {
        let Some(end) = unread.windows(2).position(|two| two == b"\r\n") else { return false };
        let line = String::from_utf8(unread[..end].to_vec()).expect("a client sends text");
        let words: Vec<&str> = line.split(' ').collect();
        let mut taken = end + 2;
        match words[0] {
            "CONNECT" => self.heard.connects.borrow_mut().push(line[8..].to_owned()),
            "PING" => match &*self.script.refuses.borrow() {
                Some(error) => connection.say(format!("-ERR '{error}'\r\n")),
                None => connection.say("PONG\r\n"),
            },
            "PONG" => {}
            "SUB" => {
                let sid = words.last().unwrap().parse().unwrap();
                match &*self.script.forbids.borrow() {
                    Some(subject) if words[1] == *subject => connection
                        .say(format!("-ERR 'Permissions Violation for Subscription to \"{subject}\"'\r\n")),
                    _ => _ = connection.subs.borrow_mut().insert(sid, (words[1].to_owned(), None)),
                }
            }
            "UNSUB" => {
                self.heard.unsubscribed.set(self.heard.unsubscribed.get() + 1);
                let sid = words[1].parse().unwrap();
                match (words.get(2), connection.subs.borrow_mut().get_mut(&sid)) {
                    (Some(after), Some(sub)) => sub.1 = Some(after.parse().unwrap()),
                    (Some(_), None) => {}
                    (None, _) => {}
                }
                if words.len() == 2 {
                    connection.subs.borrow_mut().remove(&sid);
                }
            }
            "HPUB" if self.script.has_no_headers.get() => {
                connection.say("-ERR 'message headers not supported'\r\n");
                taken = unread.len();
            }
            "PUB" | "HPUB" => {
                let size: usize = words.last().unwrap().parse().unwrap();
                if unread.len() < taken + size + 2 {
                    return false;
                }
                let payload = String::from_utf8(unread[taken..taken + size].to_vec()).unwrap();
                assert_eq!(unread[taken + size..taken + size + 2], *b"\r\n", "{line}");
                taken += size + 2;
                let has_reply = words.len() == if words[0] == "PUB" { 4 } else { 5 };
                let reply = if has_reply { words[2] } else { "" };
                self.published(net, words[1], reply, &payload, connection);
            }
            _ => panic!("no operation of a client: {line:?}"),
        }
        unread.drain(..taken);
        true
    }

    fn published(
        self: &Rc<Peer>,
        net: &Net,
        subject: &str,
        reply: &str,
        payload: &str,
        asker: &Rc<Connection>,
    ) {
        self.heard.published.borrow_mut().push((subject.to_owned(), reply.to_owned(), payload.to_owned()));
        self.publish(subject, payload);
        if subject == "nothing" && !reply.is_empty() {
            asker.say(format!("HMSG {reply} 0 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"));
        }
        let Some(answers) = &*self.answers.borrow() else { return };
        if !subject.starts_with("ask.") {
            return;
        }
        for (after, answer) in answers(net, payload) {
            let (net, to, asker) = (net.clone(), reply.to_owned(), asker.clone());
            let at = net.clone();
            net.spawn(async move {
                at.sleep(after).await;
                asker.say(format!("MSG {to} 0 {}\r\n{answer}\r\n", answer.len()));
            });
        }
    }
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
