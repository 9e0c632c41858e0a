//! Access to facts of the machine: files below one directory, so that a test may plant any of them.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The most that is read of a file. `/proc/stat` of a machine with a thousand CPUs has about 200
/// KiB.
const FILE_MAX: usize = 1 << 20;

/// The length of the first read: more than most of these files have.
const PIECE: usize = 4 << 10;

/// Files that a machine keeps open at most. [`read_of`](super::read_of) takes some ten, and two for
/// each control group with a quota; the endpoint, which keeps them, has 96 descriptors, of which
/// its shard and its connections take 72.
const KEPT_MAX: usize = 24;

/// The files of a machine.
#[derive(Clone, Debug)]
pub struct MachineFiles {
    root: PathBuf,
    /// Files that were read once, and stay open; `None` if each look opens them.
    kept: Option<Arc<Mutex<HashMap<PathBuf, File>>>>,
    /// The files that could not be looked at, if those are noted.
    refused: Option<Arc<Mutex<Vec<FileRefusal>>>>,
}

/// A file that could not be looked at: which is not the same as one that is not there, as that of a
/// feature that the kernel lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRefusal {
    /// Its path on the machine, such as `/proc/self/limits`.
    pub path: String,
    pub why: String,
}

/// Directories below which nothing is known where they are not mounted, with one that each of them
/// has.
const TREES: [(&str, &str); 2] = [("/proc/", "/proc/self"), ("/sys/", "/sys/devices")];

impl MachineFiles {
    /// The machine that this process runs on.
    pub fn here() -> MachineFiles {
        MachineFiles::below("/")
    }

    /// A machine whose files are below `root`.
    pub fn below(root: impl Into<PathBuf>) -> MachineFiles {
        MachineFiles { root: root.into(), kept: None, refused: None }
    }

    /// The same with files that stay open, so that they are read also where the process has no
    /// descriptor left: the first look opens them.
    pub fn keeping(self) -> MachineFiles {
        MachineFiles { kept: Some(Arc::default()), ..self }
    }

    /// The same, which notes what it cannot look at.
    pub fn noting(self) -> MachineFiles {
        MachineFiles { refused: Some(Arc::default()), ..self }
    }

    /// The files that could not be looked at since the last call.
    pub fn take_refused(&self) -> Vec<FileRefusal> {
        let refused = self.refused.as_ref();
        refused.map_or_else(Vec::new, |all| {
            std::mem::take(&mut *all.lock().unwrap_or_else(PoisonError::into_inner))
        })
    }

    /// Notes why there is no look at a place, unless it is not there.
    fn note(&self, place: &Path, error: &io::Error) {
        let Some(refused) = &self.refused else { return };
        let path = format!("/{}", place.strip_prefix(&self.root).unwrap_or(place).display());
        let why = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                let tree = TREES.iter().find(|(tree, _)| path.starts_with(tree));
                match tree.filter(|(_, inside)| !self.place(inside).exists()) {
                    Some((tree, _)) => format!("{} is not mounted", tree.trim_end_matches('/')),
                    None => return,
                }
            }
            // The kernel has the file of a feature that is switched off.
            io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput => return,
            _ => error.to_string(),
        };
        refused.lock().unwrap_or_else(PoisonError::into_inner).push(FileRefusal { path, why });
    }

    /// The path of a file of the machine below the root. `path` begins with a slash.
    pub fn place(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The text of a file, up to 1 MiB of it; `None` if it cannot be read.
    pub fn text(&self, path: &str) -> Option<String> {
        self.text_at(&self.place(path))
    }

    /// The same of a file whose whole place is known.
    pub fn text_at(&self, place: &Path) -> Option<String> {
        let read = |opened: io::Result<File>| {
            let text = opened.and_then(|file| Ok((whole(&file)?, file)));
            text.inspect_err(|error| self.note(place, error)).ok()
        };
        let Some(kept) = &self.kept else { return read(File::open(place)).map(|(text, _)| text) };
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        // One that can no longer be read, as that of a control group that was left, makes room for
        // its successor.
        if let Some(text) = kept.get(place).and_then(|file| whole(file).ok()) {
            return Some(text);
        }
        kept.remove(place);
        let (text, file) = read(File::open(place))?;
        if kept.len() < KEPT_MAX {
            kept.insert(place.to_owned(), file);
        }
        Some(text)
    }

    /// The first number of a file.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.numbers(path).first().copied()
    }

    /// The numbers that a file begins with.
    pub fn numbers(&self, path: &str) -> Vec<u64> {
        let text = self.text(path).unwrap_or_default();
        text.split_ascii_whitespace().map_while(|word| word.parse().ok()).collect()
    }

    /// The file of a sysctl, such as `net.core.somaxconn`.
    pub fn sysctl_file(name: &str) -> String {
        format!("/proc/sys/{}", name.replace('.', "/"))
    }

    /// The first number of a sysctl; `None` where the kernel does not have it.
    pub fn sysctl(&self, name: &str) -> Option<u64> {
        self.number(&MachineFiles::sysctl_file(name))
    }

    /// The names in a directory, in their order; none if it cannot be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let place = self.place(path);
        let entries = fs::read_dir(&place).inspect_err(|error| self.note(&place, error));
        let Ok(entries) = entries else { return Vec::new() };
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let mut names: Vec<String> = entries.flatten().map(name).collect();
        names.sort();
        names
    }

    /// True if there is such a file or directory.
    pub fn has(&self, path: &str) -> bool {
        let place = self.place(path);
        match place.metadata() {
            Ok(_) => true,
            Err(error) => {
                self.note(&place, &error);
                false
            }
        }
    }

    /// The value of a line `name: value`, as in `/proc/meminfo` and `/proc/self/status`.
    pub fn field(&self, path: &str, name: &str) -> Option<String> {
        let text = self.text(path)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().to_owned())
    }

    /// Bytes of a line `name:   123 kB`.
    pub fn kib_field(&self, path: &str, name: &str) -> Option<u64> {
        let kib: u64 = self.field(path, name)?.strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    }

    /// The text of each file with one of these names in the control groups of the process and all
    /// groups above.
    pub fn group_files(&self, wanted: &GroupFiles<'_>) -> Vec<GroupFile> {
        let groups = self.text("/proc/self/cgroup").unwrap_or_default();
        wanted.read(&groups, &self.place("/sys/fs/cgroup"), |place| self.text_at(place))
    }
}

/// The text of a file from its beginning, up to 1 MiB of it, wherever it was read to before.
fn whole(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; PIECE];
    let mut read = 0;
    loop {
        match file.read_at(&mut bytes[read..], read as u64) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if read == bytes.len() {
            if read >= FILE_MAX {
                break;
            }
            bytes.resize(2 * read, 0);
        }
    }
    Ok(String::from_utf8_lossy(&bytes[..read]).into_owned())
}

/// Files of control groups that are looked for.
pub struct GroupFiles<'a> {
    /// The controller, by which groups of the first version are found.
    pub controller: &'a str,
    /// Names in the one tree of the second version.
    pub second: &'a [&'a str],
    /// Names in the controller's tree of the first version.
    pub first: &'a [&'a str],
}

/// A file of a control group that was found.
#[derive(Debug, PartialEq, Eq)]
pub struct GroupFile {
    /// Such as `memory.max of the control group /app`.
    pub source: String,
    /// The directory of the group.
    pub folder: PathBuf,
    /// The number in the list of names.
    pub number: usize,
    pub text: String,
}

impl GroupFiles<'_> {
    /// [`read`](GroupFiles::read) with files that are opened each time.
    #[cfg(test)]
    pub fn below(&self, groups: &str, root: &Path) -> Vec<GroupFile> {
        self.read(groups, root, |place| fs::read_to_string(place).ok())
    }

    /// Looks for the groups in the text of `/proc/self/cgroup`, with file systems below `root`. In
    /// a container the paths may be those of the host, of which only the root exists.
    fn read(&self, groups: &str, root: &Path, text: impl Fn(&Path) -> Option<String>) -> Vec<GroupFile> {
        let mut found = Vec::new();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let is_its = controllers.split(',').any(|name| name == self.controller);
            let (mounts, files): (Vec<&str>, &[&str]) = match controllers {
                "" => (vec!["", "unified"], self.second),
                // Mounted by its name, or together with those that share its tree: `cpu,cpuacct`.
                _ if is_its && controllers != self.controller => {
                    (vec![self.controller, controllers], self.first)
                }
                _ if is_its => (vec![self.controller], self.first),
                _ => continue,
            };
            for group in Path::new(path).ancestors() {
                let below = group.strip_prefix("/").unwrap_or(group);
                for mount in &mounts {
                    let folder = root.join(mount).join(below);
                    for (number, file) in files.iter().enumerate() {
                        let Some(text) = text(&folder.join(file)) else { continue };
                        let source = format!("{file} of the control group {}", group.display());
                        found.push(GroupFile { source, folder: folder.clone(), number, text });
                    }
                }
            }
        }
        // A tree that is mounted under both names is one.
        found.dedup_by(|later, earlier| later.source == earlier.source);
        found
    }
}
