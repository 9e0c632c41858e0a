//! HTTP and gRPC, with hyper on a shard, and the admin endpoint, which is built on it.

mod access;
mod admin;
mod clients;
mod drains;
mod floods;
mod grpc;
mod over_streams;
mod server;
mod shed;
mod stops;
mod timer;
mod tunnels;
mod uploads;
mod websocket;
mod websocket_client;
