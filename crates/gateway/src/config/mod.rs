//! The file of the gateway: what it says, and what runs of it. With the feature `bin`.
//!
//! | file | what is in it |
//! |---|---|
//! | `error.rs`, `reader.rs` | tables of TOML with the places of their values, and errors that name them |
//! | `sources.rs` | the texts: the file, those that it includes, variables of the environment |
//! | `file.rs` | the whole file |
//! | `upstreams.rs`, `services.rs`, `routes.rs` | its parts |
//! | `running.rs` | a server of it, and what changes when it is read again |

mod error;
mod file;
mod reader;
mod routes;
mod running;
mod services;
mod sources;
mod upstreams;

pub use error::ConfigError;
pub use file::GatewayFile;
pub use running::{GatewayServer, Reloader};
