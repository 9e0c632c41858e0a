//! The kernel's caches that grew, and so the use of its memory. Only root may read them.

use std::collections::HashMap;
use std::{fs, io};

/// Caches named in a report. The others are small.
const NAMED: usize = 12;

/// Bytes of each cache.
pub(super) struct Slabs(HashMap<String, u64>);

impl Slabs {
    /// Reads the caches of `/proc/slabinfo`, with an explanation if that cannot be read.
    pub(super) fn now() -> io::Result<Slabs> {
        let text = fs::read_to_string("/proc/slabinfo").map_err(|error| {
            io::Error::new(error.kind(), format!("--slabs: /proc/slabinfo: {error}; root may read it"))
        })?;
        Ok(Slabs(parse(&text, rustix::param::page_size() as u64)))
    }

    /// The caches that grew most since `earlier`, with their growth in bytes, the largest first.
    pub(super) fn growth(&self, earlier: &Slabs) -> Vec<(&str, u64)> {
        let grown =
            |(name, bytes): (&'_ String, &u64)| bytes.saturating_sub(*earlier.0.get(name).unwrap_or(&0));
        let mut growth: Vec<_> = self.0.iter().map(|cache| (cache.0.as_str(), grown(cache))).collect();
        growth.sort_by_key(|(name, bytes)| (std::cmp::Reverse(*bytes), *name));
        growth.truncate(NAMED);
        growth.retain(|(_, bytes)| *bytes > 0);
        growth
    }
}

/// Parses lines such as `TCP 14 26 2432 13 8 : tunables 0 0 0 : slabdata 2 2 0`: pages of a slab
/// are the sixth word, slabs the last but one.
fn parse(text: &str, page_bytes: u64) -> HashMap<String, u64> {
    let cache = |line: &str| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let pages: u64 = words.get(5)?.parse().ok()?;
        let slabs: u64 = words.get(words.len().checked_sub(2)?)?.parse().ok()?;
        Some((words[0].to_owned(), pages * slabs * page_bytes))
    };
    text.lines().filter_map(cache).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "slabinfo - version: 2.1\n# name <active_objs> <num_objs>\n\
        TCP                   14     26   2432   13    8 : tunables    0    0    0 : slabdata      2      2      0\n\
        filp                 900    960    256   32    2 : tunables    0    0    0 : slabdata     30     30      0\n";
    const AFTER: &str = "slabinfo - version: 2.1\n\
        TCP                   14     26   2432   13    8 : tunables    0    0    0 : slabdata     12     12      0\n\
        filp                 900    960    256   32    2 : tunables    0    0    0 : slabdata     29     29      0\n\
        new                    1      1   4096    1    1 : tunables    0    0    0 : slabdata      1      1      0\n";

    #[test]
    fn caches_are_listed_by_growth_without_those_that_did_not_grow() {
        let (before, after) = (Slabs(parse(BEFORE, 4096)), Slabs(parse(AFTER, 4096)));
        assert_eq!(after.growth(&before), [("TCP", 10 * 8 * 4096), ("new", 4096)]);
    }
}
