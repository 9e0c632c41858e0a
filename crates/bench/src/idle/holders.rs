//! The processes that hold connections, as seen from the one that measures.

use std::io::{self, BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use clap::ValueEnum;

use super::split::{Sources, share};
use crate::wire::Layer;

/// Interval at which the caller checks the whole.
const LOOK: Duration = Duration::from_millis(200);

/// The common task of all holders.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// Open connections until all holders have this many.
    Hold(usize),
    /// One more round trip on every connection.
    Check,
}

/// Running holders. Dropping them closes all connections and waits for their end.
pub(super) struct Holders {
    holders: Vec<Holder>,
}

struct Holder {
    process: std::process::Child,
    commands: ChildStdin,
    numbers: BufReader<ChildStdout>,
    held: usize,
}

/// The arguments of holders.
pub(super) struct Start {
    pub(super) server: SocketAddr,
    pub(super) processes: usize,
    /// The final number of all processes together.
    pub(super) connections: usize,
    pub(super) connections_each: usize,
    pub(super) bytes: usize,
    pub(super) layer: Layer,
}

impl Holders {
    /// Starts them. On return each one runs, and has no connection.
    pub(super) fn start(start: &Start) -> io::Result<Holders> {
        let (mut first, mut holders) = (0, Vec::new());
        let most = share(start.connections, start.processes, 0);
        let layer = match start.layer {
            Layer::Plain | Layer::Exchange(_) => Vec::new(),
            Layer::Tls(handshakes) => {
                let value = handshakes.to_possible_value();
                vec!["--tls".to_owned(), value.map_or_else(String::new, |value| value.get_name().to_owned())]
            }
            Layer::WebSocket => vec!["--websocket".to_owned()],
        };
        for index in 0..start.processes {
            let sources = Sources::of_process(index, most, start.connections_each);
            let mut process = Command::new(std::env::current_exe()?)
                .args(["hold", "--server", &start.server.to_string()])
                .args(["--first-source", &sources.first.to_string()])
                .args(["--connections-each", &sources.connections_each.to_string()])
                .args(["--bytes", &start.bytes.to_string(), "--first", &first.to_string()])
                .args(&layer)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let (Some(commands), Some(numbers)) = (process.stdin.take(), process.stdout.take()) else {
                return Err(io::Error::other("a child has no pipe"));
            };
            holders.push(Holder { process, commands, numbers: BufReader::new(numbers), held: 0 });
            first += share(start.connections, start.processes, index);
        }
        let mut all = Holders { holders };
        for holder in &mut all.holders {
            holder.number()?;
        }
        Ok(all)
    }

    /// Makes all holders do `task`, as many at once as there are CPUs. Meanwhile `look` is called
    /// with how many connections are done, and may end it. Returns how many are done in the end.
    pub(super) fn run(
        &mut self,
        task: Task,
        mut look: impl FnMut(usize) -> io::Result<()>,
    ) -> io::Result<usize> {
        let at_once = thread::available_parallelism().map_or(1, usize::from);
        let processes = self.holders.len();
        let done = AtomicUsize::new(match task {
            Task::Hold(_) => self.holders.iter().map(|holder| holder.held).sum(),
            Task::Check => 0,
        });
        let over = AtomicBool::new(false);
        let mut lanes: Vec<Vec<(usize, &mut Holder)>> = (0..at_once).map(|_| Vec::new()).collect();
        for (index, holder) in self.holders.iter_mut().enumerate() {
            lanes[index % at_once].push((index, holder));
        }
        let (ended, ends) = mpsc::channel();
        thread::scope(|scope| {
            let (done, over) = (&done, &over);
            for lane in lanes {
                let ended = ended.clone();
                let mut holders = lane.into_iter();
                let mut work = move || {
                    holders.try_for_each(|(index, holder)| match task {
                        Task::Hold(all) => holder.hold(share(all, processes, index), done, over),
                        Task::Check => holder.check(done, over),
                    })
                };
                // The receiver of the ends outlives the threads.
                scope.spawn(move || ended.send(work()).unwrap_or(()));
            }
            drop(ended);
            let mut result = Ok(());
            loop {
                match ends.recv_timeout(LOOK) {
                    Ok(end) => result = result.and(end),
                    Err(RecvTimeoutError::Timeout) if result.is_ok() => {
                        result = look(done.load(Ordering::Relaxed));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        return result.map(|()| done.load(Ordering::Relaxed));
                    }
                }
                over.store(result.is_err(), Ordering::Relaxed);
            }
        })
    }
}

impl Holder {
    fn hold(&mut self, count: usize, done: &AtomicUsize, over: &AtomicBool) -> io::Result<()> {
        self.command(&format!("hold {count}"))?;
        self.held = self.follow(self.held, count, done, over)?;
        Ok(())
    }

    fn check(&mut self, done: &AtomicUsize, over: &AtomicBool) -> io::Result<()> {
        self.command("check")?;
        self.follow(0, self.held, done, over).map(drop)
    }

    /// Adds up its numbers until it has reported `last`, or all shall end. Returns the last number.
    fn follow(
        &mut self,
        mut told: usize,
        last: usize,
        done: &AtomicUsize,
        over: &AtomicBool,
    ) -> io::Result<usize> {
        while told != last && !over.load(Ordering::Relaxed) {
            let number = self.number()?;
            done.fetch_add(number.saturating_sub(told), Ordering::Relaxed);
            told = number;
        }
        Ok(told)
    }

    fn command(&mut self, command: &str) -> io::Result<()> {
        // If it has ended, its output has the reason.
        writeln!(self.commands, "{command}").or(Ok(()))
    }

    /// The next number that it reports. Its sockets have time limits, so that it never waits for
    /// long without one.
    fn number(&mut self) -> io::Result<usize> {
        let mut line = String::new();
        self.numbers.read_line(&mut line)?;
        let line = line.trim_end();
        if let Some(why) = line.strip_prefix("failed ") {
            return Err(io::Error::other(why.to_owned()));
        }
        if line.is_empty() {
            let status = self.process.wait()?;
            return Err(io::Error::other(format!("a process that held connections ended with {status}")));
        }
        line.parse().map_err(|_| io::Error::other(format!("a process that holds connections said {line:?}")))
    }
}

impl Drop for Holders {
    fn drop(&mut self) {
        // All at once, since each has many connections to close. An error means that it has ended.
        for holder in &mut self.holders {
            let _ = holder.process.kill();
        }
        for holder in &mut self.holders {
            let _ = holder.process.wait();
        }
    }
}
