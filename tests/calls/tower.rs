//! Services of tower as services.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use ringserve::framing::LengthPrefix;
use ringserve::handle::ConnId;
use ringserve::middleware::{Calls, Observe};
use ringserve::tower::{IntoReply, Request, Tower};
use ringserve::{CloseReason, Frame, ServerHandle};
use ringserve_tests::client::End;
use ringserve_tests::{Client, On, SOON, eventually, no_time_limits, watch};
use tokio::sync::Semaphore;
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};

fn serve<T>(make: impl Fn() -> T + Send + Sync + 'static) -> (ServerHandle, Calls)
where
    T: Service<Request, Response: IntoReply, Error: std::fmt::Display> + 'static,
{
    let calls = Calls::default();
    let counts = calls.clone();
    let server = On::default().server(no_time_limits()).framing(LengthPrefix::default());
    let running = server.start(move |_| Observe::new(Tower::new(make()), counts.on_shard()));
    (running.expect("the server starts"), calls)
}

fn client(running: &ServerHandle) -> Client {
    Client::connect(running.local_addrs()[0])
}

#[test]
fn request_carries_frame_peer_and_id_and_its_response_replies() {
    let ids: Arc<Mutex<Vec<ConnId>>> = Arc::default();
    let seen = ids.clone();
    let (running, _) = serve(move || {
        let seen = seen.clone();
        service_fn(move |request: Request| {
            seen.lock().unwrap().push(request.id);
            ready(Ok::<_, Infallible>(match &*request.frame {
                b"silence" => None,
                b"peer" => Some(request.peer.addr().unwrap().to_string()),
                _ => Some(String::from_utf8_lossy(&request.frame).into_owned()),
            }))
        })
    });
    let (mut one, mut other) = (client(&running), client(&running));
    one.send("silence");
    assert_eq!(one.ask_text("peer"), one.local_addr().to_string());
    assert_eq!(other.ask_text("text"), "text");
    let ids = ids.lock().unwrap().clone();
    assert!(ids.len() == 3 && ids[0] == ids[1] && ids[1] != ids[2], "{ids:?}");
    drop((one, other));
    ringserve_tests::finish(running);
}

#[test]
fn anything_that_is_bytes_can_be_a_reply() {
    let (running, _) = serve(|| {
        service_fn(|request: Request| {
            let bytes = hyper::body::Bytes::from_static(b"bytes");
            ready(Ok::<_, Infallible>((
                request.frame,
                [Some(bytes), None],
                vec![b'v'],
                ("text", &b"slice"[..], Some(())),
            )))
        })
        .map_response(|(frame, bytes, vec, (text, slice, nothing))| {
            Replies(frame, bytes, vec, text, slice, nothing)
        })
    });
    let mut client = client(&running);
    client.send("frame");
    for reply in ["frame", "bytes", "v", "text", "slice"] {
        assert_eq!(client.recv(), reply.as_bytes());
    }
    drop(client);
    ringserve_tests::finish(running);
}

struct Replies(Frame, [Option<hyper::body::Bytes>; 2], Vec<u8>, &'static str, &'static [u8], Option<()>);

impl IntoReply for Replies {
    fn reply<S: 'static>(self, cx: &ringserve::Cx<'_, S>) {
        self.0.reply(cx);
        self.1.reply(cx);
        self.2.reply(cx);
        self.3.reply(cx);
        self.4.reply(cx);
        self.5.reply(cx);
    }
}

#[test]
fn an_error_closes_its_connection_alone() {
    let (running, calls) = serve(|| {
        service_fn(|request: Request| {
            ready(if &*request.frame == b"fail" { Err("as it was told") } else { Ok(request.frame) })
        })
    });
    let (mut one, mut canary) = (client(&running), client(&running));
    one.send("fail");
    assert_eq!(one.end(), End::Fin);
    watch::closed_for(&running, CloseReason::HandlerError, 1);
    assert_eq!(canary.ask_text("canary"), "canary");
    assert_eq!(calls.counts().failed, 1);
    drop((one, canary));
    ringserve_tests::finish(running);
}

/// Becomes ready for one call each time the test allows it, and remembers only one waker, as the
/// contract permits.
struct Sluggish(Arc<Shared>);

#[derive(Default)]
struct Shared {
    ready: AtomicUsize,
    waker: Mutex<Option<Waker>>,
    asked: AtomicBool,
    served: Mutex<Vec<String>>,
}

impl Shared {
    fn is_ready_once(&self) {
        self.ready.fetch_add(1, SeqCst);
        let waker = self.waker.lock().unwrap().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Service<Request> for Sluggish {
    type Response = Frame;
    type Error = Infallible;
    type Future = Ready<Result<Frame, Infallible>>;

    fn poll_ready(&mut self, task: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        *self.0.waker.lock().unwrap() = Some(task.waker().clone());
        if self.0.ready.load(SeqCst) == 0 {
            return Poll::Pending;
        }
        self.0.asked.store(true, SeqCst);
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        assert!(self.0.asked.swap(false, SeqCst), "called without being asked whether it is ready");
        self.0.ready.fetch_sub(1, SeqCst);
        self.0.served.lock().unwrap().push(String::from_utf8_lossy(&request.frame).into_owned());
        ready(Ok(request.frame))
    }
}

#[test]
fn service_is_asked_before_each_call_and_calls_keep_order() {
    let shared: Arc<Shared> = Arc::default();
    let inside = shared.clone();
    let (running, calls) = serve(move || Sluggish(inside.clone()));
    let mut clients: Vec<Client> = (0..5).map(|_| client(&running)).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(n.to_string());
        eventually("the call begins", SOON, || calls.counts().waited == n as u64 + 1);
    }
    // The first one polls, and ends; so does one that only waits for its turn.
    clients.remove(0).reset();
    clients.remove(1).reset();
    eventually("their calls are dropped", SOON, || calls.counts().dropped == 2);
    for (client, n) in clients.iter_mut().zip(["1", "3", "4"]) {
        shared.is_ready_once();
        assert_eq!(client.recv(), n.as_bytes());
    }
    assert_eq!(*shared.served.lock().unwrap(), ["1", "3", "4"]);
    drop(clients);
    ringserve_tests::finish(running);
}

type Waits = Pin<Box<dyn Future<Output = Result<Frame, Infallible>>>>;

/// Answers when the test allows it, and counts the calls inside.
fn gated(gate: Arc<Semaphore>, inside: Arc<AtomicUsize>) -> impl Fn(Request) -> Waits + Clone {
    move |request: Request| {
        let (gate, inside) = (gate.clone(), inside.clone());
        Box::pin(async move {
            inside.fetch_add(1, SeqCst);
            gate.acquire().await.unwrap().forget();
            inside.fetch_sub(1, SeqCst);
            Ok(request.frame)
        })
    }
}

#[test]
fn layers_of_tower_work_on_a_shard() {
    let (gate, inside): (Arc<Semaphore>, Arc<AtomicUsize>) = (Arc::new(Semaphore::new(0)), Arc::default());
    let (open, count) = (gate.clone(), inside.clone());
    let (running, calls) = serve(move || {
        let service = service_fn(gated(open.clone(), count.clone()));
        ServiceBuilder::new().concurrency_limit(2).service(service)
    });
    let mut clients: Vec<Client> = (0..4).map(|_| client(&running)).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(n.to_string());
        eventually("the call begins", SOON, || calls.counts().waited == n as u64 + 1);
    }
    assert_eq!(inside.load(SeqCst), 2);
    for (n, client) in clients.iter_mut().enumerate() {
        gate.add_permits(1);
        assert_eq!(client.recv(), n.to_string().as_bytes());
    }
    drop(clients);
    ringserve_tests::finish(running);
}

#[test]
fn shed_call_is_answered_if_the_error_is_made_a_response() {
    let (gate, inside): (Arc<Semaphore>, Arc<AtomicUsize>) = (Arc::new(Semaphore::new(0)), Arc::default());
    let (open, count) = (gate.clone(), inside.clone());
    let (running, _) = serve(move || {
        let service = service_fn(gated(open.clone(), count.clone()));
        let service = ServiceBuilder::new().load_shed().concurrency_limit(1).service(service);
        service.map_result(|result: Result<Frame, BoxError>| {
            Ok::<_, BoxError>(result.map_or_else(|_| b"busy".to_vec(), |frame| frame.to_vec()))
        })
    });
    let (mut one, mut other) = (client(&running), client(&running));
    one.send("one");
    eventually("the first is inside", SOON, || inside.load(SeqCst) == 1);
    assert_eq!(other.ask_text("other"), "busy");
    gate.add_permits(1);
    assert_eq!(one.recv(), b"one");
    drop((one, other));
    ringserve_tests::finish(running);
}
