//! A server under measurement: this binary once more, as a child that never outlives its owner.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The start of the line by which a server reports the address to which it is bound.
pub(crate) const LISTENING: &str = "listening ";

/// The text in that line before the address of its admin endpoint, if it has one.
pub(crate) const ADMIN: &str = " admin ";

/// Time limit for a server to report its address. Starting takes milliseconds.
const START_MAX: Duration = Duration::from_secs(10);

/// The most bytes of the line with the address.
const LINE_BYTES_MAX: usize = 512;

/// The most lines before it.
const LOG_LINES_MAX: usize = 8;

/// A running server. Dropping it kills the process and waits for its end.
pub(crate) struct Child {
    process: std::process::Child,
    /// The address to which it listens.
    pub(crate) address: SocketAddr,
    /// The address of its admin endpoint.
    pub(crate) admin: Option<SocketAddr>,
}

impl Child {
    /// Starts another program on `cpu`, or on any: `PATH raw|lines --listen ADDRESS`.
    pub(crate) fn start_program(name: &str, path: &Path, mode: &str, cpu: Option<usize>) -> io::Result<Self> {
        let mut command = match cpu {
            Some(cpu) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &cpu.to_string()]).arg(path);
                command
            }
            None => Command::new(path),
        };
        command.args([mode, "--listen", "127.0.0.1:0"]);
        Child::spawn(name, &mut command)
    }

    /// Starts the server of that name on `cpu`, on a loopback port of the kernel's choice. In lock
    /// step it never preempts the generator.
    pub(crate) fn start(server: &str, cpu: usize, lock_step: bool) -> io::Result<Self> {
        let mut command = Child::command(server, Some(cpu))?;
        command.args(lock_step.then_some("--lock-step"));
        Child::spawn(server, &mut command)
    }

    /// Does the same with `shards` shards, and on any CPU if `cpu` names none.
    pub(crate) fn start_sized(server: &str, cpu: Option<usize>, shards: usize) -> io::Result<Self> {
        let mut command = Child::command(server, cpu)?;
        command.args(["--shards", &shards.to_string()]);
        Child::spawn(server, &mut command)
    }

    fn command(server: &str, cpu: Option<usize>) -> io::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", server, "--listen", "127.0.0.1:0", "--child"]);
        if let Some(cpu) = cpu {
            command.args(["--cpu", &cpu.to_string()]);
        }
        Ok(command)
    }

    /// Starts `example-kv` on any CPU, with that driver and that many shards.
    pub(crate) fn start_kv(path: &Path, driver: &str, shards: usize) -> io::Result<Self> {
        let mut command = Command::new(path);
        command.args(["--listen", "127.0.0.1:0", "--driver", driver, "--shards", &shards.to_string()]);
        command.env("RUST_LOG", "info").env("NO_COLOR", "1");
        Child::spawn("example-kv", &mut command)
    }

    fn spawn(name: &str, command: &mut Command) -> io::Result<Self> {
        let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        // From here on the process ends with `child`, also when it fails to start.
        let mut child = Self { process, address: SocketAddr::from(([127, 0, 0, 1], 0)), admin: None };
        let line = child.next_line()?;
        let unknown = || io::Error::other(format!("{name} said {line:?}, not where it listens"));
        // An example reports it in its log, where warnings may come first.
        let mut said = line.clone();
        for _ in 0..LOG_LINES_MAX {
            if said.contains(LISTENING) {
                break;
            }
            said = child.next_line()?;
        }
        let (_, addresses) = said.split_once(LISTENING).ok_or_else(unknown)?;
        let of_example = addresses.strip_prefix("on ").and_then(|rest| rest.split([',', ' ']).next());
        let addresses = of_example.unwrap_or(addresses);
        let mut addresses = addresses.split(ADMIN).map(|address| address.parse().map_err(|_| unknown()));
        child.address = addresses.next().ok_or_else(unknown)??;
        child.admin = addresses.next().transpose()?;
        Ok(child)
    }

    /// The id of its process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Reads its next line of output, within bounds.
    fn next_line(&mut self) -> io::Result<String> {
        let Some(stdout) = &mut self.process.stdout else {
            return Err(io::Error::other("the child has no pipe"));
        };
        let deadline = Instant::now() + START_MAX;
        let mut line = Vec::new();
        while line.len() < LINE_BYTES_MAX {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            if poll(&mut [PollFd::new(stdout, PollFlags::IN)], Some(&timeout))? == 0 {
                let why = format!("a server did not say within {START_MAX:?} where it listens");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            let mut byte = [0];
            match stdout.read(&mut byte)? {
                1 if byte != *b"\n" => line.extend_from_slice(&byte),
                _ => break,
            }
        }
        String::from_utf8(line).map_err(io::Error::other)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // An error means that it has ended already; then `wait` collects it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
