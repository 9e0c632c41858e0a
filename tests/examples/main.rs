//! The examples, talked to by real clients.

mod clients;
mod http;
mod kv;
mod proxy;
