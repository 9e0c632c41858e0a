//! The program: how it was built, and what a look into it at work will need.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;

use super::case::{Case, Texts};
use super::{Certainty, Finding, Severity};
use crate::machine::files::MachineFiles;

/// `CAP_SYS_PTRACE`.
const SYS_PTRACE: u32 = 19;

/// `CAP_SYS_ADMIN`.
const SYS_ADMIN: u32 = 21;

/// `CAP_PERFMON`.
const PERFMON: u32 = 38;

/// The settings with which this crate was built, and usually the program too.
pub(super) struct Build {
    pub(super) is_debug: bool,
    pub(super) aborts: bool,
    /// `None` if that is not known.
    pub(super) has_frame_pointers: Option<bool>,
}

impl Build {
    fn own(machine: &MachineFiles) -> Build {
        Build {
            is_debug: cfg!(debug_assertions),
            aborts: cfg!(panic = "abort"),
            has_frame_pointers: has_frame_pointers(machine),
        }
    }
}

pub(super) fn build(case: &Case<'_>, found: &mut Vec<Finding>) {
    judge(&Build::own(case.machine), case, found);
}

pub(super) fn judge(build: &Build, case: &Case<'_>, found: &mut Vec<Finding>) {
    if build.aborts {
        let texts = Texts {
            what: "the build's panic strategy".into(),
            value: "abort".into(),
            needed: "unwind".into(),
            otherwise:
                "one panic of a handler ends the server with all connections, instead of one connection"
                    .into(),
            fix: "remove `panic = \"abort\"` from the profile in Cargo.toml".into(),
        };
        found.push(texts.of("build", Severity::Warn, Certainty::Seen));
    }
    if build.is_debug {
        let texts = Texts {
            what: "the build".into(),
            value: "one for debugging".into(),
            needed: "an optimized one for anything that is measured".into(),
            otherwise: "each frame takes many times the CPU time".into(),
            fix: "`cargo build --release`".into(),
        };
        // It is a mistake where a load is expected, and how programs are written elsewhere.
        let has_load = case.expected.connections.is_some() || case.expected.accepts_per_second.is_some();
        let severity = if has_load { Severity::Warn } else { Severity::Info };
        found.push(texts.of("build", severity, Certainty::Seen));
    }
    if build.has_frame_pointers == Some(false) {
        let texts = Texts {
            what: "the build".into(),
            value: "without frame pointers".into(),
            needed: "frame pointers, for backtraces of a server at work".into(),
            otherwise: "`perf record --call-graph fp` shows the innermost function alone".into(),
            fix: "RUSTFLAGS=\"-C force-frame-pointers=yes\"".into(),
        };
        found.push(texts.of("build", Severity::Info, Certainty::Seen));
    }
}

/// A function that calls another one, so it has a frame.
#[inline(never)]
fn with_a_frame(n: usize) -> usize {
    black_box(n) + black_box(calls(black_box(n)))
}

#[inline(never)]
fn calls(n: usize) -> usize {
    black_box(n)
}

/// Whether functions of this crate begin by setting up a frame pointer: the first instructions of
/// one of them are looked at. `None` where its memory may not be read, and on other processors than
/// x86-64 and aarch64.
fn has_frame_pointers(machine: &MachineFiles) -> Option<bool> {
    let mut code = [0; 32];
    let address = with_a_frame as fn(usize) -> usize as usize;
    File::open(machine.place("/proc/self/mem")).ok()?.read_exact_at(&mut code, address as u64).ok()?;
    if cfg!(target_arch = "x86_64") {
        // push rbp; mov rbp, rsp. A mark for indirect calls may come first.
        Some(
            code.strip_prefix(&[0xf3, 0x0f, 0x1e, 0xfa])
                .unwrap_or(&code)
                .starts_with(&[0x55, 0x48, 0x89, 0xe5]),
        )
    } else if cfg!(target_arch = "aarch64") {
        // add x29, sp, and a number, among the first ones.
        let is_set = |word: &[u8; 4]| u32::from_le_bytes(*word) & 0xffc0_03ff == 0x9100_03fd;
        Some(code.as_chunks().0.iter().any(is_set))
    } else {
        None
    }
}

/// The settings that tools will need which look into a server that misbehaves.
pub(super) fn diagnosis(case: &Case<'_>, found: &mut Vec<Finding>) {
    let mut add = |what: &str, value: String, needed: &str, otherwise: &str, fix: &str| {
        let texts = Texts {
            what: what.into(),
            value,
            needed: needed.into(),
            otherwise: otherwise.into(),
            fix: fix.into(),
        };
        found.push(texts.of("diagnosis", Severity::Info, Certainty::Computed));
    };
    if !case.machine.has("/sys/kernel/btf/vmlinux") {
        let otherwise = "programs of bpftrace and bcc do not load here, which the server itself never needs";
        add(
            "BTF of the kernel",
            "not there".into(),
            "/sys/kernel/btf/vmlinux",
            otherwise,
            "a kernel with CONFIG_DEBUG_INFO_BTF",
        );
    }
    let paranoid = case.machine.sysctl("kernel.perf_event_paranoid");
    if let Some(level) = paranoid.filter(|level| *level > 2)
        && !case.may(PERFMON)
        && !case.may(SYS_ADMIN)
    {
        let otherwise = "`perf record` of the server needs root, just when it is urgent";
        let fix = "`sysctl -w kernel.perf_event_paranoid=2`, or CAP_PERFMON";
        add("kernel.perf_event_paranoid", level.to_string(), "2 or less", otherwise, fix);
    }
    let scope = case.machine.sysctl("kernel.yama.ptrace_scope");
    if let Some(scope) = scope.filter(|scope| *scope > 0)
        && !case.may(SYS_PTRACE)
    {
        let otherwise = "`eu-stack -p` and `gdb -p` of the server need root";
        let fix = "`sysctl -w kernel.yama.ptrace_scope=0`, or CAP_SYS_PTRACE for the tool";
        add("kernel.yama.ptrace_scope", scope.to_string(), "0", otherwise, fix);
    }
}
