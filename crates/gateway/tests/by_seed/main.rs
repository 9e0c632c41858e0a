//! Gateways by seed, in virtual time, before backends that answer, lie and end.

mod failing;
mod http2;
mod passing;
mod reloads;
mod rules;
mod smuggling;
mod tunnels;

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve::testing::{ClientStream, Net, Sim, SimServer};
use ringserve::upstream::Upstream;
use ringserve::{Server, http};
use ringserve_gateway::{Gateway, HttpUpstream, Route, RouteTable, Routes};

const SECOND: Duration = Duration::from_secs(1);
const FRONT: &str = "10.0.0.1:80";
const ADDRS: [&str; 2] = ["10.0.0.11:80", "10.0.0.12:80"];

/// A request as a backend read it.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Its lines, without the last one, which is empty.
    head: Vec<String>,
    body: Vec<u8>,
    /// It came to its end.
    is_whole: bool,
}

impl Seen {
    /// The value of a field that is there once at most.
    fn field(&self, name: &str) -> Option<&str> {
        let begin = format!("{name}: ");
        let mut values = self.head.iter().filter_map(|line| line.strip_prefix(&begin));
        let value = values.next();
        assert_eq!(values.next(), None, "{name} is there twice: {:?}", self.head);
        value
    }
}

/// The behavior of a backend for a request.
#[derive(Clone, Debug)]
enum Act {
    /// It sends this, and goes on.
    Send(String),
    /// It sends this, and ends the connection.
    SendAndEnd(String),
    SendAndReset(String),
    After(Duration, Box<Act>),
    /// It sends the first, waits, and goes on with the second.
    Pause(String, Duration, Box<Act>),
    /// It sends this, and then each byte back that comes.
    Echo(String),
}

/// A backend with a script.
struct Backend {
    seen: RefCell<Vec<Seen>>,
    accepted: Cell<usize>,
    /// Answers that were sent whole.
    sent: Cell<usize>,
    /// Reads of bodies that the script wants: false leaves them.
    reads_bodies: Cell<bool>,
}

impl Backend {
    fn start(sim: &Sim, addr: &'static str, script: impl Fn(&Seen, usize) -> Act + 'static) -> Rc<Backend> {
        let backend = Rc::new(Backend {
            seen: RefCell::default(),
            accepted: Cell::default(),
            sent: Cell::default(),
            reads_bodies: Cell::new(true),
        });
        let (this, script) = (backend.clone(), Rc::new(script));
        sim.background(addr, async move |net| {
            let mut listener = net.listen(addr)?;
            loop {
                let stream = listener.accept().await;
                this.accepted.set(this.accepted.get() + 1);
                let (this, script, net2) = (this.clone(), script.clone(), net.clone());
                net.spawn(async move { _ = this.serve(net2, stream, &*script).await });
            }
        });
        backend
    }

    async fn serve(
        &self,
        net: Net,
        mut stream: ClientStream,
        script: &dyn Fn(&Seen, usize) -> Act,
    ) -> io::Result<()> {
        while let Some(head) = head(&mut stream).await? {
            let (at, mut seen) = (self.seen.borrow().len(), Seen { head, ..Seen::default() });
            self.seen.borrow_mut().push(seen.clone());
            if self.reads_bodies.get() {
                let read = body(&mut stream, &seen.head, true).await;
                seen.body = read.bytes;
                seen.is_whole = read.is_whole;
                self.seen.borrow_mut()[at] = seen.clone();
                if !seen.is_whole {
                    return Ok(());
                }
            }
            let mut act = script(&seen, at);
            loop {
                act = match act {
                    Act::Send(bytes) => {
                        stream.send(bytes).await?;
                        self.sent.set(self.sent.get() + 1);
                        break;
                    }
                    Act::SendAndEnd(bytes) => {
                        stream.send(bytes).await?;
                        return Ok(());
                    }
                    Act::SendAndReset(bytes) => {
                        stream.send(bytes).await?;
                        net.sleep(SECOND / 100).await;
                        stream.reset();
                        return Ok(());
                    }
                    Act::After(time, act) => {
                        net.sleep(time).await;
                        *act
                    }
                    Act::Pause(bytes, time, act) => {
                        stream.send(bytes).await?;
                        net.sleep(time).await;
                        *act
                    }
                    Act::Echo(bytes) => {
                        stream.send(bytes).await?;
                        loop {
                            let bytes = stream.some().await?;
                            if bytes.is_empty() {
                                return Ok(());
                            }
                            stream.send(bytes).await?;
                        }
                    }
                };
            }
        }
        Ok(())
    }

    fn requests(&self) -> usize {
        self.seen.borrow().len()
    }

    fn last(&self) -> Seen {
        self.seen.borrow().last().cloned().expect("a request")
    }
}

/// The lines of a head. `None` at the end.
async fn head(stream: &mut ClientStream) -> io::Result<Option<Vec<String>>> {
    let mut lines = Vec::new();
    while let Some(line) = stream.line().await? {
        if line.is_empty() {
            return Ok(Some(lines));
        }
        lines.push(line);
    }
    if lines.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[derive(Debug, Default)]
struct Body {
    bytes: Vec<u8>,
    trailers: Vec<String>,
    is_whole: bool,
}

/// A body, by what its head says of its length.
async fn body(stream: &mut ClientStream, head: &[String], is_request: bool) -> Body {
    let field = |name: &str| head.iter().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let mut body = Body::default();
    if let Some(len) = field("content-length: ") {
        let len: usize = len.parse().expect("a length");
        while body.bytes.len() < len {
            match stream.exactly(1).await {
                Ok(byte) => body.bytes.extend(byte),
                Err(_) => return body,
            }
        }
        body.is_whole = true;
    } else if field("transfer-encoding: ").is_some_and(|coding| coding == "chunked") {
        body.is_whole = chunks(stream, &mut body).await.is_ok();
    } else if !is_request {
        loop {
            match stream.some().await {
                Ok(bytes) if bytes.is_empty() => break body.is_whole = true,
                Ok(bytes) => body.bytes.extend(bytes),
                Err(_) => break,
            }
        }
    } else {
        body.is_whole = true;
    }
    body
}

async fn chunks(stream: &mut ClientStream, body: &mut Body) -> io::Result<()> {
    loop {
        let line = stream.line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let len = usize::from_str_radix(&line, 16).map_err(|_| io::ErrorKind::InvalidData)?;
        if len == 0 {
            break;
        }
        body.bytes.extend(stream.exactly(len).await?);
        stream.exactly(2).await?;
    }
    while let Some(line) = stream.line().await? {
        if line.is_empty() {
            return Ok(());
        }
        body.trailers.push(line);
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// An answer as a client read it.
#[derive(Debug, Default)]
struct Answer {
    status: u16,
    head: Vec<String>,
    body: Body,
}

impl Answer {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body.bytes).into_owned()
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.head.iter().find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }
}

/// The next answer.
async fn answer(me: &mut ClientStream) -> io::Result<Answer> {
    let head = head(me).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let status = head[0].split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let has_none = status < 200 || status == 204 || status == 304;
    let body = if has_none { Body::default() } else { body(me, &head, false).await };
    Ok(Answer { status, head, body })
}

async fn ask(me: &mut ClientStream, request: impl AsRef<[u8]>) -> io::Result<Answer> {
    me.send(request).await?;
    answer(me).await
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: a.b\r\n\r\n")
}

fn post(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: a.b\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// Answers each request with its target.
fn says_its_target(seen: &Seen, _at: usize) -> Act {
    let target = seen.head[0].split(' ').nth(1).expect("a target");
    Act::Send(ok(target))
}

fn upstream(backends: usize) -> HttpUpstream {
    HttpUpstream::new(Upstream::new("web", ADDRS[..backends].iter().copied()))
}

fn all_to(upstream: &HttpUpstream) -> Routes {
    routes([("/*", Route::to(upstream))])
}

fn routes<'r>(all: impl IntoIterator<Item = (&'r str, Route)>) -> Routes {
    let table = all
        .into_iter()
        .fold(RouteTable::new(), |table, (pattern, route)| table.route(pattern, route).expect("a pattern"));
    Routes::new(table).expect("all can be reached")
}

/// A gateway with these routes.
fn start(sim: &Sim, routes: &Routes) -> SimServer {
    start_with(sim, routes, |gateway| gateway)
}

fn start_with(sim: &Sim, routes: &Routes, with: impl Fn(Gateway) -> Gateway + 'static) -> SimServer {
    let routes = routes.clone();
    let server = Server::bind(FRONT).shards(1);
    let server = sim.start(server, move |shard| http(with(Gateway::new(&routes, shard))));
    // The backends begin to listen, and there is something in the budget of retries.
    sim.run_for(SECOND);
    server.expect("it starts")
}
