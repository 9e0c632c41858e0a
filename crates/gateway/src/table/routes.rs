//! All routes, and which one takes a request.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use arc_swap::ArcSwap;
use hyper::Method;
use hyper::header::HeaderMap;

use super::pattern::{HostPattern, PathPattern, PatternError};
use super::route::Route;

/// Routes in the order in which they were given, each with the requests that it takes.
///
/// The most specific one takes a request, whatever the order: by host (a name, `*.` and the end of
/// names, `*`), then by path (text before `{name}` before `*`, segment by segment), then that with
/// more conditions on method and fields.
#[derive(Debug, Default)]
pub struct RouteTable {
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    host: HostPattern,
    path: PathPattern,
    route: Arc<Route>,
    /// The name in logs and figures.
    name: Arc<str>,
}

/// Why routes are refused.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq)]
pub enum RouteError {
    /// The pattern of a route cannot be understood.
    Pattern {
        /// The number of the route, from 0.
        route: usize,
        /// The reason.
        error: PatternError,
    },
    /// A route that no request can reach, since another one takes all of them.
    Unreachable {
        /// The number of the route, from 0.
        route: usize,
        /// The number of the one before it.
        other: usize,
    },
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RouteError::Pattern { route, error } => write!(f, "route {route}: {error}"),
            RouteError::Unreachable { route, other } => {
                write!(f, "route {route} can never be reached: route {other} takes all of its requests")
            }
        }
    }
}

ringserve_buf::debug_is_display!(RouteError);

impl std::error::Error for RouteError {}

impl RouteTable {
    /// A table without routes.
    pub fn new() -> RouteTable {
        RouteTable::default()
    }

    /// Adds a route for a pattern: a path, behind a host where it is for one.
    /// `api.example.org/v1/*` is `/v1` and what is below, for that host; `*.example.org/*` all of
    /// those hosts; `/users/{id}` one segment, for all hosts.
    ///
    /// # Errors
    /// The pattern cannot be understood, or matches nothing.
    pub fn route(self, pattern: &str, route: Route) -> Result<RouteTable, RouteError> {
        let (host, path) = pattern.split_at(pattern.find('/').unwrap_or(pattern.len()));
        self.host_route(if host.is_empty() { "*" } else { host }, path, route)
    }

    /// The same with the host and the path of the pattern.
    ///
    /// # Errors
    /// Those of [`route`](RouteTable::route).
    pub fn host_route(mut self, host: &str, path: &str, route: Route) -> Result<RouteTable, RouteError> {
        let wrong = |error| RouteError::Pattern { route: self.rows.len(), error };
        let row = Row {
            host: HostPattern::parse(host).map_err(wrong)?,
            path: PathPattern::parse(path).map_err(wrong)?,
            route: Arc::new(route),
            name: format!("{}{path}", if host == "*" { "" } else { host }).into(),
        };
        self.rows.push(row);
        Ok(self)
    }

    /// Puts the routes in their order.
    pub(crate) fn compile(self) -> Result<RouteIndex, RouteError> {
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        order.sort_by(|one, two| self.rows[*one].order(&self.rows[*two]));
        let sorted: Vec<&Row> = order.iter().map(|number| &self.rows[*number]).collect();
        for (at, row) in sorted.iter().enumerate() {
            if let Some(other) = sorted[..at].iter().position(|before| before.covers(row)) {
                return Err(RouteError::Unreachable { route: order[at], other: order[other] });
            }
        }
        let mut hosts: Vec<HostRoutes> = Vec::new();
        for (number, row) in sorted.iter().enumerate() {
            if hosts.last().is_none_or(|last| last.host != row.host) {
                hosts.push(HostRoutes {
                    host: row.host.clone(),
                    by_first: HashMap::new(),
                    others: Vec::new(),
                });
            }
            let Some(last) = hosts.last_mut() else { continue };
            match row.path.first() {
                Some(first) => last.by_first.entry(first.into()).or_default().push(number),
                None => last.others.push(number),
            }
        }
        let mut exact = HashMap::new();
        let mut patterns = Vec::new();
        for (at, host) in hosts.iter().enumerate() {
            match &host.host {
                HostPattern::Exact(name) => _ = exact.insert(name.clone(), at),
                _ => patterns.push(at),
            }
        }
        let mut rows: Vec<Option<Row>> = self.rows.into_iter().map(Some).collect();
        let rows = order.iter().filter_map(|number| rows[*number].take()).collect();
        Ok(RouteIndex { rows, hosts, exact, patterns })
    }
}

impl Row {
    /// The more specific one is less.
    fn order(&self, other: &Row) -> Ordering {
        let by_host = match (&self.host, &other.host) {
            // So that the routes of a host are together.
            (HostPattern::Exact(one), HostPattern::Exact(two)) => one.cmp(two),
            (HostPattern::Suffix(one), HostPattern::Suffix(two)) => {
                two.len().cmp(&one.len()).then_with(|| one.cmp(two))
            }
            (one, two) => one.order(two),
        };
        let conditions = |row: &Row| usize::from(!row.route.methods.is_empty()) + row.route.conditions.len();
        let by_conditions = conditions(other).cmp(&conditions(self));
        let by_methods = self.route.methods.len().cmp(&other.route.methods.len());
        by_host.then_with(|| self.path.order(&other.path)).then(by_conditions).then(by_methods)
    }

    /// True if it takes every request that the other one takes.
    fn covers(&self, other: &Row) -> bool {
        let methods = &self.route.methods;
        self.host == other.host
            && self.path.takes_the_same(&other.path)
            && (methods.is_empty()
                || (!other.route.methods.is_empty()
                    && other.route.methods.iter().all(|method| methods.contains(method))))
            && self.route.conditions.iter().all(|condition| {
                let any = |of: &super::route::FieldCondition| {
                    of.name == condition.name && condition.value.is_none()
                };
                other.route.conditions.iter().any(|of| of == condition || any(of))
            })
    }

    fn takes(&self, path: &str, method: &Method, fields: &HeaderMap) -> bool {
        let route = &self.route;
        (route.methods.is_empty() || route.methods.contains(method))
            && self.path.takes(path)
            && route.conditions.iter().all(|condition| {
                let mut values = fields.get_all(&condition.name).iter();
                match &condition.value {
                    Some(wanted) => values.any(|value| value == wanted),
                    None => values.next().is_some(),
                }
            })
    }
}

/// The routes of a host, the most specific first.
#[derive(Debug)]
struct HostRoutes {
    host: HostPattern,
    /// Those whose path begins with a text, which are the more specific ones.
    by_first: HashMap<Box<str>, Vec<usize>>,
    others: Vec<usize>,
}

/// Routes in the order in which they are looked at.
#[derive(Debug)]
pub(crate) struct RouteIndex {
    rows: Vec<Row>,
    hosts: Vec<HostRoutes>,
    exact: HashMap<Box<str>, usize>,
    /// The others, the most specific first.
    patterns: Vec<usize>,
}

/// A route that takes a request.
#[derive(Clone, Copy)]
pub(crate) struct Found<'t> {
    /// Its number among the routes of a table.
    pub(crate) number: usize,
    pub(crate) route: &'t Arc<Route>,
    pub(crate) name: &'t Arc<str>,
}

impl RouteIndex {
    pub(crate) fn find(
        &self,
        host: &str,
        path: &str,
        method: &Method,
        fields: &HeaderMap,
    ) -> Option<Found<'_>> {
        let exact = self.exact.get(host).copied();
        let others = self.patterns.iter().copied().filter(|at| self.hosts[*at].host.takes(host));
        for at in exact.into_iter().chain(others) {
            let routes = &self.hosts[at];
            let first = path.strip_prefix('/').map_or("", |rest| rest.split('/').next().unwrap_or_default());
            let of_first = routes.by_first.get(first).map_or(&[][..], Vec::as_slice);
            let mut numbers = of_first.iter().chain(&routes.others);
            if let Some(number) = numbers.find(|number| self.rows[**number].takes(path, method, fields)) {
                let row = &self.rows[*number];
                return Some(Found { number: *number, route: &row.route, name: &row.name });
            }
        }
        None
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn routes(&self) -> impl Iterator<Item = &Route> {
        self.rows.iter().map(|row| &*row.route)
    }
}

/// The routes that gateways use now. Clones are the same ones, on any thread; all shards share
/// them.
#[derive(Clone)]
pub struct Routes {
    shared: Arc<Shared>,
}

struct Shared {
    table: ArcSwap<RouteIndex>,
    /// Changes with the table, so that a shard sees by one load that its own is the last one.
    version: AtomicU64,
}

impl Routes {
    /// Routes of this table.
    ///
    /// # Errors
    /// A route can never be reached.
    pub fn new(table: RouteTable) -> Result<Routes, RouteError> {
        Ok(Routes::of(table.compile()?))
    }

    pub(crate) fn of(table: RouteIndex) -> Routes {
        let table = ArcSwap::from_pointee(table);
        Routes { shared: Arc::new(Shared { table, version: AtomicU64::new(1) }) }
    }

    /// Replaces all of them at once. Requests in flight end by the routes that they began with. A
    /// shard keeps its connections to the upstreams that are among the new ones too.
    ///
    /// # Errors
    /// Those of [`new`](Routes::new); then the old ones stay.
    pub fn replace(&self, table: RouteTable) -> Result<(), RouteError> {
        self.set(table.compile()?);
        Ok(())
    }

    pub(crate) fn set(&self, table: RouteIndex) {
        self.shared.table.store(Arc::new(table));
        // Behind the table, so that a shard that sees the number sees that.
        self.shared.version.fetch_add(1, Release);
    }

    pub(crate) fn version(&self) -> u64 {
        self.shared.version.load(Acquire)
    }

    pub(crate) fn table(&self) -> Arc<RouteIndex> {
        self.shared.table.load_full()
    }
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routes").field("len", &self.table().len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn table(patterns: &[&str]) -> RouteTable {
        patterns.iter().fold(RouteTable::new(), |table, pattern| {
            table.route(pattern, Route::fallback()).expect("a pattern")
        })
    }

    fn found(table: &RouteIndex, host: &str, path: &str) -> Option<String> {
        table.find(host, path, &Method::GET, &HeaderMap::new()).map(|found| found.name.to_string())
    }

    #[test]
    fn most_specific_route_wins_whatever_the_order() {
        let patterns = [
            "/*",
            "api.example.org/*",
            "*.example.org/v1/*",
            "api.example.org/v1/*",
            "/ping",
            "/v1/{id}",
            "*.org/*",
            "api.example.org/v1/{id}/x",
            "api.example.org/v1/users/*",
        ];
        let mut reversed = patterns;
        reversed.reverse();
        for patterns in [patterns, reversed] {
            let table = table(&patterns).compile().expect("all can be reached");
            for (host, path, route) in [
                ("api.example.org", "/v1/a", "api.example.org/v1/*"),
                ("api.example.org", "/v1/a/x", "api.example.org/v1/{id}/x"),
                ("api.example.org", "/v1/users/x", "api.example.org/v1/users/*"),
                ("api.example.org", "/ping", "api.example.org/*"),
                ("www.example.org", "/v1", "*.example.org/v1/*"),
                ("www.example.org", "/v2", "*.org/*"),
                ("example.net", "/v1/a", "/v1/{id}"),
                ("", "/ping", "/ping"),
                ("", "/ping/", "/*"),
            ] {
                assert_eq!(found(&table, host, path).as_deref(), Some(route), "{host}{path}");
            }
        }
    }

    #[test]
    fn request_that_no_route_takes_has_none() {
        let table = table(&["a.b/x"]).compile().expect("a route");
        assert_eq!(found(&table, "a.b", "/y"), None);
        assert_eq!(found(&table, "c.b", "/x"), None);
    }

    #[test]
    fn methods_and_fields_are_conditions() {
        let named = |value: &'static str| (HeaderValue::from_static(value), Route::fallback());
        let (one, of_one) = named("1");
        let table = RouteTable::new()
            .route("/a/*", Route::fallback().methods([Method::POST]))
            .and_then(|table| table.route("/*", Route::fallback()))
            .and_then(|table| table.route("/a/b", of_one.field("x".parse().unwrap(), Some(one))))
            .and_then(|table| table.route("/a/b", Route::fallback().field("x".parse().unwrap(), None)))
            .and_then(RouteTable::compile)
            .expect("all can be reached");
        let number = |method: Method, value: Option<&'static str>| {
            let mut fields = HeaderMap::new();
            value.map(|value| fields.insert("x", HeaderValue::from_static(value)));
            table.find("", "/a/b", &method, &fields).map(|found| {
                (found.name.to_string(), found.route.conditions.first().is_some_and(|of| of.value.is_some()))
            })
        };
        assert_eq!(number(Method::GET, None), Some(("/*".into(), false)));
        assert_eq!(number(Method::POST, None), Some(("/a/*".into(), false)));
        assert_eq!(number(Method::GET, Some("1")), Some(("/a/b".into(), true)));
        assert_eq!(number(Method::GET, Some("2")), Some(("/a/b".into(), false)));
    }

    #[test]
    fn route_that_cannot_be_reached_is_refused_with_the_other() {
        for (patterns, route, other) in
            [(&["/a/{x}", "/b", "/a/{y}"][..], 2, 0), (&["a.b/*", "A.B./*"], 1, 0), (&["/*", "*/*"], 1, 0)]
        {
            let error = table(patterns).compile().expect_err("one cannot be reached");
            assert_eq!(error, RouteError::Unreachable { route, other });
        }
        let methods = RouteTable::new()
            .route("/a", Route::fallback().methods([Method::GET]))
            .and_then(|table| table.route("/a", Route::fallback().methods([Method::GET])));
        assert!(methods.expect("patterns").compile().is_err());
    }

    #[test]
    fn refused_table_leaves_the_old_one() {
        let routes = Routes::new(table(&["/a"])).expect("a route");
        let version = routes.version();
        assert!(routes.replace(table(&["/b", "/b"])).is_err());
        assert_eq!((routes.version(), found(&routes.table(), "", "/a").as_deref()), (version, Some("/a")));
        assert!(routes.replace(table(&["/b"])).is_ok());
        assert_eq!((routes.version(), found(&routes.table(), "", "/a")), (version + 1, None));
    }
}
