//! How connections and servers end: by the peer, by a limit, by a drain.

mod drains;
mod ends;
mod heartbeats;
mod slow_readers;
mod time_limits;
mod trickle;
