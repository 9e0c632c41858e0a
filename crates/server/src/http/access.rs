//! The access log of requests: one line for each, once nothing of its answer is held.
//!
//! [`HttpService::access_log`](super::HttpService::access_log), or
//! [`Http::access_log`](super::Http::access_log), writes an event of `tracing` at level INFO with
//! the target `ringserve::access::http`. `LogOptions::access_file` of `ringserve::log` appends it
//! to the file of the [access log of connections](crate::access_log), as a line of JSON.
//!
//! | field | what it is |
//! |---|---|
//! | `shard`, `id` | together the connection's name, as in every other line of the log |
//! | `peer`, `via` | the peer's address, and the proxy through which it came; left out where there is none |
//! | `version`, `method` | as `HTTP/1.1`, `GET` |
//! | `path` | without the query, in which secrets stand; 1 KiB at most, what is no visible ASCII as `%XX` |
//! | `status` | left out where there was no answer |
//! | `bytes` | of the answer's body, given to the connection |
//! | `seconds` | from the head of the request to the end of the answer |
//! | `whole` | false where the answer was cut: the client is gone, a bound was exceeded, the service failed or panicked |
//!
//! An answer counts as whole once the connection has all of it; the connection's line tells whether
//! that left. A request that hyper answers by itself, since it cannot be read, has no line.

use std::cell::Cell;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;

use hyper::body::{Body, Frame};
use hyper::header::{CONTENT_LENGTH, HeaderMap};
use hyper::{Method, Request, Response, StatusCode, Version};
use ringserve_base::lines::info;
use ringserve_core::{ConnId, Time};

use super::watch::Watch;
use crate::client_info::ClientInfo;
use crate::shard::face::handle::Shard;

/// Bytes of a path that are in a line, and those that take no separate memory.
const PATH_BYTES_MAX: usize = 1024;
const SHORT_PATH: usize = 63;

/// The fields that the lines of a connection have in common.
pub(super) struct Site {
    shard: Shard,
    watch: Rc<Watch>,
    id: ConnId,
    peer: Option<SocketAddr>,
    via: Option<SocketAddr>,
    /// A line that was written, for the next request: one is enough for HTTP/1.1.
    free: Cell<Option<Rc<Line>>>,
}

impl Site {
    pub(super) fn new(shard: &Shard, watch: &Rc<Watch>, client: &ClientInfo) -> Rc<Site> {
        let peer = client.peer();
        Rc::new(Site {
            shard: shard.clone(),
            watch: watch.clone(),
            id: client.id(),
            peer: peer.addr(),
            via: peer.via(),
            free: Cell::default(),
        })
    }
}

/// A share in the line of a request, which is written when the last one is dropped; or of none.
#[derive(Clone, Default)]
pub(super) struct Logged(Option<Rc<Line>>);

/// A request.
struct Line {
    /// `None` between two requests.
    site: Option<Rc<Site>>,
    began: Time,
    version: Version,
    method: Method,
    path: Path,
    status: Cell<Option<StatusCode>>,
    /// Bytes of the answer's body that were made, and that the connection has.
    made: Cell<u64>,
    sent: Cell<u64>,
    /// The length of the answer's body, if that was given.
    expected: Cell<Option<u64>>,
    /// Nothing more is made.
    is_made: Cell<bool>,
}

/// The part of a path that is kept.
struct Path {
    len: u8,
    short: [u8; SHORT_PATH],
    /// In its place, if it is longer.
    long: Option<Box<[u8]>>,
}

impl Logged {
    pub(super) fn new<B>(site: &Rc<Site>, request: &Request<B>) -> Logged {
        let mut free = site.free.take().unwrap_or_else(Line::empty);
        if let Some(line) = Rc::get_mut(&mut free) {
            line.begin(site, request);
        }
        Logged(Some(free))
    }

    /// The service answered, or another did in its place.
    pub(super) fn answered<B: Body>(&self, response: &Response<B>) {
        let Some(line) = &self.0 else { return };
        let (status, body) = (response.status(), response.body());
        line.status.set(Some(status));
        line.expected.set(body.size_hint().exact().or_else(|| said_length(response.headers())));
        let has_no_body = line.method == Method::HEAD
            || status.is_informational()
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        line.is_made.set(has_no_body || body.is_end_stream());
    }

    /// A frame of the body, or its end.
    pub(super) fn made<B: Body>(&self, frame: Option<&Frame<B::Data>>, body: &B) {
        let Some(line) = &self.0 else { return };
        if frame.is_none_or(|frame| frame.is_trailers()) || body.is_end_stream() {
            line.is_made.set(true);
        }
    }

    /// A piece of the body.
    pub(super) fn piece(&self, bytes: usize) {
        if let Some(line) = &self.0 {
            line.made.set(line.made.get() + bytes as u64);
        }
    }

    /// The connection has bytes of it.
    pub(super) fn sent(&self, bytes: usize) {
        if let Some(line) = &self.0 {
            line.sent.set(line.sent.get() + bytes as u64);
        }
    }
}

/// The length of its answer that the service itself gives: hyper asks for no more of the body then.
fn said_length(fields: &HeaderMap) -> Option<u64> {
    fields.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

impl Drop for Logged {
    #[inline]
    fn drop(&mut self) {
        if let Some(line) = self.0.take() {
            line.let_go();
        }
    }
}

impl Line {
    #[cold]
    fn empty() -> Rc<Line> {
        Rc::new(Line {
            site: None,
            began: Time::ZERO,
            version: Version::HTTP_11,
            method: Method::GET,
            path: Path { len: 0, short: [0; SHORT_PATH], long: None },
            status: Cell::default(),
            made: Cell::default(),
            sent: Cell::default(),
            expected: Cell::default(),
            is_made: Cell::default(),
        })
    }

    /// Another request, written over the one before.
    fn begin<B>(&mut self, site: &Rc<Site>, request: &Request<B>) {
        self.site = Some(site.clone());
        self.began = site.shard.now();
        self.version = request.version();
        if self.method != *request.method() {
            self.method = request.method().clone();
        }
        self.path.set(request.uri().path().as_bytes());
        (self.status, self.made, self.sent) = Default::default();
        (self.expected, self.is_made) = Default::default();
    }

    /// Writes the line, if nothing else has a share in it.
    fn let_go(mut self: Rc<Line>) {
        let Some(line) = Rc::get_mut(&mut self) else { return };
        let Some(site) = line.site.take() else { return };
        line.write(&site);
        site.free.set(Some(self));
    }

    fn write(&self, site: &Site) {
        let now = site.shard.now();
        site.watch.note_time(now);
        let seconds = (now - self.began).as_secs_f64();
        info!(
            target: "ringserve::access::http",
            shard = site.shard.index(),
            id = %site.id,
            peer = site.peer.map(tracing::field::display),
            via = site.via.map(tracing::field::display),
            version = ?self.version,
            method = self.method.as_str(),
            path = %Shown(self.path.bytes()),
            status = self.status.get().map(|status| status.as_u16()),
            bytes = self.sent.get(),
            seconds,
            whole = self.is_whole(),
            "answered"
        );
    }

    fn is_whole(&self) -> bool {
        let (made, sent) = (self.made.get(), self.sent.get());
        self.status.get().is_some()
            && made == sent
            && (self.is_made.get() || self.expected.get() == Some(sent))
    }
}

impl Path {
    fn set(&mut self, path: &[u8]) {
        self.long = match self.short.get_mut(..path.len()) {
            Some(front) => {
                front.copy_from_slice(path);
                self.len = path.len() as u8;
                None
            }
            None => Some(path[..path.len().min(PATH_BYTES_MAX)].into()),
        };
    }

    fn bytes(&self) -> &[u8] {
        self.long.as_deref().unwrap_or(&self.short[..usize::from(self.len)])
    }
}

/// A path without what could end a line, or a value in quotes.
struct Shown<'a>(&'a [u8]);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\');
        let mut rest = self.0;
        while !rest.is_empty() {
            let plain = rest.iter().position(|byte| !is_plain(byte)).unwrap_or(rest.len());
            let (front, behind) = rest.split_at(plain);
            f.write_str(std::str::from_utf8(front).unwrap_or_default())?;
            rest = behind;
            if let Some((byte, behind)) = behind.split_first() {
                write!(f, "%{byte:02X}")?;
                rest = behind;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_has_nothing_that_ends_a_value_or_a_line() {
        for (path, shown) in [
            (&b"/a/b%20c;d=e"[..], "/a/b%20c;d=e"),
            (b"/a\nb\"c\\d\x7f\x1b[2J e", "/a%0Ab%22c%5Cd%7F%1B[2J%20e"),
            ("/gr\u{fc}n\u{85}".as_bytes(), "/gr%C3%BCn%C2%85"),
            (&[b'/', 0xff, 0xc3], "/%FF%C3"),
            (b"", ""),
        ] {
            assert_eq!(Shown(path).to_string(), shown);
        }
    }

    #[test]
    fn path_is_kept_to_its_length() {
        let mut kept = Path { len: 0, short: [0; SHORT_PATH], long: None };
        for (len, most) in [(1, 1), (0, 0), (63, 63), (64, 64), (1, 1), (1024, 1024), (1025, 1024)] {
            let path = vec![b'a'; len];
            kept.set(&path);
            assert_eq!(kept.bytes(), &path[..most]);
        }
    }
}
