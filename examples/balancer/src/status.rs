//! The state by HTTP: GET / as text, and /json; POST to /drain/HOST:PORT and /undrain/HOST:PORT,
//! from this host. A request calls the balancer by an address, as localhost, or by a name of
//! `--status-name`: a page of another site, whose name was made to resolve to this host, reads
//! nothing. A request without a `Host` is no browser's, and reads too.
//!
//! Probes ask for /healthz, or by `OPTIONS /` as HAProxy does, whatever name they use: 503 if no
//! client can be sent anywhere.

use std::future::ready;
use std::net::IpAddr;
use std::sync::Arc;

use ringserve::framing::Raw;
use ringserve::http::hyper::header::{CONTENT_TYPE, HOST, ORIGIN};
use ringserve::http::hyper::{Method, Request, Response, body::Incoming};
use ringserve::http::hyper::{http::Error, http::uri::Authority, service::service_fn};
use ringserve::http::{Http, HttpOptions};
use ringserve::limits::LimitError;
use ringserve::service::IntoService;
use ringserve::upstream::{BackendStats, Health, Upstream};
use ringserve::{Peer, Shard, Stream, stream};
use serde_json::{Value, json};
use tracing::info;

use crate::balancer::Balancer;

/// The service of a shard, whose answers depend on the peer.
pub fn service(shard: &Shard, balancer: Arc<Balancer>) -> Result<impl IntoService<Raw> + use<>, LimitError> {
    let http = Http::new(shard, &HttpOptions::default())?;
    Ok(stream(async move |stream: Stream| {
        let (peer, balancer) = (stream.peer(), balancer.clone());
        let answer = move |request: Request<Incoming>| ready(answer(&request, &peer, &balancer));
        http.serve(stream, service_fn(answer)).await
    }))
}

fn answer(request: &Request<Incoming>, peer: &Peer, balancer: &Balancer) -> Result<Response<String>, Error> {
    let path = request.uri().path().trim_start_matches('/');
    let (what, name) = path.split_once('/').unwrap_or((path, ""));
    let upstream = balancer.names.iter().find(|names| names.of == name);
    let (status, kind, body) = match (request.method(), what, upstream) {
        (&Method::GET | &Method::HEAD, "healthz", None) | (&Method::OPTIONS, "", None) => health(balancer),
        _ if !is_called_by_name(request, &balancer.args.status_name) => (
            403,
            "text/plain",
            "ask for this host by its address, localhost, or a name of --status-name\n".into(),
        ),
        (&Method::GET | &Method::HEAD, "", None) => (200, "text/plain", text(balancer)),
        (&Method::GET | &Method::HEAD, "json", None) => {
            (200, "application/json", state(balancer).to_string())
        }
        (&Method::POST, "drain" | "undrain", Some(_)) if !may_drain(request, peer) => {
            (403, "text/plain", "only a program of this host may\n".into())
        }
        (&Method::POST, "drain" | "undrain", Some(_)) => {
            let change = if what == "drain" { Upstream::drain } else { Upstream::undrain };
            change(&balancer.upstream, name);
            info!("upstream {name} is {what}ed by {peer}");
            let stats = balancer.upstream.stats();
            let changed = stats.backends.iter().filter(|backend| backend.name == name);
            (200, "text/plain", changed.map(line).collect())
        }
        _ => (404, "text/plain", "GET / or /json, POST /drain/HOST:PORT or /undrain/HOST:PORT\n".into()),
    };
    Response::builder().status(status).header(CONTENT_TYPE, kind).body(body)
}

/// Browsers say which name a page asked for, and no page has an address of this host as its own
/// name. A request of HTTP/2 has the name in its URI, usually without a header.
fn is_called_by_name(request: &Request<Incoming>, names: &[String]) -> bool {
    let authority = |text: &str| text.parse::<Authority>().is_ok_and(|said| is_ours(said.host(), names));
    let mut hosts = request.headers().get_all(HOST).iter().map(|host| host.to_str().is_ok_and(authority));
    let in_uri = request.uri().authority().map(|said| is_ours(said.host(), names));
    // Each browser says a name, and each page that posts is one of a browser.
    let without = request.method() != Method::POST;
    in_uri != Some(false) && hosts.next().or(in_uri).unwrap_or(without) && hosts.next().is_none()
}

/// Whether there is an upstream for clients.
fn health(balancer: &Balancer) -> (u16, &'static str, String) {
    let is_ready = |backend: &BackendStats| backend.health != Health::Down && !backend.is_drained;
    match balancer.upstream.stats().backends.iter().any(is_ready) {
        true => (200, "text/plain", "ok\n".into()),
        false => (503, "text/plain", "no upstream is up\n".into()),
    }
}

fn is_ours(host: &str, names: &[String]) -> bool {
    let is_address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
    let same = |name: &str| name.eq_ignore_ascii_case(host.trim_end_matches('.'));
    is_address || same("localhost") || names.iter().any(|name| same(name))
}

/// Any page that a browser of this host shows can come from there too, but says its origin.
fn may_drain(request: &Request<Incoming>, peer: &Peer) -> bool {
    let is_local = peer.addr().is_some_and(|addr| addr.ip().to_canonical().is_loopback());
    is_local && !request.headers().contains_key(ORIGIN)
}

fn text(balancer: &Balancer) -> String {
    let stats = balancer.upstream.stats();
    let lines: String = stats.backends.iter().map(line).collect();
    format!("{lines}{} retries, {} clients refused\n", stats.retries, stats.refused)
}

fn line(backend: &BackendStats) -> String {
    let BackendStats { name, in_flight, connects, connects_failed, broken, .. } = backend;
    let counts = format!("{in_flight} connections of {connects}, {connects_failed} failed, {broken} broken");
    let (there, back) = (backend.bytes_there, backend.bytes_back);
    let state = if backend.health == Health::Down { "down" } else { "up" };
    let drained = if backend.is_drained { ", drained" } else { "" };
    let ejected = if backend.is_ejected { ", ejected" } else { "" };
    let unchecked = if backend.is_unchecked { ", not checked" } else { "" };
    format!("{name} {state}{drained}{ejected}{unchecked}: {counts}, {there} bytes there and {back} back\n")
}

fn state(balancer: &Balancer) -> Value {
    let stats = balancer.upstream.stats();
    let upstreams = stats.backends.iter().zip(&balancer.names).map(|(backend, names)| {
        json!({
            "name": backend.name,
            "server_names": names.names,
            "down": backend.health == Health::Down,
            "drained": backend.is_drained,
            "ejected": backend.is_ejected,
            "unchecked": backend.is_unchecked,
            "connections": backend.in_flight,
            "clients": backend.connects,
            "failed": backend.connects_failed,
            "broken": backend.broken,
            "bytes_there": backend.bytes_there,
            "bytes_back": backend.bytes_back,
        })
    });
    json!({ "upstreams": upstreams.collect::<Value>(), "retries": stats.retries, "refused": stats.refused })
}
