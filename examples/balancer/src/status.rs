//! The state by HTTP: GET / as text, and /json; POST to /drain/HOST:PORT and /undrain/HOST:PORT, from this host. A request calls the
//! balancer by an address, as localhost, or by a name of `--status-name`: a page of another site, whose name was made to resolve to
//! this host, reads nothing. A request without a `Host` is no browser's, and reads too.
//!
//! Probes ask for /healthz, or by `OPTIONS /` as HAProxy does, whatever name they use: 503 if no client can be sent anywhere.

use std::future::ready;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ringserve::framing::Raw;
use ringserve::http::hyper::header::{CONTENT_TYPE, HOST, ORIGIN};
use ringserve::http::hyper::{Method, Request, Response, body::Incoming};
use ringserve::http::hyper::{http::Error, http::uri::Authority, service::service_fn};
use ringserve::http::{Http, HttpOptions};
use ringserve::limits::LimitError;
use ringserve::{IntoService, Peer, Shard, Stream, stream};
use serde_json::json;
use tracing::info;

use crate::balancer::{Balancer, Upstream};

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
    let upstream = balancer.upstreams.iter().find(|upstream| upstream.name == name);
    let (status, kind, body) = match (request.method(), what, upstream) {
        (&Method::GET | &Method::HEAD, "healthz", None) | (&Method::OPTIONS, "", None) => health(balancer),
        _ if !is_called_by_name(request, &balancer.args.status_name) => (
            403,
            "text/plain",
            "ask for this host by its address, localhost, or a name of --status-name\n".into(),
        ),
        (&Method::GET | &Method::HEAD, "", None) => (200, "text/plain", text(balancer)),
        (&Method::GET | &Method::HEAD, "json", None) => {
            (200, "application/json", json!(balancer).to_string())
        }
        (&Method::POST, "drain" | "undrain", Some(_)) if !may_drain(request, peer) => {
            (403, "text/plain", "only a program of this host may\n".into())
        }
        (&Method::POST, "drain" | "undrain", Some(upstream)) => {
            upstream.drained.store(what == "drain", Relaxed);
            info!("upstream {name} is {what}ed by {peer}");
            (200, "text/plain", line(upstream))
        }
        _ => (404, "text/plain", "GET / or /json, POST /drain/HOST:PORT or /undrain/HOST:PORT\n".into()),
    };
    Response::builder().status(status).header(CONTENT_TYPE, kind).body(body)
}

/// Browsers say which name a page asked for, and no page has an address of this host as its own name. A request of HTTP/2 has the
/// name in its URI, mostly without a header.
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
    let is_ready = |upstream: &Upstream| !upstream.down.load(Relaxed) && !upstream.drained.load(Relaxed);
    match balancer.upstreams.iter().any(is_ready) {
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

fn text(Balancer { upstreams, retries, refused, .. }: &Balancer) -> String {
    let lines: String = upstreams.iter().map(line).collect();
    format!("{lines}{retries:?} retries, {refused:?} clients refused\n")
}

fn line(upstream: &Upstream) -> String {
    let Upstream { name, connections, clients, failed, broken, .. } = upstream;
    let counts = format!("{connections:?} connections of {clients:?}, {failed:?} failed, {broken:?} broken");
    let (there, back) = (&upstream.bytes_there, &upstream.bytes_back);
    let state = if upstream.down.load(Relaxed) { "down" } else { "up" };
    let drained = if upstream.drained.load(Relaxed) { ", drained" } else { "" };
    let unchecked = if upstream.unchecked.load(Relaxed) { ", not checked" } else { "" };
    format!("{name} {state}{drained}{unchecked}: {counts}, {there:?} bytes there and {back:?} back\n")
}
