//! What a server serves, one service or several, and how each shard makes its own.

use std::rc::Rc;
use std::sync::Arc;

use ringserve_core::framing::{Encoding, HoldsState, TypedFraming};
use ringserve_core::{LimitError, Limits};

use super::error::Error;
use crate::guard::guard;
use crate::service::{IntoService, Service};
use crate::shard::calls::calls;
use crate::shard::handle::Shard;
use crate::shard::many::{Many, TaskNumbers};
use crate::shard::service_lane::ServiceLane;
use crate::shard::services::Services;
use crate::shard::state::Admit;
#[cfg(feature = "testing")]
use crate::testing::watch::Watches;

/// What the shards of a server serve. Each shard has one, and makes its services from it on its own thread.
pub(crate) trait Serves: Sized {
    /// The same for another shard.
    fn again(&self) -> Self;

    /// Has the framing of a service refuse limits with which it cannot work.
    ///
    /// # Errors
    /// The framing's.
    fn check_limits(&self, service: usize, limits: &Limits) -> Result<(), LimitError>;

    /// Makes the services, and says how the replies of each are encoded.
    ///
    /// # Errors
    /// Those of factories.
    fn make(self, shard: Shard) -> Result<(impl Services, Vec<Encoding>), Error>;
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
    /// What a factory made, as a lane.
    fn lane<S: Service<F::Head, Session: HoldsState<F::State>>>(
        &self,
        shard: &Shard,
        numbers: TaskNumbers,
        service: S,
    ) -> LaneOf<impl Services + use<F, Factory, S>> {
        let framing = Rc::new(self.framing.clone());
        let (encoding, admit) = (framing.reply_encoding(), self.admit.clone());
        (ServiceLane::new(shard, service, framing, admit, calls::<S, F::Head>, numbers), encoding)
    }
}

/// A service's lane, and how its replies are encoded.
type LaneOf<V> = (V, Encoding);

/// Calls a factory.
fn made<F: TypedFraming, Make: IntoService<F>>(
    shard: &Shard,
    factory: impl FnOnce() -> Make,
) -> Result<Make::Service, Error> {
    match guard(|| factory().into_service(shard)) {
        Ok(Ok(service)) => Ok(service),
        Ok(Err(error)) => {
            let factory = |error| Error::Factory { shard: shard.index(), error };
            Err(error.downcast().map_or_else(factory, |limit| Error::Limits(*limit)))
        }
        Err(_panicked) => Err(Error::FactoryPanicked { shard: shard.index() }),
    }
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
        self.framing.check_limits(limits)
    }

    fn make(self, shard: Shard) -> Result<(impl Services, Vec<Encoding>), Error> {
        let service = made(&shard, || (self.factory)(&shard))?;
        let (lane, encoding) = self.lane(&shard, TaskNumbers::ALONE, service);
        Ok((lane, vec![encoding]))
    }
}

/// One of several services, whatever its type.
pub(crate) trait Hosted: Send {
    /// The same for another shard.
    fn again(&self) -> Box<dyn Hosted>;

    /// Has its framing refuse limits with which that cannot work.
    ///
    /// # Errors
    /// The framing's.
    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError>;

    /// Makes it, with calls that are numbered so.
    ///
    /// # Errors
    /// Those of its factory.
    fn make(&self, shard: &Shard, numbers: TaskNumbers) -> Result<LaneOf<Box<dyn Services>>, Error>;

    /// The same, with everything that the service is told noted.
    ///
    /// # Errors
    /// Those of its factory.
    #[cfg(feature = "testing")]
    fn make_watched(
        &self,
        shard: &Shard,
        numbers: TaskNumbers,
        watches: &Watches,
    ) -> Result<LaneOf<Box<dyn Services>>, Error>;
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
        self.framing.check_limits(limits)
    }

    fn make(&self, shard: &Shard, numbers: TaskNumbers) -> Result<LaneOf<Box<dyn Services>>, Error> {
        let (lane, encoding) = self.lane(shard, numbers, made(shard, || (self.factory)(shard))?);
        Ok((Box::new(lane), encoding))
    }

    #[cfg(feature = "testing")]
    fn make_watched(
        &self,
        shard: &Shard,
        numbers: TaskNumbers,
        watches: &Watches,
    ) -> Result<LaneOf<Box<dyn Services>>, Error> {
        let service = made(shard, || watches.over((self.factory)(shard)))?;
        let (lane, encoding) = self.lane(shard, numbers, service);
        Ok((Box::new(lane), encoding))
    }
}

/// Several services, each with its name as errors call it.
pub(crate) struct AllOf(pub(super) Vec<(String, Box<dyn Hosted>)>);

impl AllOf {
    /// Makes each by `make`.
    pub(crate) fn make_by(
        &self,
        make: impl Fn(&dyn Hosted, TaskNumbers) -> Result<LaneOf<Box<dyn Services>>, Error>,
    ) -> Result<(Many, Vec<Encoding>), Error> {
        let mut lanes = Vec::new();
        for (number, (name, hosted)) in self.0.iter().enumerate() {
            let made = make(&**hosted, TaskNumbers::of(number));
            lanes.push(made.map_err(|error| error.of_service(Some(name).filter(|_| self.0.len() > 1)))?);
        }
        let (lanes, encodings) = lanes.into_iter().unzip();
        Ok((Many::new(lanes), encodings))
    }
}

impl Serves for AllOf {
    fn again(&self) -> Self {
        AllOf(self.0.iter().map(|(name, hosted)| (name.clone(), hosted.again())).collect())
    }

    fn check_limits(&self, service: usize, limits: &Limits) -> Result<(), LimitError> {
        self.0.get(service).map_or(Ok(()), |(_, hosted)| hosted.check_limits(limits))
    }

    fn make(self, shard: Shard) -> Result<(impl Services, Vec<Encoding>), Error> {
        self.make_by(|hosted, numbers| hosted.make(&shard, numbers))
    }
}
