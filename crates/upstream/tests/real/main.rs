//! Upstreams on the real kernel: what operators see of them, and names by DNS, backends that end
//! under load.

mod dns;
mod killed;
mod reports;

use std::convert::Infallible;

use ringserve::{Cx, Frame, Service};

/// Sends each line back, with the id that it may begin with.
struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        cx.reply(line);
        Ok(())
    }
}
