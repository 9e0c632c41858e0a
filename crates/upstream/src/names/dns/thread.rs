//! The thread that asks name servers, one for the process. No shard waits for it but by a task.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RecordType;
use hickory_resolver::system_conf::parse_resolv_conf;
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};

use super::answer::{Answer, Found, addresses, targets, ttl};
use super::{DnsQuery, Servers};
use crate::locked;

/// The longest time of a look-up, with the addresses of all targets.
const LOOKUP_MAX: Duration = Duration::from_secs(20);

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The configuration of the resolver cannot be used.
    Configuration(io::Error),
    Lookup(io::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Configuration(error) | Failure::Lookup(error) => error.fmt(f),
        }
    }
}

impl From<Failure> for io::Error {
    fn from(failed: Failure) -> io::Error {
        match failed {
            Failure::Configuration(error) | Failure::Lookup(error) => error,
        }
    }
}

struct Question {
    wanted: DnsQuery,
    servers: Servers,
    answer: oneshot::Sender<Result<Answer, Failure>>,
}

/// Begun by the first question, and again if it ended.
static THREAD: Mutex<Option<mpsc::UnboundedSender<Question>>> = Mutex::new(None);

/// Asks, and waits for the answer.
pub(super) async fn ask(wanted: DnsQuery, servers: Servers) -> Result<Answer, Failure> {
    let (to, answer) = oneshot::channel();
    send(Question { wanted, servers, answer: to }).map_err(Failure::Lookup)?;
    answer.await.unwrap_or_else(|_| {
        Err(Failure::Lookup(io::Error::other("the thread that asks name servers panicked")))
    })
}

/// An upstream has one question at a time, so the queue needs no bound.
fn send(question: Question) -> io::Result<()> {
    let mut running = locked(&THREAD);
    let question = match &*running {
        Some(questions) => match questions.send(question) {
            Ok(()) => return Ok(()),
            Err(unsent) => unsent.0,
        },
        None => question,
    };
    let (questions, received) = mpsc::unbounded_channel();
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let serve = move || runtime.block_on(serve(received));
    thread::Builder::new().name("ringserve-dns".to_owned()).spawn(serve)?;
    let sent = questions.send(question).map_err(|_| io::Error::other("the thread for name servers ended"));
    *running = Some(questions);
    sent
}

async fn serve(mut questions: mpsc::UnboundedReceiver<Question>) {
    while let Some(Question { wanted, servers, answer }) = questions.recv().await {
        tokio::spawn(async move {
            let found = tokio::time::timeout(LOOKUP_MAX, find(&wanted, &servers)).await;
            let found = found.unwrap_or_else(|_| {
                Err(Failure::Lookup(io::Error::new(io::ErrorKind::TimedOut, "name servers take too long")))
            });
            // A shard that ended waits for nothing.
            let _ = answer.send(found);
        });
    }
}

async fn find(wanted: &DnsQuery, servers: &Servers) -> Result<Answer, Failure> {
    let (config, options) = configuration(servers).map_err(Failure::Configuration)?;
    let mut found = find_at(wanted, config.clone(), &options).await;
    // The resolver takes the rubbish of one server for the answer of all, so each is asked alone.
    for server in config.name_servers().iter().filter(|_| config.name_servers().len() > 1) {
        match &found {
            Err(error) if error.kind() == io::ErrorKind::Other => {}
            _ => break,
        }
        let alone = vec![server.clone()];
        let config = ResolverConfig::from_parts(config.domain().cloned(), config.search().to_vec(), alone);
        found = find_at(wanted, config, &options).await;
    }
    found.map_err(Failure::Lookup)
}

async fn find_at(wanted: &DnsQuery, config: ResolverConfig, options: &ResolverOpts) -> io::Result<Answer> {
    let of = |strategy| resolver(config.clone(), options.clone(), strategy);
    let resolvers =
        Resolvers { ipv4: of(LookupIpStrategy::Ipv4Only)?, ipv6: of(LookupIpStrategy::Ipv6Only)? };
    match wanted {
        DnsQuery::Addresses(name) => addresses_of(&resolvers, name).await,
        DnsQuery::Services(name) => services_of(&resolvers, name).await,
    }
}

/// A resolver for each kind of addresses: one for both would pass over an answer that failed.
struct Resolvers {
    ipv4: TokioResolver,
    ipv6: TokioResolver,
}

/// The configuration for one look-up: so the files of the host are read each time.
fn configuration(servers: &Servers) -> io::Result<(ResolverConfig, ResolverOpts)> {
    match servers {
        Servers::File(path) => read(path),
        Servers::These(servers) => {
            let servers = servers.iter().map(server).collect();
            Ok((ResolverConfig::from_parts(None, Vec::new(), servers), ResolverOpts::default()))
        }
    }
}

/// A resolver for one look-up: so nothing is kept for longer than its TTL.
fn resolver(
    config: ResolverConfig,
    mut options: ResolverOpts,
    strategy: LookupIpStrategy,
) -> io::Result<TokioResolver> {
    options.ip_strategy = strategy;
    options.cache_size = 0;
    let builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    builder.with_options(options).build().map_err(io::Error::other)
}

fn read(path: &Path) -> io::Result<(ResolverConfig, ResolverOpts)> {
    let named = |error: &dyn fmt::Display, kind| {
        io::Error::new(kind, format!("{} cannot be used: {error}", path.display()))
    };
    let text = fs::read(path).map_err(|error| named(&error, error.kind()))?;
    parse_resolv_conf(text).map_err(|error| named(&error, io::ErrorKind::InvalidData))
}

fn server(addr: &SocketAddr) -> NameServerConfig {
    let mut server = NameServerConfig::udp_and_tcp(addr.ip());
    server.connections.iter_mut().for_each(|connection| connection.port = addr.port());
    server
}

async fn addresses_of(resolvers: &Resolvers, name: &str) -> io::Result<Answer> {
    let unclear = || io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no name with a port"));
    let (host, port) = name.rsplit_once(':').ok_or_else(unclear)?;
    let port = port.parse().map_err(|_| unclear())?;
    let found = ips_of(resolvers, host).await?;
    let found_at =
        |ip: IpAddr| Found { addr: SocketAddr::new(ip, port), host: host.into(), weight: 1, priority: 0 };
    if found.ips.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("{name}: it has no address")));
    }
    Ok(Answer { backends: found.ips.into_iter().map(found_at).collect(), ttl: found.ttl })
}

/// A target without an address is passed over; one that cannot be looked up fails the answer, or
/// its backends would seem to be gone.
async fn services_of(resolvers: &Resolvers, name: &str) -> io::Result<Answer> {
    let found = resolvers.ipv4.lookup(name, RecordType::SRV).await.map_err(|error| failed(name, &error))?;
    let mut answer = Answer { backends: Vec::new(), ttl: ttl(&found, now()) };
    for target in targets(&found) {
        let found = ips_of(resolvers, &target.name).await?;
        answer.ttl = answer.ttl.min(found.ttl);
        answer.backends.extend(target.at(&found.ips));
    }
    Ok(answer)
}

/// The addresses of a name, and the time for which they stand.
struct NameAddresses {
    ips: Vec<IpAddr>,
    ttl: Duration,
}

/// Asks for both kinds of addresses. Where one of the answers fails the other is not all that there
/// is, and half of them would seem to be gone.
async fn ips_of(resolvers: &Resolvers, name: &str) -> io::Result<NameAddresses> {
    let (ipv4, ipv6) = tokio::join!(resolvers.ipv4.lookup_ip(name), resolvers.ipv6.lookup_ip(name));
    let mut found = NameAddresses { ips: Vec::new(), ttl: Duration::MAX };
    for answer in [ipv4, ipv6] {
        match answer {
            Ok(answer) => {
                found.ttl = found.ttl.min(ttl(answer.as_lookup(), now()));
                found.ips.extend(answer.iter());
            }
            Err(error) if error.is_no_records_found() => {}
            Err(error) => return Err(failed(name, &error)),
        }
    }
    found.ips = addresses(found.ips.into_iter(), has_ipv6());
    Ok(found)
}

#[expect(
    clippy::disallowed_methods,
    reason = "the resolver's answers go by this clock, on a thread that is no shard's"
)]
fn now() -> Instant {
    Instant::now()
}

/// True if there is a route to other hosts by IPv6. Nothing is sent.
fn has_ipv6() -> bool {
    let documentation = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
    socket.is_ok_and(|socket| socket.connect((documentation, 9)).is_ok())
}

fn failed(name: &str, error: &NetError) -> io::Error {
    let kind = match error {
        error if error.is_no_records_found() => io::ErrorKind::NotFound,
        NetError::Timeout => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, format!("{name}: {error}"))
}
