//! The limits on admission: their values, and orders that change them.

use clap::{Args, Subcommand};
use ringserve_report::{Admission, AdmissionChange, AdmissionLimits, Rate};

use crate::client::{Endpoint, Failure};
use crate::text::{plain, seconds, table};

#[derive(Clone, Debug, Args)]
pub struct AdmissionOptions {
    /// The listener whose limits are meant, and those that share them: an address, or its number
    /// from 0. All, if it is left out
    #[arg(long, global = true, value_name = "ADDRESS")]
    listener: Option<String>,
    #[command(subcommand)]
    order: Option<Order>,
}

#[derive(Clone, Debug, Subcommand)]
enum Order {
    /// Denies networks temporarily: their peers are closed at once
    Deny(Timed),
    /// Admits peers of networks temporarily, whatever other limits say except accept_rate
    Allow(Timed),
    /// Forgets networks that were denied or allowed temporarily
    Forget {
        /// Networks as they were given, separated by commas
        #[arg(value_name = "NETWORKS")]
        networks: String,
    },
    /// Sets a limit: per_address=20, address_rate=5/20, connections_max=50000,
    /// connection_rate=100/500, accept_rate=20000/5000, or per_address=off
    Limit {
        /// The limit and its value; for a rate, connections per second and at once
        #[arg(value_name = "NAME=VALUE")]
        limit: String,
    },
}

#[derive(Clone, Debug, Args)]
struct Timed {
    /// Addresses and networks, separated by commas: 192.0.2.7,2001:db8::/32
    #[arg(value_name = "NETWORKS")]
    networks: String,
    /// Seconds for which that holds, at most 2592000
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=2_592_000))]
    seconds: u64,
}

/// Shows the limits, or changes them.
pub fn run(endpoint: &Endpoint, options: &AdmissionOptions, json: bool) -> Result<u8, Failure> {
    let Some(order) = &options.order else { return show(endpoint, json) };
    let path = match order {
        Order::Deny(timed) => timed.path("deny")?,
        Order::Allow(timed) => timed.path("allow")?,
        Order::Forget { networks } => format!("/admission/forget?network={}", checked(networks, "networks")?),
        Order::Limit { limit } => format!("/admission/limit?{}", checked(limit, "a limit")?),
    };
    let listener = match &options.listener {
        Some(listener) => format!("&listener={}", checked(listener, "a listener")?),
        None => String::new(),
    };
    println!("{}", plain(endpoint.post(&format!("{path}{listener}"))?.trim()));
    Ok(0)
}

impl Timed {
    fn path(&self, verb: &str) -> Result<String, Failure> {
        let networks = checked(&self.networks, "networks")?;
        Ok(format!("/admission/{verb}?network={networks}&seconds={}", self.seconds))
    }
}

/// Checks that a query can hold the text as it is.
fn checked<'a>(text: &'a str, what: &str) -> Result<&'a str, Failure> {
    let fits = |c: char| c.is_ascii_alphanumeric() || ".:/,=_-[]@".contains(c);
    match !text.is_empty() && text.chars().all(fits) {
        true => Ok(text),
        false => Err(Failure(format!("{:?} is not {what}", text.chars().take(60).collect::<String>()))),
    }
}

fn show(endpoint: &Endpoint, json: bool) -> Result<u8, Failure> {
    if json {
        println!("{}", endpoint.get("/admission")?.trim_end());
        return Ok(0);
    }
    print!("{}", text_of(&endpoint.get_json("/admission")?));
    Ok(0)
}

fn text_of(admission: &Admission) -> String {
    if admission.limits.is_empty() && admission.accept_rate.is_none() {
        return "the server limits no peer (Server::admission)\n".to_owned();
    }
    let mut text = String::new();
    if let Some(rate) = admission.accept_rate {
        text.push_str(&format!("{}\n", line_of_rate(rate)));
    }
    for limits in &admission.limits {
        text.push_str(&limits_of(limits));
    }
    for change in &admission.changes {
        text.push_str(&format!("{}\n", line_of_change(change)));
    }
    text
}

/// The rate of the whole server.
pub fn line_of_rate(Rate { per_second, burst }: Rate) -> String {
    format!("accept_rate={per_second}/{burst} of the whole server")
}

/// The change, and the time since then.
pub fn line_of_change(change: &AdmissionChange) -> String {
    format!("{} ago: {}", seconds(change.ago_seconds), plain(&change.what))
}

/// The limits, each as an order would set it, and the connections and networks that count for them.
pub fn line_of_limits(limits: &AdmissionLimits) -> String {
    let count = |count: Option<u32>| count.map_or("off".to_owned(), |count| count.to_string());
    let rate = |rate: Option<Rate>| {
        rate.map_or("off".to_owned(), |rate| format!("{}/{}", rate.per_second, rate.burst))
    };
    format!(
        "per_address={} address_rate={} connections_max={} connection_rate={}{}",
        count(limits.per_address),
        rate(limits.address_rate),
        count(limits.connections_max),
        rate(limits.connection_rate),
        limits.connections.map_or(String::new(), |now| format!(", {now} connections count")),
    )
}

fn limits_of(limits: &AdmissionLimits) -> String {
    let mut text = line_of_limits(limits) + "\n";
    if !limits.networks.is_empty() {
        let line = |network: &ringserve_report::TimedNetwork| {
            let what = if network.allows { "allowed" } else { "denied" };
            vec![plain(&network.network), what.to_owned(), seconds(network.left_seconds)]
        };
        text.push_str(&table(
            &["NETWORK", "IS", "FOR"],
            &limits.networks.iter().map(line).collect::<Vec<_>>(),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use ringserve_report::TimedNetwork;

    use super::*;

    #[test]
    fn limits_and_changes_are_shown() {
        let none = text_of(&Admission::default());
        assert!(none.contains("limits no peer"), "{none}");
        let rate_alone = text_of(&Admission { accept_rate: Some(Rate::default()), ..Admission::default() });
        assert_eq!(rate_alone, "accept_rate=0/0 of the whole server\n");
        let timed = TimedNetwork { network: "192.0.2.0/24".into(), allows: false, left_seconds: 90.0 };
        let limits = AdmissionLimits {
            per_address: Some(20),
            address_rate: Some(Rate { per_second: 5, burst: 20 }),
            networks_total: 1,
            networks: vec![timed],
            connections: Some(7),
            ..AdmissionLimits::default()
        };
        let change = AdmissionChange { ago_seconds: 5.0, what: "per_address is 20\x1b[2J".into() };
        let accept_rate = Some(Rate { per_second: 20_000, burst: 5000 });
        let text = text_of(&Admission { limits: vec![limits], accept_rate, changes: vec![change] });
        for words in [
            "per_address=20 address_rate=5/20 connections_max=off",
            "7 connections",
            "accept_rate=20000/5000",
            "192.0.2.0/24",
            "denied",
        ] {
            assert!(text.contains(words), "{words} is not in {text}");
        }
        assert!(!text.contains('\x1b'), "no answer moves the cursor: {text:?}");
    }

    #[test]
    fn text_that_would_change_the_request_is_refused() {
        for text in ["", "10.0.0.0/8&seconds=1", "a b", "10.0.0.1#", "10.0.0.1\r\nx: y", "ä"] {
            assert!(checked(text, "networks").is_err(), "{text:?}");
        }
        assert!(checked("10.0.0.0/8,2001:db8::/32", "networks").is_ok());
        assert!(checked("address_rate=5/20", "a limit").is_ok());
    }
}
