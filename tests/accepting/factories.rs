//! Factories that wait, on the real kernel.

use std::convert::Infallible;
use std::future::pending;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ringserve::factory::from_future;
use ringserve::framing::Lines;
use ringserve::listen::tcp;
use ringserve::server::Runtime;
use ringserve::service::IntoService;
use ringserve::sync::{Mesh, NotStarted};
use ringserve::{Cx, Error, Frame, Server, ServerControl, ServerHandle, Service, Shard};
use ringserve_tests::{On, SOON, eventually, no_time_limits};

/// Answers with the text with which it was created.
struct Says(String);

impl Service for Says {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        cx.reply(self.0.as_str());
        Ok(())
    }
}

fn lines(shards: usize) -> Server<Lines> {
    On::default().server(no_time_limits()).shards(shards).framing(Lines::default())
}

/// Starts on another thread.
fn start<M: IntoService<Lines>>(
    server: Server<Lines>,
    factory: impl Fn(&Shard) -> M + Send + Sync + 'static,
) -> Receiver<Result<ServerHandle, Error>> {
    let (sender, started) = channel();
    thread::spawn(move || drop(sender.send(server.start(factory))));
    started
}

/// A database that accepts all at once and answers on demand.
struct Slow {
    addr: SocketAddr,
    clients: Receiver<TcpStream>,
}

impl Slow {
    fn listen() -> Slow {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let (sender, clients) = channel();
        thread::spawn(move || listener.incoming().flatten().try_for_each(|client| sender.send(client)));
        Slow { addr, clients }
    }

    fn client(&self) -> TcpStream {
        self.clients.recv_timeout(SOON).expect("a factory connects")
    }
}

async fn greeted(shard: Shard, database: SocketAddr) -> std::io::Result<Says> {
    let mut stream = shard.connect(database).await?;
    match stream.read_frame().await? {
        Some(greeting) => Ok(Says(String::from_utf8_lossy(&greeting).into_owned())),
        None => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

fn ask(addr: SocketAddr) -> String {
    let mut client = TcpStream::connect(addr).unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    client.write_all(b"x\n").unwrap();
    let mut answer = [0; 16];
    let len = client.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..len]).into_owned()
}

/// The address is known before the server is ready, since a shard can be asked.
fn addr_of(controls: &Receiver<ServerControl>) -> (ServerControl, SocketAddr) {
    let control = controls.recv_timeout(SOON).expect("the factory is called");
    let addr = control.listeners()[0].as_ip().unwrap();
    (control, addr)
}

#[track_caller]
fn is_refused(addr: SocketAddr) {
    eventually("the port is closed", SOON, || TcpStream::connect(addr).is_err());
}

fn told(controls: Sender<ServerControl>) -> impl Fn(&Shard) + Send + Sync {
    let controls = Mutex::new(controls);
    move |shard| drop(controls.lock().unwrap().send(shard.server().clone()))
}

/// A lock file, as a factory captures it.
struct Lock(Arc<AtomicUsize>);

impl Lock {
    fn new(held: &Arc<AtomicUsize>) -> Lock {
        held.fetch_add(1, SeqCst);
        Lock(held.clone())
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Answers once it is allowed to.
pub(crate) struct Waits(pub(crate) Arc<AtomicBool>);

impl Service for Waits {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        while !self.0.load(SeqCst) {
            cx.sleep(Duration::from_millis(2)).await;
        }
        cx.reply(frame);
        Ok(())
    }
}

/// Checks the locks while one call of a server waits in its drain, on one of its shards.
fn locks_are_held(running: ServerHandle, held: &AtomicUsize, locks: usize, may_answer: &AtomicBool) {
    let addr = running.local_addrs()[0];
    let mut client = TcpStream::connect(addr).unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    client.write_all(b"x\n").unwrap();
    eventually("it is asked", SOON, || running.stats_now().counters.frames == 1);
    assert_eq!(held.load(SeqCst), locks, "as long as it serves");
    running.shutdown();
    is_refused(addr);
    assert_eq!(held.load(SeqCst), locks, "as long as it drains");
    may_answer.store(true, SeqCst);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"x\n");
    running.wait().unwrap();
    assert_eq!(held.load(SeqCst), 0);
}

#[test]
fn capture_of_a_factory_lives_until_the_last_shard_ended() {
    for runtime in [Runtime::Own, Runtime::Tokio] {
        let (held, may_answer) = (Arc::default(), Arc::<AtomicBool>::default());
        let (lock, waits) = (Lock::new(&held), may_answer.clone());
        let running = lines(2).runtime(runtime).start(move |_shard| {
            let _held = &lock;
            Waits(waits.clone())
        });
        locks_are_held(running.unwrap(), &held, 1, &may_answer);
    }
}

#[test]
fn capture_of_several_services_lives_until_the_last_shard_ended() {
    let (held, may_answer) = (Arc::default(), Arc::<AtomicBool>::default());
    let locked = || {
        let (lock, waits) = (Lock::new(&held), may_answer.clone());
        move |_shard: &Shard| {
            let _held = &lock;
            Waits(waits.clone())
        }
    };
    let any = || tcp("127.0.0.1:0").framing(Lines::default()).limits(no_time_limits().service);
    let server = Server::new().shards(2).service(any(), locked()).service(any(), locked());
    locks_are_held(server.start().unwrap(), &held, 2, &may_answer);
}

#[test]
fn task_hears_that_the_server_does_not_come_to_serve() {
    for runtime in [Runtime::Own, Runtime::Tokio] {
        for fails in [true, false] {
            let (sender, controls) = channel();
            let (tell, (say, heard)) = (told(sender), channel());
            let say = Mutex::new(say);
            let started = start(lines(2).runtime(runtime), move |shard| {
                tell(shard);
                let (waits, say) = (shard.clone(), say.lock().unwrap().clone());
                if shard.index() == 0 {
                    shard.spawn(async move {
                        let _ = say.send(None);
                        let _ = say.send(Some(waits.started().await));
                    });
                }
                let shard = shard.clone();
                from_future(async move {
                    match shard.index() {
                        1 if fails => Err("no journal"),
                        _ => pending::<Result<Says, &str>>().await,
                    }
                })
            });
            assert_eq!(heard.recv_timeout(SOON), Ok(None), "it is there before the services");
            if !fails {
                addr_of(&controls).0.shutdown();
            }
            let told = heard.recv_timeout(SOON).unwrap();
            assert!(matches!(told, Some(Err(NotStarted { .. }))), "{told:?}");
            assert!(started.recv_timeout(SOON).unwrap().is_err());
        }
    }
}

#[test]
fn factory_that_waits_for_an_upstream_serves_once_it_answers() {
    for runtime in [Runtime::Own, Runtime::Tokio] {
        let database = Slow::listen();
        let (sender, controls) = channel();
        let (addr, tell) = (database.addr, told(sender));
        let (there, is_there) = channel();
        let there = Mutex::new(there);
        let started = start(lines(2).runtime(runtime), move |shard| {
            tell(shard);
            let (shard, there) = (shard.clone(), there.lock().unwrap().clone());
            from_future(async move {
                let made = greeted(shard, addr).await;
                let _ = there.send(());
                made
            })
        });
        let (_, here) = addr_of(&controls);
        let early = thread::spawn(move || ask(here));
        let (mut first, mut second) = (database.client(), database.client());
        first.write_all(b"hello").unwrap();
        is_there.recv_timeout(SOON).expect("the first service is there");
        // Its shard does not accept before the other one can.
        assert!(!early.is_finished() && started.try_recv().is_err());
        second.write_all(b"hello").unwrap();
        let handle = started.recv_timeout(SOON).expect("the start returns").unwrap();
        assert_eq!(early.join().unwrap(), "hello\n");
        assert_eq!(ask(here), "hello\n");
        handle.shutdown();
        assert_eq!(handle.wait().unwrap().counters.opened, 2);
    }
}

#[test]
fn factory_hosted_by_tokio_waits_for_what_is_tokios() {
    let database = Slow::listen();
    let addr = database.addr;
    let started = start(lines(2).runtime(Runtime::Tokio), move |_shard| {
        from_future(async move {
            use tokio::io::AsyncReadExt;
            let mut stream = tokio::net::TcpStream::connect(addr).await?;
            let mut greeting = [0; 5];
            tokio::time::timeout(SOON, stream.read_exact(&mut greeting)).await??;
            Ok::<_, std::io::Error>(Says(String::from_utf8_lossy(&greeting).into_owned()))
        })
    });
    for _ in 0..2 {
        database.client().write_all(b"hello").unwrap();
    }
    let handle = started.recv_timeout(SOON).expect("the start returns").unwrap();
    assert_eq!(ask(handle.local_addrs()[0]), "hello\n");
    handle.shutdown();
    handle.wait().unwrap();
}

#[test]
fn error_after_a_wait_in_one_of_two_shards_ends_the_start() {
    for runtime in [Runtime::Own, Runtime::Tokio] {
        let database = Slow::listen();
        let (sender, controls) = channel();
        let (addr, tell) = (database.addr, told(sender));
        let started = start(lines(2).runtime(runtime), move |shard| {
            tell(shard);
            let shard = shard.clone();
            from_future(async move {
                let database = greeted(shard.clone(), addr).await;
                if shard.index() == 0 { pending().await } else { database }
            })
        });
        let (_, here) = addr_of(&controls);
        let clients = [database.client(), database.client()];
        drop(clients);
        let error = started.recv_timeout(SOON).expect("the start returns").unwrap_err();
        assert_eq!(error.to_string(), "no service for shard 1: unexpected end of file");
        is_refused(here);
    }
}

#[test]
fn panic_after_a_wait_is_that_of_a_factory() {
    let started = start(lines(2), |shard| {
        let shard = shard.clone();
        from_future(async move {
            shard.sleep(Duration::from_millis(1)).await;
            assert!(shard.index() == 0, "planted");
            pending::<Says>().await
        })
    });
    let error = started.recv_timeout(SOON).expect("the start returns").unwrap_err();
    assert!(matches!(error, Error::FactoryPanicked { shard: 1, .. }), "{error}");
}

#[test]
fn order_to_stop_ends_a_start_that_waits() {
    for runtime in [Runtime::Own, Runtime::Tokio] {
        let (sender, controls) = channel();
        let tell = told(sender);
        let held = Arc::new(());
        let of_all = Arc::downgrade(&held);
        let started = start(lines(2).runtime(runtime), move |shard| {
            tell(shard);
            let held = held.clone();
            from_future(async move {
                let _held = held;
                pending::<Says>().await
            })
        });
        let (control, here) = addr_of(&controls);
        control.shutdown();
        let error = started.recv_timeout(SOON).expect("the start returns").unwrap_err();
        assert!(matches!(error, Error::Interrupted), "{error}");
        is_refused(here);
        assert_eq!(of_all.strong_count(), 0, "a future or a factory is left");
    }
}

#[test]
fn future_of_run_until_ends_a_start_that_waits() {
    let (sender, called) = tokio::sync::mpsc::unbounded_channel();
    let mut called = called;
    let ended = lines(2).run_until(
        async move {
            for _ in 0..2 {
                called.recv().await;
            }
        },
        move |_shard| {
            let sender = sender.clone();
            from_future(async move {
                let _ = sender.send(());
                pending::<Says>().await
            })
        },
    );
    assert_eq!(ended.unwrap().counters.opened, 0);
}

#[test]
fn future_of_run_until_that_panics_ends_a_start_that_waits() {
    let ran = std::panic::catch_unwind(|| {
        let _ = lines(2).run_until(async { panic!("planted") }, |_shard| from_future(pending::<Says>()));
    });
    assert_eq!(ran.unwrap_err().downcast_ref::<&str>(), Some(&"planted"));
}

/// A factory that blocks its thread cannot be ended, and is left alone.
#[test]
fn start_timeout_ends_a_start_whatever_it_waits_for() {
    for blocks in [false, true] {
        let limits = ringserve::limits::ServerLimits::default().start_timeout(Duration::from_millis(50));
        let (release, released) = channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let started = start(lines(2).server_limits(limits), move |shard| {
            if blocks && shard.index() == 1 {
                let _ = released.lock().unwrap().recv();
            }
            let index = shard.index();
            from_future(async move {
                if index == 1 {
                    pending::<()>().await;
                }
                Says(String::new())
            })
        });
        let error = started.recv_timeout(SOON).expect("the start returns").unwrap_err();
        assert!(matches!(error, Error::StartTimeout { shard: 1, .. }), "{error}");
        drop(release);
    }
}

/// Futures begin when every factory returned: registrations of factories are there for them.
#[test]
fn future_finds_a_shard_whose_factory_took_longer() {
    let mesh = Mesh::<u64, u64>::new();
    let (slow, is_slow) = channel();
    let (slow, is_slow) = (Mutex::new(slow), Mutex::new(is_slow));
    let (begins, begun) = channel();
    let (begins, begun) = (Mutex::new(begins), Mutex::new(begun));
    let started = start(lines(2), move |shard| {
        if shard.index() == 1 {
            // The other one's factory has returned, and its future must not begin meanwhile.
            is_slow.lock().unwrap().recv_timeout(SOON).unwrap();
            let early = begun.lock().unwrap().recv_timeout(Duration::from_millis(50));
            assert_eq!(early, Err(RecvTimeoutError::Timeout), "a future begins before the last factory");
        }
        mesh.register(shard, |_from, number| 2 * number);
        let _ = slow.lock().unwrap().send(());
        let (shard, mesh, begins) = (shard.clone(), mesh.clone(), begins.lock().unwrap().clone());
        from_future(async move {
            let _ = begins.send(());
            let answer = mesh.ask(1 - shard.index(), 21).await;
            answer.map(|answer| Says(answer.to_string()))
        })
    });
    let handle = started.recv_timeout(SOON).expect("the start returns").unwrap();
    assert_eq!(ask(handle.local_addrs()[0]), "42\n");
    handle.shutdown();
    handle.wait().unwrap();
}
