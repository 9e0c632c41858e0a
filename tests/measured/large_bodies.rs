//! Number of sends and page faults of a large HTTP body.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::TcpStream;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use ringserve::{Server, http};
use ringserve_tests::{On, alone};

const BODY_BYTES: usize = 1 << 20;
const WARM_UP: usize = 20;
const REQUESTS: usize = 100;

static BODY: [u8; BODY_BYTES] = [b'b'; BODY_BYTES];

async fn answer(_request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(&BODY))))
}

/// Page faults of this process that read nothing from a disk.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, behind_name) = stat.rsplit_once(')').unwrap();
    behind_name.split_whitespace().nth(7).unwrap().parse().unwrap()
}

#[test]
fn a_body_of_a_mebibyte_leaves_in_one_send() {
    if !alone(a_body_of_a_mebibyte_leaves_in_one_send) {
        return;
    }
    // With the default limits of a server.
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).driver(On::default().driver);
    let running = server.start(|_| http(service_fn(answer))).unwrap();
    let mut client = TcpStream::connect(running.local_addrs()[0]).unwrap();
    let mut answer = vec![0; BODY_BYTES + 4096];
    let mut asks = || {
        client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").unwrap();
        let (mut read, mut whole) = (0, usize::MAX);
        while read < whole {
            read += client.read(&mut answer[read..]).unwrap();
            if whole == usize::MAX
                && let Some(head) = answer[..read].windows(4).position(|end| end == b"\r\n\r\n")
            {
                whole = head + 4 + BODY_BYTES;
            }
        }
        assert_eq!(read, whole, "there is more than the answer");
    };
    (0..WARM_UP).for_each(|_| asks());
    let (before, faults) = (running.stats_now().counters.sends, page_faults());
    (0..REQUESTS).for_each(|_| asks());
    let (sends, faults) = (running.stats_now().counters.sends - before, page_faults() - faults);
    println!("{sends} sends, {faults} page faults for {REQUESTS} bodies");
    assert_eq!(sends, REQUESTS as u64);
    assert!(faults < REQUESTS as u64, "{faults} page faults");
    drop(client);
    running.shutdown();
    running.wait().unwrap();
}
