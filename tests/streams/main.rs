//! Streams of bytes: those accepted, those to upstreams, and shards inside a runtime.

mod blocking;
mod framed;
mod hosting;
mod streams;
mod upstreams;
