//! The services of a server, one or several, and how each shard makes its own.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use ringserve_base::guard::{Panicked, guard};
use ringserve_core::framing::{AsFramingState, Encoding, TypedFraming};
use ringserve_core::{LimitError, Limits};

use crate::error::Error;
use crate::shard::calls::running_calls::calls;
use crate::shard::calls::service_lane::ServiceLane;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::{FactoryError, FactoryOutput, IntoService, Service};
use crate::shard::running::starting::ShardStart;
use crate::shard::state::many::{ServiceSet, TaskNumbers};
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::Admit;
#[cfg(feature = "testing")]
use crate::watched_service::Watches;

/// The services of a server's shards. Each shard has one value, and makes its services from it on
/// its own thread.
pub(crate) trait Serves: Sized {
    /// A copy for another shard.
    fn again(&self) -> Self;

    /// Checks limits with the framing of a service, which refuses those it cannot work with.
    ///
    /// # Errors
    /// The framing's.
    fn check_limits(&self, service: usize, limits: &Limits) -> Result<(), LimitError>;

    /// Calls the factories, and sets how the replies of each service are encoded.
    ///
    /// # Errors
    /// Those of factories.
    fn make(
        self,
        shard: Shard,
        start: &ShardStart,
    ) -> Result<(MadeOf<impl Services + use<Self>>, Vec<Encoding>), Error>;
}

/// The services that factories made for a shard.
pub(crate) type MadeOf<V> = FactoryOutput<V, Error>;

/// Factories that are no longer called, with what they captured: a lock file, a handle of the log.
/// Each shard keeps them to its end, and the handle of the server until the last blocking call
/// ended. Their drop is user code.
#[derive(Default)]
pub(crate) struct SpentFactories(Mutex<Option<Box<dyn Any + Send>>>);

impl SpentFactories {
    pub(crate) fn new(factories: impl Any + Send) -> SpentFactories {
        SpentFactories(Mutex::new(Some(Box::new(factories))))
    }
}

impl Drop for SpentFactories {
    fn drop(&mut self) {
        let factories = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let _ = guard(move || drop(factories));
    }
}

impl fmt::Debug for SpentFactories {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

/// One service, whose type is known to everything above a shard.
pub(crate) struct One<F, Factory> {
    framing: F,
    factory: Arc<Factory>,
    admit: Option<Admit>,
}

impl<F, Factory> One<F, Factory> {
    pub(super) fn new(framing: F, factory: Factory, admit: Option<Admit>) -> Self {
        One { framing, factory: Arc::new(factory), admit }
    }
}

impl<F: Clone, Factory> Clone for One<F, Factory> {
    fn clone(&self) -> Self {
        One { framing: self.framing.clone(), factory: self.factory.clone(), admit: self.admit.clone() }
    }
}

impl<F: TypedFraming + Clone, Factory> One<F, Factory> {
    /// The service that a factory made, as a lane.
    fn lane<S: Service<F::Head, Session: AsFramingState<F::State>>>(
        &self,
        shard: &Shard,
        numbers: TaskNumbers,
        made: MadeOf<S>,
    ) -> Result<LaneOf<impl Services + use<F, Factory, S>>, Error> {
        let framing = Rc::new(self.framing.clone());
        let (encoding, admit, shard) = (framing.reply_encoding(), self.admit.clone(), shard.clone());
        let lane = move |made: Result<S, Error>| {
            Ok(ServiceLane::new(&shard, made?, framing, admit, calls::<S, F::Head>, numbers))
        };
        Ok((made.map(lane)?, encoding))
    }
}

/// Refuses several calls at once where pieces of a stream would lose their order.
fn check_calls<S: Service<H>, H>(limits: &Limits) -> Result<(), LimitError> {
    let value = u64::from(limits.calls_in_flight_max);
    if value > 1 && S::PIECES && S::REORDERS {
        let name = "Limits::calls_in_flight_max, where a middleware around a codec lets calls wait,";
        return Err(LimitError::Range { name, value, min: 1, max: 1 });
    }
    Ok(())
}

/// A service's lane, and how its replies are encoded.
type LaneOf<V> = (MadeOf<V>, Encoding);

/// Calls the factory of the service with this number.
fn made<F: TypedFraming, Make: IntoService<F>>(
    shard: &Shard,
    (start, number): (&ShardStart, usize),
    factory: impl FnOnce() -> Make,
) -> Result<MadeOf<Make::Service>, Error> {
    start.calls(number);
    let of = shard.index();
    let panicked = move |panic: Panicked| Error::FactoryPanicked { shard: of, message: panic.to_string() };
    let made = guard(|| factory().into_service(shard)).map_err(panicked)?;
    let mut making = match made.map_err(|error| no_service(of, error))? {
        FactoryOutput::Now(service) => {
            start.made(number);
            return Ok(FactoryOutput::Now(service));
        }
        FactoryOutput::Later(making) => making,
    };
    let start = start.clone();
    Ok(FactoryOutput::Later(Box::pin(async move {
        let polled = poll_fn(|task| match guard(|| making.as_mut().poll(task)) {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(panicked(panic))),
        });
        let made = polled.await;
        let dropped = guard(move || drop(making)).map_err(panicked);
        let service = made?.map_err(|error| no_service(of, error))?;
        dropped?;
        start.made(number);
        Ok(service)
    })))
}

fn no_service(shard: usize, error: FactoryError) -> Error {
    let factory = |error| Error::Factory { shard, error };
    error.downcast().map_or_else(factory, |limit| Error::Limits(*limit))
}

/// Drops what was made or is being made for the other services when one will not be there. Each
/// drop is user code, whose panic must not hide the reason.
fn abandon<V>(all: &mut Vec<MadeOf<V>>) {
    for made in all.drain(..) {
        let _ = guard(move || drop(made));
    }
}

/// All of them, as soon as each is there. The first error is that of all.
fn all_of<V: 'static>(mut all: Vec<MadeOf<V>>) -> MadeOf<Vec<V>> {
    fn take<V>(all: &mut Vec<MadeOf<V>>) -> Vec<V> {
        let there = |made| match made {
            FactoryOutput::Now(made) => Some(made),
            FactoryOutput::Later(_) => None,
        };
        all.drain(..).filter_map(there).collect()
    }
    if all.iter().all(|made| matches!(made, FactoryOutput::Now(_))) {
        return FactoryOutput::Now(take(&mut all));
    }
    FactoryOutput::Later(Box::pin(poll_fn(move |task| {
        let mut waits = false;
        for number in 0..all.len() {
            if let FactoryOutput::Later(making) = &mut all[number] {
                match making.as_mut().poll(task) {
                    Poll::Ready(Ok(made)) => all[number] = FactoryOutput::Now(made),
                    Poll::Ready(Err(error)) => {
                        abandon(&mut all);
                        return Poll::Ready(Err(error));
                    }
                    Poll::Pending => waits = true,
                }
            }
        }
        if waits { Poll::Pending } else { Poll::Ready(Ok(take(&mut all))) }
    })))
}

impl<F, Factory, Make> Serves for One<F, Factory>
where
    F: TypedFraming + Clone,
    Factory: Fn(&Shard) -> Make,
    Make: IntoService<F>,
{
    fn again(&self) -> Self {
        self.clone()
    }

    fn check_limits(&self, _only: usize, limits: &Limits) -> Result<(), LimitError> {
        check_calls::<Make::Service, F::Head>(limits)?;
        self.framing.check_limits(limits)
    }

    fn make(
        self,
        shard: Shard,
        start: &ShardStart,
    ) -> Result<(MadeOf<impl Services + use<F, Factory, Make>>, Vec<Encoding>), Error> {
        let made = made(&shard, (start, 0), || (self.factory)(&shard))?;
        let (lane, encoding) = self.lane(&shard, TaskNumbers::ALONE, made)?;
        Ok((lane, vec![encoding]))
    }
}

/// One of several services, whatever its type.
pub(crate) trait Hosted: Send {
    /// A copy for another shard.
    fn again(&self) -> Box<dyn Hosted>;

    /// Checks limits with its framing, which refuses those it cannot work with.
    ///
    /// # Errors
    /// The framing's.
    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError>;

    /// Makes it, the service with this number.
    ///
    /// # Errors
    /// Those of its factory.
    fn make(&self, shard: &Shard, of: (&ShardStart, usize)) -> Result<LaneOf<Box<dyn Services>>, Error>;

    /// The same, with `watches` that record everything the service receives.
    ///
    /// # Errors
    /// Those of its factory.
    #[cfg(feature = "testing")]
    fn make_watched(
        &self,
        shard: &Shard,
        of: (&ShardStart, usize),
        watches: &Watches,
    ) -> Result<LaneOf<Box<dyn Services>>, Error>;
}

impl<F: TypedFraming + Clone, Factory> One<F, Factory> {
    fn boxed<S: Service<F::Head, Session: AsFramingState<F::State>>>(
        &self,
        shard: &Shard,
        number: usize,
        made: MadeOf<S>,
    ) -> Result<LaneOf<Box<dyn Services>>, Error> {
        let (lane, encoding) = self.lane(shard, TaskNumbers::of(number), made)?;
        Ok((lane.map(|lane| Ok(Box::new(lane?) as Box<dyn Services>))?, encoding))
    }
}

impl<F, Factory, Make> Hosted for One<F, Factory>
where
    F: TypedFraming + Clone + Send,
    Factory: Fn(&Shard) -> Make + Send + Sync + 'static,
    Make: IntoService<F>,
{
    fn again(&self) -> Box<dyn Hosted> {
        Box::new(self.clone())
    }

    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError> {
        check_calls::<Make::Service, F::Head>(limits)?;
        self.framing.check_limits(limits)
    }

    fn make(&self, shard: &Shard, of: (&ShardStart, usize)) -> Result<LaneOf<Box<dyn Services>>, Error> {
        let shard = &shard.of_service(of.1);
        self.boxed(shard, of.1, made(shard, of, || (self.factory)(shard))?)
    }

    #[cfg(feature = "testing")]
    fn make_watched(
        &self,
        shard: &Shard,
        of: (&ShardStart, usize),
        watches: &Watches,
    ) -> Result<LaneOf<Box<dyn Services>>, Error> {
        let shard = &shard.of_service(of.1);
        self.boxed(shard, of.1, made(shard, of, || watches.over((self.factory)(shard)))?)
    }
}

/// Several services, each with its name as errors call it.
pub(crate) struct AllOf(pub(super) Vec<(String, Box<dyn Hosted>)>);

impl AllOf {
    /// Makes each by `make`.
    pub(crate) fn make_by(
        &self,
        make: impl Fn(&dyn Hosted, usize) -> Result<LaneOf<Box<dyn Services>>, Error>,
    ) -> Result<(MadeOf<ServiceSet>, Vec<Encoding>), Error> {
        let (mut lanes, mut encodings) = (Vec::new(), Vec::new());
        for (number, (name, hosted)) in self.0.iter().enumerate() {
            let name = (self.0.len() > 1).then(|| name.clone());
            let made = make(&**hosted, number).inspect_err(|_| abandon(&mut lanes));
            let (lane, encoding) = made.map_err(|error| error.of_service(name.as_ref()))?;
            lanes.push(lane.map(move |lane| lane.map_err(|error: Error| error.of_service(name.as_ref())))?);
            encodings.push(encoding);
        }
        Ok((all_of(lanes).map(|lanes| lanes.map(ServiceSet::new))?, encodings))
    }
}

impl Serves for AllOf {
    fn again(&self) -> Self {
        AllOf(self.0.iter().map(|(name, hosted)| (name.clone(), hosted.again())).collect())
    }

    fn check_limits(&self, service: usize, limits: &Limits) -> Result<(), LimitError> {
        self.0.get(service).map_or(Ok(()), |(_, hosted)| hosted.check_limits(limits))
    }

    fn make(
        self,
        shard: Shard,
        start: &ShardStart,
    ) -> Result<(MadeOf<impl Services + use<>>, Vec<Encoding>), Error> {
        self.make_by(|hosted, number| hosted.make(&shard, (start, number)))
    }
}
