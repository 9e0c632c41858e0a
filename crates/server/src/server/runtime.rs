//! The runtime of a shard.

use std::fmt;
#[cfg(feature = "runtime-tokio")]
use std::io;
#[cfg(feature = "runtime-tokio")]
use std::pin::Pin;
use std::str::FromStr;

#[cfg(feature = "runtime-tokio-uring")]
use ringserve_drivers::probe_ring;

use crate::error::Error;

/// The runtime inside which the shards of a server run.
///
/// A runtime costs something for each turn. Measured, CPU time for a request grows by some per cent
/// under load, and by more where a turn brings a single request (docs/PERFORMANCE.md). Services and
/// their handlers are the same on each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Runtime {
    /// None: the shard waits in its driver. Code that needs tokio's runtime does not work in
    /// handlers; code that needs only a waker, such as tokio's channels and locks, does.
    #[default]
    Own,
    /// A current-thread runtime of tokio's for each shard, on the shard's thread, with time and I/O
    /// enabled. In factories, handlers and tasks of the shard all of tokio works: `tokio::time`,
    /// `tokio::net`, `spawn`, `spawn_local`, `spawn_blocking`, and crates above them, such as
    /// clients of databases. Cargo feature `runtime-tokio`.
    #[cfg(feature = "runtime-tokio")]
    Tokio,
    /// A runtime of tokio-uring for each shard, which is one of tokio's too: its files work in
    /// handlers. It has a separate ring, so it needs io_uring even if the server runs on epoll.
    /// Cargo feature `runtime-tokio-uring`.
    ///
    /// Its operations do not bear the drop of a call, which the end of a connection is: an open
    /// that is dropped loses its descriptor. Do them in a task of `tokio::task::spawn_local`, whose
    /// handle the call awaits.
    #[cfg(feature = "runtime-tokio-uring")]
    TokioUring,
}

impl Runtime {
    /// All of them, with their names.
    const ALL: &[(Runtime, &str)] = &[
        (Runtime::Own, "own"),
        #[cfg(feature = "runtime-tokio")]
        (Runtime::Tokio, "tokio"),
        #[cfg(feature = "runtime-tokio-uring")]
        (Runtime::TokioUring, "tokio-uring"),
    ];

    /// Refuses a runtime that cannot be made here.
    ///
    /// # Errors
    /// Names the cause and the fix.
    #[cfg(feature = "runtime-tokio-uring")]
    pub(crate) fn check(self) -> Result<(), Error> {
        if self != Runtime::TokioUring {
            return Ok(());
        }
        let why = |error| io::Error::other(format!("tokio-uring needs io_uring: {error}"));
        probe_ring().map_err(|error| Error::Runtime { shard: 0, error: why(error) })
    }

    /// The others can be made everywhere.
    #[cfg(not(feature = "runtime-tokio-uring"))]
    pub(crate) fn check(self) -> Result<(), Error> {
        Ok(())
    }

    /// Runs a future to its end inside the runtime. It is boxed, so that the runtime's loop is
    /// compiled once and not for each service.
    #[cfg(feature = "runtime-tokio-uring")]
    pub(crate) fn run<T>(self, inside: Pin<Box<dyn Future<Output = T> + '_>>) -> io::Result<T> {
        if self != Runtime::TokioUring {
            return run_on_tokio(inside);
        }
        let runtime = tokio_uring::Runtime::new(&tokio_uring::builder())?;
        Ok(runtime.block_on(inside))
    }

    /// Runs a future to its end inside tokio's runtime.
    #[cfg(all(feature = "runtime-tokio", not(feature = "runtime-tokio-uring")))]
    pub(crate) fn run<T>(self, inside: Pin<Box<dyn Future<Output = T> + '_>>) -> io::Result<T> {
        run_on_tokio(inside)
    }
}

#[cfg(feature = "runtime-tokio")]
fn run_on_tokio<T>(inside: Pin<Box<dyn Future<Output = T> + '_>>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    let done = local.block_on(&runtime, inside);
    // Tasks are dropped inside the runtime; its blocking threads are not waited for.
    {
        let _inside = runtime.enter();
        drop(local);
    }
    runtime.shutdown_background();
    Ok(done)
}

impl FromStr for Runtime {
    type Err = String;

    fn from_str(name: &str) -> Result<Runtime, String> {
        let found = Runtime::ALL.iter().find(|(_, known)| *known == name);
        let names = || Runtime::ALL.iter().map(|(_, known)| *known).collect::<Vec<_>>().join(", ");
        found
            .map(|(runtime, _)| *runtime)
            .ok_or_else(|| format!("{name} is no runtime; choose one of {}", names()))
    }
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Runtime::ALL.iter().find(|(runtime, _)| runtime == self);
        f.write_str(known.map_or("", |(_, name)| name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_named_as_it_is_shown() {
        for (runtime, name) in Runtime::ALL {
            assert_eq!((&*runtime.to_string(), name.parse()), (*name, Ok(*runtime)));
        }
        assert!("go".parse::<Runtime>().unwrap_err().starts_with("go is no runtime; choose one of own"));
    }
}
