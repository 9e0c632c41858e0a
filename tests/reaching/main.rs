//! Reaching a connection or a shard from elsewhere: handles, pushes, messages, wake-ups.

mod access_log;
mod awaits;
mod broadcast;
mod handles;
mod inspect;
mod messages;
mod metrics;
mod overload;
mod pushes;
mod snapshots;
mod traces;
mod wakes;
