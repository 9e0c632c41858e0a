//! What both drivers stand on: the calls that they make alike, and what they keep alike.

pub(crate) mod accept;
pub(crate) mod activation;
pub(crate) mod connect;
pub(crate) mod process;
pub(crate) mod report;
pub(crate) mod socket_options;
pub(crate) mod table;
pub(crate) mod trial;
pub(crate) mod wait;
