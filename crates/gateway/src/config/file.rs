//! The whole file.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::ConfigError;
use super::reader::{Section, Spot, Value};
use super::routes;
use super::services::{Kind, ServicePart};
use super::sources::Sources;
use super::upstreams::{UpstreamPart, Upstreams, started};
use crate::fields::forwarded::ForwardedFields;
use crate::proxy::gateway::Gateway;
use crate::table::routes::{RouteError, RouteIndex, RouteTable};
use ipnet::IpNet;

/// A file of the gateway that was read and found right.
pub struct GatewayFile {
    pub(super) file: PathBuf,
    pub(super) process: ProcessPart,
    pub(super) services: Vec<ServicePart>,
    pub(super) upstreams: Upstreams,
    pub(super) table: RouteIndex,
}

/// Settings of the process, which change with a restart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProcessPart {
    pub(super) shards: Option<usize>,
    pub(super) drain_timeout: Option<Duration>,
    pub(super) admin: Option<SocketAddr>,
    pub(super) options: OptionsPart,
}

/// Settings for all requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OptionsPart {
    trusted: Vec<IpNet>,
    forwarded: ForwardedFields,
    has_via: bool,
    has_request_id: bool,
    has_underscores: bool,
    has_access_log: bool,
}

impl OptionsPart {
    fn read(value: Option<Value<'_>>) -> Result<OptionsPart, ConfigError> {
        let mut part = OptionsPart {
            trusted: Vec::new(),
            forwarded: ForwardedFields::default(),
            has_via: true,
            has_request_id: true,
            has_underscores: false,
            has_access_log: false,
        };
        let Some(value) = value else { return Ok(part) };
        let section = value.section()?;
        if let Some(value) = section.take("trusted") {
            part.trusted = value.parsed_list("a network such as \"10.0.0.0/8\"")?;
        }
        if let Some(value) = section.take("forwarded") {
            part.forwarded = value.one_of(&[
                ("x-forwarded", ForwardedFields::XForwarded),
                ("rfc7239", ForwardedFields::Rfc7239),
                ("both", ForwardedFields::Both),
                ("off", ForwardedFields::Off),
            ])?;
        }
        let flag = |key, default| section.take(key).map_or(Ok(default), |value| value.boolean());
        part.has_via = flag("via", part.has_via)?;
        part.has_request_id = flag("request_id", part.has_request_id)?;
        part.has_underscores = flag("underscores", part.has_underscores)?;
        part.has_access_log = flag("access_log", part.has_access_log)?;
        section.end()?;
        Ok(part)
    }

    pub(super) fn applied(&self, gateway: Gateway) -> Gateway {
        gateway
            .trusted(self.trusted.iter().copied())
            .forwarded(self.forwarded)
            .via(self.has_via)
            .request_id(self.has_request_id)
            .underscores(self.has_underscores)
            .access_log(self.has_access_log)
    }
}

impl ProcessPart {
    fn read(root: &Section<'_>) -> Result<ProcessPart, ConfigError> {
        let mut part = ProcessPart {
            shards: None,
            drain_timeout: None,
            admin: Some(SocketAddr::from(([127, 0, 0, 1], 9000))),
            options: OptionsPart::read(root.take("gateway"))?,
        };
        if let Some(value) = root.take("server") {
            let section = value.section()?;
            let shards = section.take("shards").map(|value| value.count(1..=1024)).transpose()?;
            part.shards = shards.map(|shards| shards as usize);
            part.drain_timeout = section.take("drain_timeout").map(|value| value.time()).transpose()?;
            section.end()?;
        }
        if let Some(value) = root.take("admin") {
            if !value.is_table() {
                let is_on = value.boolean()?;
                part.admin = part.admin.filter(|_| is_on);
                return Ok(part);
            }
            let section = value.section()?;
            if let Some(value) = section.take("listen") {
                part.admin = Some(value.parsed("an address and a port")?);
            }
            section.end()?;
        }
        Ok(part)
    }
}

impl GatewayFile {
    /// Reads a file, and all files that it names. A variable of the environment such as
    /// `RINGSERVE_SERVER__SHARDS` overrides the setting `server.shards`.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn read(file: impl AsRef<Path>) -> Result<GatewayFile, ConfigError> {
        GatewayFile::read_with(file.as_ref(), &Upstreams::new())
    }

    /// Reads a file that was read before: upstreams that are as they were go on.
    pub(super) fn read_with(file: &Path, old: &Upstreams) -> Result<GatewayFile, ConfigError> {
        let sources = Sources::read(file)?;
        let tables = sources.tables()?;
        let root = Section::root(&tables);
        // It was read before all others.
        root.take("include");
        let process = ProcessPart::read(&root)?;
        let upstreams = upstreams(&root, old)?;
        let services = services(&root, &upstreams)?;
        let table = table_of(&root, &upstreams)?;
        root.end()?;
        Ok(GatewayFile { file: file.into(), process, services, upstreams, table })
    }

    /// The names of its upstreams.
    pub fn upstreams(&self) -> impl Iterator<Item = &str> {
        self.upstreams.keys().map(String::as_str)
    }

    /// The number of its routes.
    pub fn routes(&self) -> usize {
        self.table.len()
    }

    /// The addresses of its services.
    pub fn listeners(&self) -> impl Iterator<Item = SocketAddr> {
        self.services.iter().flat_map(|service| service.listen.iter().copied())
    }
}

fn upstreams(root: &Section<'_>, old: &Upstreams) -> Result<Upstreams, ConfigError> {
    let mut parts: BTreeMap<String, (UpstreamPart, Spot<'_>)> = BTreeMap::new();
    if let Some(value) = root.take("upstream") {
        for (name, value) in value.section()?.all() {
            if let Some(error) = value.second_file() {
                return Err(error);
            }
            let part = UpstreamPart::read(&value.section()?)?;
            parts.insert(name.to_owned(), (part, value.spot()));
        }
    }
    started(&parts, old)
}

fn services(root: &Section<'_>, upstreams: &Upstreams) -> Result<Vec<ServicePart>, ConfigError> {
    let Some(value) = root.take("service") else {
        return Err(root.error("there is no [[service]], so nothing listens"));
    };
    let mut services: Vec<ServicePart> = Vec::new();
    for (at, value) in value.list().iter().enumerate() {
        let service = ServicePart::read(&value.section()?, at + 1)?;
        if let Kind::Tcp(upstream) = &service.kind
            && !upstreams.contains_key(upstream)
        {
            return Err(value.error(format!("there is no upstream {upstream:?}")));
        }
        service.tls().map_err(|error| value.error(error))?;
        if services.iter().any(|other| other.name == service.name) {
            return Err(value.error(format!("there are two services {:?}", service.name)));
        }
        services.push(service);
    }
    Ok(services)
}

fn table_of(root: &Section<'_>, upstreams: &Upstreams) -> Result<RouteIndex, ConfigError> {
    let (mut table, mut spots) = (RouteTable::new(), Vec::new());
    if let Some(value) = root.take("route") {
        for value in value.list() {
            table = routes::add(&value.section()?, upstreams, table, &mut spots)?;
        }
    }
    table.compile().map_err(|error| match error {
        RouteError::Unreachable { route, other } => {
            let other = spots[other].seen_from(&spots[route]);
            let text =
                format!("this route can never be reached: the one in {other} takes all of its requests");
            spots[route].error(text)
        }
        error => root.error(error),
    })
}
