//! From a client to an upstream. What the shards share of an upstream are atomics, so that none waits for another one.

use std::net::ToSocketAddrs;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::{error::Error, io, io::ErrorKind, ptr, time::Duration};

use ringserve::net::{CopySide, ProxyHeader, copy_bidirectional, is_local_failure};
use ringserve::tls::rustls::server::{Accepted, Acceptor};
use ringserve::tls::{Pem, Tls, TlsClient};
use ringserve::{Peer, Shard, Stream};
use serde::Serialize;
use tracing::{info, warn};

use crate::Args;

/// Parts of the time of a check, of which a time in which this process did not run takes one at most.
const CHECK_PARTS: u32 = 8;

/// Time and bytes for the first record of a client. Browsers send 2 KiB.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
const HELLO_BYTES_MAX: usize = 16 << 10;

#[derive(Default, Serialize)]
pub struct Upstream {
    /// `HOST:PORT`.
    pub name: String,
    /// The names that its clients ask for by TLS; none if it is for all others.
    pub server_names: Vec<String>,
    /// By its checks, and by an operator.
    pub down: AtomicBool,
    pub drained: AtomicBool,
    /// Its last check did not come about, for want of something of this host: it is what it was before.
    pub unchecked: AtomicBool,
    /// Clients that it has now, and all that it had.
    pub connections: AtomicUsize,
    pub clients: AtomicU64,
    /// Attempts to connect that failed, and connections that broke in the middle.
    pub failed: AtomicU64,
    pub broken: AtomicU64,
    /// From clients and to them, on connections that have ended.
    pub bytes_there: AtomicU64,
    pub bytes_back: AtomicU64,
}

impl Upstream {
    pub fn new(text: &str) -> Upstream {
        let (names, name) = text.rsplit_once('=').unwrap_or(("", text));
        let server_names = names.split(',').filter(|name| !name.is_empty()).map(str::to_lowercase).collect();
        Upstream { name: name.into(), server_names, ..Upstream::default() }
    }

    pub fn host(&self) -> &str {
        self.name.rsplit_once(':').map_or("", |(host, _port)| host.trim_matches(['[', ']']))
    }

    fn has(&self, server_name: Option<&str>) -> bool {
        self.server_names.iter().any(|name| Some(&**name) == server_name)
    }
}

/// A client's place at an upstream.
struct Busy<'a>(&'a Upstream);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

#[derive(Serialize)]
pub struct Balancer {
    pub upstreams: Vec<Upstream>,
    /// Times that another upstream was tried, and clients for which there was none.
    pub retries: AtomicU64,
    pub refused: AtomicU64,
    #[serde(skip)]
    tls: Option<TlsClient>,
    #[serde(skip)]
    pub args: Args,
}

impl Balancer {
    pub fn new(args: Args) -> Result<Balancer, Box<dyn Error>> {
        Balancer::with_names(args, |name| name.to_socket_addrs().map(drop))
    }

    /// The same, where `look_up` looks whether a name has an address. One that has none is down until it has.
    pub fn with_names(
        args: Args,
        look_up: impl Fn(&str) -> io::Result<()>,
    ) -> Result<Balancer, Box<dyn Error>> {
        let tls = args.upstream_ca.as_ref().map(|ca| Tls::client(Pem::file(ca)?)).transpose()?;
        let upstreams: Vec<_> = args.upstream.iter().map(|text| Upstream::new(text)).collect();
        for (n, upstream) in upstreams.iter().enumerate() {
            let name = &upstream.name;
            match look_up(name) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    return Err(format!("upstream {name}: {error}").into());
                }
                Err(error) => {
                    warn!("upstream {name} is down until its checks find it: {error}");
                    upstream.down.store(true, Relaxed);
                }
                Ok(()) => {}
            }
            tls.as_ref().map(|tls| tls.to(upstream.host())).transpose()?;
            if upstreams[..n].iter().any(|other| other.name == *name) {
                return Err(format!("upstream {name} is given twice").into());
            }
            if !upstream.server_names.is_empty() && tls.is_some() && args.cert.is_none() {
                return Err(format!("TLS passes through to {name}: --upstream-ca needs --cert").into());
            }
        }
        Ok(Balancer { upstreams, tls, args, retries: AtomicU64::default(), refused: AtomicU64::default() })
    }

    /// Takes a place at the upstream with the fewest connections of those that are for this name, are up and were not tried. Among
    /// equals `chance` decides.
    fn choose(&self, server_name: Option<&str>, tried: &[&Upstream], chance: u64) -> Option<Busy<'_>> {
        let is_known = self.upstreams.iter().any(|upstream| upstream.has(server_name));
        let is_ready = |upstream: &&Upstream| {
            (if is_known { upstream.has(server_name) } else { upstream.server_names.is_empty() })
                && !upstream.down.load(Relaxed)
                && !upstream.drained.load(Relaxed)
                && !tried.iter().any(|other| ptr::eq(*other, *upstream))
        };
        let (before, after) = self.upstreams.split_at(chance as usize % self.upstreams.len());
        loop {
            let ready = after.iter().chain(before).filter(is_ready);
            let counted = ready.map(|upstream| (upstream, upstream.connections.load(Relaxed)));
            let (upstream, count) = counted.min_by_key(|(_, count)| *count)?;
            // Where another shard was quicker the count is another one: this one looks again.
            if upstream.connections.compare_exchange_weak(count, count + 1, Relaxed, Relaxed).is_ok() {
                return Some(Busy(upstream));
            }
        }
    }

    /// Connects for a client, or without one for a check.
    async fn connect(&self, shard: &Shard, upstream: &Upstream, client: Option<&Peer>) -> io::Result<Stream> {
        let mut connecting = shard.connect(upstream.name.as_str());
        if let Some(version) = self.args.send_proxy {
            connecting = connecting.proxy_header(match version {
                1 => client.map_or_else(ProxyHeader::local_v1, ProxyHeader::v1),
                _ => client.map_or_else(ProxyHeader::local, ProxyHeader::v2),
            });
        }
        if let Some(tls) = &self.tls {
            connecting = connecting.transport(tls.to(upstream.host()).map_err(io::Error::other)?);
        }
        connecting.await
    }

    /// Connects to an upstream, and where that fails to another one. The client's bytes wait, so that none is lost.
    async fn find(&self, client: &Stream, server_name: Option<&str>) -> io::Result<(Busy<'_>, Stream)> {
        let (mut tried, mut why) = (Vec::new(), "all are down, drained or for other names".to_owned());
        let mut ours = None;
        while let Some(busy) = self.choose(server_name, &tried, client.shard().random()) {
            self.retries.fetch_add(u64::from(!tried.is_empty()), Relaxed);
            match self.connect(client.shard(), busy.0, Some(&client.peer())).await {
                Ok(upstream) => return Ok((busy, upstream)),
                // Ports to another upstream may be left.
                Err(error) if error.kind() == ErrorKind::AddrNotAvailable => ours = Some(error),
                // This process lacks what it takes, and no other upstream helps.
                Err(error) if is_local_failure(&error) => return Err(error),
                Err(error) => {
                    why = format!("{} was tried last: {error}", busy.0.name);
                    busy.0.failed.fetch_add(1, Relaxed);
                }
            }
            tried.push(busy.0);
        }
        Err(ours.unwrap_or_else(|| io::Error::other(format!("no upstream: {why}"))))
    }

    /// Serves a client to its end.
    pub async fn serve(&self, mut client: Stream) -> Result<(), Box<dyn Error>> {
        let shard = client.shard().clone();
        let (server_name, first) = shard.timeout(HELLO_TIMEOUT, self.hello(&mut client)).await??;
        let found = self.find(&client, server_name.as_deref()).await.inspect_err(|error| {
            self.refused.fetch_add(1, Relaxed);
            if !is_local_failure(error) {
                client.upstream_failed();
            }
        });
        let (busy, mut upstream) = found?;
        busy.0.clients.fetch_add(1, Relaxed);
        upstream.queue(&first);
        let copied = copy_bidirectional(&mut client, &mut upstream).await;
        let (there, back) = *copied.as_ref().unwrap_or_else(|broken| &broken.copied);
        busy.0.bytes_there.fetch_add(first.len() as u64 + there, Relaxed);
        busy.0.bytes_back.fetch_add(back, Relaxed);
        match copied {
            Err(broken) if broken.side == CopySide::Second => {
                if !is_local_failure(&broken.error) {
                    busy.0.broken.fetch_add(1, Relaxed);
                    client.upstream_failed();
                }
                // A reset, so that the client does not take what came for all of it.
                client.abort();
                return Err(format!("upstream {}: {}", busy.0.name, broken.error).into());
            }
            // What clients do is their affair.
            Err(_) => upstream.abort(),
            Ok(_) => {}
        }
        Ok(())
    }

    /// The name that the client asks for by TLS, if upstreams have names, and what was received to learn it.
    async fn hello(&self, client: &mut Stream) -> io::Result<(Option<String>, Vec<u8>)> {
        let (mut acceptor, mut first) = (Acceptor::default(), Vec::new());
        if let Some(tls) = client.tls() {
            return Ok((tls.server_name().map(str::to_owned), first));
        }
        let are_named = self.upstreams.iter().any(|upstream| !upstream.server_names.is_empty());
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

    /// Begins to check each upstream, on this shard for all.
    pub fn check_on(self: &Arc<Balancer>, shard: &Shard) {
        for number in 0..self.upstreams.len() {
            let (balancer, on) = (self.clone(), shard.clone());
            shard.spawn(async move { balancer.watch(&on, &balancer.upstreams[number]).await });
        }
    }

    async fn watch(&self, shard: &Shard, upstream: &Upstream) {
        let (mut ticks, mut against) = (shard.interval(self.args.check_interval), 0);
        loop {
            ticks.tick().await;
            let checked = self.check_in_time(shard, upstream).await;
            if shard.is_draining() {
                return;
            }
            // What is missing here says nothing of the upstream, and is said once.
            let not_looked = checked.as_ref().err().filter(|error| is_local_failure(error));
            let was_unchecked = upstream.unchecked.swap(not_looked.is_some(), Relaxed);
            match not_looked {
                Some(error) if !was_unchecked => {
                    warn!("upstream {} cannot be checked: {error}", upstream.name)
                }
                None if was_unchecked => info!("upstream {} is checked again", upstream.name),
                _ => {}
            }
            if not_looked.is_some() {
                continue;
            }
            let is_down = upstream.down.load(Relaxed);
            against = if checked.is_err() == is_down { 0 } else { against + 1 };
            if against == if is_down { self.args.rise } else { self.args.fall } {
                against = 0;
                upstream.down.store(!is_down, Relaxed);
                match checked {
                    Ok(()) => info!("upstream {} is up", upstream.name),
                    Err(error) => warn!("upstream {} is down: {error}", upstream.name),
                }
            }
        }
    }

    /// A check, within its time. A time in which this shard was blocked, or the process stopped, is no time that the upstream had.
    async fn check_in_time(&self, shard: &Shard, upstream: &Upstream) -> io::Result<()> {
        let mut check = pin!(self.check(shard, upstream));
        for _ in 0..CHECK_PARTS {
            if let Ok(checked) = shard.timeout(self.args.check_interval / CHECK_PARTS, &mut check).await {
                return checked;
            }
        }
        Err(ErrorKind::TimedOut.into())
    }

    async fn check(&self, shard: &Shard, upstream: &Upstream) -> io::Result<()> {
        let mut stream = self.connect(shard, upstream, None).await?;
        stream.write_all(self.args.check_send.as_deref().unwrap_or_default().as_bytes()).await?;
        let Some(expected) = &self.args.check_expect else { return Ok(()) };
        let mut answer = Vec::new();
        while answer.len() < HELLO_BYTES_MAX
            && let Some(bytes) = stream.read_frame().await?
        {
            answer.extend_from_slice(&bytes);
            if answer.windows(expected.len()).any(|bytes| bytes == expected.as_bytes()) {
                return Ok(());
            }
        }
        Err(io::Error::other("the answer is another one"))
    }
}

fn name_in(hello: Accepted) -> Option<String> {
    Some(hello.client_hello().server_name()?.to_lowercase())
}
