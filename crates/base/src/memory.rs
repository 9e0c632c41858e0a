//! The memory that the process may use: limits of its control groups and address space, and the
//! memory that is available.

use std::fmt;

use crate::machine::files::{GroupFile, GroupFiles, MachineFiles};
use crate::machine::soft_limit;

/// From this value on a control group has no limit: the first version says so by the largest
/// multiple of a page that a number holds.
const NO_LIMIT: u64 = 1 << 62;

/// The memory that the process may use, with its source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UsableMemory {
    /// Bytes.
    pub bytes: u64,
    source: String,
}

/// As `24 MiB (memory.max of the control group /app)`.
impl fmt::Display for UsableMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB ({})", self.bytes >> 20, self.source)
    }
}

/// Finds the memory that the process may use: the least of the limits of its control groups and all
/// groups above (`memory.max` and `memory.high`, or `memory.limit_in_bytes` of the first version),
/// `RLIMIT_AS`, and the memory that the machine has available now. `None` if none of them can be
/// read. Memory that others in the same control group use is not subtracted.
///
/// ```no_run
/// # mod ringserve {
/// #     pub mod limits {
/// #         pub use ringserve_base::memory::usable_memory;
/// #         pub use ringserve_core::ServerLimits;
/// #     }
/// # }
/// use ringserve::limits::{ServerLimits, usable_memory};
///
/// let mut limits = ServerLimits::default();
/// if let Some(memory) = usable_memory() {
///     limits = limits.fitted(memory.bytes, 2);
/// }
/// ```
pub fn usable_memory() -> Option<UsableMemory> {
    usable_memory_of(&MachineFiles::here())
}

/// The same of a machine.
pub fn usable_memory_of(machine: &MachineFiles) -> Option<UsableMemory> {
    let (own, available) = (own_memory(machine), available_memory(machine));
    own.into_iter().chain(available).min_by_key(|memory| memory.bytes)
}

/// The memory that is the process's own, and no other's: the least limit of its control groups and
/// its address space.
pub fn own_memory(machine: &MachineFiles) -> Option<UsableMemory> {
    let mut found: Vec<UsableMemory> = machine.group_files(&LIMITS).iter().filter_map(of_group).collect();
    let address_space = soft_limit(machine, "Max address space").filter(|bytes| *bytes < NO_LIMIT);
    found.extend(address_space.map(|bytes| UsableMemory { bytes, source: "RLIMIT_AS".to_owned() }));
    found.into_iter().min_by_key(|memory| memory.bytes)
}

/// True if the process is in a control group that may have a limit, now or later.
pub fn is_in_group(machine: &MachineFiles) -> bool {
    !machine.group_files(&LIMITS).is_empty()
}

/// The memory that the machine has available for all.
pub fn available_memory(machine: &MachineFiles) -> Option<UsableMemory> {
    let available = machine.kib_field("/proc/meminfo", "MemAvailable");
    available.map(|bytes| UsableMemory { bytes, source: "MemAvailable".to_owned() })
}

/// The limits of control groups.
const LIMITS: GroupFiles<'static> = GroupFiles {
    controller: "memory",
    second: &["memory.max", "memory.high"],
    first: &["memory.limit_in_bytes"],
};

fn of_group(file: &GroupFile) -> Option<UsableMemory> {
    let bytes = parse(&file.text)?;
    Some(UsableMemory { bytes, source: file.source.clone() })
}

/// A limit as control groups have it; `None` for none.
fn parse(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|bytes| *bytes < NO_LIMIT)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// Control groups' files below a directory of the test's.
    struct Groups(PathBuf);

    impl Groups {
        fn new(name: &str, files: &[(&str, &str)]) -> Groups {
            let root = std::env::temp_dir().join(format!("ringserve-groups-{}-{name}", std::process::id()));
            for (path, text) in files {
                let place = root.join(path);
                fs::create_dir_all(place.parent().unwrap()).unwrap();
                fs::write(place, text).unwrap();
            }
            Groups(root)
        }

        fn least(&self, groups: &str) -> Option<(u64, String)> {
            let found = LIMITS.below(groups, &self.0);
            let found = found.iter().filter_map(of_group).min_by_key(|memory| memory.bytes);
            found.map(|memory| (memory.bytes, memory.source))
        }
    }

    impl Drop for Groups {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_least_limit_of_all_groups_above_counts() {
        let groups = Groups::new(
            "second",
            &[
                ("app/memory.max", "104857600\n"),
                ("app/memory.high", "max\n"),
                ("app/web/memory.max", "max\n"),
                ("app/web/memory.high", "52428800\n"),
                ("app/web/one/memory.max", "209715200\n"),
                ("other/memory.max", "1\n"),
            ],
        );
        let least = |path: &str| groups.least(&format!("0::{path}\n"));
        let high = Some((50 << 20, "memory.high of the control group /app/web".to_owned()));
        assert_eq!((least("/app/web/one"), least("/app/web")), (high.clone(), high));
        assert_eq!(least("/app"), Some((100 << 20, "memory.max of the control group /app".to_owned())));
        assert_eq!(least("/"), None, "the root has no limit");
    }

    #[test]
    fn groups_of_the_first_version_are_found_by_their_controller() {
        let none = "9223372036854771712\n";
        let groups = Groups::new(
            "first",
            &[
                ("memory/memory.limit_in_bytes", none),
                ("memory/app/memory.limit_in_bytes", "25165824\n"),
                ("memory/app/one/memory.limit_in_bytes", none),
                ("cpu/app/memory.limit_in_bytes", "1\n"),
            ],
        );
        let text = "5:cpu,cpuacct:/app\n4:memory:/app/one\n1:name=systemd:/\n0::/\n";
        let limit = Some((24 << 20, "memory.limit_in_bytes of the control group /app".to_owned()));
        assert_eq!(groups.least(text), limit);
        assert_eq!(groups.least("4:memory:/\n"), None);
    }

    #[test]
    fn in_a_container_the_root_is_its_own_group() {
        let groups = Groups::new("container", &[("memory.max", "67108864\n")]);
        let limit = Some((64 << 20, "memory.max of the control group /".to_owned()));
        assert_eq!(groups.least("0::/\n"), limit);
        assert_eq!(groups.least("0::/docker/3f2a\n"), limit, "a path of the host's");
    }

    #[test]
    fn garbage_is_no_limit() {
        let groups = Groups::new("garbage", &[("a/memory.max", "many\n"), ("memory/a/x", "")]);
        for text in ["", "0", "0:", "::", "0::/a\n", "4:memory:/a\n", "\u{0}:\n:::/a/../..\n"] {
            assert_eq!(groups.least(text), None, "{text:?}");
        }
        for (text, bytes) in
            [("max", None), ("", None), ("-1", None), ("12 ", Some(12)), ("18446744073709551615", None)]
        {
            assert_eq!(parse(text), bytes, "{text}");
        }
    }

    #[test]
    fn available_memory_is_found_in_its_text() {
        let available = |text: &str| {
            let machine = Groups::new("meminfo", &[("proc/meminfo", text)]);
            usable_memory_of(&MachineFiles::below(&machine.0)).map(|memory| memory.bytes)
        };
        let text = "MemTotal:       24683956 kB\nMemFree:  1 kB\nMemAvailable:   24106020 kB\n";
        assert_eq!(available(text), Some(24_106_020 << 10));
        for garbage in ["", "MemAvailable:", "MemAvailable: x kB", "MemAvailable: 12 MB"] {
            assert_eq!(available(garbage), None, "{garbage}");
        }
        assert!(usable_memory().is_some_and(|memory| memory.bytes > 0), "Linux has /proc");
    }
}
