//! Replacement of a listener's TLS while it is in use.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rcgen::{KeyPair, date_time_ymd};
use ringserve_core::Transport;
use ringserve_tls::rustls::version::TLS13;
use ringserve_tls::{Clients, Pem, ServerTls, Tls, TlsError, TlsListener};

use crate::pair::{Authority, Cert, Pair, client_config};

/// A certificate in files, and a server's TLS with it.
struct Files {
    dir: PathBuf,
    chain: PathBuf,
    key: PathBuf,
    tls: Tls,
}

impl Files {
    fn of(test: &str, cert: &Cert) -> Files {
        let dir = std::env::temp_dir().join(format!("ringserve-tls-{test}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (chain, key) = (dir.join("cert.pem"), dir.join("key.pem"));
        fs::write(&chain, &cert.chain).unwrap();
        fs::write(&key, &cert.key).unwrap();
        let tls = crate::server().certificate(Pem::file(&chain).unwrap(), Pem::file(&key).unwrap());
        Files { dir, chain, key, tls }
    }
}

#[test]
fn new_connections_have_the_new_certificate_and_old_ones_stay() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let cert = new.ecdsa(&["localhost"]);
    let listener = crate::pair::listener(&old);
    let transport = listener.transport();
    let (old, new) = [old, new].map(|authority| Arc::new(client_config(&authority, &[&TLS13], None))).into();
    let mut before = Pair::new(&listener, &old, "localhost").connected();
    listener.replace(crate::server().certificate(cert.pems().0, cert.pems().1)).unwrap();
    before.say(b"still here");
    assert_eq!(before.seen.plain, b"still here");
    let mut pair = Pair::new(&listener, &new, "localhost");
    // Like a shard that was there before.
    pair.channel = transport.begin(&mut pair.out).unwrap();
    pair.connected();
}

#[test]
fn what_cannot_be_used_leaves_the_old_one() {
    let authority = Authority::new("authority");
    let [first, second] = [(); 2].map(|()| authority.ecdsa(&["localhost"]));
    let Files { dir, chain, key, tls } = Files::of("replacing", &first);
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

#[test]
fn failed_reload_names_file_and_cause_in_one_line() {
    let authority = Authority::new("authority");
    let [first, other] = [(); 2].map(|()| authority.ecdsa(&["localhost"]));
    let expired = authority.sign(&["localhost"], KeyPair::generate().unwrap(), |params| {
        params.not_after = date_time_ymd(2020, 1, 1);
    });
    let Files { dir, chain, key, tls } = Files::of("failing", &first);
    let authorities = dir.join("ca.pem");
    fs::write(&authorities, authority.pem()).unwrap();
    let listener = TlsListener::new(tls.clients(Clients::optional(&authorities).unwrap())).unwrap();
    let shown = || {
        let config = Arc::new(client_config(&authority, &[&TLS13], None));
        let pair = Pair::new(&listener, &config, "localhost").connected();
        pair.client.peer_certificates().map(|chain| chain[0].to_vec())
    };
    let before = shown();
    let junk = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (file, text, blamed, cause) in [
        (&chain, &*expired.chain, &chain, "the certificate expired "),
        (&chain, "rubbish", &chain, "has no certificate"),
        (&chain, junk, &chain, "has a certificate that cannot be read: "),
        (&chain, &*other.chain, &key, "is not the key of the certificate in "),
        (&key, "rubbish", &key, "has no private key"),
        (&key, &*other.key, &key, "is not the key of the certificate in "),
        (&authorities, "rubbish", &authorities, "has no certificate"),
        (&authorities, junk, &authorities, "has a certificate that is none: "),
    ] {
        let good = fs::read(file).unwrap();
        fs::write(file, text).unwrap();
        let error = listener.reload().unwrap_err();
        let line = error.to_string();
        assert_eq!(error.file(), Some(&**blamed), "{line}");
        assert!(line.starts_with(&format!("{}: {cause}", blamed.display())), "{line}");
        assert_eq!(line.lines().count(), 1, "{line}");
        assert_eq!(shown(), before, "{line}");
        fs::write(file, good).unwrap();
        listener.reload().unwrap();
    }
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn shards_do_not_wait_for_files_that_are_read() {
    let authority = Authority::new("authority");
    let cert = authority.ecdsa(&["localhost"]);
    let Files { dir, key, tls, .. } = Files::of("reading", &cert);
    let listener = TlsListener::new(tls).unwrap();
    // Reading a pipe waits for a writer.
    fs::remove_file(&key).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &key, rustix::fs::Mode::RWXU).unwrap();
    let reloads = std::thread::spawn({
        let listener = listener.clone();
        move || listener.reload()
    });
    // The pipe can be opened once the other end is.
    let mut pipe = fs::File::options().write(true).open(&key).unwrap();
    let (says, hears) = std::sync::mpsc::channel();
    let shard = std::thread::spawn({
        let listener = listener.clone();
        move || {
            let mut out = Vec::new();
            let begun = listener.transport().begin(&mut out).is_some();
            says.send(begun).unwrap();
        }
    });
    let begun = hears.recv_timeout(Duration::from_secs(10));
    std::io::Write::write_all(&mut pipe, cert.key.as_bytes()).unwrap();
    drop(pipe);
    reloads.join().unwrap().unwrap();
    shard.join().unwrap();
    assert_eq!(begun, Ok(true), "a shard waited for a file");
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn files_that_are_watched_are_read_again() {
    static REPORTS: Mutex<Vec<Result<(), TlsError>>> = Mutex::new(Vec::new());
    let authority = Authority::new("authority");
    let dir = std::env::temp_dir().join(format!("ringserve-tls-watching-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let (chain, key) = (dir.join("cert.pem"), dir.join("key.pem"));
    let write = |chain_text: &str, key_text: &str| {
        fs::write(&key, key_text).unwrap();
        // In one step, so that the file is not read half written.
        fs::write(dir.join("new"), chain_text).unwrap();
        fs::rename(dir.join("new"), &chain).unwrap();
    };
    let [first, second] = [(); 2].map(|()| authority.ecdsa(&["localhost"]));
    write(&first.chain, &first.key);
    let tls = crate::server().certificate(Pem::file(&chain).unwrap(), Pem::file(&key).unwrap());
    let listener = TlsListener::new(tls.watch_files(Duration::from_millis(5))).unwrap();
    listener.watch(|report| REPORTS.lock().unwrap().push(report)).unwrap();
    let wait_for = |good: bool| {
        let start = Instant::now();
        while !REPORTS.lock().unwrap().iter().any(|report| report.is_ok() == good) {
            assert!(start.elapsed() < Duration::from_secs(20), "nothing was read");
            std::thread::yield_now();
        }
    };
    write("rubbish, and longer than what was there before\n", &second.key);
    wait_for(false);
    write(&second.chain, &second.key);
    wait_for(true);
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    Pair::new(&listener, &config, "localhost").connected();
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn expired_certificate_in_use_does_not_keep_the_others() {
    static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let authority = Authority::new("authority");
    let end = now() + 2;
    let sign = |end: u64| {
        authority.sign(&["old.example.org"], KeyPair::generate().unwrap(), |params| {
            params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(end);
        })
    };
    let (old, other) = (sign(end), sign(end));
    let [first, second] = [(); 2].map(|()| authority.ecdsa(&["localhost"]));
    let tls = |old: &Cert, new: &Cert| {
        let tls = crate::server().certificate(new.pems().0, new.pems().1);
        tls.certificate_for("old.example.org", old.pems().0, old.pems().1)
    };
    let listener = TlsListener::new(tls(&old, &first)).unwrap();
    listener.warn_by(|warning| WARNINGS.lock().unwrap().push(warning.to_string()));
    while now() <= end {
        std::thread::yield_now();
    }
    listener.replace(tls(&old, &second)).unwrap();
    let expired = "the certificate expired 0 days ago";
    assert_eq!(WARNINGS.lock().unwrap()[..], [format!("{expired}; it stays in use")]);
    assert_eq!(listener.replace(tls(&other, &second)).unwrap_err().to_string(), expired, "a new one");
    let log = std::env::temp_dir().join(format!("ringserve-tls-warned-{}", std::process::id()));
    for _ in 0..2 {
        listener.replace(tls(&first, &second).key_log(&log)).unwrap();
    }
    let logged = format!("the secrets of connections are logged in {}", log.display());
    assert_eq!(WARNINGS.lock().unwrap()[1..], [logged]);
    fs::remove_file(&log).unwrap();
}

#[test]
fn expiry_of_certificates_in_use_is_known_by_name() {
    let authority = Authority::new("authority");
    let until = |year| {
        authority.sign(&["localhost"], KeyPair::generate().unwrap(), |params| {
            params.not_after = date_time_ymd(year, 1, 1);
        })
    };
    let (first, soon, late) = (until(2090), until(2080), until(2099));
    let tls = |cert: &Cert| {
        let tls = crate::server().certificate(cert.pems().0, cert.pems().1);
        let tls = tls.certificate_for("www.example.org", late.pems().0, late.pems().1);
        tls.certificate_for("www.example.org", soon.pems().0, soon.pems().1)
    };
    let listener = TlsListener::new(tls(&first)).unwrap();
    let server: ServerTls = [listener.clone(), listener.clone()].into_iter().collect();
    let found = || {
        let each = server.expiries().into_iter().map(|of| (of.listener, of.name, of.not_after));
        each.collect::<Vec<_>>()
    };
    let of_listener = |listener, default: u64| {
        let named = |name: &str, year| (listener, name.to_owned(), seconds(year));
        [named("", default), named("www.example.org", 2080)]
    };
    assert_eq!(found(), [of_listener(0, 2090), of_listener(1, 2090)].concat());
    listener.replace(tls(&late)).unwrap();
    assert_eq!(found(), [of_listener(0, 2099), of_listener(1, 2099)].concat(), "that of the one in use");
}

/// From the beginning of 1970 to that of a year of this century.
fn seconds(year: u64) -> u64 {
    let days = (year - 1970) * 365 + (year - 1969) / 4;
    days * 86_400
}

#[test]
fn change_before_the_watch_begins_is_seen() {
    static REPORTS: AtomicUsize = AtomicUsize::new(0);
    let authority = Authority::new("authority");
    let cert = authority.ecdsa(&["localhost"]);
    let Files { dir, chain, tls, .. } = Files::of("stamps", &cert);
    let listener = TlsListener::new(tls.watch_files(Duration::from_millis(5))).unwrap();
    fs::write(&chain, format!("{}\n", cert.chain)).unwrap();
    // Like a server with two addresses.
    for _ in 0..2 {
        listener
            .watch(|_| {
                REPORTS.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
    }
    let start = Instant::now();
    while REPORTS.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "nothing was read");
        std::thread::yield_now();
    }
    drop(listener);
    fs::remove_dir_all(&dir).unwrap();
}
