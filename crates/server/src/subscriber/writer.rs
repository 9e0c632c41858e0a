//! The thread that writes the lines: the only one that an output can block.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ringserve_base::clock::Deadline;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::warn;

use super::queue::Queue;

/// An output that takes nothing, as a disk without room, is tried again after this time.
const AGAIN: Duration = Duration::from_secs(1);

/// For a write, and for the one line that the thread says itself.
const STACK_BYTES: usize = 256 << 10;

/// The place of the lines.
#[derive(Clone, Debug)]
pub(super) enum Output {
    Stdout,
    Stderr,
    File(PathBuf),
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Output::Stdout => f.write_str("stdout"),
            Output::Stderr => f.write_str("stderr"),
            Output::File(path) => path.display().fmt(f),
        }
    }
}

impl Output {
    /// Opens it, past the buffers and the locks of `std`, which a program's own `println!` takes.
    pub(super) fn open(&self) -> io::Result<File> {
        match self {
            Output::Stdout => Ok(io::stdout().as_fd().try_clone_to_owned()?.into()),
            Output::Stderr => Ok(io::stderr().as_fd().try_clone_to_owned()?.into()),
            Output::File(path) => OpenOptions::new().append(true).create(true).open(path),
        }
    }

    pub(super) fn is_terminal(&self) -> bool {
        match self {
            Output::Stdout => io::stdout().is_terminal(),
            Output::Stderr => io::stderr().is_terminal(),
            Output::File(_) => false,
        }
    }
}

/// The state that the threads that log share with the one that writes.
pub(super) struct Shared {
    queue: Mutex<Queue>,
    /// There is something for the writer to do.
    work: Condvar,
    /// All lines were written.
    done: Condvar,
    reopens: AtomicBool,
    dropped: AtomicU64,
}

impl Shared {
    pub(super) fn new(lines_max: usize) -> Shared {
        Shared {
            queue: Mutex::new(Queue::new(lines_max)),
            work: Condvar::new(),
            done: Condvar::new(),
            reopens: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a line written, or drops it. The lock is held for a copy.
    fn push(&self, line: &[u8]) {
        let mut queue = self.queue();
        let was_empty = queue.is_empty();
        if !queue.push(line) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        } else if was_empty {
            drop(queue);
            self.work.notify_one();
        }
    }

    /// Lines that were dropped so far.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Orders the writer to open its file again.
    pub(super) fn reopen(&self) {
        let queue = self.queue();
        self.reopens.store(true, Ordering::Relaxed);
        drop(queue);
        self.work.notify_one();
    }

    /// Waits for each line to be written. True if each is.
    pub(super) fn flush(&self, until: Deadline) -> bool {
        let queue = self.queue();
        until.wait_while(&self.done, queue, |queue| !queue.is_written()).is_written()
    }
}

/// A line comes in one call, as `tracing-subscriber` writes it.
impl Write for &Shared {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The result of a write.
enum End {
    Written,
    /// The reader of the output is gone.
    Lost,
}

struct Writer {
    shared: Arc<Shared>,
    output: Output,
    file: File,
    /// The last write ended within a line.
    is_mid_line: bool,
}

/// Starts the thread that writes. It ends with the process.
///
/// # Errors
/// The system's: the output cannot be opened, or there is no thread.
pub(super) fn start(shared: Arc<Shared>, output: Output) -> io::Result<()> {
    let writer = Writer { file: output.open()?, shared, output, is_mid_line: false };
    let thread = thread::Builder::new().name("ringserve-log".to_owned()).stack_size(STACK_BYTES);
    thread.spawn(move || writer.run()).map(drop)
}

impl Writer {
    fn run(mut self) {
        let shared = self.shared.clone();
        let mut batch = Vec::new();
        loop {
            batch.clear();
            let mut queue = shared.queue();
            if queue.is_written() {
                shared.done.notify_all();
            }
            let reopens = || shared.reopens.load(Ordering::Relaxed);
            let waits = |queue: &mut Queue| queue.is_empty() && !reopens();
            queue = shared.work.wait_while(queue, waits).unwrap_or_else(PoisonError::into_inner);
            queue.take(&mut batch);
            drop(queue);
            self.reopen_if_told();
            let end = self.write(&batch);
            let mut queue = shared.queue();
            let untold = match end {
                End::Written => queue.written(),
                End::Lost => {
                    shared.dropped.fetch_add(queue.lost(), Ordering::Relaxed);
                    0
                }
            };
            drop(queue);
            if untold > 0 {
                warn!(target: "ringserve::log", lines = untold, "lines of the log were dropped: what reads it is slow, or was away");
            }
        }
    }

    fn write(&mut self, batch: &[u8]) -> End {
        // Behind half a line that was lost.
        let before: &[u8] = if self.is_mid_line && !batch.is_empty() { b"\n" } else { b"" };
        for mut rest in [before, batch] {
            while !rest.is_empty() {
                match self.write_some(rest) {
                    Ok(count) => {
                        self.is_mid_line = rest[..count].last() != Some(&b'\n');
                        rest = &rest[count..];
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if is_dead(&error) => return End::Lost,
                    Err(_) => self.pause(),
                }
            }
        }
        End::Written
    }

    /// Writes a part of some bytes, and waits for room where the output says that it would block.
    fn write_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.file.write(bytes) {
            Ok(0) => Err(ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let again = Timespec { tv_sec: AGAIN.as_secs() as i64, tv_nsec: 0 };
                let _ = poll(&mut [PollFd::new(&self.file, PollFlags::OUT)], Some(&again));
                Err(ErrorKind::Interrupted.into())
            }
            written => written,
        }
    }

    /// Waits a while for an output that takes nothing; or for another one.
    fn pause(&mut self) {
        let reopens = || self.shared.reopens.load(Ordering::Relaxed);
        let queue = self.shared.queue();
        drop(Deadline::within(AGAIN).wait_while(&self.shared.work, queue, |_| !reopens()));
        self.reopen_if_told();
    }

    /// Opens the file again, which may be another one of the same name by now.
    fn reopen_if_told(&mut self) {
        if !self.shared.reopens.swap(false, Ordering::Relaxed) {
            return;
        }
        match self.output.open() {
            Ok(file) if matches!(self.output, Output::File(_)) => {
                (self.file, self.is_mid_line) = (file, false)
            }
            Ok(_) => {}
            Err(error) => {
                let output = &self.output;
                warn!(target: "ringserve::log", %output, %error, "the log cannot be opened again; the old file stays in use");
            }
        }
    }
}

/// True for an output that loses what is written to it: its reader ended, or the process was
/// started without it.
fn is_dead(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(number, Some(Errno::PIPE | Errno::BADF | Errno::CONNRESET | Errno::NOTCONN))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Duration;

    use super::*;

    /// No test waits as long unless it fails.
    const SOON: Duration = Duration::from_secs(60);

    fn shared(lines_max: usize) -> Arc<Shared> {
        Arc::new(Shared::new(lines_max))
    }

    fn start_at(shared: &Arc<Shared>, file: File, output: Output) {
        let writer = Writer { shared: shared.clone(), output, file, is_mid_line: false };
        thread::spawn(move || writer.run());
    }

    fn pipe() -> (File, File) {
        let (reader, writer) = io::pipe().unwrap();
        (std::os::fd::OwnedFd::from(reader).into(), std::os::fd::OwnedFd::from(writer).into())
    }

    /// A file of the test's, which is away before and after.
    fn path(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ringserve-log-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn flush_may_have_all_the_time_there_is() {
        assert!(shared(1).flush(Deadline::within(Duration::MAX)));
    }

    #[test]
    fn full_pipe_holds_up_the_writer_alone() {
        let (mut reader, writer) = pipe();
        let shared = shared(300);
        start_at(&shared, writer, Output::Stdout);
        let line = [[b'x'; 511].as_slice(), b"\n"].concat();
        // 300 lines of 512 bytes are more than the 64 KiB of a pipe, so the writer is blocked for
        // good.
        for _ in 0..1000 {
            shared.push(&line);
        }
        assert!(
            !shared.flush(Deadline::within(Duration::from_millis(1))),
            "the pipe cannot have taken everything"
        );
        let dropped = shared.dropped();
        assert!((1000 - 300 - 128..=1000 - 128).contains(&dropped), "{dropped}");
        let mut read = vec![0; 512 * (1000 - dropped as usize)];
        reader.read_exact(&mut read).unwrap();
        assert!(read.chunks(512).all(|read| read == line));
        assert!(shared.flush(Deadline::within(SOON)));
    }

    #[test]
    fn lines_for_a_full_disk_wait_for_another_file() {
        let path = path("full");
        let shared = shared(8);
        // `/dev/full` has no room for anything.
        start_at(&shared, File::options().write(true).open("/dev/full").unwrap(), Output::File(path.clone()));
        shared.push(b"before\n");
        assert!(!shared.flush(Deadline::within(Duration::from_millis(1))));
        shared.reopen();
        assert!(shared.flush(Deadline::within(SOON)));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before\n");
        assert_eq!(shared.dropped(), 0);
        let _ = std::fs::remove_file(&path);
    }

    #[test]
    fn lines_follow_a_file_that_was_moved_once_it_is_opened_again() {
        let (path, moved) = (path("now"), path("moved"));
        let shared = shared(8);
        start(shared.clone(), Output::File(path.clone())).unwrap();
        shared.push(b"first\n");
        assert!(shared.flush(Deadline::within(SOON)));
        std::fs::rename(&path, &moved).unwrap();
        shared.push(b"second\n");
        assert!(shared.flush(Deadline::within(SOON)));
        shared.reopen();
        shared.push(b"third\n");
        assert!(shared.flush(Deadline::within(SOON)));
        assert_eq!(std::fs::read_to_string(&moved).unwrap(), "first\nsecond\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "third\n");
        [path, moved].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }

    #[test]
    fn lines_for_a_reader_that_ended_are_counted_and_end_nothing() {
        let (reader, writer) = pipe();
        drop(reader);
        let shared = shared(8);
        start_at(&shared, writer, Output::Stdout);
        for lost in 1..4 {
            shared.push(b"without a reader\n");
            assert!(shared.flush(Deadline::within(SOON)));
            assert_eq!(shared.dropped(), lost);
        }
    }

    #[test]
    fn output_that_would_block_is_waited_for() {
        let (mut reader, writer) = pipe();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let shared = shared(1000);
        start_at(&shared, writer, Output::Stdout);
        let line = [[b'x'; 511].as_slice(), b"\n"].concat();
        (0..500).for_each(|_| shared.push(&line));
        let mut read = vec![0; 512 * 500];
        reader.read_exact(&mut read).unwrap();
        assert!(shared.flush(Deadline::within(SOON)) && shared.dropped() == 0);
    }
}
