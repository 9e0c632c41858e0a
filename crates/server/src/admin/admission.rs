//! `/admission`: the limits on who is let in, as they are, and orders that change them.

use std::time::Duration;

use hyper::{Response, StatusCode};
use ringserve_core::Time;
use ringserve_report::{Admission, AdmissionChange, AdmissionLimits, Rate, TimedNetwork};

use super::answer::{self, Answer};
use super::routes::{Order, parameters};
use super::target::Running;
use crate::admission::{AdmissionControl, AdmissionError, IpList};

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

/// Applies the order of a request, and answers with what was done, or with what is wrong.
pub(super) fn apply_order(running: &Running, order: Order, query: Option<&str>) -> Response<Answer> {
    match carry_out(running, order, query) {
        Ok(done) => answer::sentence(StatusCode::OK, done),
        Err(why) => answer::sentence(StatusCode::BAD_REQUEST, why),
    }
}

/// # Errors
/// A sentence with the cause; nothing is changed then.
fn carry_out(running: &Running, order: Order, query: Option<&str>) -> Result<String, String> {
    let told = |error: AdmissionError| error.to_string();
    if order == Order::Limit {
        let (control, limit) = parse_limit(running, query)?;
        return set(&control, &limit).map_err(told);
    }
    let [network, seconds, listener] = parameters(query, ["network", "seconds", "listener"])?;
    let control = control_at(running, listener)?;
    let text = network.ok_or("the network is missing: give network=192.0.2.0/24")?;
    let networks: IpList = text.parse().map_err(|error| format!("network: {error}"))?;
    if order == Order::Forget {
        if seconds.is_some() {
            return Err("forget takes no seconds".to_owned());
        }
        let count = control.forget(&networks).map_err(told)?;
        return Ok(format!("{count} of them were denied or allowed for a time, and are not any more"));
    }
    let seconds = seconds.ok_or("the time is missing: give seconds=600")?;
    let time = seconds.parse().map(Duration::from_secs);
    let time = time.map_err(|_| format!("seconds is {seconds:.20}; it must be a whole number"))?;
    match order {
        Order::Allow => {
            control.allow(&networks, time).map(|at| format!("{text} is allowed for {time:?}{}", control.share(at)))
        },
        _ => control.deny(&networks, time).map(|at| {
            let at = control.share(at);
            format!("{text} is denied for {time:?}{at}; connections that are there stay, and networks that are allowed get in")
        }),
    }
    .map_err(told)
}

/// The name of a limit and its value; `None` switches it off.
type LimitSaid = (&'static str, Option<String>);

/// The limits that can be set.
const LIMITS: [&str; 5] =
    ["per_address", "address_rate", "connections_max", "connection_rate", "accept_rate"];

/// # Errors
/// There is not one limit in the query, or one that is none.
fn parse_limit(running: &Running, query: Option<&str>) -> Result<(AdmissionControl, LimitSaid), String> {
    let [a, b, c, d, e] = LIMITS;
    let [v, w, x, y, z, listener] = parameters(query, [a, b, c, d, e, "listener"])?;
    let control = control_at(running, listener)?;
    let mut given = LIMITS.into_iter().zip([v, w, x, y, z]).filter_map(|(name, value)| Some((name, value?)));
    match (given.next(), given.next()) {
        (Some((name, value)), None) => Ok((control, (name, (value != "off").then_some(value)))),
        _ => Err(format!(
            "give one of {}, as in per_address=20, address_rate=5/20 or per_address=off",
            LIMITS.join(", ")
        )),
    }
}

fn set(control: &AdmissionControl, (name, value): &LimitSaid) -> Result<String, AdmissionError> {
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
    let at = match *name {
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
    Ok(format!("{name} is {}{at}", value.as_deref().unwrap_or("off")))
}

/// # Errors
/// There is no such listener.
fn control_at(running: &Running, listener: Option<String>) -> Result<AdmissionControl, String> {
    let Some(listener) = listener else { return Ok(running.control.admission()) };
    let all = running.control.listeners();
    let said = all.iter().position(|addr| addr.to_string() == listener);
    match said.or_else(|| listener.parse().ok().filter(|number| *number < all.len())) {
        Some(number) => Ok(running.control.admission_at(number)),
        None => {
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            Err(format!("listener is {listener:.60}; there are {}", all.join(", ")))
        }
    }
}
