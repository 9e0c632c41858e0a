//! Services on whole simulated servers, by seed. One binary: each would link a whole server of every kind.

mod bad_input;
mod blocking;
mod codec;
mod framed;
mod framings;
mod middleware;
mod overload;
mod proxies;
mod proxy_protocol;
mod replies;
mod scatter;
mod services;
mod snapshots;
mod starting;
mod tasks;
mod testing;
mod topics;
