//! Paths of the program at the endpoint.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use hyper::body::Bytes;
use hyper::header::HeaderValue;
use hyper::{Method, StatusCode};

use super::routes;
use crate::shard::remote::control::ServerControl;

/// Routes at most.
const ROUTES_MAX: usize = 64;

/// Bytes of a path at most.
const PATH_BYTES_MAX: usize = 200;

/// Bytes of an answer at most: 32 connections may each have one under way.
pub(super) const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The function that answers for a route.
type Handler = Arc<dyn Fn(&AdminRequest) -> AdminAnswer + Send + Sync>;

/// A path of the program at an [admin endpoint](crate::admin), for
/// [`Admin::route`](super::Admin::route).
///
/// | | |
/// |---|---|
/// | who may ask | as with the endpoint's own paths: the right `Host`, and a token if there is one; for [`post`](AdminRoute::post) the token for orders, and `X-Ringserve: 1` |
/// | where it runs | on a thread beside the endpoint's, so it may block: probes, metrics and all other paths are answered meanwhile |
/// | at once | 8 of all routes, and 4 of those that are [open](AdminRoute::open); further ones are answered with 503 |
/// | time | 8 s, then the answer is 503; the function goes on, and counts among the 8 |
/// | sizes | 64 KiB of a request's body, beyond which it is 413; 1 MiB of an answer, beyond which it is 500 |
/// | a panic | 500, and a line in the log with the path |
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// use ringserve::admin::{Admin, AdminAnswer, AdminRoute};
///
/// let quiet = Arc::new(AtomicBool::new(false));
/// let shown = quiet.clone();
/// let state = AdminRoute::get("/app/quiet", move |_request| format!("{}\n", shown.load(Ordering::Relaxed)));
/// let set = AdminRoute::post("/app/quiet", move |request| match request.body() {
///     b"true" | b"false" => {
///         quiet.store(request.body() == b"true", Ordering::Relaxed);
///         AdminAnswer::from("set\n")
///     }
///     _ => AdminAnswer::error(400, "say true or false"),
/// });
/// let admin = Admin::new("127.0.0.1:9000").route(state).route(set);
/// ```
#[derive(Clone)]
#[must_use = "a route is given to Admin::route"]
pub struct AdminRoute {
    path: String,
    has_effect: bool,
    is_open: bool,
    about: String,
    handler: Handler,
}

/// A request for an [`AdminRoute`].
pub struct AdminRequest {
    pub(super) path: String,
    /// The offset at which that part of the path begins which the route leaves open.
    pub(super) rest: usize,
    pub(super) query: Option<String>,
    pub(super) body: Vec<u8>,
    pub(super) token: Option<String>,
    pub(super) server: Option<ServerControl>,
}

/// The answer of an [`AdminRoute`]: text, if it is made of a string.
#[derive(Clone, Debug)]
pub struct AdminAnswer {
    status: u16,
    content_type: Cow<'static, str>,
    body: Bytes,
}

impl AdminRoute {
    /// Answers GET and HEAD at `path`, which has no effect on the server. A path that ends in `/*`
    /// is all paths below it. A path is ASCII, at most 200 bytes, and none of the endpoint's own;
    /// the start checks that.
    pub fn get<A: Into<AdminAnswer>>(
        path: impl Into<String>,
        answer: impl Fn(&AdminRequest) -> A + Send + Sync + 'static,
    ) -> AdminRoute {
        AdminRoute::new(path.into(), false, Arc::new(move |request| answer(request).into()))
    }

    /// Answers POST at `path`: an order. Each is a line in the log, with who gave it.
    pub fn post<A: Into<AdminAnswer>>(
        path: impl Into<String>,
        answer: impl Fn(&AdminRequest) -> A + Send + Sync + 'static,
    ) -> AdminRoute {
        AdminRoute::new(path.into(), true, Arc::new(move |request| answer(request).into()))
    }

    fn new(path: String, has_effect: bool, handler: Handler) -> AdminRoute {
        AdminRoute { path, has_effect, is_open: false, about: String::new(), handler }
    }

    /// Answers without a token, as `/healthz` does. The request's `Host` is checked all the same.
    /// An order is never open.
    pub fn open(self) -> AdminRoute {
        AdminRoute { is_open: true, ..self }
    }

    /// The purpose: a few words in the list of paths, which is the answer to a path that there is
    /// not.
    pub fn about(self, words: impl Into<String>) -> AdminRoute {
        AdminRoute { about: words.into(), ..self }
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn has_effect(&self) -> bool {
        self.has_effect
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    pub(super) fn answer(&self, request: &AdminRequest) -> AdminAnswer {
        (self.handler)(request)
    }

    /// The offset at which the open part of a path begins that is this route's.
    pub(super) fn rest_of(&self, path: &str) -> Option<usize> {
        match self.path.strip_suffix('*') {
            Some(folder) => (path.len() > folder.len() && path.starts_with(folder)).then_some(folder.len()),
            None => (path == self.path).then_some(path.len()),
        }
    }

    fn allows(&self, method: &Method) -> bool {
        routes::allows(self.has_effect, method)
    }

    /// # Errors
    /// A sentence with the cause.
    fn check(&self, others: &[AdminRoute]) -> Result<(), String> {
        let path: String = self.path.chars().take(PATH_BYTES_MAX).collect();
        let wrong = |why: &str| Err(format!("Admin::route: the path {path:?} {why}"));
        let fixed = self.path.strip_suffix("/*").unwrap_or(&self.path);
        let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '?' | '#' | '*' | '%');
        if !self.path.starts_with('/') || fixed.is_empty() || !fixed.chars().all(is_plain) {
            return wrong(
                "is none: it begins with /, has visible ASCII without ?, # and %, and * only as the whole end in /*",
            );
        }
        if self.path.len() > PATH_BYTES_MAX {
            return wrong(&format!("has {} bytes; {PATH_BYTES_MAX} is the most", self.path.len()));
        }
        if routes::is_own(fixed) {
            return wrong("is the endpoint's own");
        }
        if self.has_effect && self.is_open {
            return wrong("takes orders, and no order is open");
        }
        match others.iter().any(|other| other.path == self.path && other.has_effect == self.has_effect) {
            true => wrong("is there twice"),
            false => Ok(()),
        }
    }
}

impl fmt::Debug for AdminRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AdminRoute { path, has_effect, is_open, about, .. } = self;
        f.debug_struct("AdminRoute")
            .field("path", path)
            .field("has_effect", has_effect)
            .field("is_open", is_open)
            .field("about", about)
            .finish_non_exhaustive()
    }
}

impl AdminRequest {
    /// The path, without the query.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The path below the route's own, where that ends in `/*`, as it was sent: `%2F` stays. Empty
    /// for other routes.
    pub fn rest(&self) -> &str {
        &self.path[self.rest..]
    }

    /// The text after `?`, as it was sent.
    pub fn query(&self) -> Option<&str> {
        self.query.as_deref()
    }

    /// The first value of a parameter of the query, with bytes that are written as `%2F`; `None` if
    /// it is missing, or no UTF-8.
    pub fn parameter(&self, name: &str) -> Option<String> {
        routes::parameter(self.query.as_deref(), name)
    }

    /// The body, 64 KiB at most. Empty for GET.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The name of the token that the request has
    /// ([`Admin::named_token`](super::Admin::named_token)); `None` where none is asked for.
    pub fn token_name(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// The server; `None` while its factories are pending.
    pub fn server(&self) -> Option<&ServerControl> {
        self.server.as_ref()
    }
}

impl fmt::Debug for AdminRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AdminRequest { path, query, body, token, .. } = self;
        f.debug_struct("AdminRequest")
            .field("path", path)
            .field("query", query)
            .field("body_bytes", &body.len())
            .field("token_name", token)
            .finish_non_exhaustive()
    }
}

impl AdminAnswer {
    /// An answer of this content type, such as `text/csv`, with status 200.
    pub fn new(content_type: impl Into<Cow<'static, str>>, body: impl Into<Bytes>) -> AdminAnswer {
        AdminAnswer { status: 200, content_type: content_type.into(), body: body.into() }
    }

    /// JSON, as text.
    pub fn json(text: impl Into<Bytes>) -> AdminAnswer {
        AdminAnswer::new(super::answer::JSON, text)
    }

    /// A sentence that says what is wrong, with a status such as 400 or 409.
    pub fn error(status: u16, text: impl fmt::Display) -> AdminAnswer {
        AdminAnswer::from(format!("{text}\n")).status(status)
    }

    /// With another status, of 200 to 599.
    pub fn status(self, status: u16) -> AdminAnswer {
        AdminAnswer { status, ..self }
    }

    /// Its parts as they are sent.
    ///
    /// # Errors
    /// A sentence with the cause: it is too large, or has a status or a type that is none.
    pub(super) fn parts(self) -> Result<(StatusCode, HeaderValue, Bytes), String> {
        let AdminAnswer { status, content_type, body } = self;
        if body.len() > ANSWER_BYTES_MAX {
            return Err(format!("its answer has {} bytes; {ANSWER_BYTES_MAX} is the most", body.len()));
        }
        let code = StatusCode::from_u16(status).ok().filter(|code| (200..600).contains(&code.as_u16()));
        let code = code.ok_or_else(|| format!("its status {status} is none of 200 to 599"))?;
        let kind = HeaderValue::from_str(&content_type);
        Ok((code, kind.map_err(|_| format!("its content type {content_type:?} is none"))?, body))
    }
}

impl From<String> for AdminAnswer {
    fn from(text: String) -> AdminAnswer {
        AdminAnswer::new(super::answer::TEXT, text)
    }
}

impl From<&'static str> for AdminAnswer {
    fn from(text: &'static str) -> AdminAnswer {
        AdminAnswer::new(super::answer::TEXT, text)
    }
}

/// The routes of a program.
#[derive(Debug, Default)]
pub(super) struct ProgramRoutes {
    routes: Vec<AdminRoute>,
}

/// A path of the program, asked for by a method.
pub(super) enum ProgramPath<'a> {
    /// With where its open part begins.
    Route(&'a AdminRoute, usize),
    /// It has others.
    OtherMethod(&'static str),
}

impl ProgramRoutes {
    /// # Errors
    /// A sentence with the cause: a path that is none, or is there already, or too many.
    pub(super) fn check(routes: Vec<AdminRoute>) -> Result<ProgramRoutes, String> {
        if routes.len() > ROUTES_MAX {
            return Err(format!("Admin::route: there are {} routes; {ROUTES_MAX} is the most", routes.len()));
        }
        (0..routes.len()).try_for_each(|number| routes[number].check(&routes[..number]))?;
        Ok(ProgramRoutes { routes })
    }

    /// The longest route of a path. `None` if it is none of the program's.
    pub(super) fn find(&self, path: &str, method: &Method) -> Option<ProgramPath<'_>> {
        let its = self.routes.iter().filter_map(|route| Some((route, route.rest_of(path)?)));
        // A whole path goes before a folder.
        let weight = |(route, rest): &(&AdminRoute, usize)| (!route.path.ends_with('*'), *rest);
        let best = its.clone().map(|of| weight(&of)).max()?;
        let mut its = its.filter(|of| weight(of) == best);
        match its.clone().find(|(route, _)| route.allows(method)) {
            Some((route, rest)) => Some(ProgramPath::Route(route, rest)),
            None => {
                let both =
                    (its.clone().any(|(route, _)| route.has_effect), its.any(|(route, _)| !route.has_effect));
                Some(ProgramPath::OtherMethod(match both {
                    (true, true) => "GET, HEAD, POST",
                    (true, false) => "POST",
                    _ => "GET, HEAD",
                }))
            }
        }
    }

    /// One line for each.
    pub(super) fn list(&self) -> String {
        let line = |route: &AdminRoute| {
            let about = if route.about.is_empty() { "of the program" } else { &route.about };
            routes::line(if route.has_effect { "POST" } else { "GET " }, &route.path, about)
        };
        self.routes.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(path: &str) -> AdminRoute {
        AdminRoute::get(path, |_request| "")
    }

    fn post(path: &str) -> AdminRoute {
        AdminRoute::post(path, |_request| "")
    }

    #[test]
    fn paths_of_a_program_are_checked() {
        let check = |routes: Vec<AdminRoute>| ProgramRoutes::check(routes).map(drop);
        for path in ["/app", "/app/*", "/app/a-b_c.json", "/statistics"] {
            assert_eq!(check(vec![get(path), post(path)]), Ok(()), "{path}");
        }
        for (path, why) in [
            ("", "is none"),
            ("app", "is none"),
            ("/*", "is none"),
            ("/", "the endpoint's own"),
            ("/a b", "is none"),
            ("/a?b", "is none"),
            ("/ä", "is none"),
            ("/a*", "is none"),
            ("/*/a", "is none"),
            ("/%61", "is none"),
            ("/metrics", "the endpoint's own"),
            ("/healthz", "the endpoint's own"),
            ("/admission/app", "the endpoint's own"),
            ("/connections/*", "the endpoint's own"),
        ] {
            assert!(check(vec![get(path)]).unwrap_err().contains(why), "{path}");
        }
        assert!(check(vec![get("/a"), get("/a")]).unwrap_err().contains("twice"));
        assert!(check(vec![post("/a").open()]).unwrap_err().contains("no order is open"));
        assert!(check(vec![get(&format!("/{}", "a".repeat(200)))]).unwrap_err().contains("201 bytes"));
        let many = (0..65).map(|n| get(&format!("/a{n}"))).collect();
        assert!(check(many).unwrap_err().contains("65 routes"));
    }

    #[test]
    fn longest_route_of_the_method_is_found() {
        let routes = vec![get("/app/*"), get("/app/a"), post("/app/a"), get("/app/b/*"), post("/only")];
        let routes = ProgramRoutes::check(routes).unwrap();
        let found = |method: Method, path: &str| match routes.find(path, &method) {
            Some(ProgramPath::Route(route, rest)) => {
                format!("{} {} {}", route.path, route.has_effect, &path[rest..])
            }
            Some(ProgramPath::OtherMethod(allowed)) => format!("405 {allowed}"),
            None => "404".to_owned(),
        };
        assert_eq!(found(Method::GET, "/app/a"), "/app/a false ");
        assert_eq!(found(Method::HEAD, "/app/a"), "/app/a false ");
        assert_eq!(found(Method::POST, "/app/a"), "/app/a true ");
        assert_eq!(found(Method::PUT, "/app/a"), "405 GET, HEAD, POST");
        assert_eq!(found(Method::GET, "/app/a/b"), "/app/* false a/b");
        assert_eq!(found(Method::GET, "/app/b/c%2F"), "/app/b/* false c%2F");
        assert_eq!(found(Method::GET, "/only"), "405 POST");
        assert_eq!(found(Method::POST, "/app/b/c"), "405 GET, HEAD");
        for path in ["/app", "/app/", "/other", "/apps/a", ""] {
            assert_eq!(found(Method::GET, path), "404", "{path}");
        }
    }

    #[test]
    fn answers_have_bounds() {
        let parts = |answer: AdminAnswer| {
            answer.parts().map(|(status, kind, body)| (status.as_u16(), kind, body.len()))
        };
        assert_eq!(parts("a".into()), Ok((200, HeaderValue::from_static("text/plain; charset=utf-8"), 1)));
        assert_eq!(
            parts(AdminAnswer::json("{}")),
            Ok((200, HeaderValue::from_static("application/json"), 2))
        );
        assert_eq!(parts(AdminAnswer::error(409, "no")).unwrap().0, 409);
        assert!(parts(AdminAnswer::from("").status(100)).unwrap_err().contains("100"));
        assert!(parts(AdminAnswer::from("").status(1000)).is_err());
        assert!(parts(AdminAnswer::new("a\nb", "")).unwrap_err().contains("content type"));
        assert!(parts(vec_answer(ANSWER_BYTES_MAX)).is_ok());
        assert!(parts(vec_answer(ANSWER_BYTES_MAX + 1)).unwrap_err().contains("1048577 bytes"));
    }

    fn vec_answer(bytes: usize) -> AdminAnswer {
        AdminAnswer::new("application/octet-stream", vec![0; bytes])
    }
}
