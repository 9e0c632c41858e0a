//! ringline by its path for echo alone: the completion handler sends received bytes back out of the
//! receive buffer, and no task wakes up. It supports only bytes.

use std::io;

use common::Mode;
use ringline::{AsyncEventHandler, ConnCtx};

fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    match mode {
        Mode::Raw => rival_ringline::run::<Direct>(address),
        Mode::Lines => Err(io::Error::other("the direct path of ringline has no place to look for lines")),
    }
}

struct Direct;

impl AsyncEventHandler for Direct {
    fn on_accept(&self, conn: ConnCtx) -> impl Future<Output = ()> + 'static {
        echo(conn)
    }

    fn create_for_worker(_worker: usize) -> Self {
        Self
    }
}

/// Waits for the end of the connection; the rest happens without this task.
async fn echo(conn: ConnCtx) {
    conn.run_direct_echo().await;
}
