//! Channels of a server against a client of rustls', in memory.

mod clients;
mod ends;
mod names;
mod pair;
mod records;
mod replacing;
mod sessions;
mod upstream;

/// TLS of a server, by the version of rustls that this is about.
fn server() -> ringserve_tls::Tls {
    ringserve_tls::Tls::server()
}
