//! The same of rustls 0.24, with ring.

mod clients;
mod ends;
mod names;
mod pair;
mod records;
mod replacing;
mod sessions;

/// TLS of a server, by the version of rustls that this is about.
fn server() -> ringserve_tls::Tls {
    ringserve_tls::Tls::server().next_by(std::sync::Arc::new(rustls_next_ring::DEFAULT_PROVIDER))
}
