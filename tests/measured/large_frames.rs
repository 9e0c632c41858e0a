//! Large frames are put together in blocks that are reused, so that after the first ones none of
//! their pages is new.
//!
//! Faults are counted for the whole process, so there is one test in this file, and its clients
//! allocate nothing while they are counted.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::thread;

use ringserve::framing::LengthPrefix;
use ringserve::{Cx, Frame, Service};
use ringserve_tests::client::frame;
use ringserve_tests::{Client, On, alone, finish, no_time_limits, pattern};

const CLIENTS: usize = 4;
const FRAME_BYTES: usize = 1 << 20;
const WARM_UP: usize = 30;
const FRAMES: usize = 50;

/// Answers a frame with its sum.
struct Sums;

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
}

impl Service for Sums {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(&sum(&frame).to_be_bytes()[..]);
        Ok(())
    }
}

/// Page faults of this process that read no disk (proc_pid_stat(5)).
fn page_faults() -> i64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').nth(7).unwrap().parse().unwrap()
}

#[test]
fn large_frames_fault_no_page_after_the_first_ones() {
    if !alone(large_frames_fault_no_page_after_the_first_ones) {
        return;
    }
    let limits = no_time_limits().frame_bytes_max(2 * FRAME_BYTES);
    let running = On::default().server(limits).framing(LengthPrefix::default()).start(|_| Sums).unwrap();
    let payload = pattern(FRAME_BYTES);
    let (wire, expected) = (frame(&payload), frame(sum(&payload).to_be_bytes()));
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| Client::connect(running.local_addrs()[0])).collect();
    let mut pass = |frames: usize| {
        thread::scope(|scope| {
            for client in &mut clients {
                let (wire, expected) = (&wire, &expected);
                scope.spawn(move || {
                    for _ in 0..frames {
                        client.stream.write_all(wire).unwrap();
                        let mut answer = [0; 12];
                        client.stream.read_exact(&mut answer).unwrap();
                        assert_eq!(answer, expected[..]);
                    }
                });
            }
        });
    };
    pass(WARM_UP);
    let pages = (CLIENTS * FRAMES * FRAME_BYTES / 4096) as i64;
    // The memory of the test's own threads is small compared with the pages of a frame.
    crate::a_pass_fits(
        &format!("page faults, for frames of {pages} pages"),
        |faults| *faults < pages / 100,
        || {
            let before = page_faults();
            pass(FRAMES);
            page_faults() - before
        },
    );
    drop(clients);
    finish(running);
}
