//! A listener's TLS is replaced while it is in use.

use std::fs;
use std::sync::Arc;

use ringserve_core::Transport;
use ringserve_tls::rustls::version::TLS13;
use ringserve_tls::{Pem, Tls, TlsListener};

use crate::pair::{Authority, Pair, client_config};

#[test]
fn new_connections_have_the_new_certificate_and_old_ones_stay() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let cert = new.ecdsa(&["localhost"]);
    let listener = crate::pair::listener(&old);
    let transport = listener.transport();
    let (old, new) = [old, new].map(|authority| Arc::new(client_config(&authority, &[&TLS13], None))).into();
    let mut before = Pair::new(&listener, &old, "localhost").connected();
    listener.replace(Tls::server().certificate(cert.pems().0, cert.pems().1)).unwrap();
    before.say(b"still here");
    assert_eq!(before.seen.plain, b"still here");
    let mut pair = Pair::new(&listener, &new, "localhost");
    // As a shard that was there before.
    pair.channel = transport.begin(&mut pair.out).unwrap();
    pair.connected();
}

#[test]
fn what_cannot_be_used_leaves_the_old_one() {
    let authority = Authority::new("authority");
    let dir = std::env::temp_dir().join(format!("ringserve-tls-replacing-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let (chain, key) = (dir.join("cert.pem"), dir.join("key.pem"));
    let [first, second] = [(); 2].map(|()| authority.ecdsa(&["localhost"]));
    fs::write(&chain, &first.chain).unwrap();
    fs::write(&key, &first.key).unwrap();
    let tls = Tls::server().certificate(Pem::file(&chain).unwrap(), Pem::file(&key).unwrap());
    let listener = TlsListener::new(tls).unwrap();
    assert_eq!(listener.files(), [chain.clone(), key.clone()]);
    let shown = || {
        // It has no session to resume.
        let config = Arc::new(client_config(&authority, &[&TLS13], None));
        let pair = Pair::new(&listener, &config, "localhost").connected();
        pair.client.peer_certificates().map(|chain| chain[0].to_vec())
    };
    let before = shown();
    // The certificate is there, and its key is not yet.
    fs::write(&chain, &second.chain).unwrap();
    let error = listener.reload().unwrap_err();
    assert_eq!(error.file(), Some(&*key));
    assert_eq!(shown(), before);
    fs::remove_file(&key).unwrap();
    assert!(listener.reload().unwrap_err().to_string().contains("cannot be read"));
    assert_eq!(shown(), before);
    fs::write(&key, &second.key).unwrap();
    listener.reload().unwrap();
    assert_ne!(shown(), before);
    fs::remove_dir_all(&dir).unwrap();
}
