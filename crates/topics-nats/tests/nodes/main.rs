//! Topics on several nodes: in simulations by seed, with a scripted NATS, and beside a real one.

mod real;
mod service;
