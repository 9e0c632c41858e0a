//! ringline with a task per connection, the form that a protocol has.

use std::io;
use std::time::Duration;

use common::Mode;
use ringline::{AsyncEventHandler, ConnCtx, ParseResult};

fn main() -> io::Result<()> {
    let (mode, address) = common::arguments();
    match mode {
        Mode::Raw => rival_ringline::run::<Raw>(address),
        Mode::Lines => rival_ringline::run::<Lines>(address),
    }
}

struct Raw;

impl AsyncEventHandler for Raw {
    fn on_accept(&self, conn: ConnCtx) -> impl Future<Output = ()> + 'static {
        raw(conn)
    }

    fn create_for_worker(_worker: usize) -> Self {
        Self
    }
}

struct Lines;

impl AsyncEventHandler for Lines {
    fn on_accept(&self, conn: ConnCtx) -> impl Future<Output = ()> + 'static {
        lines(conn)
    }

    fn create_for_worker(_worker: usize) -> Self {
        Self
    }
}

/// Sends received bytes back until the connection ends.
async fn raw(conn: ConnCtx) {
    let mut refused = Vec::new();
    loop {
        let consumed = conn.with_data(|data| {
            // Sends the receive buffer itself, without the copy that `send_nowait` makes.
            if conn.forward_recv_buf(data).is_err() {
                refused.extend_from_slice(data);
            }
            ParseResult::Consumed(data.len())
        });
        if consumed.await == 0 || send(&conn, &refused).await.is_err() {
            return;
        }
        refused.clear();
    }
}

/// Answers all available lines in one send.
async fn lines(conn: ConnCtx) {
    let mut output = Vec::new();
    loop {
        let mut failed = false;
        let consumed = conn.with_data(|data| match common::echo_lines(data, &mut output) {
            Ok(0) => ParseResult::NeedMore,
            Ok(taken) => ParseResult::Consumed(taken),
            Err(_) => {
                failed = true;
                ParseResult::Consumed(data.len())
            }
        });
        if consumed.await == 0 || failed || send(&conn, &output).await.is_err() {
            return;
        }
        output.clear();
    }
}

/// Sends `data` through the pool, and waits for room in it if necessary.
async fn send(conn: &ConnCtx, data: &[u8]) -> io::Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    loop {
        match conn.send(data) {
            Ok(sent) => return sent.await.map(|_| ()),
            // Nothing of it was taken: the pool is empty until other sends complete.
            Err(error) if error.kind() == io::ErrorKind::Other => {
                ringline::sleep(Duration::from_millis(1)).await;
            }
            Err(error) => return Err(error),
        }
    }
}
