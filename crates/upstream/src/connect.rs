//! A connection to a backend, as its upstream says.

use std::io;

use ringserve_server::net::{ProxyHeader, is_local_failure};
use ringserve_server::{Peer, Shard, Stream};

use crate::backend::{BackendState, Counts};
use crate::settings::{SendProxy, Settings};

/// Connects for a client, or without one for this server itself, and has the connection set up
/// within the same time.
pub(crate) async fn connect<C>(
    shard: &Shard,
    settings: &Settings,
    to: &BackendState,
    client: Option<&Peer>,
    setup: impl AsyncFnOnce(Stream) -> io::Result<C>,
) -> io::Result<C> {
    let mut connecting = shard.connect(to.backend.destination().clone());
    if let Some(limits) = &settings.connection_limits {
        connecting = connecting.limits(limits.clone());
    }
    if let Some(version) = settings.send_proxy {
        connecting = connecting.proxy_header(match version {
            SendProxy::V1 => client.map_or_else(ProxyHeader::local_v1, ProxyHeader::v1),
            SendProxy::V2 => client.map_or_else(ProxyHeader::local, ProxyHeader::v2),
        });
    }
    if let Some(make) = &settings.transport {
        connecting = connecting.transport(make(&to.backend)?);
    }
    let ready = async { setup(connecting.await?).await };
    match shard.timeout(settings.connect_timeout, ready).await {
        Ok(ready) => ready,
        Err(_elapsed) => Err(io::Error::new(io::ErrorKind::TimedOut, "Upstream::connect_timeout is over")),
    }
}

/// The same for a request or a relay, which is counted.
pub(crate) async fn connect_counted<C>(
    shard: &Shard,
    settings: &Settings,
    to: &BackendState,
    client: Option<&Peer>,
    setup: impl AsyncFnOnce(Stream) -> io::Result<C>,
) -> io::Result<C> {
    let connected = connect(shard, settings, to, client, setup).await;
    let counts = &to.counts;
    match &connected {
        Ok(_) => Counts::add(&counts.connects, 1),
        Err(error) if is_local_failure(error) => {}
        Err(_) => Counts::add(&counts.connects_failed, 1),
    }
    connected
}

/// Leaves a connection as it is.
pub(crate) async fn plain(stream: Stream) -> io::Result<Stream> {
    Ok(stream)
}
