//! Routes of the file.

use std::time::Duration;

use hyper::header::{HeaderName, HeaderValue};
use hyper::{Method, StatusCode, Uri};

use super::error::ConfigError;
use super::reader::{Section, Spot, Value};
use super::upstreams::Upstreams;
use crate::fields::edit::FieldEdits;
use crate::table::access::RateKey;
use crate::table::route::{Route, RouteTimeouts};
use crate::table::routes::RouteTable;
use crate::target::{HttpUpstream, UpstreamProtocol};

type Result<T> = std::result::Result<T, ConfigError>;

/// Adds a route of the file to a table. Its patterns are added in their order, one for each host.
pub(super) fn add<'s>(
    section: &Section<'s>,
    upstreams: &Upstreams,
    mut table: RouteTable,
    spots: &mut Vec<Spot<'s>>,
) -> Result<RouteTable> {
    let hosts = section.take("host");
    let path = section.take("path");
    let route = read(section, upstreams)?;
    section.end()?;
    let text = path.as_ref().map_or(Ok("/*"), |value| value.string())?;
    let names = hosts.as_ref().map_or(Ok(vec!["*"]), |value| value.strings())?;
    for host in names {
        // The place of what is most likely wrong.
        let spot = path.as_ref().or(hosts.as_ref()).map_or_else(|| section.spot(), Value::spot);
        table = match table.host_route(host, text, route.clone()) {
            Ok(table) => table,
            Err(crate::table::routes::RouteError::Pattern { error, .. }) => {
                return Err(path
                    .as_ref()
                    .or(hosts.as_ref())
                    .map_or_else(|| section.error(&error), |value| value.error(&error)));
            }
            Err(error) => return Err(section.error(error)),
        };
        spots.push(spot);
    }
    Ok(table)
}

fn read(section: &Section<'_>, upstreams: &Upstreams) -> Result<Route> {
    let mut route = target(section, upstreams)?;
    if let Some(methods) = section.take("methods") {
        let each = |value: &Value<'_>| value.parsed::<Method>("a method");
        route = route.methods(methods.list().iter().map(each).collect::<Result<Vec<_>>>()?);
    }
    if let Some(fields) = section.take("fields") {
        for (name, value) in fields.section()?.all() {
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| value.error("it is no name of a field"))?;
            let wanted = if value.is_string() { Some(value.parsed("a value of a field")?) } else { None };
            if wanted.is_none() && !value.boolean()? {
                return Err(value.error("a field is wanted by its value, or by true"));
            }
            route = route.field(name, wanted);
        }
    }
    let prefix = |value: Value<'_>| match value.string()? {
        text if text.starts_with('/') => Ok(text.to_owned()),
        _ => Err(value.error("a prefix begins with `/`")),
    };
    if let Some(value) = section.take("strip_prefix") {
        route = route.strip_prefix(&prefix(value)?);
    }
    if let Some(value) = section.take("add_prefix") {
        route = route.add_prefix(&prefix(value)?);
    }
    if let Some(value) = section.take("set_host") {
        route = route.host(value.parsed("a host")?);
    }
    if let Some(value) = section.take("request_fields") {
        route = route.request_fields(edits(&value.section()?)?);
    }
    if let Some(value) = section.take("response_fields") {
        route = route.response_fields(edits(&value.section()?)?);
    }
    if let Some(value) = section.take("timeout") {
        route = route.timeouts(timeouts(&value.section()?)?);
    }
    if let Some(value) = section.take("retry_on") {
        let statuses = value.list().iter().map(|value| value.count(400..=599)).collect::<Result<Vec<_>>>()?;
        route = route.retry_on(statuses.into_iter().filter_map(|status| u16::try_from(status).ok()));
    }
    if let Some(value) = section.take("body_bytes_max") {
        route = route.body_bytes_max(value.bytes()?);
    }
    if let Some(value) = section.take("body_bytes_per_second_min") {
        route = route.body_bytes_per_second_min(value.count(0..=1 << 30)?);
    }
    if let Some(value) = section.take("upgrade") {
        let is_http1 = |upstream: &HttpUpstream| upstream.spoken() == UpstreamProtocol::Http1;
        if !route.upstreams().all(is_http1) {
            return Err(value.error("a tunnel needs an upstream whose protocol is \"http/1.1\""));
        }
        route = route.upgrades(value.strings()?);
    }
    if section.take("raw_path").map_or(Ok(false), |value| value.boolean())? {
        route = route.raw_paths();
    }
    if section.take("idempotency_keys").map_or(Ok(false), |value| value.boolean())? {
        route = route.idempotency_keys();
    }
    access(route, section, upstreams)
}

/// The target of its requests: one of several settings.
fn target(section: &Section<'_>, upstreams: &Upstreams) -> Result<Route> {
    let upstream = section.take("upstream");
    let split = section.take("split");
    let respond = section.take("respond");
    let redirect = section.take("redirect");
    let status = section.take("status");
    let all = [&upstream, &split, &respond, &redirect];
    if let Some(second) = all.into_iter().flatten().nth(1) {
        return Err(second.error("a route has one of upstream, split, respond and redirect"));
    }
    if let Some(status) = status.as_ref().filter(|_| redirect.is_none()) {
        return Err(status.error("it is that of a redirect"));
    }
    if let Some(value) = upstream {
        return Ok(Route::to(named(&value, value.string()?, upstreams)?));
    }
    if let Some(value) = split {
        let mut shares = Vec::new();
        for (name, weight) in value.section()?.all() {
            shares.push((named(&weight, name, upstreams)?, weight.count(0..=1_000_000)?));
        }
        return Route::split(shares).map_err(|error| value.error(error));
    }
    if let Some(value) = respond {
        return fixed(&value);
    }
    let Some(value) = redirect else {
        return Err(section.error("it has none of upstream, split, respond and redirect"));
    };
    let status = status.map_or(Ok(308), |value| value.one_of_numbers(&[301, 302, 303, 307, 308]))?;
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::PERMANENT_REDIRECT);
    match value.string()? {
        "https" => Ok(Route::redirect_to_https()),
        _ => Ok(Route::redirect(status, value.parsed::<HeaderValue>("a target")?)),
    }
}

fn fixed(value: &Value<'_>) -> Result<Route> {
    let section = value.section()?;
    let status = section.take("status").map_or(Ok(200), |value| value.count(200..=599))?;
    let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
    let body = section.take("body").map_or(Ok(""), |value| value.string())?.to_owned();
    let kind = match section.take("content_type") {
        Some(value) => value.parsed("a type of content")?,
        None => HeaderValue::from_static("text/plain; charset=utf-8"),
    };
    section.end()?;
    Ok(Route::respond(status.unwrap_or(StatusCode::OK), kind, body))
}

fn named<'u>(value: &Value<'_>, name: &str, upstreams: &'u Upstreams) -> Result<&'u HttpUpstream> {
    if let Some(running) = upstreams.get(name) {
        return Ok(&running.http);
    }
    let near = upstreams.keys().map(|known| (strsim::damerau_levenshtein(known, name), known));
    let near = near.min().filter(|(distance, _)| *distance <= 3);
    let hint = near.map_or(String::new(), |(_, name)| format!("; {name}?"));
    Err(value.error(format!("there is no upstream {name:?}{hint}")))
}

fn edits(section: &Section<'_>) -> Result<FieldEdits> {
    let mut edits = FieldEdits::default();
    if let Some(names) = section.take("remove") {
        for name in names.list() {
            edits = edits.remove(name.string()?).map_err(|error| name.error(error))?;
        }
    }
    if let Some(fields) = section.take("set") {
        for (name, value) in fields.section()?.all() {
            edits = edits.set(name, value.string()?).map_err(|error| value.error(error))?;
        }
    }
    if let Some(fields) = section.take("add") {
        for (name, value) in fields.section()?.all() {
            edits = edits.add(name, value.string()?).map_err(|error| value.error(error))?;
        }
    }
    section.end()?;
    Ok(edits)
}

fn timeouts(section: &Section<'_>) -> Result<RouteTimeouts> {
    let mut timeouts = RouteTimeouts::default();
    let time = |key| section.take(key).map(|value| value.time()).transpose();
    if let Some(time) = time("response")? {
        timeouts = timeouts.response(time);
    }
    if let Some(time) = time("body_idle")? {
        timeouts = timeouts.body_idle(time);
    }
    timeouts = timeouts.request(time("request")?.filter(|time| *time > Duration::ZERO));
    section.end()?;
    Ok(timeouts)
}

/// Who may use a route, and how much.
fn access(mut route: Route, section: &Section<'_>, upstreams: &Upstreams) -> Result<Route> {
    const NETWORK: &str = "a network such as \"10.0.0.0/8\"";
    let networks = |value: &Value<'_>| match value.parsed_list(NETWORK)? {
        list if list.is_empty() => Err(value.error("it has no network")),
        list => Ok(list),
    };
    if let Some(value) = section.take("allow") {
        route = route.allow(networks(&value)?);
    }
    if let Some(value) = section.take("deny") {
        route = route.deny(networks(&value)?);
    }
    if let Some(value) = section.take("rate") {
        route = rate(route, &value)?;
    }
    if let Some(value) = section.take("requests_max") {
        route = route.requests_max(usize::try_from(value.number(1..=1 << 32)?).unwrap_or(usize::MAX));
    }
    match section.take("auth") {
        Some(value) => auth(route, &value.section()?, upstreams),
        None => Ok(route),
    }
}

fn rate(route: Route, value: &Value<'_>) -> Result<Route> {
    let section = value.section()?;
    let key = match section.take("by") {
        None => RateKey::Address,
        Some(by) => match by.string()?.split_once(':') {
            None if by.string()? == "address" => RateKey::Address,
            Some(("header", name)) => RateKey::Field(
                HeaderName::from_bytes(name.as_bytes()).map_err(|_| by.error("it is no name of a field"))?,
            ),
            _ => return Err(by.error("a rate is by \"address\", or by a field, as \"header:x-tenant\"")),
        },
    };
    let number = |key| section.take(key).map(|value| value.count(1..=1_000_000)).transpose();
    let (per_second, burst) = (number("per_second")?, number("burst")?);
    section.end()?;
    let Some(per_second) = per_second else { return Err(value.error("it has no per_second")) };
    route.rate(key, per_second, burst.unwrap_or(per_second)).map_err(|error| value.error(error))
}

fn auth(route: Route, section: &Section<'_>, upstreams: &Upstreams) -> Result<Route> {
    let (forward, basic) = (section.take("forward"), section.take("users_file"));
    let (path, copy, realm) = (section.take("path"), section.take("copy"), section.take("realm"));
    section.end()?;
    match (forward, basic) {
        (Some(forward), None) => {
            let upstream = named(&forward, forward.string()?, upstreams)?;
            let path = match &path {
                Some(path) if !path.string()?.starts_with('/') => {
                    return Err(path.error("a path begins with `/`"));
                }
                Some(path) if path.string()?.parse::<Uri>().is_err() => {
                    return Err(path.error("it is no path"));
                }
                Some(path) => path.string()?,
                None => "/",
            };
            let copied = copy.map_or(Ok(Vec::new()), |value| value.parsed_list("a name of a field"))?;
            Ok(route.forward_auth(upstream, path, copied))
        }
        (None, Some(file)) => {
            let text = std::fs::read_to_string(file.string()?)
                .map_err(|error| file.error(format!("{}: {error}", file.string().unwrap_or_default())))?;
            let mut users = Vec::new();
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let Some(user) = line.split_once(':') else {
                    return Err(file.error(format!("its line {} is not name:password", number + 1)));
                };
                users.push(user);
            }
            let realm = realm.as_ref().map_or(Ok("gateway"), |value| value.string())?;
            Ok(route.basic_auth(realm, users))
        }
        _ => {
            Err(section.error("it has one of forward (an upstream) and users_file (lines of name:password)"))
        }
    }
}
