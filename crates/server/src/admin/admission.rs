//! `/admission`: the limits on who is let in, as they are, and orders that change them.

use std::fmt;
use std::time::Duration;

use hyper::Response;
use ringserve_admission::{AdmissionControl, AdmissionError, IpList};
use ringserve_core::Time;
use ringserve_report::{Admission, AdmissionChange, AdmissionLimits, Rate, TimedNetwork};

use super::answer::{self, Answer};
use super::routes::{Order, parameters};
use super::target::Running;

/// Networks in a report, which is written each second: `/admission` has all of them.
pub(super) const NETWORKS_REPORTED: usize = 20;

/// The limits as they are now, with `networks` networks of each at most.
pub(super) fn admission(running: &Running, networks: usize) -> Admission {
    let control = running.control.admission();
    let now = running.control.now();
    let rate = |rate: Option<(u32, u32)>| rate.map(|(per_second, burst)| Rate { per_second, burst });
    let limits = control.settings().into_iter().map(|of| AdmissionLimits {
        per_address: of.per_address,
        address_rate: rate(of.address_rate),
        connections_max: of.connections_max,
        connection_rate: rate(of.connection_rate),
        connections: of.connections,
        networks_total: of.timed.len() as u64,
        networks: of
            .timed
            .into_iter()
            .take(networks)
            .map(|timed| TimedNetwork {
                network: timed.network,
                allows: timed.allows,
                left_seconds: timed.left.as_secs_f64(),
            })
            .collect(),
    });
    let ago = |at: Time| (now - at).as_secs_f64();
    let changes = control.changes();
    Admission {
        limits: limits.collect(),
        accept_rate: rate(control.accept_rate()),
        changes: changes
            .into_iter()
            .map(|of| AdmissionChange { ago_seconds: ago(of.at), what: of.what })
            .collect(),
    }
}

pub(super) fn show(running: &Running) -> Response<Answer> {
    answer::json(serde_json::to_vec(&admission(running, usize::MAX)))
}

/// A change that an order makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) what: What,
    /// The address of the one listener that is meant, with those that share its limits; `None` for
    /// all.
    pub(super) listener: Option<String>,
}

/// The change that is ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Deny {
        networks: String,
        time: Duration,
    },
    Allow {
        networks: String,
        time: Duration,
    },
    Forget {
        networks: String,
    },
    /// `None` switches the limit off.
    Limit {
        name: &'static str,
        value: Option<String>,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Deny { networks, time } => write!(f, "deny {networks:.100} for {time:?}")?,
            What::Allow { networks, time } => write!(f, "allow {networks:.100} for {time:?}")?,
            What::Forget { networks } => write!(f, "forget {networks:.100}")?,
            What::Limit { name, value } => {
                write!(f, "limit {name}={:.40}", value.as_deref().unwrap_or("off"))?
            }
        }
        match &self.listener {
            Some(listener) => write!(f, " at {listener}"),
            None => Ok(()),
        }
    }
}

/// The limits that can be set.
pub(super) const LIMITS: [&str; 5] =
    ["per_address", "address_rate", "connections_max", "connection_rate", "accept_rate"];

impl Change {
    /// The change that the query of an order asks for.
    ///
    /// # Errors
    /// A sentence with the cause.
    pub(super) fn parse(running: &Running, order: Order, query: Option<&str>) -> Result<Change, String> {
        if order == Order::Limit {
            let [a, b, c, d, e] = LIMITS;
            let [v, w, x, y, z, listener] = parameters(query, [a, b, c, d, e, "listener"])?;
            let listener = listener.map(|said| find_listener(running, &said)).transpose()?;
            let mut given =
                LIMITS.into_iter().zip([v, w, x, y, z]).filter_map(|(name, value)| Some((name, value?)));
            return match (given.next(), given.next()) {
                (Some((name, value)), None) => Ok(Change {
                    what: What::Limit { name, value: (value != "off").then_some(value) },
                    listener,
                }),
                _ => Err(format!(
                    "give one of {}, as in per_address=20, address_rate=5/20 or per_address=off",
                    LIMITS.join(", ")
                )),
            };
        }
        let [network, seconds, listener] = parameters(query, ["network", "seconds", "listener"])?;
        let listener = listener.map(|said| find_listener(running, &said)).transpose()?;
        let networks = network.ok_or("the network is missing: give network=192.0.2.0/24")?;
        if order == Order::Forget {
            return match seconds {
                Some(_) => Err("forget takes no seconds".to_owned()),
                None => Ok(Change { what: What::Forget { networks }, listener }),
            };
        }
        let seconds = seconds.ok_or("the time is missing: give seconds=600")?;
        let time = seconds.parse().map(Duration::from_secs);
        let time = time.map_err(|_| format!("seconds is {seconds:.20}; it must be a whole number"))?;
        let what = match order {
            Order::Allow => What::Allow { networks, time },
            _ => What::Deny { networks, time },
        };
        Ok(Change { what, listener })
    }

    /// Makes it. Returns what was done.
    ///
    /// # Errors
    /// A sentence with the cause; nothing is changed then.
    pub(super) fn apply(&self, running: &Running) -> Result<String, String> {
        let told = |error: AdmissionError| error.to_string();
        let control = control_of(running, self.listener.as_deref())?;
        let list = |text: &str| text.parse::<IpList>().map_err(|error| format!("network: {error}"));
        match &self.what {
            What::Limit { name, value } => set(&control, name, value.as_deref()).map_err(told),
            What::Forget { networks } => {
                let count = control.forget(&list(networks)?).map_err(told)?;
                Ok(format!("{count} of them were denied or allowed for a time, and are not any more"))
            }
            What::Allow { networks, time } => {
                let at = control.allow(&list(networks)?, *time).map_err(told)?;
                Ok(format!("{networks} is allowed for {time:?}{}", control.share(at)))
            }
            What::Deny { networks, time } => {
                let at = control.deny(&list(networks)?, *time).map_err(told)?;
                let at = control.share(at);
                Ok(format!(
                    "{networks} is denied for {time:?}{at}; connections that are there stay, and networks that are allowed get in"
                ))
            }
        }
    }
}

/// The control of all listeners, or of the one at this address and those that share its limits.
///
/// # Errors
/// There is no listener at this address.
pub(super) fn control_of(running: &Running, listener: Option<&str>) -> Result<AdmissionControl, String> {
    match listener {
        None => Ok(running.control.admission()),
        Some(listener) => Ok(running.control.admission_at(number_of(running, listener)?)),
    }
}

fn set(control: &AdmissionControl, name: &str, value: Option<&str>) -> Result<String, AdmissionError> {
    let wrong =
        |form: &str, value: &str| AdmissionError::new(format!("{name} is {value:.40}; it must be {form}"));
    let count = || match value {
        None => Ok(None),
        Some(value) => value.parse().map(Some).map_err(|_| wrong("a number of connections, or off", value)),
    };
    let rate = || match value {
        None => Ok(None),
        Some(value) => {
            let numbers = value
                .split_once('/')
                .and_then(|(rate, burst)| Some((rate.parse().ok()?, burst.parse().ok()?)));
            numbers.map(Some).ok_or_else(|| wrong("RATE/BURST, such as 5/20, or off", value))
        }
    };
    let at = match name {
        "per_address" => control.share(control.set_per_address(count()?)?),
        "address_rate" => control.share(control.set_address_rate(rate()?)?),
        "connections_max" => control.share(control.set_connections_max(count()?)?),
        "connection_rate" => control.share(control.set_connection_rate(rate()?)?),
        _ => match rate()? {
            Some((per_second, burst)) => {
                control.set_accept_rate(per_second, burst)?;
                String::new()
            }
            None => return Err(wrong("RATE/BURST: it cannot be switched off while the server runs", "off")),
        },
    };
    Ok(format!("{name} is {}{at}", value.unwrap_or("off")))
}

/// The address of a listener, which is said by that or by its number.
///
/// # Errors
/// There is no such listener.
fn find_listener(running: &Running, said: &str) -> Result<String, String> {
    let all = running.control.listeners();
    let known = all.iter().find(|addr| addr.to_string() == said);
    let known = known.or_else(|| all.get(said.parse::<usize>().ok()?));
    known.map(ToString::to_string).ok_or_else(|| no_listener(running, said))
}

/// # Errors
/// There is no listener at this address.
fn number_of(running: &Running, listener: &str) -> Result<usize, String> {
    let mut all = running.control.listeners().iter();
    all.position(|addr| addr.to_string() == listener).ok_or_else(|| no_listener(running, listener))
}

fn no_listener(running: &Running, said: &str) -> String {
    let all: Vec<String> = running.control.listeners().iter().map(ToString::to_string).collect();
    format!("listener is {said:.60}; there are {}", all.join(", "))
}
