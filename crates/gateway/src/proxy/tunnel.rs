//! Bytes both ways behind an answer of 101.

use ringserve_server::Stream;
use ringserve_server::http::upgrade::Switch;
use ringserve_server::net::{CopySide, copy_bidirectional};
use ringserve_upstream::PooledConnection;

use super::body::Place;
use crate::client::http::HttpConnection;

/// Turns the client's connection into a tunnel to the backend, once hyper has sent it the answer of
/// 101. Only bytes that came behind the two heads are carried. The request keeps its places among
/// those of its route and among tunnels. Its connection leaves the pool: tunnels last, and would
/// lock out requests.
pub(super) fn begin(
    switch: Switch,
    mut connection: PooledConnection<HttpConnection>,
    places: (Option<Place>, Place),
) {
    connection.detach();
    switch.then(async move |mut client: Stream, read| {
        let _places = places;
        let Ok((mut upstream, read_back)) = connection.stream().await else {
            client.abort();
            return;
        };
        upstream.queue(&read[..]);
        client.queue(&read_back[..]);
        if let Err(broken) = copy_bidirectional(&mut client, &mut upstream).await {
            // Neither side may take what came for all of it.
            match broken.side {
                CopySide::First => upstream.abort(),
                CopySide::Second => client.abort(),
            }
        }
    });
}
