//! Which answer of a connection of HTTP/1.1 says that it is the last one.
//!
//! A client that sends several requests at once is answered each that had arrived, so the word is
//! said where nothing is after a request. hyper does not show what it has of the next one: how
//! long a request is follows from its parts, and what was read is known.

use std::cell::Cell;
use std::rc::Rc;

use hyper::Request;
use hyper::body::{Body, Incoming};
use hyper::header::{HeaderName, HeaderValue};

use super::{Watch, Watching};

/// Whether the answers of a connection of HTTP/1.1 say that it ends.
#[derive(Debug, Default)]
pub(super) struct Farewell {
    says: Cell<Says>,
    /// The end of the latest request in all that was read, as far as that is known; [`UNKNOWN`].
    ends: Cell<u64>,
    /// An answer left without saying it since the last look.
    unsaid: Cell<bool>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Says {
    #[default]
    Nothing,
    /// With an answer after which nothing came.
    AtTheEnd,
    /// With that to the request that ends here or later: what came before it was there in time.
    From(u64),
}

/// The length of a request whose body comes in chunks.
const UNKNOWN: u64 = u64::MAX;

/// Bytes of a request of HTTP/1.1, as clients usually write it: only the parts of its head are
/// known.
pub(crate) fn request_bytes(request: &Request<Incoming>) -> u64 {
    let (uri, body) = (request.uri(), request.body().size_hint().exact());
    let (Some(body), Some(target), None) = (body, uri.path_and_query(), uri.scheme()) else { return UNKNOWN };
    let field = |(name, value): (&HeaderName, &HeaderValue)| {
        name.as_str().len() + ": ".len() + value.len() + "\r\n".len()
    };
    let fields: usize = request.headers().iter().map(field).sum();
    let line = request.method().as_str().len() + target.as_str().len() + "  HTTP/1.1\r\n\r\n".len();
    (line + fields) as u64 + body
}

impl Farewell {
    fn begin(&self) {
        self.says.set(Says::AtTheEnd);
    }

    /// A request of this length was read, of `read` bytes in all, the last of which came behind
    /// `read_from`.
    fn request(&self, bytes: u64, read_from: u64, read: u64) {
        let before = self.ends.get();
        // Behind the one before, where both came together or this one came in pieces.
        let follows = (read_from..read).contains(&before) || before.checked_add(bytes) == Some(read);
        self.ends.set(if follows { before } else { read_from }.saturating_add(bytes));
    }

    /// True if an answer that leaves now is the last one, where `read` bytes were read in all and
    /// `unread` ones wait.
    fn is_last(&self, has_body: bool, read: u64, unread: impl FnOnce() -> bool) -> bool {
        let ends = self.ends.get();
        let is_last = match self.says.get() {
            Says::Nothing => return false,
            // A body that has not all come is not waited for.
            Says::AtTheEnd => ends != UNKNOWN && (ends == read || (has_body && ends > read)) && !unread(),
            Says::From(arrived) => ends >= arrived,
        };
        if !is_last {
            self.unsaid.set(true);
        }
        is_last
    }

    /// True if the latest request goes on after the first `from` bytes, and ended among the `read`
    /// ones, or `enough` of it are there.
    pub(super) fn body_came(&self, from: u64, read: u64, enough: u64) -> bool {
        let ends = self.ends.get();
        from < ends && (ends <= read || read - from >= enough)
    }

    /// All that comes after the first `arrived` bytes comes too late. True if the last answer, if
    /// there was one since the last look, said so.
    fn is_said(&self, arrived: u64) -> bool {
        if self.says.get() == Says::AtTheEnd {
            self.says.set(Says::From(arrived));
        }
        !self.unsaid.take()
    }
}

impl Watch {
    pub(in crate::http) fn is_http2(&self) -> bool {
        self.http2.get()
    }

    /// A request of HTTP/1.1 of `bytes` bytes was read.
    pub(in crate::http) fn note_request(&self, bytes: u64) {
        self.farewell.request(bytes, self.read_from.get(), self.read.get());
    }

    /// The server drains, and what had arrived was read.
    pub(in crate::http) fn begin_farewell(&self) {
        self.farewell.begin();
    }

    /// True if no request runs, and nothing of an answer is held.
    pub(in crate::http) fn is_quiet(&self) -> bool {
        self.requests.borrow().iter().all(|request| Rc::strong_count(request) == 1)
    }

    /// True if a connection of HTTP/1.1 may end whose moment has come.
    pub(in crate::http) fn may_leave(&self) -> bool {
        let is_said = self.farewell.is_said(self.read.get());
        is_said && self.is_quiet()
    }

    fn has_unread(&self) -> bool {
        self.fate.as_ref().is_some_and(|fate| fate.has_unread())
    }
}

impl Watching {
    /// True if the answer of HTTP/1.1 that leaves now says that it is the last one.
    pub(in crate::http) fn is_last(&self) -> bool {
        let Some(connection) = self.connection.upgrade().filter(|_| !self.http2) else { return false };
        connection.farewell.is_last(self.has_body, connection.read.get(), || connection.has_unread())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_says_the_end_where_nothing_is_behind_its_request() {
        let farewell = Farewell::default();
        farewell.request(30, 0, 30);
        assert!(!farewell.is_last(false, 30, || false), "it was not told");
        farewell.begin();
        farewell.request(30, 30, 60);
        assert!(farewell.is_last(false, 60, || false));
        assert!(!farewell.is_last(false, 60, || true), "more waits");
        assert!(!farewell.is_last(false, 61, || false), "more was read");
        // In two pieces.
        farewell.request(30, 80, 90);
        assert!(farewell.is_last(false, 90, || false));
        // Three that came together.
        farewell.request(30, 90, 180);
        assert!(!farewell.is_last(false, 180, || false));
        farewell.request(40, 90, 180);
        assert!(!farewell.is_last(false, 180, || false));
        farewell.request(20, 90, 180);
        assert!(farewell.is_last(false, 180, || false));
        // A body that has not come.
        farewell.request(500, 180, 230);
        assert!(farewell.is_last(true, 230, || false));
        assert!(!farewell.is_last(false, 230, || false), "a head whose length is another one");
    }

    #[test]
    fn rest_of_a_body_comes_at_its_rate_or_ends() {
        let farewell = Farewell::default();
        farewell.request(1000, 0, 100);
        assert!(!farewell.body_came(100, 199, 100));
        assert!(farewell.body_came(100, 200, 100));
        assert!(farewell.body_came(999, 1000, 100), "its last byte");
        assert!(!farewell.body_came(1000, 5000, 100), "what is behind it is a head");
        farewell.request(UNKNOWN, 1000, 1100);
        assert!(farewell.body_came(1100, 1200, 100));
        assert!(!farewell.body_came(1100, 1199, 100));
    }

    #[test]
    fn what_had_arrived_is_answered_before_the_end_is_said() {
        let farewell = Farewell::default();
        farewell.begin();
        farewell.request(30, 0, 90);
        assert!(!farewell.is_last(false, 90, || false));
        assert!(!farewell.is_said(90), "the client does not know");
        assert!(farewell.is_said(1000), "the first look holds");
        farewell.request(30, 0, 90);
        assert!(!farewell.is_last(false, 90, || false));
        farewell.request(30, 0, 200);
        assert!(farewell.is_last(false, 200, || true));
        farewell.request(UNKNOWN, 200, 240);
        assert!(farewell.is_last(true, 240, || true), "one whose length is not known");
    }
}
