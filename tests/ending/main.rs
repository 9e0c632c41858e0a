//! The ends of connections and servers: by the peer, by a limit, by a drain.

mod drains;
mod ends;
mod heartbeats;
mod slow_readers;
mod time_limits;
mod trickle;
