//! The log of a server: a subscriber of `tracing` that never holds up a shard.
//!
//! [`init`] sets it, at the begin of a program. Whatever becomes of the output, a full pipe, a
//! terminal that is stopped by Ctrl-S, a disk without room: the threads that log go on. Their lines
//! wait in a bounded queue, from which one thread writes them. A line that finds the queue full is
//! dropped and counted: the log tells how many once lines leave again, and the metric
//! `ringserve_log_lines_dropped_total` ([`lines_dropped`]) at once.
//!
//! ```no_run
//! use ringserve::log::{self, LogOptions};
//! # use ringserve::{Cx, Frame, Server, Service, framing::Lines};
//! # struct Echo;
//! # impl Service for Echo {
//! #     type Session = ();
//! #     type Error = std::convert::Infallible;
//! #     async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Self::Error> { Ok(()) }
//! # }
//!
//! fn main() -> Result<(), ringserve::Error> {
//!     log::init(LogOptions::default().json().file("/var/log/app.log").access_file("/var/log/app.access.log"))?;
//!     Server::bind("0.0.0.0:7000").framing(Lines::default()).access_log(true).serve(|_shard| Echo)
//! }
//! ```
//!
//! * The environment variable `RUST_LOG` has the filter, or [`LogOptions::filter`] where there is
//!   none; `info` without either. [`set_filter`] changes it at any time, and so does POST
//!   `/log-level` of the admin endpoint.
//! * Text has colors if it goes to a terminal and the environment has no `NO_COLOR`. A file, a pipe
//!   and journald get none.
//! * A file is opened again by [`reopen`], for whatever moves old files away; during
//!   [`serve`](crate::Server::serve) also by SIGHUP, unless the process has a terminal.
//! * A panic is a line with its file and line, instead of the text that Rust writes to stderr; with
//!   a back trace where `RUST_BACKTRACE` asks for it.
//! * What waits when the process exits is written out within a second, or lost. A process that
//!   aborts loses it, but for the panic of a program that is built with `panic = "abort"`.
//!
//! # Lines of JSON
//!
//! ```json
//! {"v":1,"ts":"2026-11-27T12:00:00.123456Z","level":"warn","target":"app","msg":"..","shard":0,"id":"17.3","peer":"10.1.2.3:5511"}
//! ```
//!
//! Behind the message come the event's fields by their names: numbers and booleans as such, all
//! else as a string. `spans` has the names of the spans around the event, the outermost first. A
//! name is not changed within the version `v`; new ones may come.

mod json;
mod panics;
mod queue;
mod writer;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use json::Json;
use ringserve_base::clock::Deadline;
use ringserve_base::log_thread::set_never_blocks;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Metadata, Subscriber, warn};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Registry, reload};
use writer::{Output, Shared};

use crate::error::Error;

/// Lines that wait at most: 8192 take 4 MiB, and a server under attack writes some hundred a
/// second.
const LINES_MAX: usize = 8192;

/// For what is left at the exit.
const END: Duration = Duration::from_secs(1);

/// The target of the lines of [`access_log`](crate::access_log), and the front of those of
/// requests.
const ACCESS: &str = "ringserve::access";

fn is_access(target: &str) -> bool {
    target.strip_prefix(ACCESS).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The log of this process, once there is one.
static LOG: OnceLock<Log> = OnceLock::new();

struct Log {
    lines: Lines,
    filter: reload::Handle<EnvFilter, Registry>,
}

/// The destination of the log, and its form. By default text to stdout.
#[derive(Clone, Debug)]
#[must_use = "options are given to init"]
pub struct LogOptions {
    output: Output,
    access: Option<PathBuf>,
    is_json: bool,
    filter: String,
    color: Option<bool>,
    targets: bool,
    lines_max: usize,
}

impl Default for LogOptions {
    fn default() -> LogOptions {
        LogOptions {
            output: Output::Stdout,
            access: None,
            is_json: false,
            filter: "info".to_owned(),
            color: None,
            targets: false,
            lines_max: LINES_MAX,
        }
    }
}

impl LogOptions {
    /// Writes [lines of JSON](crate::subscriber#lines-of-json).
    pub fn json(mut self) -> LogOptions {
        self.is_json = true;
        self
    }

    /// Appends to a file, which is made if it is not there. It has no colors, which
    /// [`color`](LogOptions::color) puts there.
    pub fn file(mut self, path: impl Into<PathBuf>) -> LogOptions {
        self.output = Output::File(path.into());
        self
    }

    /// Writes to stderr.
    pub fn stderr(mut self) -> LogOptions {
        self.output = Output::Stderr;
        self
    }

    /// Appends the lines of the [access log](crate::access_log) to a separate file, as JSON. Its
    /// queue is another one, so that many short connections push no other line out.
    pub fn access_file(mut self, path: impl Into<PathBuf>) -> LogOptions {
        self.access = Some(path.into());
        self
    }

    /// Sets the filter for a process without `RUST_LOG`: `info,app=debug` for example. `info` by
    /// default.
    pub fn filter(mut self, filter: impl Into<String>) -> LogOptions {
        self.filter = filter.into();
        self
    }

    /// Colors the text or not, whatever the output is.
    pub fn color(mut self, color: bool) -> LogOptions {
        self.color = Some(color);
        self
    }

    /// Writes the target of each line of text, which is the module by default. JSON always has it.
    pub fn targets(mut self, targets: bool) -> LogOptions {
        self.targets = targets;
        self
    }

    /// Bounds the lines that wait, with 512 bytes for each: 8192 by default, 1 at least. Memory is
    /// taken as lines wait.
    pub fn lines_max(mut self, lines: usize) -> LogOptions {
        self.lines_max = lines.max(1);
        self
    }
}

/// Sets the subscriber of the whole process, and has panics logged. To be called once, before the
/// server starts.
///
/// # Errors
/// [`Error::Log`]: a file cannot be opened, the filter of the options is none, or there is a
/// subscriber already. A wrong filter in `RUST_LOG` is a warning, and that of the options holds.
pub fn init(options: LogOptions) -> Result<(), Error> {
    let wrong = |text: String| Err(Error::Log(text));
    let (filter, ignored) = match first_filter(&options.filter) {
        Ok(filter) => filter,
        Err(error) => {
            return wrong(format!(
                "LogOptions::filter is {:?}: {error}; write one such as \"info,app=debug\"",
                options.filter
            ));
        }
    };
    let lines = match Lines::start(&options) {
        Ok(lines) => lines,
        Err(error) => return wrong(error),
    };
    let color = options.color.unwrap_or_else(|| options.output.is_terminal() && !no_color());
    let (filter, handle) = reload::Layer::new(filter);
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(color && !options.is_json)
        .log_internal_errors(false)
        .event_format(Form {
            text: tracing_subscriber::fmt::format().with_target(options.targets),
            is_json: options.is_json,
            is_access_apart: options.access.is_some(),
        })
        .with_writer(lines.clone());
    let subscriber = Registry::default().with(filter).with(layer);
    if tracing::subscriber::set_global_default(subscriber).is_err() {
        return wrong("there is a subscriber of tracing already".to_owned());
    }
    let _ = LOG.set(Log { lines, filter: handle });
    set_never_blocks();
    panics::to_the_log(flush);
    ringserve_drivers::at_exit(at_exit);
    if let Some(error) = ignored {
        warn!("RUST_LOG is ignored: {error}");
    }
    Ok(())
}

/// Opens the files of the log again, as after a rotation: lines go on in the old ones until then.
/// Returns at once, and a file that cannot be opened is reported in the old one. Without [`init`],
/// and for stdout and stderr, nothing happens.
pub fn reopen() {
    if let Some(log) = LOG.get() {
        log.lines.each().for_each(Shared::reopen);
    }
}

/// Lines that were dropped since the start, because the queue was full or nothing reads the output.
pub fn lines_dropped() -> u64 {
    LOG.get().map_or(0, |log| log.lines.each().map(Shared::dropped).sum())
}

/// Waits until each line so far is written, for this time at most. True if each is. The exit of the
/// process does it, with a second.
pub fn flush(within: Duration) -> bool {
    LOG.get().is_none_or(|log| log.lines.flush(within))
}

/// Sets the filter: `info,ringserve=debug` for example.
///
/// # Errors
/// The reason why it is none, or that there is no [`init`].
pub fn set_filter(filter: &str) -> Result<(), String> {
    let log = LOG.get().ok_or("the log is not that of ringserve::log")?;
    let filter = parse(filter).map_err(|error| error.to_string())?;
    log.filter.reload(filter).map_err(|error| error.to_string())
}

extern "C" fn at_exit() {
    flush(END);
}

type FilterError = tracing_subscriber::filter::ParseError;

fn parse(filter: &str) -> Result<EnvFilter, FilterError> {
    EnvFilter::builder().with_default_directive(LevelFilter::ERROR.into()).parse(filter)
}

/// The filter of `RUST_LOG`, or the one of the options, and why the former is ignored.
fn first_filter(of_options: &str) -> Result<(EnvFilter, Option<FilterError>), FilterError> {
    let wish = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
    match wish.is_empty() {
        true => Ok((parse(of_options)?, None)),
        false => match parse(&wish) {
            Ok(filter) => Ok((filter, None)),
            Err(error) => Ok((parse(of_options)?, Some(error))),
        },
    }
}

fn no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// The queues of lines: that of the log, and that of the access log if it has its own file.
#[derive(Clone)]
struct Lines {
    log: Arc<Shared>,
    access: Option<Arc<Shared>>,
}

impl Lines {
    fn start(options: &LogOptions) -> Result<Lines, String> {
        let start = |output: Output| {
            let shared = Arc::new(Shared::new(options.lines_max));
            match writer::start(shared.clone(), output.clone()) {
                Ok(()) => Ok(shared),
                Err(error) => Err(format!("the log cannot be written to {output}: {error}")),
            }
        };
        let access = options.access.clone().map(|path| start(Output::File(path))).transpose()?;
        Ok(Lines { log: start(options.output.clone())?, access })
    }

    fn each(&self) -> impl Iterator<Item = &Shared> {
        [Some(&*self.log), self.access.as_deref()].into_iter().flatten()
    }

    /// Waits until each line of both is written, for this time at most.
    fn flush(&self, within: Duration) -> bool {
        let until = Deadline::within(within);
        self.each().all(|lines| lines.flush(until))
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = &'a Shared;

    fn make_writer(&'a self) -> &'a Shared {
        &self.log
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> &'a Shared {
        match &self.access {
            Some(access) if is_access(event.target()) => access,
            _ => &self.log,
        }
    }
}

/// The form in which events are written.
struct Form {
    text: Format<Full>,
    is_json: bool,
    is_access_apart: bool,
}

impl<S, N> FormatEvent<S, N> for Form
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        match self.is_json || self.is_access_apart && is_access(event.metadata().target()) {
            true => Json.format_event(context, line, event),
            false => self.text.format_event(context, line, event),
        }
    }
}

#[cfg(test)]
mod tests;
