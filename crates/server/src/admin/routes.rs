//! The paths of the endpoint.

use hyper::Method;
use percent_encoding::percent_decode_str;
use ringserve_core::ConnId;

/// The subject of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Page,
    Metrics,
    Report,
    Events,
    Connections,
    Stalls,
    Doctor,
    Health,
    Ready,
    Drain,
    Close { shard: usize, id: ConnId },
    LogLevel,
    Admission,
    ChangeAdmission(Order),
}

/// A change of the limits on who is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Deny,
    Allow,
    Forget,
    Limit,
}

impl Order {
    /// The order of a path behind `/admission/`.
    pub(super) fn find(name: &str) -> Option<Order> {
        Some(match name {
            "deny" => Order::Deny,
            "allow" => Order::Allow,
            "forget" => Order::Forget,
            "limit" => Order::Limit,
            _ => return None,
        })
    }
}

/// Each path with its method and what it is for, as a list for users.
const PATHS: &[(&str, &str, &str)] = &[
    ("GET ", "/", "the page"),
    ("GET ", "/report.json", "all that is seen of the server, as JSON"),
    ("GET ", "/events", "the same each second, as server-sent events"),
    ("GET ", "/metrics", "figures for Prometheus, as OpenMetrics"),
    ("GET ", "/connections?by=outbox&limit=20", "connections by outbox, idle, bytes_in, age or oldest_call"),
    ("GET ", "/stalls", "the last times for which a shard did not go on"),
    ("GET ", "/doctor?for=connections=1000000", "what is wrong with the machine and the settings"),
    ("GET ", "/admission", "the limits on who is let in, as JSON"),
    ("GET ", "/healthz", "503 if a shard has not gone on for 10 s"),
    ("GET ", "/readyz", "503 while the server starts, drains or cannot take connections"),
    ("POST", "/drain", "shuts the server down"),
    ("POST", "/connections/ID/close", "closes a connection, after its queued replies"),
    (
        "POST",
        "/admission/deny?network=N&seconds=S",
        "denies a network for a time; /allow lets it in, /forget ends either",
    ),
    ("POST", "/admission/limit?per_address=20", "sets a limit on who is let in"),
    ("POST", "/log-level", "sets the filter of the log, which is the body"),
];

impl Route {
    /// The route of a path, without its query.
    pub(super) fn find(path: &str) -> Option<Route> {
        Some(match path {
            "/" => Route::Page,
            "/metrics" => Route::Metrics,
            "/report.json" => Route::Report,
            "/events" => Route::Events,
            "/connections" => Route::Connections,
            "/stalls" => Route::Stalls,
            "/doctor" => Route::Doctor,
            "/healthz" => Route::Health,
            "/readyz" => Route::Ready,
            "/drain" => Route::Drain,
            "/log-level" => Route::LogLevel,
            "/admission" => Route::Admission,
            _ => {
                if let Some(order) = path.strip_prefix("/admission/") {
                    return Order::find(order).map(Route::ChangeAdmission);
                }
                let (shard, id) = parse_id(path.strip_prefix("/connections/")?.strip_suffix("/close")?)?;
                Route::Close { shard, id }
            }
        })
    }

    /// The route that a probe asks for. `OPTIONS /` is how HAProxy asks unless it is configured
    /// otherwise.
    pub(super) fn probe(method: &Method, path: &str) -> Option<Route> {
        match Route::find(path) {
            Some(Route::Page) if method == Method::OPTIONS => Some(Route::Ready),
            route => route.filter(|route| route.is_probe()),
        }
    }

    /// True if a request has an effect.
    pub(super) fn has_effect(self) -> bool {
        matches!(self, Route::Drain | Route::Close { .. } | Route::LogLevel | Route::ChangeAdmission(_))
    }

    /// True if it tells nothing of the server but how it is, and so needs no token: for probes, and
    /// for the page that asks for the token.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Route::Page | Route::Health | Route::Ready)
    }

    /// True if supervisors and balancers ask it again and again.
    pub(super) fn is_probe(self) -> bool {
        matches!(self, Route::Health | Route::Ready)
    }

    /// The methods of the path, for the header `allow`.
    pub(super) fn methods(self) -> &'static str {
        if self.has_effect() { "POST" } else { "GET, HEAD" }
    }

    pub(super) fn allows(self, method: &Method) -> bool {
        allows(self.has_effect(), method)
    }
}

/// True if a path with an effect, or without one, answers this method.
pub(super) fn allows(has_effect: bool, method: &Method) -> bool {
    match has_effect {
        true => method == Method::POST,
        false => method == Method::GET || method == Method::HEAD,
    }
}

/// True for a path that has a route of the endpoint's, or is below one.
pub(super) fn is_own(path: &str) -> bool {
    Route::find(path).is_some()
        || ["/connections", "/admission"]
            .iter()
            .any(|own| path.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

/// All paths, one a line.
pub(super) fn list() -> String {
    PATHS.iter().map(|(method, path, what)| line(method, path, what)).collect()
}

/// A line of the list.
pub(super) fn line(method: &str, path: &str, what: &str) -> String {
    format!("{method} {path:<33} {what}\n")
}

/// The first value of a parameter; `None` if it is missing, or no UTF-8.
pub(super) fn parameter(query: Option<&str>, wanted: &str) -> Option<String> {
    let mut pairs = query?.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let (_, value) = pairs.find(|(name, _)| *name == wanted)?;
    Some(percent_decode_str(value).decode_utf8().ok()?.into_owned())
}

/// The name of a connection as the endpoint writes it: `0.17.3`.
pub(super) fn name_of(shard: usize, id: ConnId) -> String {
    format!("{shard}.{id}")
}

fn parse_id(text: &str) -> Option<(usize, ConnId)> {
    let mut parts = text.split('.');
    let mut next = || {
        let part = parts.next()?;
        part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse::<u64>().ok())?
    };
    let (shard, slot, generation) = (next()?, next()?, next()?);
    let fits = slot < u64::from(ConnId::SLOTS_MAX) && generation >> ConnId::GENERATION_BITS == 0;
    let is_whole = parts.next().is_none();
    (fits && is_whole).then(|| Some((usize::try_from(shard).ok()?, ConnId::new(slot as u32, generation))))?
}

/// The value of each parameter of a query that is known, with bytes that are written as `%2F`.
///
/// # Errors
/// A sentence with the cause: a parameter that is not known, or is there twice, or a value that is
/// no UTF-8.
pub(super) fn parameters<const N: usize>(
    query: Option<&str>,
    known: [&str; N],
) -> Result<[Option<String>; N], String> {
    let mut values = [const { None }; N];
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let Some(number) = known.iter().position(|known| *known == name) else {
            return Err(format!("{name:.40} is no parameter of this path; there are {}", known.join(", ")));
        };
        let value = percent_decode_str(value).decode_utf8();
        let value = value.map_err(|_| format!("{name} is no UTF-8"))?.into_owned();
        if values[number].replace(value).is_some() {
            return Err(format!("{name} is there twice"));
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_of_the_list_has_a_route_of_its_method() {
        for (method, path, _) in PATHS {
            let path = path.split('?').next().unwrap().replace("ID", "0.17.3");
            let route = Route::find(&path).unwrap_or_else(|| panic!("{path} has no route"));
            assert_eq!(route.has_effect(), *method == "POST", "{path}");
            assert!(route.allows(&method.trim().parse().unwrap()), "{path}");
            assert!(list().contains(&path.replace("0.17.3", "ID")));
        }
    }

    #[test]
    fn other_paths_have_none() {
        for path in [
            "",
            "//",
            "/index.html",
            "/metrics/",
            "/Metrics",
            "/../etc/passwd",
            "/%2e%2e/etc/passwd",
            "/drain/",
            "/connections/",
            "/connections//close",
            "/connections/1.2.3",
            "/connections/1.2/close",
            "/connections/1.2.3.4/close",
            "/connections/a.b.c/close",
            "/connections/-1.2.3/close",
            "/connections/+1.2.3/close",
            "/connections/0.16777216.0/close",
            "/connections/0.0.68719476736/close",
            "/connections/99999999999999999999.0.0/close",
            "/connections/0.../close",
            "/connections/../close",
            "/admission/",
            "/admission/deny/",
            "/admission/open",
        ] {
            assert_eq!(Route::find(path), None, "{path:?}");
        }
    }

    #[test]
    fn connection_is_found_by_the_name_that_was_written() {
        let id = ConnId::new(17, 3);
        assert_eq!(name_of(2, id), "2.17.3");
        assert_eq!(Route::find("/connections/2.17.3/close"), Some(Route::Close { shard: 2, id }));
    }

    #[test]
    fn effects_are_never_open_and_need_a_post() {
        for route in [
            Route::Drain,
            Route::LogLevel,
            Route::Close { shard: 0, id: ConnId::new(0, 0) },
            Route::ChangeAdmission(Order::Deny),
            Route::ChangeAdmission(Order::Limit),
        ] {
            assert!(!route.is_open() && route.allows(&Method::POST) && !route.allows(&Method::GET));
            assert_eq!(route.methods(), "POST");
        }
        for route in [
            Route::Report,
            Route::Metrics,
            Route::Connections,
            Route::Stalls,
            Route::Doctor,
            Route::Events,
            Route::Admission,
        ] {
            assert!(
                !route.is_probe()
                    && !route.is_open()
                    && !route.allows(&Method::POST)
                    && route.allows(&Method::HEAD)
            );
        }
    }

    #[test]
    fn parameters_are_known_and_there_once() {
        let of = |query| parameters(query, ["by", "limit"]);
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(of(None), Ok([None, None]));
        assert_eq!(of(Some("limit=5&by=age")), Ok([some("age"), some("5")]));
        assert_eq!(of(Some("&by&")), Ok([some(""), None]));
        assert_eq!(
            of(Some("by=192.0.2.0%2F24%2c%3A%3a1&limit=a+b%26c=%")),
            Ok([some("192.0.2.0/24,::1"), some("a+b&c=%")])
        );
        assert!(of(Some("by=%ff")).unwrap_err().contains("by is no UTF-8"));
        assert!(of(Some("by=a&by=b")).unwrap_err().contains("twice"));
        assert!(of(Some("order=up")).unwrap_err().contains("by, limit"));
    }
}
