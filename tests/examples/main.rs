//! The examples and a few servers, talked to by real clients.

mod balancer;
mod clients;
mod http;
mod kv;
mod probes;
mod proxy;
mod starting;
mod tls_echo;
mod websocket;
