//! The examples, as programs.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};

use crate::{SOON, eventually};

/// Builds an example like this test, and returns its path: one of the root package, or a separate
/// package. Each is built once.
pub fn build(name: &str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    // Poisoned by a test that failed to build one.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    built.entry(name.to_owned()).or_insert_with(|| build_now(name)).clone()
}

fn build_now(name: &str) -> PathBuf {
    // This test is `<target directory>/[<triple>/]<profile>/deps/<name>-<hash>`.
    let own = std::env::current_exe().unwrap();
    let profile = own.ancestors().nth(2).expect("a test is two levels below its target directory");
    let mut target = profile.parent().expect("the target directory");
    if let Ok(triple) = std::env::var("CARGO_BUILD_TARGET")
        && target.ends_with(triple)
    {
        target = target.parent().expect("the target directory");
    }
    let mut cargo = Command::new(env!("CARGO"));
    // Built for the whole workspace, and with an example, which enables the features of tests, so
    // that features are those of `cargo test --workspace`: nothing is built twice. That example
    // exists then.
    cargo.args(["build", "--quiet", "--workspace", "--example"]).current_dir(workspace());
    let package = format!("example-{}", name.replace('_', "-"));
    let is_package = workspace().join("examples").join(name).join("Cargo.toml").exists();
    if is_package {
        cargo.args(["proxy", "--bin", &package]);
    } else {
        cargo.arg(name);
    }
    if cfg!(feature = "guide") {
        cargo.args(["--features", "ringserve-tests/guide"]);
    }
    if cfg!(feature = "runtime-tokio-uring") {
        cargo.args(["--features", "ringserve-tests/runtime-tokio-uring"]);
    }
    if cfg!(feature = "runtime-tokio-uring") && name == "tokio_inside" {
        cargo.args(["--features", "example-tokio-inside/runtime-tokio-uring"]);
    }
    let profile_name = profile.file_name().expect("a profile has a name");
    cargo.arg("--profile").arg(if profile_name == "debug" { OsStr::new("test") } else { profile_name });
    cargo.arg("--target-dir").arg(target);
    assert!(cargo.status().expect("cargo is there").success(), "{name} is not built");
    if is_package { profile.join(package) } else { profile.join("examples").join(name) }
}

/// The script that talks to an example.
pub fn client(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(name)
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in the workspace")
}

/// An example that runs.
pub struct Example {
    child: Child,
    pub addr: SocketAddr,
    /// The lines that it logged so far.
    log: Arc<Mutex<String>>,
}

impl Example {
    /// Builds and starts it on a port of the kernel's choice, with these additional options.
    #[track_caller]
    pub fn start(name: &str, args: &[&str]) -> Example {
        let mut child = Command::new(build(name))
            .args(["--listen", "127.0.0.1:0"])
            .args(args)
            .env("NO_COLOR", "1")
            .stdout(Stdio::piped())
            .spawn()
            .expect("it was built");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let addr = loop {
            let line = lines.next().expect("it says where it listens").unwrap();
            if let Some((_, rest)) = line.split_once("listening on ") {
                break rest.split(' ').next().unwrap().parse().unwrap();
            }
        };
        // It must not block on its log.
        let log = Arc::new(Mutex::new(String::new()));
        let logged = log.clone();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                logged.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Example { child, addr, log }
    }

    /// Waits until it logged this.
    #[track_caller]
    pub fn said(&self, text: &str) {
        eventually(&format!("it says {text:?}"), SOON, || self.log.lock().unwrap().contains(text));
    }

    /// The address of its listener with this number: 1 for the second one.
    #[track_caller]
    pub fn listens_at(&self, listener: usize) -> SocketAddr {
        if listener == 0 {
            return self.addr;
        }
        let mut addr = None;
        eventually(&format!("it listens {} times", listener + 1), SOON, || {
            let log = self.log.lock().unwrap();
            let rest = log.split("listening on ").nth(listener);
            addr = rest.and_then(|rest| rest.split_once(' ')).map(|(addr, _)| addr.parse().unwrap());
            addr.is_some()
        });
        addr.unwrap()
    }

    /// Terminates it as an operator does.
    pub fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    /// Terminates it, and waits for its end.
    #[track_caller]
    pub fn stop(mut self) -> ExitStatus {
        self.terminate();
        self.ends()
    }

    /// Waits until it has ended.
    #[track_caller]
    pub fn ends(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("it ends", SOON, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
