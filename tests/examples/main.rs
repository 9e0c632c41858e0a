//! The examples and a few servers, talked to by real clients.

mod clients;
mod http;
mod kv;
mod proxy;
mod websocket;
