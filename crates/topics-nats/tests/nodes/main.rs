//! Topics on several nodes: in simulations by seed, with a scripted NATS, and beside a real one.

mod broker;
mod by_seed;
mod faults;
mod real;
mod service;
