//! The service that benchmarks call.

use std::convert::Infallible;

use ringserve::{Cx, Frame, Service};

/// Sends each frame back.
pub struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}
