//! Unix sockets: the file and who may have it, and that everything holds which holds with TCP.

mod common;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use common::child::{Process, is_child};
use common::client::End;
use common::{Actor, Client, Lab, On, no_time_limits, on_epoll, pattern};
use ringserve::framing::LengthPrefix;
use ringserve::{CloseReason, Error, Limits, ListenAddr, Running, Server, SocketOptions};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

/// A directory of this test alone, which goes with it.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("ringserve-{}-{name}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Dir(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The names of the files in it.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn server_at(path: impl Into<PathBuf>) -> Server<LengthPrefix> {
    let server = Server::bind_unix(path).shards(1).pin(false).limits(no_time_limits());
    server.framing(LengthPrefix::default())
}

fn start(path: impl Into<PathBuf>) -> Result<Running, Error> {
    server_at(path).start(|_| Actor::new(Default::default()))
}

#[track_caller]
fn refused(path: impl Into<PathBuf>) -> String {
    start(path).err().expect("it does not start").to_string()
}

#[test]
fn all_shards_accept_from_one_unix_socket() {
    let dir = Dir::new("shards");
    let lab = Lab::of(server_at(dir.path("s")).shards(4));
    assert_eq!(lab.running.listeners(), [ListenAddr::Unix(dir.path("s"))]);
    assert!(lab.running.local_addrs().is_empty() && lab.accept_queues().is_empty());
    let mut clients = Vec::new();
    for _ in 0..100 {
        let mut client = Client::connect_unix(dir.path("s"));
        assert_eq!(client.ask("e"), b"e");
        clients.push(client);
    }
    let payload = [&b"e"[..], &pattern(200_000)].concat();
    clients.iter_mut().for_each(|client| assert_eq!(client.ask("t"), b"t"));
    clients.iter_mut().for_each(|client| assert!(client.ask(&payload) == payload));
    let report = lab.report();
    let accepted: Vec<u64> = report.shards.iter().map(|shard| shard.counters.accepted).collect();
    println!("accepted by shards {accepted:?}, skew {:?}", report.accept_skew());
    assert_eq!((report.connections, accepted.iter().sum()), (100, 100));
    // With epoll whoever is awake first takes what is there.
    assert!(on_epoll() || accepted.iter().all(|count| *count > 0), "{accepted:?}");
    assert!(lab.shared.peers.lock().unwrap().iter().all(Option::is_none));
    drop(clients);
    lab.finish();
}
