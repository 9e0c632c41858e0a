//! A child process: the test binary again, in a test that does nothing unless it runs as the child.

use std::any::type_name;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use ringserve::{Error, ServerHandle};
use rustix::process::{Pid, Signal, getuid, kill_process};

use crate::{Client, SOON, finish};

/// Variable that marks a test as the child.
const ROLE: &str = "RINGSERVE_TEST_CHILD";

pub struct Process {
    pub child: Child,
    pub stdin: ChildStdin,
    lines: Receiver<String>,
    /// Lines that were skipped in a search for one, for the message of a failure.
    skipped: Vec<String>,
}

/// Variable that marks a test as alone in its process.
const ALONE: &str = "RINGSERVE_TEST_ALONE";

/// The most processes of [`alone`] at once: some load a core or two, most wait.
const ALONE_MAX: usize = 4;

static ALONE_NOW: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// One of the [`ALONE_MAX`] places.
struct Place;

impl Place {
    fn wait() -> Place {
        let (taken, freed) = &ALONE_NOW;
        let taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
        *freed.wait_while(taken, |taken| *taken == ALONE_MAX).unwrap_or_else(PoisonError::into_inner) += 1;
        Place
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (taken, freed) = &ALONE_NOW;
        *taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        freed.notify_one();
    }
}

/// Runs a test in a process of which it is the only test, so that its counts are its own. True in
/// that process. False in the process of `cargo test`, once the test has passed there.
#[track_caller]
pub fn alone<F: Fn()>(test: F) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = test_name(&test);
    let _place = Place::wait();
    let done = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .expect("the test binary runs again");
    let (said, why) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    println!("{said}{why}");
    assert!(
        done.status.success() && said.contains("1 passed"),
        "{name} fails in its process: {}",
        done.status
    );
    false
}

/// The test binary's name of the test that is this function: its path inside the crate.
fn test_name<F: Fn()>(_test: &F) -> &'static str {
    let path = type_name::<F>();
    path.split_once("::").map_or(path, |(_crate, path)| path)
}

/// True in the process that [`Process::start`] created.
pub fn is_child() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// The test binary. Signals have their usual effect there, even if this process was started with
/// some ignored, as by `nohup`.
fn program() -> Command {
    const BROKEN_PIPE: u64 = 1 << 12;
    let path = std::env::current_exe().unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    if ignored & !BROKEN_PIPE == 0 {
        return Command::new(path);
    }
    let mut command = Command::new("env");
    command.arg("--default-signal").arg(path);
    command
}

impl Process {
    /// Runs one ignored test of this binary, which is named by its function.
    pub fn start<F: Fn()>(child: F) -> Process {
        Process::start_as(child, |command| command)
    }

    /// Does [`start`](Process::start) in a separate network namespace, which has only loopback.
    /// `None` if this user may not create one, or a tool is missing.
    pub fn start_in_own_network<F: Fn()>(child: F) -> Option<Process> {
        let options = if getuid().is_root() { "-n" } else { "-rn" };
        let shell = |script: &str| {
            let mut command = Command::new("unshare");
            command.args([options, "sh", "-c", &format!("ip link set lo up && {script}"), "sh"]);
            command
        };
        if !shell("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            return None;
        }
        Some(Process::spawn(child, shell("exec \"$@\"").arg(std::env::current_exe().unwrap())))
    }

    /// Does [`start`](Process::start) by a command that runs its arguments.
    pub fn start_by<F: Fn()>(child: F, command: &mut Command) -> Process {
        Process::spawn(child, command)
    }

    /// Does [`start`](Process::start) after a change to the command.
    pub fn start_as<F: Fn()>(child: F, change: impl FnOnce(&mut Command) -> &mut Command) -> Process {
        Process::spawn(child, change(&mut program()))
    }

    fn spawn<F: Fn()>(child: F, command: &mut Command) -> Process {
        let mut child = command
            .args([test_name(&child), "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Its errors appear with the output of the test, unless the command says otherwise.
            .spawn()
            .expect("the test binary runs again");
        let stdin = child.stdin.take().unwrap();
        let (tell, lines) = channel();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        // A read has no time limit; this thread ends with the child.
        thread::spawn(move || output.all(|line| line.is_ok_and(|line| tell.send(line).is_ok())));
        Process { child, stdin, lines, skipped: Vec::new() }
    }

    /// The rest of the next line of its output that holds `mark`.
    #[track_caller]
    pub fn line_after(&mut self, mark: &str) -> String {
        loop {
            match self.lines.recv_timeout(2 * SOON) {
                Ok(line) => {
                    if let Some(at) = line.find(mark) {
                        self.skipped.clear();
                        return line[at + mark.len()..].trim().to_owned();
                    }
                    self.skipped.push(line);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the child ended without saying {mark:?}; it said {:#?}", self.skipped)
                }
                Err(RecvTimeoutError::Timeout) => {
                    panic!("the child does not say {mark:?}; it said {:#?}", self.skipped)
                }
            }
        }
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("the child listens");
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the child is there");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The result of a child's server: its log, then the error if there was one.
pub struct Outcome {
    pub log: String,
    pub refused: Option<String>,
}

impl Outcome {
    /// Runs the ignored test `child` of this binary, which reads a line of input and calls
    /// [`Outcome::tell`].
    #[track_caller]
    pub fn of<F: Fn()>(child: F, input: &str) -> Outcome {
        // The operator's choice would decide for a server that may choose.
        let mut process = Process::start_as(child, |command| command.env_remove("RINGSERVE_DRIVER"));
        process.say(input);
        let mut log = String::new();
        loop {
            let line = process.line_after("");
            if line == "served" {
                return Outcome { log, refused: None };
            }
            if let Some(error) = line.strip_prefix("refused: ") {
                return Outcome { log, refused: Some(error.to_owned()) };
            }
            log.push_str(&line);
            log.push('\n');
        }
    }

    /// Runs in the child: has 20 clients ask, each by its number, and reports the result to the
    /// parent.
    pub fn tell(started: Result<ServerHandle, Error>, ask: impl Fn(usize, &mut Client)) {
        let running = match started {
            Ok(running) => running,
            Err(error) => return println!("\nrefused: {error}"),
        };
        let mut clients: Vec<Client> = (0..20).map(|_| Client::connect(running.local_addrs()[0])).collect();
        clients.iter_mut().enumerate().for_each(|(n, client)| ask(n, client));
        drop(clients);
        finish(running);
        println!("\nserved");
    }

    #[track_caller]
    pub fn served(&self) {
        assert_eq!(self.refused, None, "{}", self.log);
    }
}
