//! Allocations of a connection's first item with a codec.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its clients
//! allocate nothing while it is counted either.

use std::io::{Error, Read, Write};

use ringserve::codec::{CodecCx, CodecService, WithCodec};
use ringserve_tests::{Client, On, alone, no_time_limits, watch};
use stats_alloc::Region;
use tokio_util::bytes::BytesMut;
use tokio_util::codec::BytesCodec;

const CONNECTIONS: usize = 200;

struct Echo;

impl CodecService for Echo {
    type Codec = BytesCodec;
    type Session = ();
    type Error = Error;

    fn codec(&self) -> BytesCodec {
        BytesCodec::new()
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, item: BytesMut) -> Result<(), Error> {
        cx.reply(item)
    }
}

/// A handle for other threads would be two allocations for each connection, and a few atomic
/// operations for each item.
#[test]
fn items_of_a_codec_make_no_handle() {
    if !alone(items_of_a_codec_make_no_handle) {
        return;
    }
    let server = On::default().server(no_time_limits().unwatched());
    let running = server.start(|_| WithCodec::new(Echo)).expect("the server starts");
    let mut back = [0; 5];
    let mut ask = |client: &mut Client| {
        client.stream.write_all(b"hello").unwrap();
        client.stream.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"hello");
    };
    let connect = || (0..CONNECTIONS).map(|_| Client::connect(running.local_addrs()[0]));
    let mut warm: Vec<Client> = connect().collect();
    warm.iter_mut().for_each(&mut ask);
    let mut clients: Vec<Client> = connect().collect();
    watch::holds(&running, 2 * CONNECTIONS);
    let region = Region::new(crate::ALLOCATOR);
    clients.iter_mut().for_each(&mut ask);
    let made = region.change().allocations;
    println!("{made} allocations in the first items of {CONNECTIONS} connections");
    assert!(made < 2 * CONNECTIONS, "{made} allocations in the first items of {CONNECTIONS} connections");
    crate::a_pass_fits(
        &format!("allocations in {} items", 20 * CONNECTIONS),
        |made| *made == 0,
        || {
            let region = Region::new(crate::ALLOCATOR);
            (0..20).for_each(|_| clients.iter_mut().for_each(&mut ask));
            region.change().allocations
        },
    );
    drop((warm, clients));
    watch::holds(&running, 0);
    ringserve_tests::finish(running);
}
