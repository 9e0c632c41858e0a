//! Figures of the process, by the names that Prometheus' clients have for them.

use std::fmt;
use std::sync::OnceLock;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;
use ringserve_base::machine::files::MachineFiles;
use ringserve_base::machine::{open_descriptors, soft_limit};

use super::families::Families;

/// Ticks of a second in `/proc`: the kernel's constant for programs (`USER_HZ`) on each processor
/// that Linux is built for here.
const TICKS_PER_SECOND: f64 = 100.0;

/// The process by its names in Prometheus, for a [registry](prometheus_client::registry::Registry)
/// of the program's: `process_cpu_seconds_total`, `process_open_fds`, `process_max_fds`,
/// `process_resident_memory_bytes`, `process_virtual_memory_bytes` and
/// `process_start_time_seconds`.
///
/// [`Metrics::write_prometheus`](super::Metrics::write_prometheus) and `/metrics` of an admin
/// endpoint have them already. A figure that `/proc` does not tell is left out. A read takes four
/// files, some tens of microseconds.
///
/// ```
/// use ringserve::metrics::Process;
/// use ringserve::metrics::prometheus_client::{encoding::text::encode, registry::Registry};
///
/// let mut registry = Registry::default();
/// registry.register_collector(Box::new(Process::default()));
/// let mut text = String::new();
/// encode(&mut text, &registry).unwrap();
/// assert!(text.contains("process_open_fds "));
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Process {}

/// The figures of a process in `/proc`.
#[derive(Debug, Default, PartialEq)]
struct ProcessFigures {
    cpu_seconds: Option<f64>,
    open_fds: Option<u64>,
    max_fds: Option<u64>,
    resident_bytes: Option<u64>,
    virtual_bytes: Option<u64>,
    /// Since the beginning of 1970.
    start_time: Option<f64>,
}

impl ProcessFigures {
    fn of(machine: &MachineFiles, booted: Option<f64>) -> ProcessFigures {
        let stat = machine.text("/proc/self/stat").unwrap_or_default();
        // The name of the program is in parentheses, and may have some itself. The third field is
        // behind it.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let ticks = field(14).zip(field(15)).map(|(user, system)| user + system);
        ProcessFigures {
            cpu_seconds: ticks.map(|ticks| ticks as f64 / TICKS_PER_SECOND),
            open_fds: open_descriptors(machine),
            max_fds: soft_limit(machine, "Max open files"),
            resident_bytes: machine.kib_field("/proc/self/status", "VmRSS"),
            virtual_bytes: field(23),
            start_time: booted.zip(field(22)).map(|(booted, ticks)| booted + ticks as f64 / TICKS_PER_SECOND),
        }
    }
}

/// When the machine booted. The file has a line for each CPU and each interrupt, and is read once.
fn booted(machine: &MachineFiles) -> Option<f64> {
    let text = machine.text("/proc/stat")?;
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

impl Collector for Process {
    fn encode(&self, to: DescriptorEncoder<'_>) -> fmt::Result {
        static BOOTED: OnceLock<Option<f64>> = OnceLock::new();
        let machine = MachineFiles::here();
        let booted = *BOOTED.get_or_init(|| booted(&machine));
        write(&ProcessFigures::of(&machine, booted), &mut Families::new(to, "process_"))
    }
}

fn write(of: &ProcessFigures, to: &mut Families<'_>) -> fmt::Result {
    let ProcessFigures { cpu_seconds, open_fds, max_fds, resident_bytes, virtual_bytes, start_time } = of;
    let one = |value: &Option<u64>| value.map(|value| (Vec::new(), value));
    let cpu = cpu_seconds.map(|seconds| (Vec::new(), seconds));
    to.counters("cpu", "CPU time of the process, of the system for it too", Some(&Unit::Seconds), cpu)?;
    to.gauges("open_fds", "Descriptors that are open", None, one(open_fds))?;
    to.gauges("max_fds", "Descriptors that may be open", None, one(max_fds))?;
    let what = "Memory of the process that is in RAM";
    to.gauges("resident_memory", what, Some(&Unit::Bytes), one(resident_bytes))?;
    to.gauges("virtual_memory", "Address space of the process", Some(&Unit::Bytes), one(virtual_bytes))?;
    let started = start_time.map(|at| (Vec::new(), at));
    to.gauges(
        "start_time",
        "When the process started, since the beginning of 1970",
        Some(&Unit::Seconds),
        started,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_all_figures() {
        let machine = MachineFiles::here();
        let found = ProcessFigures::of(&machine, booted(&machine));
        assert!(
            found.open_fds.is_some_and(|count| count >= 3) && found.max_fds >= found.open_fds,
            "{found:?}"
        );
        assert!(found.resident_bytes.is_some_and(|bytes| bytes > 1 << 20), "{found:?}");
        assert!(found.virtual_bytes > found.resident_bytes && found.cpu_seconds.is_some(), "{found:?}");
        assert!(found.start_time.is_some_and(|at| at > 1e9), "{found:?}");
    }

    #[test]
    fn name_of_the_program_may_have_parentheses() {
        let root = std::env::temp_dir().join(format!("ringserve-process-{}", std::process::id()));
        std::fs::create_dir_all(root.join("proc/self")).unwrap();
        let stat = "7 (a) R (b)) S 1 1 1 0 -1 4194304 1 0 0 0 150 50 0 0 20 0 1 0 300 8192 2 9";
        std::fs::write(root.join("proc/self/stat"), stat).unwrap();
        let found = ProcessFigures::of(&MachineFiles::below(&root), Some(1000.0));
        std::fs::remove_dir_all(root).unwrap();
        assert_eq!((found.cpu_seconds, found.start_time), (Some(2.0), Some(1003.0)));
        assert_eq!((found.virtual_bytes, found.max_fds, found.resident_bytes), (Some(8192), None, None));
    }
}
