//! A broadcast to a thousand connections through a submission queue of eight entries.

mod common;

use std::io::Read;
use std::net::TcpStream;

use common::{UringRig as Rig, small};
use ringserve_core::{CloseHow, Completion, ConnId, Driver, Op, SendEnd, Wait};
use ringserve_drivers::UringConfig;

const ENTRIES: u32 = 8;
const CONNECTIONS: u32 = 1000;

/// Hands the send of every connection to the driver before any turn, and takes turns until all of
/// them ended.
fn broadcast(rig: &mut Rig, ids: &[ConnId], text: &[u8], quietly: bool) {
    ids.iter().for_each(|id| rig.send(*id, text));
    let mut ended = vec![false; ids.len()];
    // Each turn submits what the queue holds; 125 turns are enough, and nothing depends on how many
    // more it takes.
    let turns_max = 4 * ids.len() / ENTRIES as usize;
    for _ in 0..turns_max {
        if quietly {
            rig.driver.defer_sent();
        }
        rig.turn(Wait::No);
        for event in rig.events.drain(..) {
            let Completion::Sent { id, end: SendEnd::Done, batch } = event else { panic!("{event:?}") };
            assert!(
                batch.is_empty() && !std::mem::replace(&mut ended[id.slot() as usize], true),
                "{id} twice"
            );
        }
        if ended.iter().all(|ended| *ended) {
            return;
        }
    }
    panic!("after {turns_max} turns {} have not ended", ended.iter().filter(|ended| !**ended).count());
}

/// Checks that each client got these bytes and nothing else.
fn all_got(clients: &mut [TcpStream], text: &[u8]) {
    let mut got = vec![0; text.len()];
    for (n, client) in clients.iter_mut().enumerate() {
        client.read_exact(&mut got).unwrap();
        assert!(got == text, "connection {n}");
        client.set_nonblocking(true).unwrap();
        let more = client.peek(&mut [0]);
        assert!(
            more.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock),
            "connection {n}: more"
        );
        client.set_nonblocking(false).unwrap();
    }
}

#[test]
fn broadcast_to_a_thousand_by_eight_entries_reaches_each_once() {
    let (submission_entries, completion_entries) = (ENTRIES, ENTRIES);
    let config = UringConfig { submission_entries, completion_entries, connections: CONNECTIONS, ..small() };
    let mut rig = Rig::accepting(&config);
    let (mut clients, ids): (Vec<_>, Vec<_>) = (0..CONNECTIONS).map(|slot| rig.connect(slot)).unzip();
    for (round, quietly) in [false, true, true, false].into_iter().enumerate() {
        let before = rig.driver.stats();
        let text = format!("broadcast {round}");
        broadcast(&mut rig, &ids, text.as_bytes(), quietly);
        all_got(&mut clients, text.as_bytes());
        let waited = rig.driver.stats().submissions_delayed - before.submissions_delayed;
        assert!(waited >= u64::from(CONNECTIONS - ENTRIES), "{waited} operations had to wait");
    }
    for id in ids {
        rig.driver.submit(Op::Close { id, how: CloseHow::Abort });
    }
    for _ in 0..CONNECTIONS {
        rig.wait_for("Closed", |event| matches!(event, Completion::Closed { .. }).then_some(()));
    }
    rig.settled();
}
