//! From a client to an upstream: which of them are for it, and the name that it asks for. The rest
//! is the library's.

use std::net::ToSocketAddrs;
use std::{error::Error, io, io::ErrorKind, rc::Rc, time::Duration};

use ringserve::Stream;
use ringserve::net::{CopySide, is_local_failure};
use ringserve::tls::rustls::server::{Accepted, Acceptor};
use ringserve::tls::{Pem, Tls};
use ringserve::upstream::{Backend, Check, Relay, SendProxy, Upstream, UpstreamError};
use tracing::warn;

use crate::Args;

/// Time and bytes for the first record of a client. Browsers send 2 KiB.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
const HELLO_BYTES_MAX: usize = 16 << 10;

/// The names that clients of an upstream ask for by TLS; none if it is for all others.
#[derive(Debug, PartialEq)]
pub struct Names {
    /// The upstream, as `HOST:PORT`.
    pub of: String,
    pub names: Vec<String>,
}

impl Names {
    pub fn new(text: &str) -> Names {
        let (names, of) = text.rsplit_once('=').unwrap_or(("", text));
        let names = names.split(',').filter(|name| !name.is_empty()).map(str::to_lowercase).collect();
        // As the upstream calls it.
        Names { of: Backend::new(of).name().into(), names }
    }

    fn have(&self, server_name: Option<&str>) -> bool {
        self.names.iter().any(|name| Some(&**name) == server_name)
    }
}

pub struct Balancer {
    pub upstream: Upstream,
    pub names: Vec<Names>,
    pub args: Args,
}

impl Balancer {
    pub fn new(args: Args) -> Result<Balancer, Box<dyn Error>> {
        Balancer::with_names(args, |name| name.to_socket_addrs().map(drop))
    }

    /// The same, where `look_up` looks whether a name has an address. One that has none is down
    /// until it has.
    pub fn with_names(
        args: Args,
        look_up: impl Fn(&str) -> io::Result<()>,
    ) -> Result<Balancer, Box<dyn Error>> {
        let names: Vec<_> = args.upstream.iter().map(|text| Names::new(text)).collect();
        let upstream = upstream(&args, &names)?;
        for (n, Names { of, names: asked_for }) in names.iter().enumerate() {
            match look_up(of) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    return Err(format!("upstream {of}: {error}").into());
                }
                Err(error) => {
                    warn!("upstream {of} is down until its checks find it: {error}");
                    upstream.mark_down(of);
                }
                Ok(()) => {}
            }
            if names[..n].iter().any(|other| other.of == *of) {
                return Err(format!("upstream {of} is given twice").into());
            }
            if !asked_for.is_empty() && args.upstream_ca.is_some() && args.cert.is_none() {
                return Err(format!("TLS passes through to {of}: --upstream-ca needs --cert").into());
            }
        }
        Ok(Balancer { upstream, names, args })
    }

    /// Whether a backend is for clients that ask for this name.
    fn is_for(&self, server_name: Option<&str>) -> impl Fn(&Backend) -> bool {
        let is_known = self.names.iter().any(|names| names.have(server_name));
        move |backend| {
            let names = self.names.iter().find(|names| names.of == backend.name());
            names.is_some_and(|of| if is_known { of.have(server_name) } else { of.names.is_empty() })
        }
    }

    /// Serves a client to its end.
    pub async fn serve(&self, relay: &Relay, mut client: Stream) -> Result<(), Box<dyn Error>> {
        let shard = client.shard().clone();
        let (server_name, first) = shard.timeout(HELLO_TIMEOUT, self.hello(&mut client)).await??;
        let found = relay.connect_among(&client, self.is_for(server_name.as_deref())).await;
        let mut place = match found {
            Ok(place) => place,
            Err(error) => {
                if !matches!(&error, UpstreamError::Failed(error) if is_local_failure(error)) {
                    client.upstream_failed();
                }
                return Err(format!("no upstream: {error}").into());
            }
        };
        place.queue(&first);
        let name = place.backend().to_owned();
        match place.copy(&mut client).await {
            Err(broken) if broken.side == CopySide::Second => {
                Err(format!("upstream {name}: {}", broken.error).into())
            }
            // What clients do is their affair.
            _ => Ok(()),
        }
    }

    /// The name that the client asks for by TLS, if upstreams have names, and what was received to
    /// learn it.
    async fn hello(&self, client: &mut Stream) -> io::Result<(Option<String>, Vec<u8>)> {
        let (mut acceptor, mut first) = (Acceptor::default(), Vec::new());
        if let Some(tls) = client.tls() {
            return Ok((tls.server_name().map(str::to_owned), first));
        }
        let are_named = self.names.iter().any(|of| !of.names.is_empty());
        while are_named
            && first.len() < HELLO_BYTES_MAX
            && let Some(frame) = client.read_frame().await?
        {
            first.extend_from_slice(&frame);
            let mut unread = &frame[..];
            while !unread.is_empty() && acceptor.read_tls(&mut unread).is_ok() {
                match acceptor.accept() {
                    Ok(None) => {}
                    // What is not TLS asks for no name.
                    all => return Ok((all.ok().flatten().and_then(name_in), first)),
                }
            }
        }
        Ok((None, first))
    }
}

/// The rules of the upstreams, as the options have them.
fn upstream(args: &Args, names: &[Names]) -> Result<Upstream, Box<dyn Error>> {
    let check = match &args.check_expect {
        None => Check::connect(),
        Some(expect) => Check::exchange(args.check_send.clone().unwrap_or_default(), &**expect),
    };
    let check = check.interval(args.check_interval).rise(args.rise).fall(args.fall);
    let mut upstream = Upstream::new("servers", names.iter().map(|names| &*names.of))
        .check(check)
        .connect_timeout(args.connect_timeout)
        // An upstream that is down is never tried, were it the last one.
        .panic_below(0);
    if let Some(version) = args.send_proxy {
        upstream = upstream.send_proxy(if version == 1 { SendProxy::V1 } else { SendProxy::V2 });
    }
    if let Some(ca) = &args.upstream_ca {
        let tls = Tls::client(Pem::file(ca)?)?;
        for names in names {
            tls.to(Backend::new(&*names.of).host())?;
        }
        upstream = upstream.transport(move |backend| match tls.to(backend.host()) {
            Ok(transport) => Ok(transport as Rc<_>),
            Err(error) => Err(io::Error::other(error)),
        });
    }
    Ok(upstream)
}

fn name_in(hello: Accepted) -> Option<String> {
    Some(hello.client_hello().server_name()?.to_lowercase())
}
