//! Processes of servers on the first CPU, and this one on the second.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use ringserve::server::Driver;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::rows::Row;
use super::server::Told;
use crate::client::Failure;

/// Time limit for a server to start, to restart and to report, even one whose CPU others want.
const WITHIN: Duration = Duration::from_secs(20);

/// The CPU of servers, and that of this process.
pub(super) struct Cpus {
    server: CpuSet,
    own: CpuSet,
}

impl Cpus {
    /// Takes the first two CPUs that this process may use, and stays on the second.
    pub(super) fn take() -> Result<Cpus, Failure> {
        let all =
            sched_getaffinity(None).map_err(|error| Failure(format!("CPUs cannot be found: {error}")))?;
        let mut each = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).map(|cpu| {
            let mut one = CpuSet::new();
            one.set(cpu);
            one
        });
        let (Some(server), Some(own)) = (each.next(), each.next()) else {
            return Err(Failure(
                "the drill needs two CPUs: one for a server, one for its clients".to_owned(),
            ));
        };
        stay_on(&own)?;
        Ok(Cpus { server, own })
    }

    /// Starts a process that stays on the first CPU.
    fn start(&self, command: &mut Command) -> Result<Child, Failure> {
        // A process starts on the CPU of its parent's thread.
        stay_on(&self.server)?;
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        stay_on(&self.own)?;
        Ok(child?)
    }
}

fn stay_on(cpus: &CpuSet) -> Result<(), Failure> {
    sched_setaffinity(None, cpus)
        .map_err(|error| Failure(format!("this process cannot choose its CPU: {error}")))
}

/// The server's process, killed at the end.
pub(super) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    addr: SocketAddr,
}

impl Process {
    /// Starts a server of this program.
    pub(super) fn start(
        cpus: &Cpus,
        row: Row,
        driver: Driver,
        micros: u64,
        sheds: bool,
    ) -> Result<Process, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["overload-server", "--row", row.name(), "--driver", &driver.to_string()]);
        command.args(["--micros", &micros.to_string()]);
        if sheds {
            command.arg("--sheds");
        }
        Process::listening(cpus.start(&mut command)?)
    }

    /// Starts a server with another library.
    pub(super) fn start_rival(cpus: &Cpus, program: &Path, micros: u64) -> Result<Process, Failure> {
        let mut command = Command::new(program);
        command.args(["work", "--listen", "127.0.0.1:0", "--micros", &micros.to_string()]);
        Process::listening(cpus.start(&mut command)?)
    }

    fn listening(mut child: Child) -> Result<Process, Failure> {
        let (tell, lines) = channel();
        let output = child.stdout.take();
        // A read has no time limit; this thread ends with the process.
        thread::spawn(move || {
            let each = output.map(BufReader::new).into_iter().flat_map(BufRead::lines).map_while(Result::ok);
            each.take_while(|line| tell.send(line.clone()).is_ok()).for_each(drop);
        });
        let input = child.stdin.take();
        let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut process = Process { child, input, lines, addr: unknown };
        process.addr = process.listens()?;
        Ok(process)
    }

    fn listens(&mut self) -> Result<SocketAddr, Failure> {
        let line = self.line()?;
        let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok());
        addr.ok_or_else(|| Failure(format!("the server of the drill reports no address, but {line:?}")))
    }

    fn line(&mut self) -> Result<String, Failure> {
        match self.lines.recv_timeout(WITHIN) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                Err(Failure("the server of the drill does not answer".to_owned()))
            }
            Err(RecvTimeoutError::Disconnected) => {
                // The process ended, and reports why.
                let said = self.child.stderr.take().map(BufReader::new).into_iter();
                let last = said.flat_map(BufRead::lines).map_while(Result::ok).last().unwrap_or_default();
                Err(Failure(format!("the server ended: {}", last.trim_start_matches("ringserve-ctl: "))))
            }
        }
    }

    fn say(&mut self, line: &str) -> Result<(), Failure> {
        let gone = || Failure("the server of the drill accepts no orders".to_owned());
        Ok(self.input.as_mut().ok_or_else(gone)?.write_all(format!("{line}\n").as_bytes())?)
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The counts of the server since its last start.
    pub(super) fn told(&mut self) -> Result<Told, Failure> {
        self.say("tell")?;
        let line = self.line()?;
        serde_json::from_str(&line).map_err(|error| Failure(format!("the server reports {line:?}: {error}")))
    }

    /// Orders the server to end at once, with all of its connections, and to restart at its
    /// address. Does not wait for it.
    pub(super) fn begins_again(&mut self) -> Result<(), Failure> {
        self.say("again")
    }

    /// Waits until the server has restarted.
    pub(super) fn has_begun(&mut self) -> Result<(), Failure> {
        self.listens().map(drop)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
