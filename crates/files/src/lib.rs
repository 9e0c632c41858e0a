//! Files that a server reads again when they change: certificates, keys, lists of networks.
//!
//! A look is a `stat` of each file. What has changed is read; what was read is judged by its user,
//! whether it is taken or refused; and only then it counts as seen. So a file that cannot be read
//! for a while, since descriptors are used up or its disk is not mounted, is read at the first look
//! at which that is possible, and what fails the same way look after look is reported once.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Properties that change with a file: its device and number, its size, and the times at which its
/// content and its facts changed. The last one is the kernel's alone, so that a file that is
/// written with its old time and size shows too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    file: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(data: &Metadata) -> Stamp {
        Stamp {
            file: (data.dev(), data.ino()),
            size: data.len(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        }
    }
}

/// A file as it was read.
#[derive(Clone, Debug)]
pub struct Content {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Of the file that was opened, taken before it was read, so that a change meanwhile is seen at
    /// the next look.
    pub stamp: Stamp,
}

/// Reads a file, up to `bytes_max` of it.
///
/// # Errors
/// If it cannot be opened or read.
pub fn read(file: &Path, bytes_max: u64) -> io::Result<Content> {
    let file = File::open(file)?;
    let stamp = Stamp::of(&file.metadata()?);
    let mut bytes = Vec::new();
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(Content { bytes, stamp })
}

/// Looks at files that belong together.
#[derive(Debug, Default)]
pub struct Watcher {
    /// Those of the content that was judged last.
    judged: Option<Vec<Stamp>>,
    /// Why they could not be read at the look before.
    failed: Option<String>,
}

impl Watcher {
    /// Of files that were judged as they were with these stamps, in their order.
    pub fn of_judged(stamps: Vec<Stamp>) -> Watcher {
        Watcher { judged: Some(stamps), failed: None }
    }

    /// Looks at `files`. If one is not as it was when they were judged, all are read by `read`,
    /// which returns their stamps too, in the same order, and what it read is judged by `judge`.
    /// `None` if nothing changed, or if they cannot be read for a reason that was returned before.
    ///
    /// # Errors
    /// The error of `read`, and the next look reads again; or the error of `judge`, and no look
    /// reads again before a file changes.
    pub fn look<T, U, E: fmt::Display>(
        &mut self,
        files: &[impl AsRef<Path>],
        read: impl FnOnce() -> Result<(T, Vec<Stamp>), E>,
        judge: impl FnOnce(T) -> Result<U, E>,
    ) -> Option<Result<U, E>> {
        let stamps: Option<Vec<Stamp>> =
            files.iter().map(|file| fs::metadata(file).ok().map(|data| Stamp::of(&data))).collect();
        if stamps.is_some() && stamps == self.judged {
            self.failed = None;
            return None;
        }
        match read() {
            Ok((content, stamps)) => {
                self.failed = None;
                let judged = judge(content);
                self.judged = Some(stamps);
                Some(judged)
            }
            Err(error) => {
                let why = error.to_string();
                let is_new = self.failed.as_ref() != Some(&why);
                self.failed = Some(why);
                is_new.then_some(Err(error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A file that is removed at the end.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str, text: &str) -> Temporary {
            let file = std::env::temp_dir().join(format!("ringserve-files-{name}-{}", std::process::id()));
            fs::write(&file, text).unwrap();
            Temporary(file)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    /// A look that takes every content.
    fn look(watcher: &mut Watcher, file: &Path) -> Option<Result<String, String>> {
        let read = || {
            let read = read(file, 100).map_err(|error| error.to_string())?;
            Ok((read.bytes, vec![read.stamp]))
        };
        watcher.look(&[file], read, |bytes| String::from_utf8(bytes).map_err(|error| error.to_string()))
    }

    fn fails(watcher: &mut Watcher, file: &Path, why: &str) -> Option<Result<(), String>> {
        watcher.look(&[file], || Err::<((), _), _>(why.to_owned()), Ok)
    }

    #[test]
    fn file_that_cannot_be_read_is_tried_again_and_told_once() {
        let file = Temporary::new("later", "one");
        let mut watcher = Watcher::default();
        let why = |why: &str| Some(Err(why.to_owned()));
        assert_eq!(fails(&mut watcher, &file.0, "no descriptor"), why("no descriptor"));
        assert_eq!(fails(&mut watcher, &file.0, "no descriptor"), None, "it stays");
        assert_eq!(fails(&mut watcher, &file.0, "no disk"), why("no disk"));
        // The file did not change meanwhile.
        assert_eq!(look(&mut watcher, &file.0), Some(Ok("one".to_owned())));
        assert_eq!(look(&mut watcher, &file.0), None);
        fs::write(&file.0, "other").unwrap();
        assert_eq!(fails(&mut watcher, &file.0, "no disk"), why("no disk"), "it was read in between");
        assert_eq!(look(&mut watcher, &file.0), Some(Ok("other".to_owned())));
    }

    #[test]
    fn content_that_is_refused_is_read_once() {
        let file = Temporary::new("refused", "one");
        let mut watcher = Watcher::default();
        fs::write(&file.0, [0xff]).unwrap();
        assert!(look(&mut watcher, &file.0).is_some_and(|judged| judged.is_err()));
        assert_eq!(look(&mut watcher, &file.0), None);
    }

    #[test]
    fn file_that_is_gone_is_looked_for() {
        let file = Temporary::new("gone", "one");
        let mut watcher = Watcher::default();
        assert!(look(&mut watcher, &file.0).is_some());
        fs::remove_file(&file.0).unwrap();
        assert!(look(&mut watcher, &file.0).is_some_and(|read| read.is_err()));
        assert_eq!(look(&mut watcher, &file.0), None);
        fs::write(&file.0, "again").unwrap();
        assert_eq!(look(&mut watcher, &file.0), Some(Ok("again".to_owned())));
    }

    #[test]
    fn change_shows_behind_the_same_time_and_size() {
        let file = Temporary::new("same", "one");
        let before = read(&file.0, 100).unwrap();
        let modified = fs::metadata(&file.0).unwrap().modified().unwrap();
        let mut watcher = Watcher::of_judged(vec![before.stamp]);
        assert_eq!(look(&mut watcher, &file.0), None);
        // The clock of the file system may stand still for some milliseconds.
        for _ in 0..2000 {
            if read(&file.0, 100).unwrap().stamp != before.stamp {
                break;
            }
            fs::write(&file.0, "two").unwrap();
            File::options().write(true).open(&file.0).unwrap().set_modified(modified).unwrap();
        }
        assert_eq!(look(&mut watcher, &file.0), Some(Ok("two".to_owned())));
    }

    #[test]
    fn no_more_is_read_than_is_asked_for() {
        let file = Temporary::new("long", "0123456789");
        assert_eq!(read(&file.0, 4).unwrap().bytes, b"0123");
    }
}
