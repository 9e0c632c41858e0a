//! Upstreams on the real kernel: what operators see of them, and names by DNS, backends that end
//! under load.

mod dns;
mod killed;
mod reports;
