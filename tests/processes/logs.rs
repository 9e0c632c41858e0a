//! A log whose pipe is full or has no reader: only its own thread waits for it.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use ringserve::admin::{Admin, AdminRoute};
use ringserve::framing::Lines;
use ringserve::log::{self, LogOptions};
use ringserve::{Cx, Frame, Service};
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::{On, SOON, eventually, no_time_limits};
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use rustix::stdio::{dup2_stderr, dup2_stdout};

/// Variable with the child's kind of log, and the address of its admin endpoint.
const LOG: &str = "RINGSERVE_TEST_LOG";
const ADMIN: &str = "RINGSERVE_TEST_LOG_ADMIN";

/// The most lines that wait for a reader, in a child with the log of `ringserve`.
const LINES_MAX: usize = 100;

/// Bytes that fill a pipe. A line, so that later ones are whole.
const FILLER: &[u8; 64] = b"...............................................................\n";

struct Misbehaves;

impl Service for Misbehaves {
    type Session = ();
    type Error = &'static str;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), &'static str> {
        match &*line {
            // Until the watchdog reports it.
            b"block" => eventually("the stall is told", SOON, || {
                cx.shard().server().stalls().iter().any(|stall| stall.ongoing)
            }),
            b"panic" => panic!("planted"),
            b"fail" => return Err("planted"),
            b"say" => (0..LINES_MAX / 2).for_each(|n| tracing::info!(n, "a line of the program")),
            _ => {}
        }
        cx.reply(line);
        Ok(())
    }
}

/// Serves until a signal, with an admin endpoint.
fn serve(parent: &File) {
    let limits = no_time_limits().drain_timeout(Duration::from_secs(2));
    let server = On::default().server(limits).framing(Lines::default());
    let (tells, tells_of_orders) = (parent.try_clone().unwrap(), parent.try_clone().unwrap());
    let (ends, end) = mpsc::channel();
    let end = Mutex::new(end);
    let long = AdminRoute::post("/long", move |_request| {
        say(&tells_of_orders, "a long order".to_owned());
        end.lock().unwrap().recv_timeout(SOON).map_or("late", |()| "done")
    });
    let end = AdminRoute::post("/end", move |_request| ends.send(()).map_or("late", |()| "done"));
    let admin = Admin::new(std::env::var(ADMIN).unwrap()).route(long).route(end);
    let ended = server.admin(admin).serve(move |shard| {
        let addr = &shard.server().listeners()[0];
        say(&tells, format!("serves at {addr}"));
        Misbehaves
    });
    say(parent, format!("serve returned {ended:?}"));
}

/// Written at once, since the log may go there too.
fn say(mut parent: &File, line: String) {
    parent.write_all(format!("\n{line}\n").as_bytes()).unwrap();
}

/// The child: its stderr is a pipe, which it treats as ordered.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes logs::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let parent = File::from(io::stdout().as_fd().try_clone_to_owned().unwrap());
    let (reader, writer) = io::pipe().unwrap();
    dup2_stderr(&writer).unwrap();
    let how = std::env::var(LOG).unwrap();
    let is_dead = how.starts_with("dead");
    if is_dead {
        dup2_stdout(&writer).unwrap();
    }
    drop(writer);
    let reader = (!is_dead).then(|| File::from(OwnedFd::from(reader)));
    match how.ends_with("ringserve") {
        true => log::init(LogOptions::default().stderr().lines_max(LINES_MAX)).unwrap(),
        false => tracing_subscriber::fmt().with_ansi(false).with_writer(io::stderr).init(),
    }
    if let Some(reader) = reader {
        let parent = parent.try_clone().unwrap();
        thread::spawn(move || follow(reader, parent));
    }
    serve(&parent);
}

/// The child's treatment of its pipe.
fn follow(reader: File, parent: File) {
    let mut reader = Some(reader);
    for order in io::stdin().lines().map_while(Result::ok) {
        match order.as_str() {
            "fill" => {
                // Another description of the same pipe, so that it blocks threads that log.
                let nonblocking = OFlags::NONBLOCK.bits() as i32;
                let pipe = File::options().write(true).custom_flags(nonblocking).open("/proc/self/fd/2");
                let mut pipe = pipe.unwrap();
                while pipe.write(FILLER).is_ok() {}
                say(&parent, "filled".to_owned());
            }
            "log" => {
                (0..10 * LINES_MAX).for_each(|n| tracing::info!(n, "a line of the program"));
                say(&parent, "logged".to_owned());
            }
            "read" => {
                let (reader, parent) = (BufReader::new(reader.take().unwrap()), parent.try_clone().unwrap());
                thread::spawn(move || {
                    for line in reader.lines().map_while(Result::ok).filter(|line| !line.starts_with("...")) {
                        say(&parent, format!("read {line}"));
                    }
                });
            }
            order => unreachable!("no order: {order}"),
        }
    }
}

/// The child: lines of JSON on stdout.
#[test]
#[ignore = "the child process of `lines_of_json_have_panics_and_the_level_follows_the_endpoint`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes logs::child_logs_json -- --exact --ignored --nocapture"]
fn child_logs_json() {
    if !is_child() {
        return;
    }
    log::init(LogOptions::default().json()).unwrap();
    assert!(log::init(LogOptions::default()).is_err(), "there is one log");
    serve(&File::from(io::stdout().as_fd().try_clone_to_owned().unwrap()));
}

/// The child: its log is a file.
#[test]
#[ignore = "the child process of `sighup_opens_the_file_of_the_log_again`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes logs::child_logs_to_a_file -- --exact --ignored --nocapture"]
fn child_logs_to_a_file() {
    if !is_child() {
        return;
    }
    log::init(LogOptions::default().file(std::env::var(LOG).unwrap())).unwrap();
    serve(&File::from(io::stdout().as_fd().try_clone_to_owned().unwrap()));
}

/// The child: its log is its terminal, and its other output goes to a file.
#[test]
#[ignore = "the child process of `stopped_terminal_holds_up_nothing`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes logs::child_logs_to_a_terminal -- --exact --ignored --nocapture"]
fn child_logs_to_a_terminal() {
    if !is_child() {
        return;
    }
    log::init(LogOptions::default().stderr().lines_max(LINES_MAX)).unwrap();
    let parent = File::options().append(true).open(std::env::var(LOG).unwrap()).unwrap();
    say(&parent, format!("process {}", std::process::id()));
    serve(&parent);
}

/// Ctrl-S stops the output of a terminal, and a thread that writes there waits.
#[test]
fn stopped_terminal_holds_up_nothing() {
    let file = std::env::temp_dir().join(format!("ringserve-terminal-{}", std::process::id()));
    let admin = file.with_extension("sock");
    File::create(&file).unwrap();
    let child = format!(
        "exec '{}' logs::child_logs_to_a_terminal --exact --ignored --nocapture",
        std::env::current_exe().unwrap().display()
    );
    // It gives the child a terminal, of which our pipes are the other end.
    let mut command = Command::new("script");
    command.args(["-qfc", &child, "/dev/null"]).env("RINGSERVE_TEST_CHILD", "1").env_remove("RUST_LOG");
    command.env(LOG, &file).env(ADMIN, format!("unix:{}", admin.display()));
    let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut terminal) = started else { return eprintln!("there is no `script`: nothing is tested") };
    let (mut keys, mut screen) = (terminal.stdin.take().unwrap(), terminal.stdout.take().unwrap());
    let shown = Arc::new(Mutex::new(Vec::new()));
    let shows = shown.clone();
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = screen.read(&mut bytes) {
            shows.lock().unwrap().extend_from_slice(&bytes[..count]);
        }
    });
    let has = |words: &str| {
        let shown = shown.lock().unwrap();
        shown.windows(words.len()).any(|window| window == words.as_bytes())
    };
    let said = |begin: &str| {
        let mut found = None;
        eventually(begin, SOON, || {
            let text = fs::read_to_string(&file).unwrap();
            found = text.lines().find_map(|line| line.strip_prefix(begin)).map(str::to_owned);
            found.is_some()
        });
        found.unwrap()
    };
    let process: i32 = said("process ").parse().unwrap();
    let peer = BufReader::new(TcpStream::connect(said("serves at ")).unwrap());
    peer.get_ref().set_read_timeout(Some(SOON)).unwrap();
    let mut served = AtTerminal { peer, admin };
    served.answers("hello");
    let ctrl = |keys: &mut ChildStdin, letter: u8| {
        keys.write_all(&[letter & 0x1f]).unwrap();
        keys.flush().unwrap();
    };
    ctrl(&mut keys, b's');
    eventually("the log is stuck", SOON, || {
        served.answers("say");
        served.dropped() > 0
    });
    assert!(!has("lines of the log were dropped"), "nothing is shown");
    served.answers("block");
    assert!(served.ask("GET /healthz", "").starts_with("HTTP/1.1 200"));
    served.answers("hello");
    ctrl(&mut keys, b'q');
    eventually("the terminal goes on", SOON, || has("lines of the log were dropped"));
    kill_process(Pid::from_raw(process).unwrap(), Signal::TERM).unwrap();
    assert_eq!(said("serve returned "), "Ok(())");
    drop(keys);
    eventually("the process ends", SOON, || terminal.try_wait().unwrap().is_some());
    fs::remove_file(&file).unwrap();
}

/// A peer of a server, and its endpoint.
struct AtTerminal {
    peer: BufReader<TcpStream>,
    admin: PathBuf,
}

impl Asks for AtTerminal {
    fn peer(&mut self) -> &mut BufReader<TcpStream> {
        &mut self.peer
    }

    fn admin(&self) -> &Path {
        &self.admin
    }
}

struct Served {
    process: Process,
    peer: BufReader<TcpStream>,
    admin: PathBuf,
}

impl Served {
    fn start<F: Fn()>(child: F, how: &str) -> Served {
        let name = how.rsplit('/').next().unwrap();
        let admin = std::env::temp_dir().join(format!("ringserve-log-{}-{name}.sock", std::process::id()));
        let place = format!("unix:{}", admin.display());
        // Without a terminal, to which SIGHUP would refer.
        let mut command = Command::new("setsid");
        command.arg(std::env::current_exe().unwrap()).env(LOG, how).env(ADMIN, place);
        let mut process =
            Process::start_by(child, command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE"));
        let addr = process.line_after("serves at ");
        let peer = BufReader::new(TcpStream::connect(addr).unwrap());
        peer.get_ref().set_read_timeout(Some(SOON)).unwrap();
        Served { process, peer, admin }
    }

    /// Orders the drain, and waits for the end.
    #[track_caller]
    fn ends(mut self) -> ExitStatus {
        self.process.signal(Signal::TERM);
        assert_eq!(self.process.line_after("serve returned "), "Ok(())");
        eventually("the process ends", SOON, || self.process.child.try_wait().unwrap().is_some());
        self.process.child.wait().unwrap()
    }
}

/// A server with a connection, and its endpoint at a Unix socket.
trait Asks {
    fn peer(&mut self) -> &mut BufReader<TcpStream>;

    fn admin(&self) -> &Path;

    fn says(&mut self, line: &str) {
        writeln!(self.peer().get_mut(), "{line}").unwrap();
    }

    #[track_caller]
    fn answers(&mut self, line: &str) {
        self.says(line);
        let mut answer = String::new();
        self.peer().read_line(&mut answer).expect("an answer");
        assert_eq!(answer.trim_end(), line);
    }

    /// The answer of the endpoint, with its head.
    #[track_caller]
    fn ask(&self, request: &str, body: &str) -> String {
        let mut stream = UnixStream::connect(self.admin()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let len = body.len();
        let head = "Host: localhost\r\nX-Ringserve: 1\r\nConnection: close";
        write!(stream, "{request} HTTP/1.1\r\n{head}\r\nContent-Length: {len}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream
            .read_to_string(&mut answer)
            .unwrap_or_else(|error| panic!("{request} is not answered: {error}"));
        answer
    }

    /// Lines that were dropped, by the metric: the endpoint has it once the server has begun.
    fn dropped(&self) -> u64 {
        let mut dropped = None;
        eventually("the metric is there", SOON, || {
            let metrics = self.ask("GET /metrics", "");
            let name = "ringserve_log_lines_dropped_total ";
            dropped = metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
            dropped.is_some()
        });
        dropped.unwrap()
    }
}

impl Asks for Served {
    fn peer(&mut self) -> &mut BufReader<TcpStream> {
        &mut self.peer
    }

    fn admin(&self) -> &Path {
        &self.admin
    }
}

/// Checks that shards, watchdog, endpoint and signals work.
fn goes_on_behind_a_full_pipe(how: &str) -> Served {
    let mut served = Served::start(child_serves, how);
    served.process.say("fill");
    served.process.line_after("filled");
    for count in 1..=2 {
        served.answers("block");
        eventually("the stall is told by the endpoint", SOON, || {
            served.ask("GET /stalls", "").matches("\"ongoing\":false").count() >= count
        });
        assert!(served.ask("GET /healthz", "").starts_with("HTTP/1.1 200"));
        served.answers("hello");
    }
    served
}

#[test]
fn full_pipe_of_the_log_of_ringserve_holds_up_nothing() {
    let mut served = goes_on_behind_a_full_pipe("ringserve");
    served.process.say("log");
    served.process.line_after("logged");
    let dropped = served.dropped();
    assert!(dropped >= 9 * LINES_MAX as u64, "{dropped} of {} lines", 10 * LINES_MAX);
    served.answers("hello");
    assert!(served.ends().success());
}

#[test]
fn full_pipe_of_another_log_holds_up_no_watchdog_or_endpoint() {
    let served = goes_on_behind_a_full_pipe("another");
    assert!(served.ends().success());
}

#[test]
fn lines_that_were_dropped_are_told_once_the_pipe_is_read() {
    let mut served = goes_on_behind_a_full_pipe("ringserve");
    served.process.say("log");
    served.process.line_after("logged");
    served.process.say("read");
    // The cause depends on how busy the machine is.
    served.process.line_after("shard 0 stalled for ");
    let told = served.process.line_after("lines of the log were dropped");
    let told: u64 = told.rsplit_once("lines=").unwrap().1.parse().unwrap();
    assert_eq!(told, served.dropped());
    // It continues.
    served.says("fail");
    served.process.line_after("handler failed, connection closed");
    assert!(served.ends().success());
}

#[test]
fn dead_stdout_and_stderr_end_no_server() {
    for how in ["dead-ringserve", "dead-another"] {
        let mut served = Served::start(child_serves, how);
        served.answers("hello");
        if how == "dead-ringserve" {
            eventually("lines are counted", SOON, || served.dropped() > 0);
        }
        served.process.signal(Signal::TERM);
        assert_eq!(served.process.line_after("serve returned "), "Ok(())");
    }
}

#[test]
fn lines_of_json_have_panics_and_the_level_follows_the_endpoint() {
    let mut served = Served::start(child_logs_json, "json");
    served.answers("hello");
    served.says("panic");
    let line = served
        .process
        .line_after(r#""level":"error","target":"ringserve::panic","msg":"panicked: planted","#);
    assert!(line.contains(r#""thread":"ringserve-0","at":"tests/processes/logs.rs:"#), "{line}");
    let line = served.process.line_after(r#""msg":"user code panicked; its connection is closed","#);
    assert!(line.contains(r#""shard":0,"#) && line.contains(r#""panic":"planted""#), "{line}");
    let answer = served.ask("POST /log-level", "info,ringserve_server=debug");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // The source of the order: this process, at the other end of a Unix socket.
    let who = format!(
        r#""peer":"unix, user {}, process {}""#,
        rustix::process::getuid().as_raw(),
        std::process::id()
    );
    let line = served.process.line_after(r#""msg":"the admin endpoint sets the log to "#);
    assert!(line.contains("info,ringserve_server=debug") && line.contains(&who), "{line}");
    let line = served.process.line_after(r#""msg":"order to the admin endpoint: POST /log-level","#);
    assert!(line.contains(&who) && line.contains(r#""status":200"#), "{line}");
    let answer = served.ask("POST /log-level", "ringserve=loud");
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    // An unread answer makes the end of the connection a reset.
    let mut leaves = UnixStream::connect(&served.admin).unwrap();
    let order = "POST /long HTTP/1.1\r\nHost: localhost\r\nX-Ringserve: 1\r\nContent-Length: 0\r\n\r\n";
    write!(leaves, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n{order}").unwrap();
    served.process.line_after("a long order");
    leaves.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(leaves.read(&mut [0]).unwrap(), 1);
    drop(leaves);
    let line = served
        .process
        .line_after(r#""msg":"order to the admin endpoint, whose caller left before the answer: "#);
    assert!(line.contains("POST /long") && line.contains(&who), "{line}");
    assert!(served.ask("POST /end", "").ends_with("done"));
    served.process.line_after(r#""spans":["admin"],"msg":"connection opened","#);
    // The last line is written before the process is gone.
    served.process.signal(Signal::TERM);
    let line = served.process.line_after(r#""msg":"stopped after "#);
    assert!(line.contains("handler_panicked 1"), "{line}");
}

/// Like any program that moves old files away.
#[test]
fn sighup_opens_the_file_of_the_log_again() {
    let file = std::env::temp_dir().join(format!("ringserve-log-{}.log", std::process::id()));
    let old = file.with_extension("old");
    let has = |file: &Path, line: &str| fs::read_to_string(file).is_ok_and(|text| text.contains(line));
    let mut served = Served::start(child_logs_to_a_file, file.to_str().unwrap());
    served.answers("hello");
    served.says("fail");
    eventually("the line is in the file", SOON, || has(&file, "handler failed"));
    fs::rename(&file, &old).unwrap();
    served.process.signal(Signal::HUP);
    eventually("the line of the signal is in a new file", SOON, || has(&file, "SIGHUP: "));
    assert!(!has(&old, "SIGHUP: ") && !has(&file, "handler failed"));
    assert!(served.ends().success());
    assert!(has(&file, "stopped after ") && !has(&old, "stopped after "));
    [file, old].iter().for_each(|file| fs::remove_file(file).unwrap());
}
