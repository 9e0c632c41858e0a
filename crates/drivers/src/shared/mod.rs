//! The base of both drivers: system calls and bookkeeping that they share.

pub(crate) mod accept;
pub(crate) mod activation;
pub(crate) mod coalesce;
pub(crate) mod connect;
pub(crate) mod process;
pub(crate) mod report;
pub(crate) mod socket_options;
pub(crate) mod table;
pub(crate) mod trial;
pub(crate) mod wait;
