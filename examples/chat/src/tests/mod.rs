//! Whole chats by seed, in virtual time.

mod ends;
mod lines;
mod messages;
mod rooms;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};

use super::{Args, HELP, MISSED_MAX, server};
use clap::Parser;

const SECOND: Duration = Duration::from_secs(1);

/// In this time each line comes, whatever the network does.
const SOON: Duration = Duration::from_secs(600);

const LINE_BYTES_MAX: usize = 4096;

/// A chat on one to four shards.
fn starts(sim: &Sim) -> SimServer {
    let [lines, http, messages] = ["10.0.0.1:7000", "10.0.0.1:9000", "10.0.0.1:7080"];
    let args = Args::parse_from(["chat", "--listen", lines, "--http", http, "--websocket", messages]);
    sim.start_several(server(&args).shards(1 + sim.seed() as usize % 4)).unwrap()
}

async fn next(me: &mut ClientStream) -> io::Result<String> {
    me.line().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Reads up to a line.
async fn awaits(me: &mut ClientStream, wanted: &str) -> io::Result<()> {
    while next(me).await? != wanted {}
    Ok(())
}

async fn asks(me: &mut ClientStream, line: &str, answer: &str) -> io::Result<()> {
    me.send(format!("{line}\n")).await?;
    assert_eq!(next(me).await?, answer, "{line}");
    Ok(())
}

/// Connects, and is called `name` from then on.
async fn enters(net: &Net, addr: SocketAddr, name: &str) -> io::Result<ClientStream> {
    let mut me = net.connect(addr).await?;
    let greeting = next(&mut me).await?;
    assert!(greeting.starts_with("* you are guest-"), "{greeting}");
    assert!(greeting.ends_with(", in lobby; /name X, /join ROOM, /leave, /who, /quit"), "{greeting}");
    me.send(format!("/name {name}\n")).await?;
    awaits(&mut me, &format!("* you are called {name} now")).await?;
    Ok(me)
}

/// A place where members wait for each other. One that gives up is waited for no more.
struct Meeting {
    missing: Rc<Cell<usize>>,
    is_there: bool,
}

impl Meeting {
    fn of(count: usize) -> Rc<Cell<usize>> {
        Rc::new(Cell::new(count))
    }

    fn new(missing: &Rc<Cell<usize>>) -> Meeting {
        Meeting { missing: missing.clone(), is_there: false }
    }

    fn comes(&mut self) {
        if !std::mem::replace(&mut self.is_there, true) {
            self.missing.set(self.missing.get() - 1);
        }
    }

    async fn all(&mut self, net: &Net) {
        self.comes();
        while self.missing.get() > 0 {
            net.sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.comes();
    }
}
