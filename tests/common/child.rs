//! A process of its own: the test binary again, in a test that does nothing unless it is called so.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Tells a test that it is the child.
const ROLE: &str = "RINGSERVE_TEST_CHILD";

pub struct Process {
    pub child: Child,
    pub stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

/// True in the process that [`Process::start`] made.
pub fn is_child() -> bool {
    std::env::var_os(ROLE).is_some()
}

impl Process {
    /// Runs one ignored test of this binary.
    pub fn start(test: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the test binary runs again");
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Process { child, stdin, lines }
    }

    /// The rest of the next line of its output that holds `mark`.
    #[track_caller]
    pub fn line_after(&mut self, mark: &str) -> String {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            if let Some(at) = line.find(mark) {
                return line[at + mark.len()..].trim().to_owned();
            }
        }
        panic!("the child ended without saying {mark:?}");
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
