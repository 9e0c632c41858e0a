//! Advice that is out of date or wrong on kernels of today, where a file of this machine follows
//! it.

use std::collections::{BTreeMap, HashSet};

use super::case::{Case, Texts};
use super::{Certainty, Finding, Severity};
use crate::machine::files::MachineFiles;

/// Directories whose `.conf` files are read at the boot, and the one file beside them.
const FOLDERS: &[&str] = &["/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d"];
const FILE: &str = "/etc/sysctl.conf";

/// Lines that are reported at most: a file of thousands is an accident.
const FOUND_MAX: usize = 16;

/// A line of such a file.
struct Line {
    place: String,
    name: String,
    value: String,
}

impl Line {
    fn numbers(&self) -> Vec<u64> {
        self.value.split_ascii_whitespace().map_while(|word| word.parse().ok()).collect()
    }

    fn number(&self) -> Option<u64> {
        self.numbers().first().copied()
    }
}

/// A sysctl of which articles say what does not hold.
struct Advice {
    name: &'static str,
    /// True if the line follows the advice.
    is_followed: fn(&Line, &Case<'_>) -> bool,
    severity: Severity,
    /// The fact that contradicts the advice.
    truth: &'static str,
    otherwise: &'static str,
    fix: &'static str,
}

const REMOVE: &str = "remove the line";

const ADVICE: &[Advice] = &[
    Advice {
        name: "net.ipv4.tcp_tw_recycle",
        is_followed: |_, _| true,
        severity: Severity::Info,
        truth: "no such line: it is gone since Linux 4.12",
        otherwise: "nothing happens but an error at the boot; before, it dropped peers behind one NAT",
        fix: REMOVE,
    },
    Advice {
        name: "net.ipv4.tcp_fin_timeout",
        is_followed: |_, _| true,
        severity: Severity::Info,
        truth: "no such line, if it is to shorten TIME_WAIT: it bounds FIN_WAIT_2, and TIME_WAIT is 60 s always",
        otherwise: "peers that close their half late are reset sooner",
        fix: REMOVE,
    },
    Advice {
        name: "net.core.somaxconn",
        // The default before.
        is_followed: |line, case| line.number().is_some_and(|value| value <= 128) && case.kernel() >= (5, 4),
        severity: Severity::Warn,
        truth: "4096, which is the default since Linux 5.4",
        otherwise: "the line makes each accept queue shorter than it would be without it",
        fix: REMOVE,
    },
    Advice {
        name: "net.ipv4.tcp_abort_on_overflow",
        is_followed: |line, _| line.number().is_some_and(|value| value > 0),
        severity: Severity::Warn,
        truth: "0: at a full accept queue the first packet is dropped, and this resets nothing",
        otherwise: "peers are reset where the queue fills in the middle of their handshake, who would have got in a moment later",
        fix: "remove the line, and shed load by Server::admit or the limits of the server",
    },
    Advice {
        name: "vm.nr_hugepages",
        is_followed: |line, _| line.number().is_some_and(|value| value > 0),
        severity: Severity::Info,
        truth: "no such line for the sake of connections: sockets are memory of the kernel, in small pieces",
        otherwise: "the pages are taken from all that does not ask for huge ones",
        fix: REMOVE,
    },
    Advice {
        name: "net.core.rmem_max",
        is_followed: |line, _| line.number().is_some_and(|value| value >= 16 << 20),
        severity: Severity::Info,
        truth: "any, if the program leaves SO_RCVBUF alone: it bounds that option, and tuning ends at net.ipv4.tcp_rmem",
        otherwise: "nothing changes for a server that sets no SocketOptions::receive_buffer_bytes",
        fix: REMOVE,
    },
    Advice {
        name: "net.core.wmem_max",
        is_followed: |line, _| line.number().is_some_and(|value| value >= 16 << 20),
        severity: Severity::Info,
        truth: "any, if the program leaves SO_SNDBUF alone: it bounds that option, and tuning ends at net.ipv4.tcp_wmem",
        otherwise: "nothing changes for a server that sets no SocketOptions::send_buffer_bytes",
        fix: REMOVE,
    },
    Advice {
        name: "net.ipv4.tcp_rmem",
        is_followed: |line, _| line.numbers().get(2).is_some_and(|most| *most >= 64 << 20),
        severity: Severity::Info,
        truth: "the bandwidth × round trip of one connection, as its third value: each connection may take that much",
        otherwise: "few peers that send while their handlers wait fill net.ipv4.tcp_mem",
        fix: "remove the line, or 6 MiB as the third value where links are not both long and fast",
    },
    Advice {
        name: "net.ipv4.tcp_wmem",
        is_followed: |line, _| line.numbers().get(2).is_some_and(|most| *most >= 64 << 20),
        severity: Severity::Info,
        truth: "the bandwidth × round trip of one connection, as its third value: each connection may take that much",
        otherwise: "few peers that do not read fill net.ipv4.tcp_mem, unless SocketOptions::not_sent_bytes_max bounds them",
        fix: "remove the line, or 4 MiB as the third value where links are not both long and fast",
    },
    Advice {
        name: "net.ipv4.tcp_keepalive_time",
        is_followed: |_, _| true,
        severity: Severity::Info,
        truth: "any: the server sets SocketOptions::keep_alive on its sockets, and gives a silent peer up after 180 s",
        otherwise: "nothing changes for this server",
        fix: "set SocketOptions::keep_alive",
    },
    Advice {
        name: "net.ipv4.tcp_low_latency",
        is_followed: |_, _| true,
        severity: Severity::Info,
        truth: "no such line: it does nothing since Linux 4.14",
        otherwise: "nothing happens",
        fix: REMOVE,
    },
];

/// Lines of this machine's files that follow such advice.
pub(super) fn outdated(case: &Case<'_>, found: &mut Vec<Finding>) {
    let lines = lines(case.machine);
    let mut add = |line: &Line, severity, truth: &str, otherwise: &str, fix: &str| {
        let texts = Texts {
            what: format!("{} in {}", line.name, line.place),
            value: line.value.clone(),
            needed: truth.into(),
            otherwise: otherwise.into(),
            fix: fix.into(),
        };
        found.push(texts.of("advice", severity, Certainty::Computed));
    };
    let followed = lines.iter().flat_map(|line| {
        let its = ADVICE.iter().filter(|advice| advice.name == line.name);
        its.filter(|advice| (advice.is_followed)(line, case)).map(move |advice| (line, advice))
    });
    for (line, advice) in followed.take(FOUND_MAX) {
        add(line, advice.severity, advice.truth, advice.otherwise, advice.fix);
    }
    let last = |name: &str| lines.iter().rfind(|line| line.name == name);
    if let (Some(of_process), Some(of_machine)) = (last("fs.nr_open"), last("fs.file-max"))
        && of_process.number() >= of_machine.number()
    {
        let truth = "any: it caps one process, and fs.file-max all together; neither has to exceed the other";
        add(
            of_process,
            Severity::Info,
            truth,
            "nothing happens",
            "LimitNOFILE= in systemd, which is what a server has",
        );
    }
}

/// All lines that set something, file by file.
fn lines(machine: &MachineFiles) -> Vec<Line> {
    // The same name in an earlier folder replaces a file.
    let mut files: BTreeMap<String, String> = BTreeMap::new();
    for folder in FOLDERS {
        for name in machine.names(folder).into_iter().filter(|name| name.ends_with(".conf")) {
            files.entry(name.clone()).or_insert_with(|| format!("{folder}/{name}"));
        }
    }
    // One of them is often a link to the file beside.
    let mut seen = HashSet::new();
    let files = files.into_values().chain([FILE.to_owned()]);
    let files: Vec<String> =
        files.filter(|file| machine.place(file).canonicalize().is_ok_and(|real| seen.insert(real))).collect();
    let of_file = |file: String| {
        let text = machine.text(&file).unwrap_or_default();
        let lines = (1..).zip(text.lines()).filter_map(|(number, line)| parse(&file, number, line));
        lines.collect::<Vec<_>>()
    };
    files.into_iter().flat_map(of_file).collect()
}

/// `name = value`; a dash before it tells to go on after an error, and slashes may stand for dots.
fn parse(file: &str, number: usize, line: &str) -> Option<Line> {
    let line = line.trim();
    if line.starts_with(['#', ';']) {
        return None;
    }
    let (name, value) = line.split_once('=')?;
    let name = name.trim().trim_start_matches('-').replace('/', ".");
    Some(Line { place: format!("{file}:{number}"), name, value: value.trim().to_owned() })
}
