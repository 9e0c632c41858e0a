use ringserve_core::framing::Framing;
use ringserve_core::{Driver, Limits};

use super::calls::calls;
use super::handle::Shard;
use super::inbox::Remote;
use super::{Parts, Running};
use crate::log::LogObserver;
use crate::service::Service;
use crate::stats::ShardReport;

/// Runs one shard with one listener on this thread, over any driver, until the driver breaks.
///
/// # Errors
/// The driver's.
pub fn run_on<S: Service, F: Framing, D: Driver>(
    driver: D,
    service: S,
    framing: F,
    limits: Limits,
) -> Result<ShardReport, i32> {
    let remote = Remote::new();
    let connections_max = driver.connections_max();
    let core = ringserve_core::Shard::new(
        limits.clone(),
        connections_max,
        1,
        framing,
        driver.pool().clone(),
        LogObserver::new(0),
    );
    let shard = Shard::new(0, 1, remote);
    // The driver has no slots beside those of accepted connections.
    let limits = Limits { upstreams_max: 0, ..limits };
    let first_upstream = connections_max as u32;
    let (admit, others) = (None, None);
    let parts = Parts { shard, core, driver, service, admit, others, limits, first_upstream };
    Running::new(parts, calls::<S>).run()
}
