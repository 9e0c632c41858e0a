//! Clients, each with an address of its kind, and their helpers.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime;
use tokio::task::LocalSet;

use crate::client::Failure;

/// Clients per address: a kernel searches longer for a port if an address has thousands.
const OF_ONE_ADDRESS: usize = 250;

/// The address from which attackers come.
pub(super) const ATTACKER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 1, 0, 1));

/// The address of a client by its number, in 127.2.0.0/16.
pub(super) fn of_client(number: usize) -> IpAddr {
    let [high, low] = ((number / OF_ONE_ADDRESS + 1) as u16).to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, 2, high, low))
}

/// Connects from an address.
pub(super) async fn connect(from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from, 0))?;
    let stream = socket.connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sends a line and waits for it to come back.
pub(super) async fn echo(stream: &mut TcpStream) -> io::Result<()> {
    let (line, mut answer) = (b"echo\n", [0; 5]);
    stream.write_all(line).await?;
    stream.read_exact(&mut answer).await?;
    if answer == *line { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// Runs tasks of this thread until the given one is done.
pub(super) fn run_local<T>(done: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, done)
}

/// Raises the limit on descriptors of this process as far as allowed. Servers that it starts
/// inherit it.
pub(super) fn raise_descriptors() -> Result<(), Failure> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|error| Failure(format!("RLIMIT_NOFILE cannot be changed: {error}")))
}

/// Descriptors that this process may open.
pub(super) fn descriptors() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The value that this share of all values does not exceed; 0 if there is none.
pub(super) fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let place = (values.len() as f64 * share) as usize;
    values.get(place.min(values.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_spread_over_addresses_and_none_attacks() {
        let addresses: std::collections::HashSet<_> = (0..19_000).map(of_client).collect();
        assert_eq!(addresses.len(), 19_000 / OF_ONE_ADDRESS);
        assert!(!addresses.contains(&ATTACKER) && addresses.iter().all(IpAddr::is_loopback));
        assert_eq!(of_client(0), IpAddr::from([127, 2, 0, 1]));
    }

    #[test]
    fn percentile_is_a_value_that_was_measured() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!((percentile(&mut values, 0.5), percentile(&mut values, 0.99)), (51.0, 100.0));
        assert_eq!((percentile(&mut [7.0], 0.99), percentile(&mut [], 0.99)), (7.0, 0.0));
    }
}
