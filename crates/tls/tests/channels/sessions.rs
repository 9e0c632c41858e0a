//! Sessions that are resumed, and those that must not be.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{KeyPair, date_time_ymd};
use ringserve_core::CloseReason;
use ringserve_tls::rustls::version::{TLS12, TLS13};
use ringserve_tls::rustls::{AlertDescription, ClientConfig, HandshakeKind};
use ringserve_tls::{Clients, Tickets, TlsListener};

use crate::pair::{Authority, Pair, client_config};

fn resumes(listener: &TlsListener, config: &Arc<ClientConfig>) -> bool {
    let pair = Pair::new(listener, config, "localhost").connected();
    pair.info().is_resumed()
}

#[test]
fn session_is_resumed_on_every_shard() {
    let authority = Authority::new("authority");
    let listener = crate::pair::listener(&authority);
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(client_config(&authority, &[version], None));
        assert!(!resumes(&listener, &config));
        // Each connection has its own transport here, as each shard has.
        for _ in 0..5 {
            assert!(resumes(&listener, &config));
        }
    }
}

#[test]
fn session_outlives_a_restart_with_a_file_of_tickets() {
    let authority = Authority::new("authority");
    let dir = std::env::temp_dir().join(format!("ringserve-tls-sessions-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("tickets.key");
    std::fs::write(&file, [7; 31]).unwrap();
    let error = Tickets::from_file(&file).unwrap_err().to_string();
    assert_eq!(error, format!("{}: has 31 bytes; a secret for tickets has at least 32", file.display()));
    std::fs::write(&file, [7; 48]).unwrap();
    let cert = authority.ecdsa(&["localhost"]);
    let start = |tickets: Tickets| {
        let (chain, key) = cert.pems();
        TlsListener::new(crate::server().certificate(chain, key).tickets(tickets)).unwrap()
    };
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(client_config(&authority, &[version], None));
        assert!(!resumes(&start(Tickets::from_file(&file).unwrap()), &config));
        assert!(resumes(&start(Tickets::from_file(&file).unwrap()), &config));
        assert!(!resumes(&start(Tickets::random()), &config), "of another process");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn session_of_other_authorities_is_not_resumed() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let cert = old.ecdsa(&["localhost"]);
    let client = old.ecdsa(&["client.example.org"]);
    let tls = |clients: Clients| {
        let (chain, key) = cert.pems();
        crate::server().certificate(chain, key).clients(clients)
    };
    let listener = TlsListener::new(tls(Clients::of(old.pem().into(), true))).unwrap();
    for version in [&TLS12, &TLS13] {
        listener.replace(tls(Clients::of(old.pem().into(), true))).unwrap();
        let config = Arc::new(client_config(&old, &[version], Some(&client)));
        assert!(!resumes(&listener, &config));
        assert!(resumes(&listener, &config));
        let pair = Pair::new(&listener, &config, "localhost").connected();
        let names: Vec<_> = pair.info().identity().unwrap().dns_names().map(str::to_owned).collect();
        assert_eq!(names, ["client.example.org"], "of a session that was resumed");
        // An equal configuration: the session is still good.
        listener.replace(tls(Clients::of(old.pem().into(), true))).unwrap();
        assert!(resumes(&listener, &config));
        listener.replace(tls(Clients::of(new.pem().into(), true))).unwrap();
        let mut pair = Pair::new(&listener, &config, "localhost");
        pair.exchange();
        assert!(pair.seen.fault.is_some() && pair.seen.ready == 0);
    }
}

#[test]
fn client_whose_certificate_expired_does_not_resume() {
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let authority = Authority::new("authority");
    let end = now().as_secs() + 4;
    let client = authority.sign(&["client"], KeyPair::generate().unwrap(), |params| {
        params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(end);
    });
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let clients = Clients::of(authority.pem().into(), true);
    let listener = TlsListener::new(crate::server().certificate(chain, key).clients(clients)).unwrap();
    let configs =
        [&TLS12, &TLS13].map(|version| Arc::new(client_config(&authority, &[version], Some(&client))));
    for config in &configs {
        assert!(!resumes(&listener, config));
        assert!(resumes(&listener, config), "while it is within its time");
    }
    while now().as_secs() <= end {
        std::thread::yield_now();
    }
    for config in &configs {
        let mut pair = Pair::new(&listener, config, "localhost");
        pair.exchange();
        let expired = AlertDescription::CertificateExpired.into();
        assert_eq!(pair.seen.fault, Some(CloseReason::TlsHandshakeFailed(expired)));
        assert_eq!(pair.client.handshake_kind(), Some(HandshakeKind::Resumed));
        assert!(pair.seen.ready == 0 && pair.client.process_new_packets().unwrap().peer_has_closed());
    }
}

#[test]
fn no_ticket_is_sent_where_none_is_wanted() {
    let authority = Authority::new("authority");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    for (count, resumed) in [(0, false), (1, true)] {
        let tls = crate::server().certificate(chain.clone(), key.clone()).tickets_sent(count);
        let listener = TlsListener::new(tls).unwrap();
        for version in [&TLS12, &TLS13] {
            let config = Arc::new(client_config(&authority, &[version], None));
            resumes(&listener, &config);
            assert_eq!(resumes(&listener, &config), resumed);
        }
    }
}
