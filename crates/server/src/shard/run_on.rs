use ringserve_core::framing::Framing;
use ringserve_core::{Driver, Limits};

use super::{Parts, Running, Shard};
use crate::log::LogObserver;
use crate::remote::Remote;
use crate::running::ShardReport;
use crate::service::Service;
use crate::tasks::calls;

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
        limits,
        connections_max,
        1,
        framing,
        driver.pool().clone(),
        LogObserver::new(0),
    );
    let shard = Shard::new(0, 1, remote);
    Running::new(Parts { shard, core, driver, service, admit: None, others: None }, calls::<S>).run()
}
