//! Reaching a connection or a shard from elsewhere: handles, pushes, messages, wake-ups.

mod awaits;
mod broadcast;
mod handles;
mod messages;
mod metrics;
mod pushes;
mod snapshots;
mod wakes;
