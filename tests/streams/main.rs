//! Streams of bytes: those accepted, those to upstreams, and shards inside a runtime.

mod blocking;
mod hosting;
mod streams;
mod upstreams;
