//! Figures of the program: counters, gauges and histograms that each shard counts for itself, and
//! that are summed when they are read.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;
use ringserve_drivers::guarded;

use ringserve_base::lines::error;

/// Series of a name by default: a label that peers choose the value of must not fill the memory.
const SERIES_MAX: usize = 1000;

/// Families at most: names are written in a program, and a loop that makes them is an accident.
const FAMILIES_MAX: usize = 1000;

/// Bytes of a label's value at most: what is longer is cut.
const VALUE_BYTES_MAX: usize = 128;

/// Buckets of a histogram at most, without the one that has no end: each is a line of every series.
const BUCKETS_MAX: usize = 64;

/// The value of each label of the series that stands for all beyond [`Figures::series_max`].
const OTHER: &str = "other";

/// Names that are the server's.
const RESERVED: [&str; 2] = ["ringserve_", "process_"];

/// Buckets for times in seconds, from a millisecond to ten seconds.
pub const SECONDS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Counters, gauges and histograms of the program. Each thread counts in separate cells, which are
/// summed when the figures are read: to count is a load and a store, without a lock or an
/// instruction that other cores wait for.
///
/// A name is registered once, in `main` as a rule, with its help and its labels. The result is
/// moved into the factory, which asks it for a handle of each series on its shard
/// ([`Counters::with`]). The handle counts, and stays on its thread. To make one takes a lock and
/// allocates 256 bytes, so a factory or a session keeps it, and no call makes one.
///
/// A name that is there with another type, or is not in order otherwise, is no panic: its figures
/// are not shown. [`check`](Figures::check) says so, a line of the log too, and a server that shows
/// them on its admin endpoint (`Admin::figures`) does not start.
///
/// ```no_run
/// use ringserve::admin::Admin;
/// use ringserve::framing::Lines;
/// use ringserve::metrics::{Counter, Figures, Gauge};
/// use ringserve::{Cx, Frame, Server, Service, service::{CloseCx, OpenCx, Refusal}};
///
/// struct News {
///     published: Counter,
///     here: Gauge,
/// }
///
/// impl Service for News {
///     type Session = ();
///     type Error = std::convert::Infallible;
///
///     async fn open(&self, _opening: &OpenCx<'_>) -> Result<(), Refusal> {
///         self.here.add(1);
///         Ok(())
///     }
///
///     async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Self::Error> {
///         self.published.add(1);
///         cx.reply(line);
///         Ok(())
///     }
///
///     fn close(&self, _closed: &CloseCx<'_, ()>) {
///         self.here.add(-1);
///     }
/// }
///
/// fn main() -> Result<(), ringserve::Error> {
///     let figures = Figures::default();
///     let published = figures.counter("news_published", "Messages that were published", ["by"]);
///     let here = figures.gauge("news_peers", "Peers that are here", []);
///     Server::bind("0.0.0.0:7000")
///         .framing(Lines::default())
///         .admin(Admin::new("127.0.0.1:9000").figures(&figures))
///         .serve(move |_shard| News { published: published.with(["lines"]), here: here.with([]) })
/// }
/// ```
///
/// Without an admin endpoint they are a [`Collector`] for a registry of the program's, or
/// [text](Figures::write_prometheus). Clones are the same figures.
#[derive(Clone, Default)]
pub struct Figures {
    shared: Arc<Shared>,
}

struct Shared {
    families: Mutex<Vec<Arc<Family>>>,
    faults: Mutex<Vec<String>>,
    series_max: AtomicUsize,
}

impl Default for Shared {
    fn default() -> Shared {
        Shared {
            families: Mutex::default(),
            faults: Mutex::default(),
            series_max: AtomicUsize::new(SERIES_MAX),
        }
    }
}

/// A fault of [`Figures`]: each name that cannot be shown, and why.
#[derive(Clone, PartialEq, Eq)]
pub struct FiguresError(String);

ringserve_buf::debug_is_display!(FiguresError);

impl fmt::Display for FiguresError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FiguresError {}

/// The series of one name.
struct Family {
    name: String,
    help: String,
    labels: Vec<String>,
    kind: Kind,
    /// The ends of a histogram's buckets.
    ends: Arc<[f64]>,
    shared: Arc<Shared>,
    series: Mutex<BTreeMap<Values, Series>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// The values of its labels.
type Values = Arc<[Box<str>]>;

/// The counts of all threads under the same values.
#[derive(Clone, Default)]
struct Series {
    /// Of handles that are gone.
    past: Sum,
    live: Live,
}

/// Cells of a piece at most.
const PIECE: usize = 64;

/// The cells of the handles that are there, in pieces: a reader takes what there is with one step
/// for each piece, and reads it without the lock. Who adds or removes cells meanwhile copies the
/// piece that it changes, and no other.
#[derive(Clone, Default)]
struct Live {
    pieces: Vec<Arc<Vec<Arc<Cells>>>>,
}

impl Live {
    fn push(&mut self, cells: Arc<Cells>) {
        if self.pieces.last().is_none_or(|last| last.len() == PIECE) {
            self.pieces.push(Arc::default());
        }
        let before = PIECE * (self.pieces.len() - 1);
        if let Some(last) = self.pieces.last_mut() {
            cells.place.store(before + last.len(), Ordering::Relaxed);
            Arc::make_mut(last).push(cells);
        }
    }

    /// The last ones take the place of those that are removed.
    fn remove(&mut self, cells: &Arc<Cells>) {
        let Some(last) = self.pieces.last_mut().and_then(|last| Arc::make_mut(last).pop()) else { return };
        self.pieces.pop_if(|last| last.is_empty());
        if !Arc::ptr_eq(&last, cells) {
            let place = cells.place.load(Ordering::Relaxed);
            last.place.store(place, Ordering::Relaxed);
            if let Some(piece) = self.pieces.get_mut(place / PIECE) {
                Arc::make_mut(piece)[place % PIECE] = last;
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    fn each(&self) -> impl Iterator<Item = &Arc<Cells>> {
        self.pieces.iter().flat_map(|piece| piece.iter())
    }
}

/// The counts of one handle. On lines that no other thread writes: 128 bytes, since processors
/// fetch lines of 64 in pairs.
#[repr(align(128))]
struct Cells {
    /// The count, the value of a gauge as `i64`, or the sum of a histogram as `f64`.
    value: AtomicU64,
    /// The number of values in each bucket, the one without an end last.
    buckets: Box<[AtomicU64]>,
    /// The index of these cells among those of their series. Read and written under its lock.
    place: AtomicUsize,
}

/// The counts of several handles.
#[derive(Clone, Default)]
struct Sum {
    whole: u64,
    real: f64,
    buckets: Vec<u64>,
}

impl Sum {
    fn add(&mut self, cells: &Cells) {
        let value = cells.value.load(Ordering::Relaxed);
        self.whole = self.whole.wrapping_add(value);
        if !cells.buckets.is_empty() {
            self.real += f64::from_bits(value);
        }
        self.buckets.resize(cells.buckets.len(), 0);
        for (sum, cell) in self.buckets.iter_mut().zip(&cells.buckets) {
            *sum += cell.load(Ordering::Relaxed);
        }
    }
}

impl Series {
    fn sum(&self) -> Sum {
        let mut sum = self.past.clone();
        self.live.each().for_each(|cells| sum.add(cells));
        sum
    }
}

impl Figures {
    /// Series of each name at most, 1000 by default and 1 at least. A series is what has the same
    /// values of all labels. What comes beyond counts in one more, in which each label is `other`.
    /// It holds for series that are made later.
    pub fn series_max(self, series: usize) -> Figures {
        self.shared.series_max.store(series.max(1), Ordering::Relaxed);
        self
    }

    /// Registers a counter: what is added up, such as messages. Its name is shown with `_total`
    /// behind it, whether it was given so or not; `help` is a line for people. The same
    /// registration again, with the same help and labels, is the same counter.
    ///
    /// Names have letters, digits, `_` and `:`, labels all of them but the colon, and neither
    /// begins with a digit. Names that begin with `ringserve_` or `process_` are the server's.
    pub fn counter<const N: usize>(&self, name: &str, help: &str, labels: [&str; N]) -> Counters<N> {
        let name = name.strip_suffix("_total").unwrap_or(name);
        Counters { family: self.register(Kind::Counter, name, help, &labels, &[]) }
    }

    /// Registers a gauge: what rises and falls, such as peers that are here. Shown is the sum of
    /// all its handles.
    pub fn gauge<const N: usize>(&self, name: &str, help: &str, labels: [&str; N]) -> Gauges<N> {
        Gauges { family: self.register(Kind::Gauge, name, help, &labels, &[]) }
    }

    /// Registers a histogram: how often values were in each bucket. `buckets` are where they end,
    /// rising, 64 at most, and one without an end is added: [`SECONDS`] are some for times.
    pub fn histogram<const N: usize>(
        &self,
        name: &str,
        help: &str,
        labels: [&str; N],
        buckets: &[f64],
    ) -> Histograms<N> {
        Histograms { family: self.register(Kind::Histogram, name, help, &labels, buckets) }
    }

    /// Whether all that was registered so far can be shown.
    ///
    /// # Errors
    /// The names that cannot be shown, each with its cause: a name or a label that is none, one
    /// that is the server's, one that is there with another type, help or labels, or whose lines
    /// would have the name of another's; buckets that do not rise; more than 1000 names.
    pub fn check(&self) -> Result<(), FiguresError> {
        let faults = lock(&self.shared.faults);
        match faults.is_empty() {
            true => Ok(()),
            false => Err(FiguresError(faults.join("; "))),
        }
    }

    /// Appends all figures as OpenMetrics text, with the line that ends it.
    ///
    /// ```
    /// use ringserve::metrics::Figures;
    ///
    /// let figures = Figures::default();
    /// let logins = figures.counter("app_logins", "Logins", ["how"]).with(["token"]);
    /// logins.add(2);
    /// let mut text = String::new();
    /// figures.write_prometheus(&mut text);
    /// assert!(text.contains("app_logins_total{how=\"token\"} 2\n"));
    /// ```
    pub fn write_prometheus(&self, to: &mut String) {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        // A `String` takes everything.
        let _ = text::encode(to, &registry);
    }

    fn register(&self, kind: Kind, name: &str, help: &str, labels: &[&str], ends: &[f64]) -> Arc<Family> {
        let mut families = lock(&self.shared.families);
        let is_same = |known: &&Arc<Family>| {
            known.kind == kind
                && known.name == name
                && known.help == help
                && known.labels == labels
                && *known.ends == *ends
        };
        if let Some(known) = families.iter().find(is_same) {
            return known.clone();
        }
        let family = Arc::new(Family {
            name: name.to_owned(),
            help: help.to_owned(),
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
            kind,
            ends: ends.into(),
            shared: self.shared.clone(),
            series: Mutex::default(),
        });
        match family.check(&families) {
            Ok(()) => families.push(family.clone()),
            Err(fault) => {
                guarded(|| error!("figures of the program are not shown: {fault}"));
                lock(&self.shared.faults).push(fault);
            }
        }
        family
    }
}

impl fmt::Debug for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> =
            lock(&self.shared.families).iter().map(|family| family.name.clone()).collect();
        f.debug_tuple("Figures").field(&names).finish()
    }
}

impl Collector for Figures {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let families = lock(&self.shared.families).clone();
        families.iter().try_for_each(|family| family.encode(&mut to))
    }
}

impl Kind {
    fn metric_type(self) -> MetricType {
        match self {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
        }
    }
}

/// True for a name of OpenMetrics; `is_label` for one without a colon.
fn is_name(name: &str, is_label: bool) -> bool {
    let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_' || (c == ':' && !is_label);
    name.starts_with(is_letter) && name.chars().all(|c| is_letter(c) || c.is_ascii_digit())
}

/// The names that begin the lines of a figure of this type.
pub(super) fn line_names(name: &str, metric_type: &str) -> Vec<String> {
    let endings: &[&str] = match metric_type {
        "counter" => &["", "_total"],
        "info" => &["", "_info"],
        "histogram" => &["", "_bucket", "_count", "_sum"],
        "summary" => &["", "_count", "_sum"],
        _ => &[""],
    };
    endings.iter().map(|ending| format!("{name}{ending}")).collect()
}

impl Family {
    /// Whether it can be shown with those that are known.
    ///
    /// # Errors
    /// A sentence with the cause.
    fn check(&self, known: &[Arc<Family>]) -> Result<(), String> {
        let name: String = self.name.chars().take(100).collect();
        let wrong = |why: &str| Err(format!("{name:?} {why}"));
        if !is_name(&self.name, false) {
            return wrong(
                "is no name of a figure: it has letters, digits, _ and :, and begins with no digit",
            );
        }
        if RESERVED.iter().any(|reserved| self.name.starts_with(reserved)) {
            return wrong("begins like the server's own figures, with ringserve_ or process_");
        }
        for (number, label) in self.labels.iter().enumerate() {
            if !is_name(label, true) || label.starts_with("__") {
                return wrong(&format!("has a label {label:.100?}, which is no name of one"));
            }
            if label == "le" {
                return wrong("has a label le, which is that of buckets");
            }
            if self.labels[..number].contains(label) {
                return wrong(&format!("has the label {label} twice"));
            }
        }
        if self.help.contains('\n') {
            return wrong("has more than one line of help");
        }
        if self.ends.len() > BUCKETS_MAX {
            return wrong(&format!("has {} buckets; {BUCKETS_MAX} is the most", self.ends.len()));
        }
        if !self.ends.iter().all(|end| end.is_finite()) || !self.ends.is_sorted_by(|one, next| one < next) {
            return wrong("has buckets that do not rise from one to the next, or have no end");
        }
        if let Some(other) = known.iter().find(|other| other.name == self.name) {
            return wrong(&format!(
                "is there twice: as a {} with the labels {:?}, and as a {} with {:?}, or with another help or other buckets",
                other.kind.metric_type().as_str(),
                other.labels,
                self.kind.metric_type().as_str(),
                self.labels
            ));
        }
        let ours = self.line_names();
        if let Some(other) =
            known.iter().find(|other| other.line_names().iter().any(|name| ours.contains(name)))
        {
            return wrong(&format!("would have lines of the same name as {:?}", other.name));
        }
        if known.len() >= FAMILIES_MAX {
            return wrong(&format!("is beyond {FAMILIES_MAX} names, which is the most"));
        }
        Ok(())
    }

    /// The names that begin its lines.
    fn line_names(&self) -> Vec<String> {
        line_names(&self.name, self.kind.metric_type().as_str())
    }

    fn encode(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // Summed without the lock: a handle that is made or dropped waits for no reader.
        let all: Vec<(Values, Series)> =
            lock(&self.series).iter().map(|(values, series)| (values.clone(), series.clone())).collect();
        let sums: Vec<(Values, Sum)> =
            all.into_iter().map(|(values, series)| (values, series.sum())).collect();
        if sums.is_empty() {
            return Ok(());
        }
        let mut encoder = to.encode_descriptor(&self.name, &self.help, None, self.kind.metric_type())?;
        for (values, sum) in &sums {
            let labels: Vec<(&str, &str)> =
                self.labels.iter().map(|label| &**label).zip(values.iter().map(|value| &**value)).collect();
            match labels.is_empty() {
                true => self.encode_sum(&mut encoder, sum)?,
                false => self.encode_sum(&mut encoder.encode_family(&labels)?, sum)?,
            }
        }
        Ok(())
    }

    fn encode_sum(&self, to: &mut MetricEncoder<'_>, sum: &Sum) -> fmt::Result {
        match self.kind {
            Kind::Counter => to.encode_counter(&sum.whole, None::<&Exemplar<NoLabelSet, f64>>),
            Kind::Gauge => to.encode_gauge(&(sum.whole as i64)),
            Kind::Histogram => {
                let ends = self.ends.iter().copied().chain([f64::INFINITY]);
                let counts = sum.buckets.iter().copied().chain(std::iter::repeat(0));
                let buckets: Vec<(f64, u64)> = ends.zip(counts).collect();
                to.encode_histogram::<NoLabelSet>(sum.real, sum.buckets.iter().sum(), &buckets, None)
            }
        }
    }

    /// A new handle on the series with these values.
    fn own(self: &Arc<Self>, values: &[&str]) -> Own {
        let mut values: Values = values.iter().map(|value| cut(value).into()).collect();
        let buckets = if self.kind == Kind::Histogram { self.ends.len() + 1 } else { 0 };
        let cells = Arc::new(Cells {
            value: AtomicU64::new(0),
            buckets: (0..buckets).map(|_| AtomicU64::new(0)).collect(),
            place: AtomicUsize::new(0),
        });
        let mut series = lock(&self.series);
        if !series.contains_key(&values) && series.len() >= self.shared.series_max.load(Ordering::Relaxed) {
            values = values.iter().map(|_| OTHER.into()).collect();
        }
        series.entry(values.clone()).or_default().live.push(cells.clone());
        Own { cells, family: self.clone(), values }
    }
}

/// A handle's part of a series. Its drop leaves what was counted.
struct Own {
    cells: Arc<Cells>,
    family: Arc<Family>,
    values: Values,
}

impl Own {
    #[inline]
    fn add(&self, n: u64) {
        add(&self.cells.value, n);
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let mut all = lock(&self.family.series);
        let Some(series) = all.get_mut(&self.values) else { return };
        series.live.remove(&self.cells);
        match self.family.kind {
            // What a shard held that ended is there no more.
            Kind::Gauge if series.live.is_empty() => drop(all.remove(&self.values)),
            Kind::Gauge => {}
            Kind::Counter | Kind::Histogram => series.past.add(&self.cells),
        }
    }
}

/// The beginning of a value that is too long.
fn cut(value: &str) -> &str {
    let end = (0..=value.len().min(VALUE_BYTES_MAX)).rev().find(|end| value.is_char_boundary(*end));
    &value[..end.unwrap_or(0)]
}

/// A load and a store: one thread writes, and others read.
#[inline]
fn add(cell: &AtomicU64, n: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The counters of one name: see [`Figures::counter`].
#[derive(Clone)]
pub struct Counters<const N: usize> {
    family: Arc<Family>,
}

/// The gauges of one name: see [`Figures::gauge`].
#[derive(Clone)]
pub struct Gauges<const N: usize> {
    family: Arc<Family>,
}

/// The histograms of one name: see [`Figures::histogram`].
#[derive(Clone)]
pub struct Histograms<const N: usize> {
    family: Arc<Family>,
}

/// Counts on its thread: see [`Counters::with`]. Clones count together.
#[derive(Clone)]
pub struct Counter {
    own: Rc<Own>,
}

/// Holds a number on its thread: see [`Gauges::with`]. Clones hold the same one.
#[derive(Clone)]
pub struct Gauge {
    own: Rc<Own>,
}

/// Counts values on its thread: see [`Histograms::with`]. Clones count together.
#[derive(Clone)]
pub struct ValueHistogram {
    own: Rc<Own>,
}

impl<const N: usize> Counters<N> {
    /// A counter of the series with these values of the labels, in their order, for this thread.
    /// The series is shown from now on, as 0 until it counts. Several of the same series are
    /// summed, and what a counter counted stays when it is dropped. It takes a lock, and values are
    /// cut at 128 bytes.
    pub fn with(&self, values: [&str; N]) -> Counter {
        Counter { own: Rc::new(self.family.own(&values)) }
    }
}

impl<const N: usize> Gauges<N> {
    /// A gauge of the series with these values of the labels, in their order, for this thread: 0
    /// until it is set. Several of the same series are summed, and the number of one that is
    /// dropped is there no more. It takes a lock, and values are cut at 128 bytes.
    pub fn with(&self, values: [&str; N]) -> Gauge {
        Gauge { own: Rc::new(self.family.own(&values)) }
    }
}

impl<const N: usize> Histograms<N> {
    /// A histogram of the series with these values of the labels, in their order, for this thread.
    /// Several of the same series are summed, and what was counted stays when it is dropped. It
    /// takes a lock, and values are cut at 128 bytes.
    pub fn with(&self, values: [&str; N]) -> ValueHistogram {
        ValueHistogram { own: Rc::new(self.family.own(&values)) }
    }
}

impl Counter {
    /// Counts `n` more.
    #[inline]
    pub fn add(&self, n: u64) {
        self.own.add(n);
    }
}

impl Gauge {
    /// Adds to the number; a negative one is taken away.
    #[inline]
    pub fn add(&self, n: i64) {
        self.own.add(n as u64);
    }

    /// Sets the number of this handle.
    #[inline]
    pub fn set(&self, n: i64) {
        self.own.cells.value.store(n as u64, Ordering::Relaxed);
    }
}

impl ValueHistogram {
    /// Counts a value: it is in the first bucket whose end is not below it. One that is no number
    /// counts in the last one, and not in the sum.
    #[inline]
    pub fn observe(&self, value: f64) {
        let Own { cells, family, .. } = &*self.own;
        let number =
            if value.is_nan() { family.ends.len() } else { family.ends.partition_point(|end| *end < value) };
        if let Some(bucket) = cells.buckets.get(number) {
            add(bucket, 1);
        }
        if !value.is_nan() {
            let sum = f64::from_bits(cells.value.load(Ordering::Relaxed)) + value;
            cells.value.store(sum.to_bits(), Ordering::Relaxed);
        }
    }

    /// Counts a time, in seconds.
    #[inline]
    pub fn observe_time(&self, time: Duration) {
        self.observe(time.as_secs_f64());
    }
}

macro_rules! debug_by_name {
    ($($name:ident $(<$n:ident>)?: $($to_family:ident).+;)*) => {
        $(impl$(<const $n: usize>)? fmt::Debug for $name$(<$n>)? {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.$($to_family).+.name).finish()
            }
        })*
    };
}

debug_by_name! {
    Counters<N>: family;
    Gauges<N>: family;
    Histograms<N>: family;
    Counter: own.family;
    Gauge: own.family;
    ValueHistogram: own.family;
}
