//! Channels of WebSocket, as a shard calls them.

mod messages;
mod rules;
mod side;
mod upgrades;
