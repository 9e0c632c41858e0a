//! Listeners of the file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ringserve_server::tls::{Pem, Tls, TlsError};

use super::error::ConfigError;
use super::reader::{Section, Value};

/// A service as the file has it. It changes with a restart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServicePart {
    pub(super) name: String,
    pub(super) listen: Vec<SocketAddr>,
    pub(super) certificates: Vec<Certificate>,
    /// Networks of proxies whose PROXY headers are believed.
    pub(super) proxies: Vec<String>,
    pub(super) kind: Kind,
    pub(super) idle_timeout: Option<Duration>,
    pub(super) header_timeout: Option<Duration>,
    pub(super) header_bytes_max: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    Http,
    RedirectToHttps,
    /// Bytes both ways to this upstream.
    Tcp(String),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Certificate {
    chain: PathBuf,
    key: PathBuf,
    name: Option<String>,
}

impl ServicePart {
    pub(super) fn read(section: &Section<'_>, number: usize) -> Result<ServicePart, ConfigError> {
        let name = section.take("name").map(|value| value.string().map(str::to_owned)).transpose()?;
        let Some(listen) = section.take("listen") else {
            return Err(section.error("it listens nowhere: listen = [\"0.0.0.0:80\"]"));
        };
        let addresses = listen
            .parsed_list::<SocketAddr>("an address and a port, such as \"0.0.0.0:80\" or \"[::]:80\"")?;
        if addresses.is_empty() {
            return Err(listen.error("there is none"));
        }
        let certificates = match section.take("tls") {
            Some(value) => value.list().iter().map(Certificate::read).collect::<Result<Vec<_>, _>>()?,
            None => Vec::new(),
        };
        let (mode, upstream, redirect) =
            (section.take("mode"), section.take("upstream"), section.take("redirect"));
        let is_tcp =
            mode.as_ref().map_or(Ok(false), |value| value.one_of(&[("http", false), ("tcp", true)]))?;
        let kind = match (is_tcp, upstream, redirect) {
            (true, Some(upstream), None) => Kind::Tcp(upstream.string()?.to_owned()),
            (true, None, _) => return Err(section.error("mode = \"tcp\" needs an upstream")),
            (true, _, Some(redirect)) => return Err(redirect.error("mode = \"tcp\" has no redirect")),
            (false, Some(upstream), _) => {
                return Err(
                    upstream.error("requests of HTTP go where routes say; this is for mode = \"tcp\"")
                );
            }
            (false, None, Some(redirect)) => {
                redirect.one_of(&[("https", ())])?;
                Kind::RedirectToHttps
            }
            (false, None, None) => Kind::Http,
        };
        let proxies = section.take("proxy_protocol").map_or(Ok(Vec::new()), |value| value.strings())?;
        let header_bytes =
            section.take("header_bytes_max").map(|value| within(&value, 1..=64 << 10)).transpose()?;
        let part = ServicePart {
            name: name.unwrap_or_else(|| format!("service {number}")),
            listen: addresses,
            certificates,
            proxies: proxies.into_iter().map(str::to_owned).collect(),
            kind,
            idle_timeout: section.take("idle_timeout").map(|value| value.time()).transpose()?,
            header_timeout: section.take("header_timeout").map(|value| value.time()).transpose()?,
            header_bytes_max: header_bytes,
        };
        section.end()?;
        Ok(part)
    }

    /// The certificates, as they are in their files now.
    pub(super) fn tls(&self) -> Result<Option<Tls>, TlsError> {
        let mut tls: Option<Tls> = None;
        for certificate in &self.certificates {
            let (chain, key) = (Pem::file(&certificate.chain)?, Pem::file(&certificate.key)?);
            let before = tls.take().unwrap_or_else(Tls::server);
            tls = Some(match &certificate.name {
                Some(name) => before.certificate_for(name, chain, key),
                None => before.certificate(chain, key),
            });
        }
        Ok(tls.map(|tls| tls.watch_files(Duration::from_secs(10))))
    }
}

fn within(value: &Value<'_>, range: std::ops::RangeInclusive<u32>) -> Result<u32, ConfigError> {
    let bytes = u32::try_from(value.bytes()?).ok().filter(|bytes| range.contains(bytes));
    bytes.ok_or_else(|| value.error(format!("it is {} to {} bytes", range.start(), range.end())))
}

impl Certificate {
    fn read(value: &Value<'_>) -> Result<Certificate, ConfigError> {
        let section = value.section()?;
        let file = |key| match section.take(key) {
            Some(value) => value.string().map(PathBuf::from),
            None => Err(section.error(format!("it has no {key}: a file of PEM"))),
        };
        let certificate = Certificate {
            chain: file("cert")?,
            key: file("key")?,
            name: section.take("name").map(|value| value.string().map(str::to_owned)).transpose()?,
        };
        section.end()?;
        Ok(certificate)
    }
}
