//! Channels of a server against a rustls client, in memory.

mod clients;
mod ends;
mod names;
mod pair;
mod records;
mod replacing;
mod sessions;
mod upstream;

/// TLS of a server, by the tested version of rustls.
fn server() -> ringserve_tls::Tls {
    ringserve_tls::Tls::server()
}
