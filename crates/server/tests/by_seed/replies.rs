//! Replies of every form by seed, to peers that take them slowly, partly or not at all: every byte
//! arrives once and in order, and owned bytes are kept until they are sent, and no longer.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes};
use ringserve_server::framing::{LengthPrefix, Payload};
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{Cx, Frame, Limits, LocalHandle, Server, Service, SharedPayload};

/// Forms in which a service can answer.
const FORMS: u8 = 9;

/// Bytes that differ from their neighbours and from those of other lengths.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251 + len) as u8).collect()
}

/// Owns bytes, and says when it is dropped; one of an odd length panics then.
struct Owner(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
        assert!(self.0.len().is_multiple_of(2), "planted: an owner");
    }
}

/// Answers with as many bytes as it is asked for, in the form it is asked for.
struct Answers {
    /// Owners that live.
    owners: Arc<AtomicUsize>,
    /// Replies that were given up.
    given_up: Rc<Cell<u64>>,
}

impl Answers {
    fn owned(&self, len: usize) -> Bytes {
        self.owners.fetch_add(1, Ordering::SeqCst);
        Bytes::from_owner(Owner(pattern(len), self.owners.clone()))
    }
}

impl Service for Answers {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let (form, len) = (frame[0], u32::from_be_bytes(frame[1..5].try_into().unwrap()) as usize);
        let bytes = pattern(len);
        match form {
            0 => cx.reply(&bytes),
            1 => cx.reply(bytes),
            2 => cx.reply(self.owned(len)),
            3 => cx.reply(Arc::<[u8]>::from(bytes)),
            4 => cx.reply_with(|out| bytes.chunks(1000).for_each(|chunk| out.put_slice(chunk))),
            5 => cx.reply_parts([Payload::from(&bytes[..len / 3]), self.owned(len).slice(len / 3..).into()]),
            6 => {
                let given_up = cx.reply_with(|out| {
                    out.put_owned(self.owned(len));
                    out.put_u8(6);
                    Err("no")
                });
                assert_eq!(given_up, Err("no"));
                self.given_up.set(self.given_up.get() + 1);
                cx.reply(&bytes);
            }
            7 => cx.write_with(|out| {
                out.put_u32(len as u32);
                out.put_owned(self.owned(len));
            }),
            _ => {
                let (handle, shared): (LocalHandle, _) = (cx.local_handle(), SharedPayload::new(bytes));
                // A push that is refused is sent as a reply, which never is.
                if handle.push_shared(&shared).is_err() {
                    cx.reply_shared(&shared);
                }
            }
        }
        cx.ready().await;
        Ok(())
    }
}

fn question(form: u8, len: usize) -> Vec<u8> {
    [&[0, 0, 0, 5, form][..], &(len as u32).to_be_bytes()].concat()
}

#[test]
fn replies_of_every_form_arrive_whole_at_slow_peers() {
    let seeds = if cfg!(debug_assertions) { 30 } else { 600 };
    let planted = |message: &str| message.contains("planted");
    let answered = Rc::new(Cell::new(0));
    let count = answered.clone();
    Sim::seeds(seeds).faults(Faults::all()).allow_panics(planted).run(move |sim| {
        let (owners, given_up) = (Arc::new(AtomicUsize::new(0)), Rc::new(Cell::new(0)));
        let (of_shards, gave_up, answered) = (owners.clone(), given_up.clone(), count.clone());
        let limits = Limits::default().outbox_bytes_high(100_000).outbox_bytes_low(20_000);
        let server = Server::bind("10.0.0.1:7000").framing(LengthPrefix::default()).limits(limits);
        let addr =
            sim.serve(server, move |_shard| Answers { owners: of_shards.clone(), given_up: gave_up.clone() });
        sim.expect_losses();
        for n in 0..6 {
            let answered = answered.clone();
            sim.client(format!("c{n}"), async move |net| {
                let draw = |below: u64| net.random() % below;
                let Ok(mut me) = net.connect(addr).await else { return Ok(()) };
                let (mut asked, mut questions) = (Vec::new(), Vec::new());
                for _ in 0..1 + draw(12) {
                    let len = [0, 1, 500, 5_000, 32_767, 32_768, 60_000, 150_001][draw(8) as usize];
                    let form = draw(FORMS.into()) as u8;
                    asked.push((form, len));
                    questions.extend(question(form, len));
                }
                if me.send(&questions).await.is_err() {
                    return Ok(());
                }
                for (form, len) in asked {
                    net.sleep(Duration::from_millis(draw(300))).await;
                    let Ok(header) = me.exactly(4).await else { return Ok(()) };
                    assert_eq!(header, (len as u32).to_be_bytes(), "form {form}");
                    let Ok(payload) = me.exactly(len).await else { return Ok(()) };
                    assert!(payload == pattern(len), "form {form}, {len} bytes");
                    answered.set(answered.get() + 1);
                }
                Ok(())
            });
        }
        sim.run_for(Duration::from_secs(600));
        sim.finish();
        assert_eq!(owners.load(Ordering::SeqCst), 0, "owned bytes are kept");
    });
    assert!(answered.get() > seeds * 5, "{} answers", answered.get());
}

/// A reply whose length its prefix cannot say closes the connection after what was queued before
/// it.
#[test]
fn reply_longer_than_its_prefix_says_is_not_sent() {
    struct TooLong;
    impl Service for TooLong {
        type Session = ();
        type Error = Infallible;

        async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
            cx.reply_with(|out| write!(out, "{:>5}", "ok").unwrap());
            cx.reply_with(|out| out.put_bytes(b'x', 256));
            Ok(())
        }
    }
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        let server = Server::bind("10.0.0.1:7000").framing(LengthPrefix::bytes(1));
        let addr = sim.serve(server, |_shard| TooLong);
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send(b"\x01?").await?;
            assert_eq!(me.closed().await?, b"\x05   ok");
            Ok(())
        });
        sim.run_for(Duration::from_secs(60));
    });
}

/// Bodies of HTTP/1.1 that leave without a copy, in pieces and behind one another.
#[cfg(feature = "http")]
#[test]
fn large_bodies_arrive_whole_at_slow_peers() {
    use ringserve_server::http;
    use ringserve_server::http::hyper::body::Incoming;
    use ringserve_server::http::hyper::service::service_fn;
    use ringserve_server::http::hyper::{Request, Response};

    fn text(len: usize) -> String {
        pattern(len).into_iter().map(|byte| char::from(b'a' + byte % 26)).collect()
    }
    async fn answer(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
        Ok(Response::new(text(request.uri().path()[1..].parse().unwrap())))
    }
    let answered = Rc::new(Cell::new(0));
    let count = answered.clone();
    Sim::seeds(if cfg!(debug_assertions) { 15 } else { 300 }).faults(Faults::all()).run(move |sim| {
        let addr = sim.serve(Server::bind("10.0.0.1:7000"), |_shard| http(service_fn(answer)));
        sim.expect_losses();
        for n in 0..4 {
            let answered = count.clone();
            sim.client(format!("c{n}"), async move |net| {
                let Ok(mut me) = net.connect(addr).await else { return Ok(()) };
                let draw = |below: u64| net.random() % below;
                for _ in 0..1 + draw(3) {
                    let len = [0, 100, 32_767, 32_768, 100_000, 700_001, 1_200_003][draw(7) as usize];
                    if me.send(format!("GET /{len} HTTP/1.1\r\nHost: a\r\n\r\n")).await.is_err() {
                        return Ok(());
                    }
                    while let Some(line) = me.line().await.ok().flatten() {
                        // It would be the system's, which no seed decides.
                        assert!(!line.starts_with("date:"), "{line}");
                        if line.trim_end().is_empty() {
                            break;
                        }
                    }
                    net.sleep(Duration::from_millis(draw(200))).await;
                    let Ok(body) = me.exactly(len).await else { return Ok(()) };
                    assert!(body == text(len).into_bytes(), "a body of {len} bytes");
                    answered.set(answered.get() + 1);
                }
                Ok(())
            });
        }
        sim.run_for(Duration::from_secs(600));
    });
    assert!(answered.get() > 30, "{} bodies", answered.get());
}

/// Bodies of HTTP that wait for memory that others keep.
#[cfg(feature = "http")]
mod http_bodies {
    use ringserve_server::http;
    use ringserve_server::http::hyper::body::Incoming;
    use ringserve_server::http::hyper::service::service_fn;
    use ringserve_server::http::hyper::{Request, Response};
    use ringserve_server::limits::ServerLimits;
    use ringserve_server::testing::{Net, SimServer};

    use super::*;

    async fn answer(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
        Ok(Response::new("b".repeat(request.uri().path()[1..].parse().unwrap())))
    }

    /// A server whose memory a peer keeps that takes some all the time, for `seconds`, and so is
    /// not closed for others.
    fn used_up(sim: &Sim, seconds: u64) -> SimServer {
        let server = Server::bind("10.0.0.1:7000")
            .limits(Limits::default().outbox_bytes_max(4 << 20))
            .server_limits(ServerLimits::default().held_bytes_max(4 << 20));
        let running = sim.start(server, |_shard| http(service_fn(answer))).expect("the server starts");
        sim.background("slow", async move |net| {
            let mut me = net.connect("10.0.0.1:7000").await?;
            me.send("GET /3900000 HTTP/1.1\r\nHost: a\r\n\r\n").await?;
            for _ in 0..seconds {
                me.exactly(4000).await?;
                net.sleep(Duration::from_secs(1)).await;
            }
            Ok(())
        });
        sim.run_for(Duration::from_secs(1));
        running
    }

    #[test]
    fn wait_for_memory_has_an_end() {
        Sim::seeds(10).faults(Faults::none()).run(|sim| {
            let _running = used_up(sim, 60);
            sim.client("waits", async move |net| {
                let mut me = net.connect("10.0.0.1:7000").await?;
                me.send("GET /200000 HTTP/1.1\r\nHost: a\r\n\r\n").await?;
                let (asked, mut came) = (net.now(), 0);
                while let Ok(some) = me.some().await
                    && !some.is_empty()
                {
                    came += some.len();
                }
                let waited = net.now() - asked;
                assert!(came < 200_000, "{came} bytes");
                assert!((5..=15).contains(&waited.as_secs()), "{waited:?}");
                Ok(())
            });
            sim.run_for(Duration::from_secs(60));
        });
    }

    #[test]
    fn granted_memory_goes_back_once_the_body_counts() {
        Sim::seeds(10).faults(Faults::none()).run(|sim| {
            let running = used_up(sim, 2);
            let ask = |name: &str| {
                sim.background(name, async move |net: Net| {
                    let mut me = net.connect("10.0.0.1:7000").await?;
                    me.send("GET /600000 HTTP/1.1\r\nHost: a\r\n\r\n").await?;
                    net.sleep(Duration::from_secs(60)).await;
                    Ok(())
                });
            };
            ask("waits");
            sim.run_for(Duration::from_secs(5));
            let held = running.stats().shards[0].held_bytes;
            assert!(held > 0);
            ask("need not wait");
            sim.run_for(Duration::from_secs(5));
            let both = running.stats().shards[0].held_bytes;
            assert!(both.abs_diff(2 * held) < 4096, "{both}, and {held} before");
        });
    }
}
