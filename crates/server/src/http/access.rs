//! The access log of requests: one line for each, once nothing of its answer is held any more.
//!
//! [`HttpService::access_log`](super::HttpService::access_log), or [`Http::access_log`](super::Http::access_log), writes an event of
//! `tracing` at level INFO with the target `ringserve::access::http`. `LogOptions::access_file` of `ringserve::log` appends it to the
//! file of the [access log of connections](crate::access_log), as a line of JSON.
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
//! An answer counts as whole once the connection has all of it; the connection's line tells whether that left. A request that hyper
//! answers by itself, since it cannot be read, has no line.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::Write;
use std::net::SocketAddr;
use std::rc::Rc;

use hyper::body::{Body, Frame};
use hyper::{Method, Request, Response, StatusCode, Version};
use ringserve_core::{ConnId, Time};
use ringserve_drivers::guarded;
use tracing::info;

use crate::peer::Peer;
use crate::shard::handle::Shard;

/// Bytes of a path that are in a line.
const PATH_BYTES_MAX: usize = 1024;

/// What the lines of a connection have in common.
pub(super) struct Site {
    shard: Shard,
    id: ConnId,
    peer: Option<SocketAddr>,
    via: Option<SocketAddr>,
}

impl Site {
    pub(super) fn new(shard: &Shard, id: ConnId, peer: Peer) -> Rc<Site> {
        Rc::new(Site { shard: shard.clone(), id, peer: peer.addr(), via: peer.via() })
    }
}

/// A request, whose line is written when this is dropped.
pub(super) struct Line {
    site: Rc<Site>,
    began: Time,
    version: Version,
    method: Method,
    path: Box<[u8]>,
    status: Cell<Option<StatusCode>>,
    /// Bytes of the answer's body that were made, and that the connection has.
    made: Cell<u64>,
    sent: Cell<u64>,
    /// How many there are, if that was said.
    expected: Cell<Option<u64>>,
    /// Nothing more is made.
    is_made: Cell<bool>,
}

impl Line {
    pub(super) fn new<B>(site: &Rc<Site>, request: &Request<B>) -> Rc<Line> {
        let path = request.uri().path().as_bytes();
        Rc::new(Line {
            site: site.clone(),
            began: site.shard.now(),
            version: request.version(),
            method: request.method().clone(),
            path: path[..path.len().min(PATH_BYTES_MAX)].into(),
            status: Cell::default(),
            made: Cell::default(),
            sent: Cell::default(),
            expected: Cell::default(),
            is_made: Cell::default(),
        })
    }

    /// The service answered, or another did in its place.
    pub(super) fn answered<B: Body>(&self, response: &Response<B>) {
        let (status, body) = (response.status(), response.body());
        self.status.set(Some(status));
        self.expected.set(body.size_hint().exact());
        let has_no_body = self.method == Method::HEAD
            || status.is_informational()
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        self.is_made.set(has_no_body || body.is_end_stream());
    }

    /// A frame of the body, or its end, and whether it is known to be the last one.
    pub(super) fn made<D>(&self, frame: Option<&Frame<D>>, is_last: bool) {
        if is_last || frame.is_none_or(|frame| frame.is_trailers()) {
            self.is_made.set(true);
        }
    }

    /// A piece of the body.
    pub(super) fn piece(&self, bytes: usize) {
        self.made.set(self.made.get() + bytes as u64);
    }

    /// The connection has bytes of it.
    pub(super) fn sent(&self, bytes: usize) {
        self.sent.set(self.sent.get() + bytes as u64);
    }

    fn is_whole(&self) -> bool {
        let (made, sent) = (self.made.get(), self.sent.get());
        self.status.get().is_some()
            && made == sent
            && (self.is_made.get() || self.expected.get() == Some(sent))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let Site { shard, id, peer, via } = &*self.site;
        let path = escape(&self.path);
        let seconds = (shard.now() - self.began).as_secs_f64();
        guarded(|| {
            info!(
                target: "ringserve::access::http",
                shard = shard.index(),
                %id,
                peer = peer.map(tracing::field::display),
                via = via.map(tracing::field::display),
                version = ?self.version,
                method = self.method.as_str(),
                path = &*path,
                status = self.status.get().map(|status| status.as_u16()),
                bytes = self.sent.get(),
                seconds,
                whole = self.is_whole(),
                "answered"
            );
        });
    }
}

/// A path without what could end a line, or a value in quotes.
fn escape(path: &[u8]) -> Cow<'_, str> {
    let is_plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\');
    if path.iter().all(is_plain)
        && let Ok(path) = std::str::from_utf8(path)
    {
        return path.into();
    }
    let mut escaped = String::with_capacity(3 * path.len());
    for byte in path {
        if is_plain(byte) {
            escaped.push(char::from(*byte));
        } else {
            _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_has_nothing_that_ends_a_value_or_a_line() {
        assert!(matches!(escape(b"/a/b%20c;d=e"), Cow::Borrowed("/a/b%20c;d=e")));
        assert_eq!(escape(b"/a\nb\"c\\d\x7f\x1b[2J e"), "/a%0Ab%22c%5Cd%7F%1B[2J%20e");
        assert_eq!(escape("/gr\u{fc}n\u{85}".as_bytes()), "/gr%C3%BCn%C2%85");
        assert_eq!(escape(&[b'/', 0xff, 0xc3]), "/%FF%C3");
    }
}
