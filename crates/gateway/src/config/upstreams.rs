//! Upstreams of the file.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ringserve_server::tls::{Pem, Tls};
use ringserve_upstream::{Backend, Balance, Check, PoolLimits, Retry, SendProxy, Upstream};

use super::error::ConfigError;
use super::reader::{Section, Spot, Value};
use crate::target::{HttpUpstream, UpstreamProtocol};

/// Connections to a backend that a shard has where the file does not say.
const CONNECTIONS_MAX: usize = 64;

/// An upstream as the file has it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct UpstreamPart {
    backends: Vec<BackendPart>,
    settings: UpstreamSettings,
}

#[derive(Clone, Debug, PartialEq)]
struct BackendPart {
    address: String,
    weight: u32,
}

/// The place of backends that do not stand in the file.
#[derive(Clone, Debug, PartialEq)]
enum Found {
    Name(String),
    File(PathBuf),
}

/// The settings of an upstream, without its backends.
#[derive(Clone, Debug, Default, PartialEq)]
struct UpstreamSettings {
    found: Option<Found>,
    balance: Option<Balance>,
    check: Option<CheckPart>,
    connect_timeout: Option<Duration>,
    queue: Option<Duration>,
    queue_max: Option<u64>,
    connections_max: Option<u64>,
    idle_max: Option<u64>,
    idle_timeout: Option<Duration>,
    tries_max: Option<u32>,
    ejection: Option<bool>,
    panic_below: Option<u32>,
    replay_bytes_max: Option<u64>,
    tunnels_max: Option<u64>,
    send_proxy: Option<SendProxy>,
    tls: Option<TlsPart>,
    protocol: UpstreamProtocol,
}

#[derive(Clone, Debug, PartialEq)]
struct CheckPart {
    http: Option<(String, u32)>,
    interval: Option<Duration>,
    rise: Option<u32>,
    fall: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
struct TlsPart {
    authorities: PathBuf,
    name: Option<String>,
}

/// An upstream that runs, and what it was made of.
#[derive(Clone)]
pub(super) struct RunningUpstream {
    part: UpstreamPart,
    pub(super) http: HttpUpstream,
}

/// The upstreams of a file by name.
pub(super) type Upstreams = BTreeMap<String, RunningUpstream>;

impl UpstreamPart {
    pub(super) fn read(section: &Section<'_>) -> Result<UpstreamPart, ConfigError> {
        let (backends, found) = backends(section)?;
        let balances =
            [("p2c", Balance::PeakEwma), ("least", Balance::Least), ("round_robin", Balance::RoundRobin)];
        let time = |key| section.take(key).map(|value| value.time()).transpose();
        let number = |key, most| section.take(key).map(|value| value.number(1..=most)).transpose();
        let settings = UpstreamSettings {
            found,
            balance: section.take("balance").map(|value| value.one_of(&balances)).transpose()?,
            check: section.take("check").map(|value| CheckPart::read(&value)).transpose()?.flatten(),
            connect_timeout: time("connect_timeout")?,
            queue: time("queue")?,
            queue_max: number("queue_max", 1 << 20)?,
            connections_max: number("connections_max", 1 << 16)?,
            idle_max: section.take("idle_max").map(|value| value.number(0..=1 << 16)).transpose()?,
            idle_timeout: time("idle_timeout")?,
            tries_max: section.take("tries_max").map(|value| value.count(1..=10)).transpose()?,
            ejection: section.take("ejection").map(|value| value.boolean()).transpose()?,
            panic_below: section.take("panic_below").map(|value| value.count(0..=100)).transpose()?,
            replay_bytes_max: section.take("replay_bytes_max").map(|value| value.bytes()).transpose()?,
            tunnels_max: section.take("tunnels_max").map(|value| value.number(0..=1 << 20)).transpose()?,
            send_proxy: section
                .take("send_proxy")
                .map(|value| value.one_of(&[("v1", SendProxy::V1), ("v2", SendProxy::V2)]))
                .transpose()?,
            tls: section.take("tls").map(|value| TlsPart::read(&value)).transpose()?,
            protocol: protocol(section)?,
        };
        section.end()?;
        Ok(UpstreamPart { backends, settings })
    }

    fn backends(&self) -> impl Iterator<Item = Backend> {
        self.backends.iter().map(|part| Backend::new(&*part.address).weight(part.weight))
    }

    fn start(&self, name: &str) -> io::Result<RunningUpstream> {
        let settings = &self.settings;
        let mut pool = PoolLimits::default().wait_max(settings.queue.unwrap_or(Duration::from_secs(1)));
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let pool_connections = settings.connections_max.map_or(CONNECTIONS_MAX, count);
        pool = pool.connections_max(pool_connections);
        // Requests come in bursts: what is closed behind one is made again for the next.
        pool = pool.idle_max(settings.idle_max.map_or(pool_connections, count));
        if let Some(most) = settings.queue_max {
            pool = pool.waiting_max(count(most));
        }
        if let Some(time) = settings.idle_timeout {
            pool = pool.idle_timeout(time);
        }
        let mut upstream = match &settings.found {
            None => Upstream::new(name, self.backends()),
            Some(Found::Name(of)) => Upstream::names(name, &**of),
            Some(Found::File(path)) => Upstream::file(name, path),
        }
        .pool(pool);
        if let Some(balance) = settings.balance {
            upstream = upstream.balance(balance);
        }
        if let Some(check) = &settings.check {
            upstream = upstream.check(check.check());
        }
        if let Some(time) = settings.connect_timeout {
            upstream = upstream.connect_timeout(time);
        }
        if let Some(tries) = settings.tries_max {
            upstream = upstream.retry(Retry::default().tries_max(tries));
        }
        if let Some(is_on) = settings.ejection {
            upstream = upstream.ejection(is_on);
        }
        if let Some(percent) = settings.panic_below {
            upstream = upstream.panic_below(percent);
        }
        if let Some(version) = settings.send_proxy {
            upstream = upstream.send_proxy(version);
        }
        if let Some(tls) = &settings.tls {
            upstream = tls.below(upstream, settings.protocol)?;
        }
        let mut http = HttpUpstream::new(upstream).protocol(settings.protocol);
        if let Some(bytes) = settings.replay_bytes_max {
            http = http.replay_bytes_max(count(bytes));
        }
        if let Some(tunnels) = settings.tunnels_max {
            http = http.tunnels_max(count(tunnels));
        }
        Ok(RunningUpstream { part: self.clone(), http })
    }
}

/// The version of HTTP, which has to fit what is below.
fn protocol(section: &Section<'_>) -> Result<UpstreamProtocol, ConfigError> {
    let Some(value) = section.take("protocol") else { return Ok(UpstreamProtocol::Http1) };
    let (protocol, is_below_tls) = value.one_of(&[
        ("http/1.1", (UpstreamProtocol::Http1, None)),
        ("h2", (UpstreamProtocol::Http2, Some(true))),
        ("h2c", (UpstreamProtocol::Http2, Some(false))),
        ("auto", (UpstreamProtocol::Negotiated, Some(true))),
    ])?;
    match (is_below_tls, section.take("tls").is_some()) {
        (Some(true), false) => Err(value.error("it is agreed on by TLS, and there is no tls; h2c?")),
        (Some(false), true) => Err(value.error("it is HTTP/2 without TLS, and there is tls; h2?")),
        _ => Ok(protocol),
    }
}

/// The backends that stand in the file, or where they are found.
fn backends(section: &Section<'_>) -> Result<(Vec<BackendPart>, Option<Found>), ConfigError> {
    let (listed, names, file) = (section.take("addresses"), section.take("names"), section.take("file"));
    match (&listed, &names, &file) {
        (Some(listed), None, None) => {
            let backends = listed.list().iter().map(BackendPart::read).collect::<Result<Vec<_>, _>>()?;
            if backends.is_empty() { Err(listed.error("there is none")) } else { Ok((backends, None)) }
        }
        (None, Some(names), None) => Ok((Vec::new(), Some(Found::Name(address(names)?)))),
        (None, None, Some(file)) => Ok((Vec::new(), Some(Found::File(file.string()?.into())))),
        _ => {
            let text = "it has one of addresses = [\"10.0.0.11:80\"], names = \"web.internal:80\" and file = \"web.txt\"";
            Err(section.error(text))
        }
    }
}

impl BackendPart {
    fn read(value: &Value<'_>) -> Result<BackendPart, ConfigError> {
        if value.is_string() {
            return Ok(BackendPart { address: address(value)?, weight: 1 });
        }
        let section = value.section()?;
        let Some(at) = section.take("address") else { return Err(section.error("it has no address")) };
        let weight = section.take("weight").map_or(Ok(1), |value| value.count(1..=1000))?;
        section.end()?;
        Ok(BackendPart { address: address(&at)?, weight })
    }
}

/// A host and a port.
fn address(value: &Value<'_>) -> Result<String, ConfigError> {
    let text = value.string()?;
    let is_whole = text
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
    if is_whole { Ok(text.into()) } else { Err(value.error(format!("{text:?} is not a host and a port"))) }
}

impl CheckPart {
    /// `None` for no checks.
    fn read(value: &Value<'_>) -> Result<Option<CheckPart>, ConfigError> {
        let plain = CheckPart { http: None, interval: None, rise: None, fall: None };
        if !value.is_table() {
            return Ok(value.boolean()?.then_some(plain));
        }
        let section = value.section()?;
        let status = section.take("status").map_or(Ok(200), |value| value.count(100..=599))?;
        let http = match section.take("http") {
            Some(value)
                if value.string()?.starts_with('/') && !value.string()?.contains([' ', '\r', '\n']) =>
            {
                Some((value.string()?.to_owned(), status))
            }
            Some(value) => return Err(value.error("a path begins with `/` and has no blanks")),
            None => None,
        };
        let part = CheckPart {
            http,
            interval: section.take("interval").map(|value| value.time()).transpose()?,
            rise: section.take("rise").map(|value| value.count(1..=100)).transpose()?,
            fall: section.take("fall").map(|value| value.count(1..=100)).transpose()?,
        };
        section.end()?;
        Ok(Some(part))
    }

    fn check(&self) -> Check {
        let mut check = match &self.http {
            // An answer of HTTP/1.0 ends with its connection, and no server waits for more.
            Some((path, status)) => Check::exchange(
                format!("GET {path} HTTP/1.0\r\nhost: localhost\r\nconnection: close\r\n\r\n"),
                format!(" {status} "),
            ),
            None => Check::connect(),
        };
        if let Some(time) = self.interval {
            check = check.interval(time);
        }
        if let Some(rise) = self.rise {
            check = check.rise(rise);
        }
        if let Some(fall) = self.fall {
            check = check.fall(fall);
        }
        check
    }
}

impl TlsPart {
    fn read(value: &Value<'_>) -> Result<TlsPart, ConfigError> {
        let section = value.section()?;
        let Some(authorities) = section.take("authorities") else {
            return Err(section.error("it has no authorities: a file of PEM"));
        };
        let name = section.take("name").map(|value| value.string().map(str::to_owned)).transpose()?;
        section.end()?;
        Ok(TlsPart { authorities: authorities.string()?.into(), name })
    }

    fn below(&self, upstream: Upstream, protocol: UpstreamProtocol) -> io::Result<Upstream> {
        let tls = Pem::file(&self.authorities).and_then(Tls::client).map_err(io::Error::other)?;
        let offered = match protocol {
            UpstreamProtocol::Http1 => &["http/1.1"][..],
            UpstreamProtocol::Http2 => &["h2"],
            UpstreamProtocol::Negotiated => &["h2", "http/1.1"],
        };
        let tls = tls.alpn(offered.iter().copied());
        let name = self.name.clone();
        Ok(upstream.transport(move |backend: &Backend| {
            let name = name.as_deref().unwrap_or(backend.host());
            Ok(tls.to(name).map_err(io::Error::other)?)
        }))
    }
}

/// Starts these upstreams: those that are as they were go on, with their connections and what is
/// known of their backends.
pub(super) fn started(
    parts: &BTreeMap<String, (UpstreamPart, Spot<'_>)>,
    old: &Upstreams,
) -> Result<Upstreams, ConfigError> {
    let mut all = Upstreams::new();
    for (name, (part, spot)) in parts {
        let same = old.get(name).filter(|running| running.part.settings == part.settings);
        let running = match same {
            Some(running) => RunningUpstream { part: part.clone(), http: running.http.clone() },
            None => part.start(name).map_err(|why| spot.error(format!("upstream.{name}: {why}")))?,
        };
        all.insert(name.clone(), running);
    }
    Ok(all)
}

/// Gives those that went on the backends of the new file.
pub(super) fn set_backends(new: &Upstreams, old: &Upstreams) {
    for (name, running) in new {
        let changed = old.get(name).is_some_and(|before| {
            running.part.settings.found.is_none()
                && before.http.key() == running.http.key()
                && before.part.backends != running.part.backends
        });
        if changed {
            running.http.upstream().set_backends(running.part.backends());
        }
    }
}
