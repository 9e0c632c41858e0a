//! Distribution of connections over processes and source addresses.

use std::net::Ipv4Addr;
use std::{fs, io};

/// The first source address; others follow it. Far from those of `churn`.
const FIRST_SOURCE: Ipv4Addr = Ipv4Addr::new(127, 1, 0, 1);

/// The most connections from one address. The kernel searches for a free port with each connect,
/// which is quick while two of three are free.
const PER_SOURCE_MAX: usize = 9000;

/// The share of part `index` of `parts` in `total`. Shares differ by one at most, and none shrinks
/// when `total` grows.
pub(super) fn share(total: usize, parts: usize, index: usize) -> usize {
    total / parts + usize::from(index < total % parts)
}

/// The number of parts of at most `most` that `total` things need.
pub(super) fn parts(total: usize, most: usize) -> usize {
    total.div_ceil(most).max(1)
}

/// The loopback addresses of one process: `count` of them, and the connections of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sources {
    pub(crate) first: Ipv4Addr,
    pub(crate) connections_each: usize,
}

impl Sources {
    /// The addresses of process `index`, when each process has at most `connections`. No two
    /// processes share one.
    pub(super) fn of_process(index: usize, connections: usize, each: usize) -> Sources {
        let before = index * parts(connections, each);
        Sources { first: nth_after(FIRST_SOURCE, before), connections_each: each }
    }

    /// The source of the process's connection `number`.
    pub(super) fn address(self, number: usize) -> Ipv4Addr {
        nth_after(self.first, number / self.connections_each)
    }
}

/// Connections that one address may have, limited by its ports.
pub(super) fn connections_each() -> io::Result<usize> {
    let path = "/proc/sys/net/ipv4/ip_local_port_range";
    let text = fs::read_to_string(path)?;
    let ports = ports_in(&text).ok_or_else(|| io::Error::other(format!("{path} reads {text:?}")))?;
    // All ports if there are few: then connecting takes longer, and works.
    Ok(ports.min(PER_SOURCE_MAX))
}

/// Ports in a range such as `32768 60999`, both ends included.
fn ports_in(text: &str) -> Option<usize> {
    let mut ends = text.split_ascii_whitespace().map(|end| end.parse::<usize>().ok());
    let (first, last) = (ends.next()??, ends.next()??);
    (first <= last).then(|| last - first + 1)
}

fn nth_after(first: Ipv4Addr, number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(first.to_bits() + number as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_sum_up_and_never_shrink() {
        for total in [0, 1, 1000, 1001, 1500, 999_999, 1_000_000] {
            for count in [1, 2, 3, 51] {
                let shares: Vec<_> = (0..count).map(|index| share(total, count, index)).collect();
                assert_eq!(shares.iter().sum::<usize>(), total, "{count} parts");
                assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
                let grown = (0..count).all(|index| share(total + 1, count, index) >= shares[index]);
                assert!(grown, "{total} in {count} parts");
            }
        }
    }

    #[test]
    fn as_many_parts_as_hold_everything() {
        assert_eq!((parts(1, 1000), parts(1000, 1000), parts(1001, 1000)), (1, 1, 2));
    }

    #[test]
    fn no_address_has_too_many_connections_nor_two_processes() {
        let (processes, connections, each) = (51, 19_608, 9000);
        let mut used = std::collections::HashMap::new();
        for process in 0..processes {
            let sources = Sources::of_process(process, connections, each);
            for number in 0..connections {
                let (count, holder) = used.entry(sources.address(number)).or_insert((0, process));
                *count += 1;
                assert_eq!(*holder, process);
            }
        }
        assert_eq!(used.len(), processes * 3);
        assert!(used.iter().all(|(address, (count, _))| *count <= each && address.is_loopback()));
        assert!(used.contains_key(&FIRST_SOURCE));
    }

    #[test]
    fn ports_include_both_ends() {
        assert_eq!(ports_in("32768\t60999\n"), Some(28_232));
        for text in ["", "1", "2 1", "a b"] {
            assert_eq!(ports_in(text), None, "{text:?}");
        }
    }
}
