//! Rates of frames and bytes by a key that the program names.

use std::fmt;
use std::hash::Hash;
use std::time::Duration;

use ringserve_admission::{KeyRates, RetryAfter};
use ringserve_core::Frame;

use crate::overload::{Load, Shed};
use crate::shard::face::closed::Failure;
use crate::shard::face::cx::Cx;
use crate::shard::face::service::{Service, delegate_to_service};

/// The longest wait of a call, unless the program says so.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Bounds how fast the connections of a key send together: those of a user, an API key, a tenant.
///
/// A frame that comes too early is given to [`Service::shed`], which answers it in the words of the
/// protocol. Where that has it served, as it does by default, the call waits for its turn, and
/// holds up its connection as any pending call does; one that would wait for more than
/// [`wait_max`](RateLimit::wait_max) fails, and its connection is closed, with
/// [`RateLimitError::TooFast`]. The wait counts towards
/// [`Limits::handler_timeout`](crate::Limits::handler_timeout).
///
/// ```
/// use std::cell::Cell;
/// use std::convert::Infallible;
///
/// use ringserve::admission::{KeyLimits, KeyRates};
/// use ringserve::framing::Lines;
/// use ringserve::middleware::RateLimit;
/// use ringserve::overload::{Load, Shed};
/// use ringserve::{Cx, Frame, Server, Service};
///
/// struct Store;
///
/// impl Service for Store {
///     /// The tenant, once the connection has named one.
///     type Session = Cell<Option<u64>>;
///     type Error = Infallible;
///
///     async fn call(&self, cx: &Cx<'_, Self::Session>, frame: Frame) -> Result<(), Infallible> {
///         cx.reply(frame);
///         Ok(())
///     }
///
///     fn shed(&self, cx: &Cx<'_, Self::Session>, _: &Frame, _: Load) -> Shed {
///         cx.reply("-BUSY");
///         Shed::Answered
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rates = KeyRates::new(KeyLimits::default().frames(100, 200))?;
/// # let running =
/// Server::bind("127.0.0.1:0").framing(Lines::default()).start(move |_shard| {
///     RateLimit::by_key(Store, rates.clone(), |cx, _frame| cx.session().get())
/// })?;
/// # running.shutdown();
/// # running.wait()?;
/// # Ok(())
/// # }
/// ```
///
/// The bytes are those of the frame, without what its framing puts around it. A frame without a key
/// is served. It allocates nothing; a call reads the clock once, and its key should be a number or
/// bytes of fixed length, since it is made for each frame. For the memory of each key see
/// [`KeyRates`].
#[derive(Clone, Debug)]
pub struct RateLimit<S, F> {
    service: S,
    rates: KeyRates,
    key: F,
    wait_max: Duration,
}

impl<S, F> RateLimit<S, F> {
    /// Bounds how fast `service` is called for each key, which `key` tells for each frame. Give
    /// clones of the same `rates` to all shards. A frame for which it is `None` is served: one
    /// before the log-in, for example.
    pub fn by_key<H, K: Hash>(service: S, rates: KeyRates, key: F) -> RateLimit<S, F>
    where
        S: Service<H>,
        F: Fn(&Cx<'_, S::Session>, &Frame<H>) -> Option<K>,
    {
        RateLimit { service, rates, key, wait_max: WAIT_MAX }
    }

    /// Sets how long a call that came too early waits at most. Default 10 s; zero closes each
    /// connection that sends too fast, unless [`Service::shed`] answers it. A call that waits has
    /// its turn, and takes it from others of the key even if its connection ends meanwhile: for as
    /// long the key may be blocked by what was sent before.
    #[must_use]
    pub fn wait_max(self, time: Duration) -> Self {
        Self { wait_max: time, ..self }
    }

    /// The service inside.
    pub fn inner(&self) -> &S {
        &self.service
    }
}

impl<S, F, H, K> Service<H> for RateLimit<S, F>
where
    S: Service<H>,
    F: Fn(&Cx<'_, S::Session>, &Frame<H>) -> Option<K> + 'static,
    H: 'static,
    K: Hash,
{
    type Session = S::Session;
    type Error = RateLimitError<S::Error>;

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame<H>) -> Result<(), Self::Error> {
        if let Some(key) = (self.key)(cx, &frame) {
            let units = (1, frame.len());
            if self.rates.reserve(cx.shard(), &key, units, Duration::ZERO).is_err() {
                if self.service.shed(cx, &frame, cx.load().max(Load::Shedding)) == Shed::Answered {
                    cx.head().count_shed();
                    return Ok(());
                }
                // Each waits once, for its own turn: of many that waited for the same one all but
                // one would wait again.
                let wait = self.rates.reserve(cx.shard(), &key, units, self.wait_max);
                cx.sleep(wait.map_err(RateLimitError::TooFast)?).await;
            }
        }
        self.service.call(cx, frame).await.map_err(RateLimitError::Service)
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, Self::Error>) {
        match failure {
            Failure::Error(RateLimitError::Service(error)) => self.service.failed(cx, &Failure::Error(error)),
            // The service has had its say, when it was asked whether to answer.
            Failure::Error(RateLimitError::TooFast(_)) => {}
            Failure::TimedOut => self.service.failed(cx, &Failure::TimedOut),
            Failure::Panicked(message) => self.service.failed(cx, &Failure::Panicked(message)),
        }
    }

    delegate_to_service!(S, H, true);
}

/// The reason why a call through [`RateLimit`] failed.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RateLimitError<E> {
    /// The key sent too fast: the call would have waited for this time.
    TooFast(RetryAfter),
    /// The inner service failed.
    Service(E),
}

impl<E: fmt::Display> fmt::Display for RateLimitError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RateLimitError::TooFast(after) => after.fmt(f),
            RateLimitError::Service(error) => error.fmt(f),
        }
    }
}

ringserve_buf::debug_is_display!(RateLimitError<E>, [E: fmt::Display]);

impl<E: std::error::Error + 'static> std::error::Error for RateLimitError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RateLimitError::TooFast(_) => None,
            // The service's error is shown as it is, so its cause is the next one.
            RateLimitError::Service(error) => error.source(),
        }
    }
}
