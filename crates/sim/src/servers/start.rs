//! The waits of a server's factories at its start, and the ends of these waits.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringserve_server::factory::{FactoryError, FactoryFuture, FactoryOutput};
use ringserve_server::framing::{AsFramingState, TypedFraming};
use ringserve_server::sync::Mesh;
use ringserve_server::testing::Sim;
use ringserve_server::{Error, IntoService, ServerControl, Service, Shard};

use super::cover::Cover;
use super::plan::{Fate, Plan, StartPlan};
use super::service::UPSTREAM;

/// Attempts of a factory to reach its upstream: faults may prevent it.
const ATTEMPTS: usize = 8;

/// The things for which factories wait, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Timer,
    Upstream,
    Blocking,
    Question,
}

/// One start of a server.
pub struct Start {
    plan: StartPlan,
    /// The factory with the wait: shard and service.
    concerns: (usize, usize),
    fate: Option<Fate>,
    services: usize,
    made: AtomicUsize,
    /// Futures of factories that are neither done nor dropped.
    alive: AtomicUsize,
    /// Questions that no shard answered.
    unanswered: AtomicUsize,
    control: Mutex<Option<ServerControl>>,
    mesh: Mesh<u64, u64>,
    cover: Cover,
}

impl Start {
    pub fn new(plan: &Plan, fate: Option<Fate>, cover: &Cover) -> Arc<Start> {
        let services = 1 + usize::from(plan.second.is_some());
        let at = plan.start.seed as usize;
        Arc::new(Start {
            plan: plan.start,
            concerns: (at % plan.shards, at / 16 % services),
            fate,
            services: services * plan.shards,
            made: AtomicUsize::new(0),
            alive: AtomicUsize::new(0),
            unanswered: AtomicUsize::new(0),
            control: Mutex::default(),
            mesh: Mesh::new(),
            cover: cover.clone(),
        })
    }

    /// Notes that a connection is accepted, which must not happen before the last service exists.
    pub fn accepts(&self) -> bool {
        let made = self.made.load(Ordering::Relaxed);
        assert_eq!(made, self.services, "a connection is accepted before all services are there");
        true
    }

    /// Runs in a factory, which `make`s the service after its waits.
    pub fn begin<S: 'static>(
        self: &Arc<Start>,
        shard: &Shard,
        service: usize,
        make: impl FnOnce(&Shard) -> Result<S, &'static str> + 'static,
    ) -> Begun<S> {
        if !self.plan.waits {
            let made = make(shard);
            self.made.fetch_add(1, Ordering::Relaxed);
            return Begun::Now(made);
        }
        *self.control.lock().unwrap_or_else(PoisonError::into_inner) = Some(shard.server().clone());
        if service == 0 {
            self.mesh.register(shard, |_from, number| 2 * number);
        }
        let (start, shard) = (self.clone(), shard.clone());
        self.alive.fetch_add(1, Ordering::Relaxed);
        let alive = Alive(self.clone());
        Begun::Later(Box::pin(async move {
            let _alive = alive;
            start.wait(&shard).await;
            match start.fate.filter(|_| start.concerns == (shard.index(), service)) {
                Some(Fate::Fails) => return Err("planted".into()),
                Some(Fate::Panics) => panic!("planted: a factory panics"),
                Some(Fate::Drains | Fate::Aborts | Fate::TimesOut) => pending().await,
                None => {}
            }
            let made = make(&shard)?;
            start.made.fetch_add(1, Ordering::Relaxed);
            Ok(made)
        }))
    }

    async fn wait(&self, shard: &Shard) {
        for _ in 0..shard.random() % 3 {
            let all = [Wait::Timer, Wait::Upstream, Wait::Blocking, Wait::Question];
            let wait = all[(shard.random() % 4) as usize];
            match wait {
                Wait::Timer => shard.sleep(Duration::from_micros(shard.random() % 3_000_000)).await,
                Wait::Upstream => self.reach_upstream(shard).await,
                Wait::Blocking => assert!(shard.spawn_blocking(|| ()).await.is_ok(), "there is room"),
                Wait::Question => {
                    let to = (shard.random() % shard.count() as u64) as usize;
                    match self.mesh.ask(to, 21).await {
                        Ok(answer) => assert_eq!(answer, 42),
                        Err(_) => _ = self.unanswered.fetch_add(1, Ordering::Relaxed),
                    }
                }
            }
            self.cover.count("start", format!("{wait:?}"));
        }
    }

    /// Faults may break each attempt.
    async fn reach_upstream(&self, shard: &Shard) {
        for _ in 0..ATTEMPTS {
            let said = async {
                let mut stream = shard.connect(SocketAddr::from(UPSTREAM)).await?;
                stream.queue(b"?");
                stream.read_frame().await
            };
            if shard.timeout(Duration::from_secs(1), said).await.is_ok_and(|said| said.is_ok()) {
                return;
            }
            shard.sleep(Duration::from_millis(100)).await;
        }
    }

    /// Makes a peer connect early, and orders the server to stop if that is its fate.
    pub fn accompany(self: &Arc<Start>, sim: &Sim, addr: SocketAddr) {
        if !self.plan.waits {
            return;
        }
        let early = Duration::from_micros(sim.random() % 3_000_000);
        sim.background("early", async move |net| {
            net.sleep(early).await;
            let mut me = net.connect(addr).await?;
            net.sleep(early).await;
            me.finish()?;
            me.closed().await?;
            Ok(())
        });
        if let Some(fate @ (Fate::Drains | Fate::Aborts)) = self.fate {
            let start = self.clone();
            sim.client("operator", async move |net| {
                net.sleep(Fate::TOLD).await;
                let control = start.control.lock().unwrap_or_else(PoisonError::into_inner).take();
                let control = control.expect("a factory was called");
                if fate == Fate::Drains {
                    control.shutdown()
                } else {
                    control.abort()
                }
                Ok(())
            });
        }
    }

    /// Checks that every factory found every shard there.
    pub fn check(&self) {
        let left = [&self.alive, &self.unanswered].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(left, [0, 0], "futures of factories, and questions without an answer");
    }

    /// Checks that the start ended as it had to, and nothing is left of its factories.
    pub fn check_failed(&self, error: &Error) {
        let error = match error {
            Error::Service { error, .. } => error,
            error => error,
        };
        let of = self.concerns.0;
        let is_right = match self.fate {
            Some(Fate::Fails) => matches!(error, Error::Factory { shard, .. } if *shard == of),
            Some(Fate::Panics) => matches!(error, Error::FactoryPanicked { shard, .. } if *shard == of),
            Some(Fate::Drains | Fate::Aborts) => matches!(error, Error::Interrupted),
            Some(Fate::TimesOut) => matches!(error, Error::StartTimeout { shard, .. } if *shard == of),
            None => true,
        } || matches!(error, Error::Broken { .. });
        assert!(is_right, "a start whose fate is {:?} ends with: {error}", self.fate);
        assert_eq!(self.alive.load(Ordering::Relaxed), 0, "futures of factories are left");
        if let Some(fate) = self.fate {
            self.cover.count("start", format!("{fate:?}"));
        }
    }
}

/// Counts a future.
struct Alive(Arc<Start>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The return value of a factory.
pub enum Begun<S> {
    Now(Result<S, &'static str>),
    Later(FactoryFuture<S>),
}

impl<F: TypedFraming<Head = ()>, S: Service<Session: AsFramingState<F::State>>> IntoService<F> for Begun<S> {
    type Service = S;

    fn into_service(self, _shard: &Shard) -> Result<FactoryOutput<S>, FactoryError> {
        Ok(match self {
            Begun::Now(made) => FactoryOutput::Now(made?),
            Begun::Later(making) => FactoryOutput::Later(making),
        })
    }
}
