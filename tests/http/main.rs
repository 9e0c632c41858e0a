//! HTTP and gRPC, with hyper on a shard, and the admin endpoint that stands on it.

mod admin;
mod drains;
mod floods;
mod grpc;
mod over_streams;
mod server;
mod shed;
mod stops;
mod timer;
mod uploads;
mod websocket;
