//! Backends that are the lines of a file.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringserve_files::{Watcher, read};
use ringserve_server::Shard;

use crate::backend::Backend;
use crate::discover::{Backends, Discover};
use crate::upstream::Upstream;

/// Time between two looks at the file.
const LOOKS_EACH: Duration = Duration::from_secs(1);

/// A file is read up to this.
const BYTES_MAX: u64 = 1 << 20;

/// A file with the backends of an upstream. See [`Upstream::file`].
#[derive(Clone, Debug)]
pub struct BackendFile {
    path: PathBuf,
}

impl BackendFile {
    /// Reads backends as they stand in such a file.
    ///
    /// ```
    /// use ringserve::upstream::{Backend, BackendFile};
    ///
    /// let backends = BackendFile::parse("# the large one\n10.0.0.11:80 weight=4\n10.0.0.12:80\n").unwrap();
    /// assert_eq!(backends, [Backend::new("10.0.0.11:80").weight(4), Backend::new("10.0.0.12:80")]);
    /// assert_eq!(BackendFile::parse("here").unwrap_err().to_string(), "line 1: \"here\" is no address with a port");
    /// ```
    ///
    /// # Errors
    /// `InvalidData` with the number of the line that is none.
    pub fn parse(text: &str) -> io::Result<Vec<Backend>> {
        let lines = text.lines().enumerate();
        let lines = lines.map(|(index, line)| (index + 1, line.split('#').next().unwrap_or("").trim()));
        lines.filter(|(_, line)| !line.is_empty()).map(|(number, line)| backend(line, number)).collect()
    }
}

fn backend(line: &str, number: usize) -> io::Result<Backend> {
    let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("line {number}: {why}"));
    let mut words = line.split_whitespace();
    let address = words.next().unwrap_or("");
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    let is_clear = address.starts_with("unix:/") || port.is_some_and(|port| port.parse::<u16>().is_ok());
    if !is_clear {
        return Err(wrong(format!("{address:?} is no address with a port")));
    }
    let mut backend = Backend::new(address);
    for word in words {
        let weight = word.strip_prefix("weight=").and_then(|weight| weight.parse().ok());
        match weight {
            Some(weight @ 1..=65535) => backend = backend.weight(weight),
            _ => return Err(wrong(format!("{word:?} is not weight=1 to weight=65535"))),
        }
    }
    Ok(backend)
}

impl Upstream {
    /// An upstream whose backends stand in a file, one a line: `10.0.0.11:80`, `10.0.0.12:80
    /// weight=4`, `unix:/run/a.sock`, with comments behind `#`. The file is looked at once a
    /// second, and read when it changed, up to 1 MiB. One that is missing, empty or wrong changes
    /// nothing, and is logged with the line.
    pub fn file(name: &str, path: impl AsRef<Path>) -> Upstream {
        Upstream::discover(name, BackendFile { path: path.as_ref().to_owned() })
    }
}

impl Discover for BackendFile {
    async fn run(&self, shard: &Shard, backends: &Backends) -> io::Result<()> {
        let mut watcher = Watcher::default();
        let mut looks = shard.interval(LOOKS_EACH);
        loop {
            looks.tick().await;
            let (path, mut watches) = (self.path.clone(), std::mem::take(&mut watcher));
            let looked = shard.spawn_blocking(move || {
                let found = watches.look(
                    &[&path],
                    || read(&path, BYTES_MAX).map(|content| (content.bytes, vec![content.stamp])),
                    |bytes| BackendFile::parse(&String::from_utf8_lossy(&bytes)),
                );
                (watches, found.map(|found| found.map_err(|error| named(&path, &error))))
            });
            let found;
            (watcher, found) = looked.await.map_err(io::Error::other)?;
            match found {
                Some(Ok(found)) => backends.set(found),
                Some(Err(error)) => backends.not_found(error),
                None => {}
            }
        }
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rubbish_is_refused_with_its_line() {
        let why = |text: &str| BackendFile::parse(text).unwrap_err().to_string();
        assert_eq!(why("a:1\n\nb:70000"), "line 3: \"b:70000\" is no address with a port");
        assert_eq!(why("a:1 weight=0"), "line 1: \"weight=0\" is not weight=1 to weight=65535");
        assert_eq!(why("a:1 heavy"), "line 1: \"heavy\" is not weight=1 to weight=65535");
        assert_eq!(BackendFile::parse(" # nothing\n").unwrap(), []);
        assert_eq!(
            BackendFile::parse("unix:/run/a.sock # here").unwrap(),
            [Backend::new("unix:/run/a.sock")]
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = BackendFile::parse(&text);
        }
    }
}
