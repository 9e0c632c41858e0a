//! A client that passes bytes on both ways.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use ringserve_server::net::{CopyError, CopySide, copy_bidirectional, is_local_failure};
use ringserve_server::{Frame, Shard, Stream};

use crate::backend::{Backend, BackendState, Counts};
use crate::connect::{connect_counted, plain};
use crate::error::UpstreamError;
use crate::health;
use crate::names;
use crate::policy::maglev::hash;
use crate::settings::Balance;
use crate::upstream::Upstream;
use crate::view::{Choice, View};

impl Upstream {
    /// A client of this shard that passes bytes on both ways, a connection to a backend for each
    /// one of a client. Made in a factory; clones are the same one. It chooses by
    /// [`Balance::Least`], whatever [`balance`](Upstream::balance) says: what lasts for long is
    /// counted, not timed.
    ///
    /// ```no_run
    /// use ringserve::upstream::Upstream;
    /// use ringserve::{Server, Stream, stream};
    ///
    /// fn main() -> Result<(), ringserve::Error> {
    ///     let upstream = Upstream::new("web", ["10.0.0.11:80", "10.0.0.12:80"]);
    ///     Server::bind("127.0.0.1:7000").serve(move |shard| {
    ///         let relay = upstream.relay(shard);
    ///         stream(async move |mut client: Stream| -> Result<(), Box<dyn std::error::Error>> {
    ///             let place = relay.connect(&client).await?;
    ///             place.copy(&mut client).await?;
    ///             Ok(())
    ///         })
    ///     })
    /// }
    /// ```
    ///
    /// [`ServerLimits::upstreams_max`](ringserve_server::limits::ServerLimits::upstreams_max) is
    /// 1024 for a shard unless it is set, and a relay needs one for each client.
    pub fn relay(&self, shard: &Shard) -> Relay {
        let view = Rc::new(View::new(&self.clone().balance(Balance::Least), shard, || ()));
        health::begin(self, shard, &view);
        names::begin(self, shard, &view);
        Relay { view }
    }
}

/// A client of an [`Upstream`] on one shard, which passes bytes on both ways. See
/// [`Upstream::relay`].
#[derive(Clone)]
pub struct Relay {
    view: Rc<View<()>>,
}

impl Relay {
    /// Connects to a backend for this client, and where that fails to another one, until all were
    /// tried. The client's bytes wait meanwhile, so that none is lost.
    ///
    /// # Errors
    /// [`NoBackend`](UpstreamError::NoBackend), or the error of the last try. Where this process
    /// lacks what it takes, such as a descriptor, no other backend is tried; [`is_local_failure`]
    /// tells.
    pub async fn connect(&self, client: &Stream) -> Result<Place, UpstreamError> {
        self.connect_to(client, None, |_| true).await
    }

    /// The same, at the backend that the key belongs to, such as the client's address: see
    /// [`Call::key`](crate::Call::key).
    ///
    /// # Errors
    /// Those of [`connect`](Relay::connect).
    pub async fn connect_by_key(
        &self,
        client: &Stream,
        key: impl AsRef<[u8]>,
    ) -> Result<Place, UpstreamError> {
        self.connect_to(client, Some(hash(key.as_ref())), |_| true).await
    }

    /// The same among the backends for which `is_for` is true.
    ///
    /// # Errors
    /// Those of [`connect`](Relay::connect).
    pub async fn connect_among(
        &self,
        client: &Stream,
        is_for: impl Fn(&Backend) -> bool,
    ) -> Result<Place, UpstreamError> {
        self.connect_to(client, None, is_for).await
    }

    async fn connect_to(
        &self,
        client: &Stream,
        key: Option<u64>,
        is_for: impl Fn(&Backend) -> bool,
    ) -> Result<Place, UpstreamError> {
        let view = &self.view;
        view.is_resolved(u64::MAX).await;
        let (mut tried, mut last, mut ours) = (Vec::new(), None, None);
        let choose = |tried: &[_]| {
            let is_for: &dyn Fn(&BackendState) -> bool = &|state| is_for(&state.backend);
            match key {
                Some(key) => view.choose_by_key(view.now(), key, tried, Some(is_for)),
                None => view.choose(tried, Some(is_for)),
            }
        };
        while let Some(mut choice) = choose(&tried) {
            if !tried.is_empty() {
                view.upstream.state().count_retry();
            }
            let settings = view.upstream.settings();
            match connect_counted(&view.shard, settings, choice.state(), Some(&client.peer()), plain).await {
                Ok(stream) => return Ok(Place { stream, choice, sent: 0 }),
                // Ports to another backend may be left.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                    choice.says_nothing();
                    ours = Some(UpstreamError::Failed(error));
                }
                Err(error) if is_local_failure(&error) => {
                    choice.says_nothing();
                    view.upstream.state().count_refused();
                    return Err(UpstreamError::Failed(error));
                }
                Err(error) => {
                    choice.failed();
                    let name = choice.state().backend.name();
                    let error = io::Error::new(error.kind(), format!("{name} was tried last: {error}"));
                    last = Some(UpstreamError::Failed(error));
                }
            }
            tried.push(choice.member().clone());
        }
        view.upstream.state().count_refused();
        Err(ours.or(last).unwrap_or(UpstreamError::NoBackend))
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Relay").field(&self.view.upstream).finish()
    }
}

/// A client's place at a backend, with the connection to it. Its drop closes the connection and
/// gives the place back.
pub struct Place {
    stream: Stream,
    choice: Choice<()>,
    /// Bytes for the backend.
    sent: u64,
}

/// The end of the time before the first byte of the backend.
enum First {
    Answer(Frame),
    /// The backend ended before it said anything.
    End,
    /// The client ended, or one of the two broke: this shows again to who reads it next.
    Other,
}

impl Place {
    /// The backend's name.
    pub fn backend(&self) -> &str {
        self.choice.state().backend.name()
    }

    /// Queues bytes for the backend, such as those that were read to learn for whom they are. As
    /// [`Stream::queue`].
    pub fn queue(&mut self, bytes: &[u8]) {
        self.sent += bytes.len() as u64;
        self.stream.queue(bytes);
    }

    /// Copies between the client and the backend, in both directions, until both have ended, as
    /// [`copy_bidirectional`] does. Returns the bytes that went to the backend, with those
    /// [queued](Place::queue) before, and back.
    ///
    /// A backend that resets the connection, or ends it before its first byte to a client that had
    /// sent something, has failed: enough of these [eject](Upstream::ejection) it. What was sent is
    /// not repeated elsewhere. A connection that breaks on one side is reset on the other one, so
    /// that neither takes what came for all of it.
    ///
    /// # Errors
    /// If one of the two broke: the client is [`CopySide::First`].
    pub async fn copy(mut self, client: &mut Stream) -> Result<(u64, u64), CopyError> {
        let copied = self.copy_all(client).await;
        let (there, back) = *copied.as_ref().unwrap_or_else(|broken| &broken.copied);
        let counts = &self.choice.state().counts;
        Counts::add(&counts.bytes_there, there);
        Counts::add(&counts.bytes_back, back);
        match &copied {
            Err(broken) if broken.side == CopySide::Second => {
                if !is_local_failure(&broken.error) {
                    Counts::add(&counts.broken, 1);
                    if !self.choice.is_settled() {
                        self.choice.failed();
                    }
                    client.upstream_failed();
                }
                client.abort();
            }
            Err(_) => self.stream.abort(),
            Ok(_) => {}
        }
        if !self.choice.is_settled() {
            match back {
                0 => self.choice.says_nothing(),
                _ => self.choice.succeeded(),
            }
        }
        copied
    }

    async fn copy_all(&mut self, client: &mut Stream) -> Result<(u64, u64), CopyError> {
        let back = match self.first(client).await {
            First::Answer(frame) => {
                // From here on the backend works.
                self.choice.succeeded();
                let len = frame.len() as u64;
                client.queue(frame);
                len
            }
            First::End => {
                if self.sent > 0 {
                    self.choice.failed();
                }
                0
            }
            First::Other => 0,
        };
        let there = self.sent;
        match copy_bidirectional(client, &mut self.stream).await {
            Ok((more, further)) => Ok((there + more, back + further)),
            Err(mut broken) => {
                broken.copied = (there + broken.copied.0, back + broken.copied.1);
                Err(broken)
            }
        }
    }

    /// Waits for the first bytes of the backend. A client that is silent, as are those that connect
    /// in advance, does not keep others from trying whether a backend works again.
    async fn first(&mut self, client: &mut Stream) -> First {
        if self.choice.is_trial() {
            let (shard, time) = (client.shard().clone(), self.choice.trial_time());
            let first = poll_fn(|task| self.poll_first(task, client));
            if let Ok(first) = shard.timeout(time, first).await {
                return first;
            }
            self.choice.gives_up_trial();
        }
        poll_fn(|task| self.poll_first(task, client)).await
    }

    /// Passes bytes to the backend until something comes back.
    fn poll_first(&mut self, task: &mut Context<'_>, client: &mut Stream) -> Poll<First> {
        loop {
            match self.stream.poll_read_frame(task) {
                Poll::Ready(Ok(Some(frame))) => return Poll::Ready(First::Answer(frame)),
                Poll::Ready(Ok(None)) => return Poll::Ready(First::End),
                Poll::Ready(Err(_)) => return Poll::Ready(First::Other),
                Poll::Pending => {}
            }
            // Without room the client's bytes stay where they are, which holds it back.
            if ready!(pin!(self.stream.ready()).poll(task)).is_err() {
                return Poll::Ready(First::Other);
            }
            match ready!(client.poll_read_frame(task)) {
                Ok(Some(frame)) => {
                    self.sent += frame.len() as u64;
                    self.stream.queue(frame);
                }
                Ok(None) | Err(_) => return Poll::Ready(First::Other),
            }
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Place").field(&self.backend()).finish()
    }
}
