//! A reply that owns its bytes is sent without a copy: it costs one small block, and neither memory
//! nor time for its length.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its client
//! allocates nothing while it is counted either.

use std::convert::Infallible;
use std::io::{Read, Write};

use bytes::Bytes;
use ringserve::framing::Raw;
use ringserve::{Cx, Frame, Service};
use ringserve_tests::{Client, On, alone, no_time_limits, watch};
use stats_alloc::Region;

const WARM_UP: usize = 200;
const REPLIES: usize = 1_000;

/// From here on a reply is not copied.
const OWNED_BYTES_MIN: usize = 32 << 10;

/// The most bytes of a block for a lease.
const BLOCK_BYTES_MAX: usize = 128;

/// Answers each byte with bytes that the reply owns.
struct Body {
    body: Bytes,
    /// Whether they are written between others.
    in_parts: bool,
}

impl Service for Body {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        for _ in 0..frame.len() {
            if self.in_parts {
                cx.reply_with(|out| out.put_owned(self.body.clone()));
            } else {
                cx.reply(self.body.clone());
            }
        }
        Ok(())
    }
}

#[test]
fn owned_reply_takes_one_lease_and_no_copy() {
    if !alone(owned_reply_takes_one_lease_and_no_copy) {
        return;
    }
    for in_parts in [false, true] {
        for together in [1, 8] {
            counts(OWNED_BYTES_MIN, in_parts, together, 1);
            counts(5 * OWNED_BYTES_MIN + 7, in_parts, together, 1);
            // A reply with one byte less is copied, to memory that exists already.
            counts(OWNED_BYTES_MIN - 1, in_parts, together, 0);
        }
    }
}

/// Has `together` replies of `len` bytes requested at once, each of which may take as many blocks.
fn counts(len: usize, in_parts: bool, together: usize, blocks: usize) {
    let body = Bytes::from(vec![b'o'; len]);
    let server = On::default().server(no_time_limits().unwatched()).framing(Raw);
    let running = server.start(move |_| Body { body: body.clone(), in_parts }).expect("the server starts");
    let mut client = Client::connect(running.local_addrs()[0]);
    let mut back = vec![0; len * together];
    let mut ask = |replies: usize| {
        for _ in 0..replies / together {
            client.stream.write_all(&[b'?'; 8][..together]).unwrap();
            client.stream.read_exact(&mut back).unwrap();
        }
    };
    ask(WARM_UP);
    crate::a_pass_fits(
        &format!("{len} bytes, {together} together: allocations and their bytes in {REPLIES} replies"),
        |&(made, bytes)| made == blocks * REPLIES && bytes <= made * BLOCK_BYTES_MAX,
        || {
            let region = Region::new(crate::ALLOCATOR);
            ask(REPLIES);
            let change = region.change();
            (change.allocations + change.reallocations, change.bytes_allocated)
        },
    );
    assert!(back.iter().all(|byte| *byte == b'o'));
    drop(client);
    watch::holds(&running, 0);
    ringserve_tests::finish(running);
}
