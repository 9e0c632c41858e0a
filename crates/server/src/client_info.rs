//! Who asks: what is known of the connection of a request.

use std::fmt;
#[cfg(feature = "tls")]
use std::rc::Rc;
use std::sync::Arc;

use ringserve_base::peer::Peer;
#[cfg(feature = "tls")]
use ringserve_core::facts_as;
use ringserve_core::proxy::Tlvs;
use ringserve_core::{ConnId, Outlet};
#[cfg(feature = "tls")]
use ringserve_tls::TlsInfo;

/// The connection of a request: its peer, what a proxy said of it, and the facts of its handshake.
/// Each request that a service of [`http`](crate::http()) or an [`Http`](crate::http::Http) is
/// given has one among its extensions, so a handler of axum or of tower takes it from there. It is
/// `Send`, and a clone copies nothing.
///
/// ```no_run
/// use std::convert::Infallible;
///
/// use ringserve::http::ClientInfo;
/// use ringserve::http::hyper::body::Incoming;
/// use ringserve::http::hyper::service::service_fn;
/// use ringserve::http::hyper::{Request, Response};
/// use ringserve::{Server, http};
///
/// async fn who(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
///     let peer = request.extensions().get::<ClientInfo>().map(|client| client.peer().to_string());
///     Ok(Response::new(peer.unwrap_or_default()))
/// }
///
/// fn main() -> Result<(), ringserve::Error> {
///     Server::bind("127.0.0.1:8080").serve(|_shard| http(service_fn(who)))
/// }
/// ```
#[derive(Clone)]
pub struct ClientInfo {
    known: Arc<Known>,
}

struct Known {
    peer: Peer,
    id: ConnId,
    shard: usize,
    /// As they came.
    tlvs: Option<Box<[u8]>>,
    handshake: Handshake,
}

/// The facts of a handshake, for code that runs anywhere; none without the feature `tls`.
struct Handshake {
    #[cfg(feature = "tls")]
    tls: Option<TlsInfo>,
}

#[cfg(feature = "tls")]
impl Handshake {
    fn of(conn: &Outlet) -> Handshake {
        let info = conn.transport_info().and_then(facts_as).map(|info: Rc<TlsInfo>| (*info).clone());
        Handshake { tls: info }
    }

    fn show(&self, to: &mut fmt::DebugStruct<'_, '_>) {
        to.field("tls", &self.tls);
    }
}

#[cfg(not(feature = "tls"))]
impl Handshake {
    fn of(_conn: &Outlet) -> Handshake {
        Handshake {}
    }

    fn show(&self, _to: &mut fmt::DebugStruct<'_, '_>) {}
}

impl ClientInfo {
    /// The facts of this connection of a shard.
    pub(crate) fn of(conn: &Outlet, shard: usize) -> ClientInfo {
        let known = Known {
            peer: Peer::of(conn),
            id: conn.id(),
            shard,
            tlvs: conn.tlvs().as_ref().map(as_they_came),
            handshake: Handshake::of(conn),
        };
        ClientInfo { known: Arc::new(known) }
    }

    /// The other end of the connection, behind a proxy that of the client.
    pub fn peer(&self) -> Peer {
        self.known.peer
    }

    /// The id of the connection, unique on its [shard](ClientInfo::shard).
    pub fn id(&self) -> ConnId {
        self.known.id
    }

    /// The number of the shard that serves it.
    pub fn shard(&self) -> usize {
        self.known.shard
    }

    /// Fields that the proxy sent about the client beside its address, as
    /// [`Cx::tlvs`](crate::Cx::tlvs).
    pub fn tlvs(&self) -> Option<Tlvs> {
        self.known.tlvs.as_deref().map(Tlvs::of)
    }

    /// The facts of the connection's handshake; `None` without TLS.
    #[cfg(feature = "tls")]
    pub fn tls(&self) -> Option<&TlsInfo> {
        self.known.handshake.tls.as_ref()
    }
}

/// [`Tlvs`] belong to their shard, and this does not.
fn as_they_came(tlvs: &Tlvs) -> Box<[u8]> {
    let mut bytes = Vec::new();
    for (kind, value) in tlvs.iter() {
        // It had two bytes for its length.
        bytes.push(kind);
        bytes.extend((value.len() as u16).to_be_bytes());
        bytes.extend(value);
    }
    bytes.into()
}

impl fmt::Debug for ClientInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ClientInfo");
        shown
            .field("peer", &self.peer())
            .field("shard", &self.shard())
            .field("id", &self.id())
            .field("tlvs", &self.tlvs());
        self.known.handshake.show(&mut shown);
        shown.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_proxy_are_kept_as_they_came() {
        let bytes = [&[0xea, 0, 3][..], b"vpc", &[1, 0, 2], b"h2", &[5, 0, 0]].concat();
        let tlvs = Tlvs::of(&bytes);
        assert_eq!(*as_they_came(&tlvs), *bytes);
        assert_eq!(Tlvs::of(&as_they_came(&tlvs)), tlvs);
    }
}
