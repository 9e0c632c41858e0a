//! HTTP and gRPC, with hyper on a shard.

mod floods;
mod grpc;
mod over_streams;
mod server;
mod timer;
mod websocket;
