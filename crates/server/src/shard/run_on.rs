use ringserve_core::framing::Framing;
use ringserve_core::{Driver, Limits};

use super::{LocalTasks, Parts, Running};
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
    let local_tasks = LocalTasks::new(remote.clone());
    Running::new(Parts { index: 0, core, driver, service, remote, admit: None, local_tasks }, calls::<S>)
        .run()
}
