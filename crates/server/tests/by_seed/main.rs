//! Services on whole simulated servers, by seed. One binary: each would link a whole server of
//! every kind.

mod arrivals;
mod bad_input;
mod blocking;
mod codec;
mod ends;
mod framed;
mod framings;
mod heavy;
mod key_rates;
mod last_words;
mod late_calls;
mod middleware;
mod overload;
mod proxies;
mod proxy_protocol;
mod pushes;
mod read_rates;
mod replies;
mod services;
mod snapshots;
mod stages;
mod starting;
mod tasks;
mod testing;

use std::convert::Infallible;

use ringserve_server::{Cx, Frame, Service};

/// Says each frame again.
struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}
