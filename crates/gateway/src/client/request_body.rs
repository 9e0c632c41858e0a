//! The body of a request on its way to a backend, of which the front is kept as long as the request
//! may be sent again.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{AUTHORIZATION, COOKIE, EXPECT, HOST, HeaderName, MAX_FORWARDS, RANGE, TE, VIA};
use ringserve_server::Shard;

use super::pace::Pace;
use crate::fields::forwarded::is_of_a_proxy;
use crate::fields::strip::{Direction, strip};

/// An error of any body.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// The source of a body.
pub(crate) enum Source {
    Nothing,
    Client(Incoming),
    Other(BoxedBody),
}

/// The reason why a body is not sent to its end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyFault {
    TooLong,
    /// Who sends it is gone, or sent what is no body.
    Broken,
}

impl fmt::Display for BodyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BodyFault::TooLong => "the body is too long",
            BodyFault::Broken => "the body ended too early",
        })
    }
}

ringserve_buf::debug_is_display!(BodyFault);

impl std::error::Error for BodyFault {}

/// A body that may be sent several times.
pub(crate) struct BodyKeeper {
    shared: Rc<Shared>,
}

struct Shared {
    state: RefCell<State>,
    fault: Cell<Option<BodyFault>>,
    is_ended: Cell<bool>,
    /// Pieces that were taken.
    taken: Cell<u64>,
    /// Pieces of those that are kept that the newest body has sent.
    sent: Cell<usize>,
    /// Nothing more is kept once it has sent them.
    is_forgotten: Cell<bool>,
    /// When its client sent, if that is measured.
    pace: Option<(Shard, Cell<Pace>)>,
}

struct State {
    source: Source,
    /// The front, as long as all that was taken is in it.
    kept: Option<Vec<Bytes>>,
    kept_bytes: usize,
    kept_max: usize,
    trailers: Option<HeaderMap>,
    /// Fields that are no trailers, in addition to those that never are.
    guarded: Box<[HeaderName]>,
    bytes: u64,
    bytes_max: u64,
}

/// The memory of a piece beside its bytes.
const PIECE_BYTES: usize = 64;

impl BodyKeeper {
    pub(crate) fn new(source: Source, bytes_max: u64, kept_max: usize) -> BodyKeeper {
        let source = if source.is_end_stream() { Source::Nothing } else { source };
        let is_ended = matches!(source, Source::Nothing);
        // Of one that will not fit nothing is kept.
        let fits = source.size_hint().lower() <= kept_max as u64;
        let state = State {
            source,
            kept: fits.then(Vec::new),
            kept_bytes: 0,
            kept_max,
            trailers: None,
            guarded: Box::default(),
            bytes: 0,
            bytes_max,
        };
        let shared = Shared {
            state: RefCell::new(state),
            fault: Cell::default(),
            is_ended: Cell::new(is_ended),
            taken: Cell::default(),
            sent: Cell::default(),
            is_forgotten: Cell::default(),
            pace: None,
        };
        BodyKeeper { shared: Rc::new(shared) }
    }

    /// Measures how fast it comes, by the clock of a shard.
    pub(crate) fn timed(mut self, shard: &Shard, bytes_per_second_min: u32) -> BodyKeeper {
        if let Some(shared) = Rc::get_mut(&mut self.shared).filter(|shared| !shared.is_ended.get()) {
            shared.pace = Some((shard.clone(), Cell::new(Pace::new(bytes_per_second_min))));
        }
        self
    }

    /// Leaves these out of the trailers.
    pub(crate) fn without(self, guarded: Box<[HeaderName]>) -> BodyKeeper {
        self.shared.state.borrow_mut().guarded = guarded;
        self
    }

    /// The body from its front. What another one of these had taken is in it, if that was kept.
    pub(crate) fn body(&self) -> RequestBody {
        self.shared.sent.set(0);
        RequestBody { shared: self.shared.clone(), at: 0, has_trailers: true }
    }

    /// True if all that was taken of it is kept, so that it can be sent again.
    pub(crate) fn can_be_sent(&self) -> bool {
        self.shared.fault.get().is_none()
            && !self.shared.is_forgotten.get()
            && (self.shared.taken.get() == 0 || self.shared.state.borrow().kept.is_some())
    }

    /// Keeps nothing more: an answer came. What the newest body has yet to send of the front goes
    /// once it did.
    pub(crate) fn forget(&self) {
        self.shared.is_forgotten.set(true);
        self.shared.let_go();
    }

    pub(crate) fn fault(&self) -> Option<BodyFault> {
        self.shared.fault.get()
    }

    /// True if the newest body sent it to its end.
    pub(crate) fn is_ended(&self) -> bool {
        let state = self.shared.state.borrow();
        self.shared.is_ended.get()
            && state.kept.as_ref().is_none_or(|kept| self.shared.sent.get() >= kept.len())
    }

    /// When its client sent. `None` if there is no body, or it is not measured.
    pub(crate) fn pace(&self) -> Option<Pace> {
        self.shared.pace.as_ref().map(|(_, pace)| pace.get())
    }
}

impl Shared {
    /// Notes that the source has a piece of `bytes`, or its end; or that it has none yet.
    fn note(&self, bytes: Option<usize>) {
        let Some((shard, pace)) = &self.pace else { return };
        let mut changed = pace.get();
        match bytes {
            Some(bytes) => changed.has_come(shard.now(), bytes),
            None if changed.is_waiting() => return,
            None => changed.begins_to_wait(shard.now()),
        }
        pace.set(changed);
    }

    /// Drops the front if it is forgotten and sent.
    fn let_go(&self) {
        let mut state = self.state.borrow_mut();
        if self.is_forgotten.get() && state.kept.as_ref().is_some_and(|kept| self.sent.get() >= kept.len()) {
            let kept = state.kept.take();
            drop(state);
            drop(kept);
        }
    }
}

impl Source {
    fn is_end_stream(&self) -> bool {
        match self {
            Source::Nothing => true,
            Source::Client(body) => body.is_end_stream(),
            Source::Other(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Source::Nothing => SizeHint::with_exact(0),
            Source::Client(body) => body.size_hint(),
            Source::Other(body) => body.size_hint(),
        }
    }

    fn poll_frame(&mut self, task: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self {
            Source::Nothing => Poll::Ready(None),
            Source::Client(body) => Pin::new(body).poll_frame(task).map_err(Into::into),
            Source::Other(body) => body.as_mut().poll_frame(task),
        }
    }
}

/// Removes what a server might take for a field of the head that this gateway wrote (RFC 9110,
/// 6.5.1).
fn remove_fields(trailers: &mut HeaderMap, guarded: &[HeaderName]) {
    let is_of_the_head = |name: &HeaderName| {
        let text = name.as_str();
        is_of_a_proxy(name)
            || [AUTHORIZATION, COOKIE, EXPECT, HOST, MAX_FORWARDS, RANGE, TE, VIA].contains(name)
            || text.starts_with("content-")
            || text.contains('_')
            || guarded.contains(name)
    };
    let names: Vec<HeaderName> = trailers.keys().filter(|name| is_of_the_head(name)).cloned().collect();
    names.iter().for_each(|name| _ = trailers.remove(name));
    if strip(trailers, Direction::ToUpstream { has_underscores: false }).is_err() {
        trailers.clear();
    }
}

/// The body that hyper sends.
pub(crate) struct RequestBody {
    shared: Rc<Shared>,
    /// Pieces of those that are kept that were taken here.
    at: usize,
    has_trailers: bool,
}

impl RequestBody {
    fn count(&mut self) {
        self.at += 1;
        self.shared.sent.set(self.at);
        self.shared.let_go();
    }

    /// The next piece from its source, which is kept if there is room.
    fn poll_source(&self, task: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyFault>>> {
        let shared = &*self.shared;
        let mut state = shared.state.borrow_mut();
        let polled = state.source.poll_frame(task);
        shared.note(match &polled {
            Poll::Ready(Some(Ok(frame))) => Some(frame.data_ref().map_or(0, Bytes::len)),
            Poll::Ready(_) => Some(0),
            Poll::Pending => None,
        });
        let frame = match ready!(polled) {
            None => {
                shared.is_ended.set(true);
                return Poll::Ready(None);
            }
            Some(Ok(frame)) => frame,
            Some(Err(_)) => {
                shared.fault.set(Some(BodyFault::Broken));
                return Poll::Ready(Some(Err(BodyFault::Broken)));
            }
        };
        shared.taken.set(shared.taken.get() + 1);
        let frame = match frame.into_trailers() {
            Ok(mut trailers) => {
                remove_fields(&mut trailers, &state.guarded);
                state.trailers = Some(trailers.clone());
                shared.is_ended.set(true);
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            Err(frame) => frame,
        };
        let Some(data) = frame.data_ref() else { return Poll::Ready(Some(Ok(frame))) };
        state.bytes += data.len() as u64;
        if state.bytes > state.bytes_max {
            shared.fault.set(Some(BodyFault::TooLong));
            return Poll::Ready(Some(Err(BodyFault::TooLong)));
        }
        state.kept_bytes += data.len() + PIECE_BYTES;
        if state.kept_bytes > state.kept_max {
            let kept = state.kept.take();
            drop(kept);
        }
        if let Some(kept) = &mut state.kept {
            kept.push(data.clone());
        }
        if state.source.is_end_stream() {
            shared.is_ended.set(true);
        }
        Poll::Ready(Some(Ok(frame)))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyFault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyFault>>> {
        let kept = {
            let state = self.shared.state.borrow();
            state.kept.as_ref().and_then(|kept| kept.get(self.at)).cloned()
        };
        if let Some(piece) = kept {
            self.count();
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        if self.shared.is_ended.get() {
            let trailers = self.shared.state.borrow().trailers.clone();
            let is_first = std::mem::replace(&mut self.has_trailers, false);
            return Poll::Ready(trailers.filter(|_| is_first).map(|trailers| Ok(Frame::trailers(trailers))));
        }
        let frame = ready!(self.poll_source(task));
        self.count();
        if frame.as_ref().is_some_and(|frame| frame.as_ref().is_ok_and(Frame::is_trailers)) {
            self.has_trailers = false;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let state = self.shared.state.borrow();
        let is_kept = state.kept.as_ref().is_some_and(|kept| self.at < kept.len());
        self.shared.is_ended.get() && !is_kept && (state.trailers.is_none() || !self.has_trailers)
    }

    fn size_hint(&self) -> SizeHint {
        let state = self.shared.state.borrow();
        let rest = state.source.size_hint();
        let kept = state.kept.as_ref().and_then(|kept| kept.get(self.at..));
        let kept: u64 = kept.map_or(0, |kept| kept.iter().map(|piece| piece.len() as u64).sum());
        match rest.exact() {
            Some(rest) => SizeHint::with_exact(rest + kept),
            None => SizeHint::default(),
        }
    }
}

/// A body of any type, with errors of one.
pub(crate) type BoxedBody = Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>;

/// Puts a body into a box.
pub(crate) fn boxed<B>(body: B) -> BoxedBody
where
    B: Body<Data = Bytes> + 'static,
    B::Error: Into<BodyError>,
{
    Box::pin(MapError(Box::pin(body)))
}

struct MapError<B>(Pin<Box<B>>);

impl<B> Body for MapError<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BodyError>,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.0.as_mut().poll_frame(task).map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Waker;

    use super::*;

    struct Pieces(VecDeque<Frame<Bytes>>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = BodyError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _task: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
            Poll::Ready(self.0.pop_front().map(Ok))
        }
    }

    fn keeper(pieces: &[&'static str], bytes_max: u64, kept_max: usize) -> BodyKeeper {
        let frames = pieces.iter().map(|piece| Frame::data(Bytes::from_static(piece.as_bytes()))).collect();
        BodyKeeper::new(Source::Other(Box::pin(Pieces(frames))), bytes_max, kept_max)
    }

    fn next(body: &mut RequestBody) -> Option<Result<String, BodyFault>> {
        let mut task = Context::from_waker(Waker::noop());
        let Poll::Ready(frame) = Pin::new(body).poll_frame(&mut task) else { panic!("nothing comes") };
        Some(frame?.map(|frame| match frame.into_data() {
            Ok(data) => String::from_utf8(data.to_vec()).expect("text"),
            Err(_) => "trailers".into(),
        }))
    }

    fn all(mut body: RequestBody) -> String {
        std::iter::from_fn(|| next(&mut body)).map(|piece| piece.expect("a piece")).collect()
    }

    #[test]
    fn body_that_fits_can_be_sent_again() {
        let keeper = keeper(&["ab", "cd", "ef"], 100, 6 + 3 * PIECE_BYTES);
        let mut first = keeper.body();
        assert_eq!(next(&mut first), Some(Ok("ab".into())));
        assert_eq!(next(&mut first), Some(Ok("cd".into())));
        drop(first);
        assert!(keeper.can_be_sent() && !keeper.is_ended());
        assert_eq!(all(keeper.body()), "abcdef");
        assert!(keeper.can_be_sent() && keeper.is_ended());
        assert_eq!(all(keeper.body()), "abcdef");
    }

    #[test]
    fn longer_body_is_sent_once() {
        let keeper = keeper(&["ab", "cd"], 100, 3 + 2 * PIECE_BYTES);
        assert!(keeper.can_be_sent());
        assert_eq!(all(keeper.body()), "abcd");
        assert!(!keeper.can_be_sent());
    }

    #[test]
    fn body_is_not_sent_again_once_it_is_forgotten() {
        let keeper = keeper(&["ab", "cd"], 100, 1000);
        let mut first = keeper.body();
        assert_eq!(next(&mut first), Some(Ok("ab".into())));
        keeper.forget();
        assert!(!keeper.can_be_sent());
        assert_eq!(all(first), "cd");
    }

    #[test]
    fn replay_is_whole_though_its_answer_came_before() {
        let keeper = keeper(&["ab", "cd", "ef"], 100, 1000);
        assert_eq!(all(keeper.body()), "abcdef");
        let mut second = keeper.body();
        assert_eq!(next(&mut second), Some(Ok("ab".into())));
        keeper.forget();
        assert!(!keeper.can_be_sent() && !keeper.is_ended() && !second.is_end_stream());
        assert_eq!(all(second), "cdef");
        assert!(keeper.is_ended());
    }

    #[test]
    fn trailers_have_no_fields_of_the_head() {
        let lines =
            [("x-forwarded-for", "1.1.1.1"), ("x-user", "root"), ("x_a", "1"), ("x-sum", "7"), ("te", "x")];
        let mut trailers: HeaderMap = lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().expect("a value")))
            .collect();
        remove_fields(&mut trailers, &[HeaderName::from_static("x-user")]);
        assert_eq!(trailers.keys().collect::<Vec<_>>(), ["x-sum"]);
    }

    #[test]
    fn body_beyond_its_bound_is_a_fault() {
        let keeper = keeper(&["ab", "cd"], 3, 10);
        let mut body = keeper.body();
        assert_eq!(next(&mut body), Some(Ok("ab".into())));
        assert_eq!(next(&mut body), Some(Err(BodyFault::TooLong)));
        assert_eq!(keeper.fault(), Some(BodyFault::TooLong));
        assert!(!keeper.can_be_sent());
    }

    #[test]
    fn trailers_are_sent_again_too() {
        let mut frames = VecDeque::from([Frame::data(Bytes::from_static(b"a"))]);
        frames.push_back(Frame::trailers(HeaderMap::new()));
        let keeper = BodyKeeper::new(Source::Other(Box::pin(Pieces(frames))), 100, 1000);
        assert_eq!(all(keeper.body()), "atrailers");
        assert_eq!(all(keeper.body()), "atrailers");
    }
}
