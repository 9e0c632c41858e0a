//! A copy of the tree, in which bugs are planted and checked one after the other.

use std::collections::BTreeSet;
use std::error::Error;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::bug::{Bug, Check};
use crate::items::Sources;
use crate::root;

/// The most seconds for a check, without the build: a check that never ends found the bug.
const CHECK_SECONDS: u64 = 600;

/// Build settings of the copy: the time of the build matters more than that of the run.
const BUILD: [(&str, &str); 5] = [
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    ("CARGO_INCREMENTAL", "1"),
];

/// Seeds for tests that take their number from the environment.
const TEST_SEEDS: &str = "300";

/// The outcome of a check.
enum Verdict {
    /// The check failed, with this as its first message.
    Found(String),
    /// Nothing failed.
    Missed,
    /// There is no such test, or it does not compile.
    Invalid(String),
}

/// The copy and where it is built.
struct Tree {
    folder: PathBuf,
    target: PathBuf,
    seeds: u32,
    only_seeds: bool,
    sources: Sources,
}

/// Plants each bug, and reports what found it. Returns the number of those that nothing found.
///
/// # Errors
/// If the tree cannot be copied, or a check fails without any bug.
pub fn run(bugs: &[Bug], seeds: u32, only_seeds: bool) -> Result<usize, Box<dyn Error>> {
    let folder = root().join("target/bugs");
    let target = std::env::var_os("BUGS_TARGET_DIR").map_or_else(|| folder.join("target"), PathBuf::from);
    let tree = Tree {
        folder: folder.join("tree"),
        target: path::absolute(target)?,
        seeds,
        only_seeds,
        sources: Sources::new(root()),
    };
    tree.copy()?;
    tree.holds_without_a_bug(bugs)?;
    let mut missed = 0;
    for bug in bugs {
        let (is_found, text) = match tree.try_bug(bug)? {
            Verdict::Found(by) => (true, by),
            Verdict::Missed => (false, format!("NOT FOUND: {}", bug.breaks)),
            Verdict::Invalid(why) => (false, why),
        };
        missed += usize::from(!is_found);
        println!("{}: {}", bug.name, text.chars().take(150).collect::<String>());
    }
    println!("{} of {} found", bugs.len() - missed, bugs.len());
    Ok(missed)
}

impl Tree {
    /// Updates the copy to the current tree. Unchanged files keep their time, so that they are not
    /// built again.
    fn copy(&self) -> Result<(), Box<dyn Error>> {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "-co", "--exclude-standard"])
            .current_dir(root())
            .output()?;
        if !listed.status.success() {
            return Err(format!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr)).into());
        }
        let listed = String::from_utf8(listed.stdout)?;
        let files: BTreeSet<&Path> = listed.split_terminator('\0').map(Path::new).collect();
        remove_others(&self.folder, Path::new(""), &files)?;
        for file in files {
            // A file that is deleted but not committed yet is still listed.
            let (from, to) = (root().join(file), self.folder.join(file));
            if !from.exists() {
                if to.exists() {
                    fs::remove_file(to)?;
                }
            } else if !to.exists() || fs::read(&from)? != fs::read(&to)? {
                fs::create_dir_all(to.parent().expect("a file lies in a folder"))?;
                fs::copy(from, to)?;
            }
        }
        Ok(())
    }

    /// Checks that every check passes without a bug: one that fails would find each of them.
    fn holds_without_a_bug(&self, bugs: &[Bug]) -> Result<(), Box<dyn Error>> {
        let mut checks: Vec<&Check> = bugs.iter().map(|bug| &bug.check).collect();
        checks.sort();
        checks.dedup();
        for check in checks {
            let verdict = match check {
                Check::Seeds => self.seeds(&[], 200)?,
                Check::Servers => self.seeds(&["--servers"], 200)?,
                Check::Test(args) => self.test(args)?,
            };
            match verdict {
                Verdict::Missed => {}
                Verdict::Found(by) | Verdict::Invalid(by) => {
                    return Err(format!("fails without any bug: {check}: {by}").into());
                }
            }
        }
        Ok(())
    }

    fn try_bug(&self, bug: &Bug) -> Result<Verdict, Box<dyn Error>> {
        let planted = match bug.planted(&self.sources) {
            Ok(planted) => planted,
            Err(misfit) => return Ok(Verdict::Invalid(misfit)),
        };
        planted.iter().try_for_each(|(file, text)| fs::write(self.folder.join(file), text))?;
        let verdict = match &bug.check {
            Check::Test(args) => self.test(args),
            Check::Servers => self.seeds(&["--servers"], self.seeds.min(5000)),
            Check::Seeds => {
                self.seeds(&[], self.seeds).and_then(|verdict| match (verdict, self.crate_of(bug)) {
                    (Verdict::Missed, Some(of)) if !self.only_seeds => {
                        self.test(&format!("-p ringserve-{of}"))
                    }
                    (verdict, _) => Ok(verdict),
                })
            }
        };
        planted.keys().try_for_each(|file| fs::copy(root().join(file), self.folder.join(file)).map(drop))?;
        verdict
    }

    fn crate_of<'a>(&self, bug: &'a Bug) -> Option<&'a str> {
        let mut parts = bug.edits.first()?.file.iter().filter_map(OsStr::to_str);
        parts.next().filter(|folder| *folder == "crates").and(parts.next())
    }

    fn seeds(&self, args: &[&str], seeds: u32) -> Result<Verdict, Box<dyn Error>> {
        let mut build = self.command("cargo");
        build.args(["build", "--quiet", "--release", "-p", "ringserve-sim"]);
        if let (false, output) = finished(&mut build, u64::MAX)? {
            return Ok(Verdict::Invalid(format!("does not compile: {}", first(&output, &["error"]))));
        }
        let jobs = thread::available_parallelism()?.to_string();
        let mut sim = self.command(self.target.join("release/ringserve-sim"));
        sim.args(args).args(["--seeds", &seeds.to_string(), "--jobs", &jobs]);
        let (holds, output) = finished(&mut sim, 60 + u64::from(seeds) / 100)?;
        Ok(if holds { Verdict::Missed } else { Verdict::Found(first(&output, &["seed ", "too seldom"])) })
    }

    fn test(&self, args: &str) -> Result<Verdict, Box<dyn Error>> {
        let mut test = self.command("cargo");
        test.arg("test").args(args.split_whitespace());
        let mut build = self.command("cargo");
        build.arg("test").args(args.split_whitespace().take_while(|arg| *arg != "--"));
        if let (false, output) = finished(build.args(["--quiet", "--no-run"]), u64::MAX)? {
            return Ok(Verdict::Invalid(format!("does not compile: {}", first(&output, &["error"]))));
        }
        let (holds, output) = finished(&mut test, CHECK_SECONDS)?;
        let ran = output.lines().any(|line| line.starts_with("running ") && !line.starts_with("running 0 "));
        Ok(match (holds, ran) {
            (true, true) => Verdict::Missed,
            (true, false) => Verdict::Invalid(format!("no test is called so: cargo test {args}")),
            (false, _) => Verdict::Found(first(&output, &["---- ", "thread "])),
        })
    }

    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.folder).envs(BUILD).env("CARGO_TARGET_DIR", &self.target);
        if std::env::var_os("RINGSERVE_SEEDS").is_none() {
            command.env("RINGSERVE_SEEDS", TEST_SEEDS);
        }
        command
    }
}

/// Removes files that the tree no longer has.
fn remove_others(folder: &Path, below: &Path, files: &BTreeSet<&Path>) -> io::Result<()> {
    fs::create_dir_all(folder.join(below))?;
    for entry in fs::read_dir(folder.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            remove_others(folder, &path, files)?;
        } else if !files.contains(&*path) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Runs a command to its end, or for `seconds`. Returns whether it succeeded, and its output.
fn finished(command: &mut Command, seconds: u64) -> Result<(bool, String), Box<dyn Error>> {
    let output = std::env::temp_dir().join(format!("ringserve-bugs-{}", std::process::id()));
    let file = fs::File::create(&output)?;
    let mut child =
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0).spawn()?;
    let (pid, (ends, ended)) = (Pid::from_child(&child), channel::<()>());
    let guard = thread::spawn(move || {
        let is_late = ended.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout);
        // Together with the programs that it started.
        is_late && kill_process_group(pid, Signal::KILL).is_ok()
    });
    let status = child.wait()?;
    drop(ends);
    if guard.join().is_ok_and(|is_late| is_late) {
        fs::remove_file(output)?;
        return Ok((false, "seed or test never ends".to_owned()));
    }
    let text = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
    fs::remove_file(output)?;
    Ok((status.success(), text))
}

/// The first line that begins in this way, else the last one.
fn first(output: &str, begins: &[&str]) -> String {
    let named = begins.iter().find_map(|begin| output.lines().find(|line| line.starts_with(begin)));
    named.or(output.lines().last()).unwrap_or_default().to_owned()
}
