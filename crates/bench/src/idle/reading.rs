//! A reading of all memory that counts.

use std::{fs, io};

use super::Plan;
use super::memory::{Kernel, anonymous_bytes};
use super::slabs::Slabs;

pub(super) struct Reading {
    /// Anonymous memory of the server, in bytes.
    user: u64,
    kernel: Kernel,
    slabs: Option<Slabs>,
}

impl Reading {
    pub(super) fn now(plan: &Plan, server: u32) -> io::Result<Reading> {
        if plan.drop_caches {
            let path = "/proc/sys/vm/drop_caches";
            fs::write(path, "2").map_err(|error| {
                io::Error::new(error.kind(), format!("--drop-caches: {path}: {error}; root may write it"))
            })?;
        }
        let slabs = if plan.slabs { Some(Slabs::now()?) } else { None };
        Ok(Reading { user: anonymous_bytes(server)?, kernel: Kernel::now()?, slabs })
    }

    /// Bytes of user memory and of the kernel's, for each of the connections opened since `before`.
    pub(super) fn growth(&self, before: &Reading, connections: usize) -> (f64, f64) {
        let each = |before, after| each(before, after, connections);
        (each(before.user, self.user), each(before.kernel.used(), self.kernel.used()))
    }

    /// Prints the parts of the growth on standard error.
    pub(super) fn explain(&self, name: &str, before: &Reading, connections: usize) {
        let each = |before, after| each(before, after, connections);
        let (was, is) = (&before.kernel, &self.kernel);
        eprintln!("{name}: {} -> {} bytes of anonymous memory", before.user, self.user);
        eprintln!(
            "{name}: the kernel's for each connection: slab {:.0}, stacks and tables {:.0}, socket buffers {:.0}; MemAvailable fell \
             by {:.0}, with sockets' inodes counted as used",
            each(was.slab, is.slab),
            each(was.others, is.others),
            each(was.buffers, is.buffers),
            each(is.left_since(*was), was.available),
        );
        if let (Some(before), Some(after)) = (&before.slabs, &self.slabs) {
            for (cache, bytes) in after.growth(before) {
                eprintln!(
                    "{name}: slab {cache}: {:.0} for each connection",
                    bytes as f64 / connections as f64
                );
            }
        }
    }
}

fn each(before: u64, after: u64, connections: usize) -> f64 {
    after.saturating_sub(before) as f64 / connections as f64
}
