//! Connections whose clients write at the same time.

use std::collections::VecDeque;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use ringserve_core::{Completion, ConnId, ReceiveEnd, Wait};

use super::{PATIENCE, Rig, Tested, pattern};

/// Connections to which a thread each writes `len` bytes and then ends.
pub fn busy<D: Tested>(
    rig: &mut Rig<D>,
    count: u32,
    len: usize,
) -> (Vec<ConnId>, Vec<thread::JoinHandle<()>>) {
    (0..count)
        .map(|slot| {
            let (mut client, id) = rig.connect_receiving(slot);
            let writer = thread::spawn(move || client.write_all(&pattern(slot as usize, len)).unwrap());
            (id, writer)
        })
        .unzip()
}

/// Takes everything until each connection saw its end; leases are held for `hold` completions.
pub fn take_all<D: Tested>(rig: &mut Rig<D>, ids: &[ConnId], len: usize, hold: usize) {
    let mut got = vec![Vec::new(); ids.len()];
    let mut held = VecDeque::new();
    let mut open = ids.len();
    let deadline = Instant::now() + PATIENCE;
    while open > 0 {
        assert!(Instant::now() < deadline, "{open} connections did not end; {:?}", rig.driver.stats());
        if rig.events.is_empty() {
            held.pop_front();
        }
        rig.turn(if held.is_empty() { Wait::For(Duration::from_millis(100)) } else { Wait::No });
        while let Some(event) = rig.events.pop_front() {
            match event {
                Completion::Received { id, lease } => {
                    got[id.slot() as usize].extend_from_slice(&lease);
                    held.push_back(lease);
                    if held.len() > hold {
                        held.pop_front();
                    }
                }
                Completion::ReceiveEnded { end, .. } => {
                    assert_eq!(end, ReceiveEnd::Eof);
                    open -= 1;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    for (slot, got) in got.iter().enumerate() {
        assert!(*got == pattern(slot, len), "connection {slot} got {} bytes, wrong or too few", got.len());
    }
}
