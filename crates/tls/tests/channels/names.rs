//! Certificates by the name that a client asks for, and those that cannot be used.

use std::sync::Arc;

use rcgen::{KeyPair, date_time_ymd};
use ringserve_tls::rustls::pki_types::CertificateDer;
use ringserve_tls::rustls::pki_types::pem::PemObject;
use ringserve_tls::rustls::version::{TLS12, TLS13};
use ringserve_tls::rustls::{self, ClientConfig, ServerConfig};
use ringserve_tls::{Pem, Tls, TlsError, TlsListener};

use crate::pair::{Authority, Cert, Pair, client_config, client_config_of};

fn shown(pair: &Pair) -> &[u8] {
    &pair.client.peer_certificates().unwrap()[0]
}

fn is(cert: &Cert, pair: &Pair) -> bool {
    *CertificateDer::from_pem_slice(cert.chain.as_bytes()).unwrap() == *shown(pair)
}

#[test]
fn name_then_wildcard_then_default_is_shown() {
    let authority = Authority::new("authority");
    let all = ["localhost", "www.example.org", "other.example.org", "a.b.example.org", "example.org"];
    let [default, exact, star] = [(); 3].map(|()| authority.ecdsa(&all));
    let tls = crate::server().certificate(default.pems().0, default.pems().1);
    let tls = tls.certificate_for("WWW.example.org.", exact.pems().0, exact.pems().1);
    let tls = tls.certificate_for("*.example.org", star.pems().0, star.pems().1);
    let listener = TlsListener::new(tls).unwrap();
    let config = Arc::new(client_config(&authority, &[&TLS12, &TLS13], None));
    for (name, cert) in [
        ("www.example.org", &exact),
        ("WWW.EXAMPLE.ORG", &exact),
        ("other.example.org", &star),
        ("a.b.example.org", &default),
        ("example.org", &default),
        ("localhost", &default),
    ] {
        let pair = Pair::new(&listener, &config, name).connected();
        assert!(is(cert, &pair), "{name}");
        assert_eq!(pair.info().server_name(), Some(&*name.to_ascii_lowercase()));
    }
}

#[test]
fn name_with_a_trailing_dot_is_the_name_without() {
    let authority = Authority::new("authority");
    let [default, exact] = [(); 2].map(|()| authority.ecdsa(&["www.example.org"]));
    let tls = crate::server().certificate(default.pems().0, default.pems().1);
    let tls = tls.certificate_for("www.example.org", exact.pems().0, exact.pems().1);
    let listener = TlsListener::new(tls).unwrap();
    // A rustls client removes the dot, so another byte takes its place first.
    let config = Arc::new(client_config(&authority, &[&TLS12], None));
    let mut pair = Pair::new(&listener, &config, "www.example.orgX");
    let mut hello = pair.client_bytes();
    let name = hello.windows(16).position(|bytes| bytes == b"www.example.orgX").unwrap();
    hello[name + 15] = b'.';
    pair.feed(&hello);
    let certificate = CertificateDer::from_pem_slice(exact.chain.as_bytes()).unwrap();
    assert!(pair.out.windows(certificate.len()).any(|bytes| *bytes == *certificate));
}

#[test]
fn client_is_shown_the_key_that_it_can_use() {
    let authority = Authority::new("authority");
    let (ecdsa, rsa) = (authority.ecdsa(&["localhost"]), authority.rsa(&["localhost"]));
    let tls =
        crate::server().certificate(ecdsa.pems().0, ecdsa.pems().1).certificate(rsa.pems().0, rsa.pems().1);
    let listener = TlsListener::new(tls).unwrap();
    let config = client_config(&authority, &[&TLS12], None);
    let mut provider = ClientConfig::crypto_provider(&config).as_ref().clone();
    let pair = Pair::new(&listener, &Arc::new(config), "localhost").connected();
    assert!(is(&ecdsa, &pair));
    provider.cipher_suites.retain(|suite| format!("{suite:?}").contains("ECDHE_RSA"));
    let config = client_config_of(provider, &authority, &[&TLS12], None);
    let pair = Pair::new(&listener, &Arc::new(config), "localhost").connected();
    assert!(is(&rsa, &pair));
}

#[test]
fn address_for_a_name_gets_the_default() {
    let authority = Authority::new("authority");
    let cert = authority.sign(&["localhost"], KeyPair::generate().unwrap(), |params| {
        params.subject_alt_names.push(rcgen::SanType::IpAddress([127, 0, 0, 1].into()));
    });
    let listener = TlsListener::new(crate::server().certificate(cert.pems().0, cert.pems().1)).unwrap();
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    let pair = Pair::new(&listener, &config, "127.0.0.1").connected();
    assert_eq!(pair.info().server_name(), None);
}

fn error(tls: Tls) -> String {
    let error: TlsError = TlsListener::new(tls).unwrap_err();
    assert!(!error.to_string().contains('\n'));
    error.to_string()
}

#[test]
fn client_that_can_use_no_key_hears_of_a_failure() {
    let authority = Authority::new("authority");
    let listener = crate::pair::listener(&authority);
    let mut provider = rustls::crypto::ring::default_provider();
    let algorithms = &mut provider.signature_verification_algorithms;
    let is_rsa =
        |scheme: rustls::SignatureScheme| scheme.as_str().is_some_and(|name| name.starts_with("RSA"));
    let of_rsa: Vec<_> = algorithms.mapping.iter().copied().filter(|(scheme, _)| is_rsa(*scheme)).collect();
    algorithms.mapping = of_rsa.leak();
    let config = crate::pair::client_config_of(provider, &authority, &[&TLS12, &TLS13], None);
    let mut pair = Pair::new(&listener, &Arc::new(config), "localhost");
    pair.exchange();
    // `handshake_failure`: scanners count it as an answer.
    assert_eq!(pair.seen.fault, Some(ringserve_core::CloseReason::TlsHandshakeFailed(40)));
}

#[test]
fn certificates_that_cannot_be_shown_are_named_at_the_start() {
    let authority = Authority::new("authority");
    let (good, other) = (authority.ecdsa(&["localhost"]), authority.ecdsa(&["localhost"]));
    let key = || KeyPair::generate().unwrap();
    let old = authority.sign(&["localhost"], key(), |params| params.not_after = date_time_ymd(2001, 2, 3));
    let young = authority.sign(&["localhost"], key(), |params| params.not_before = date_time_ymd(2999, 2, 3));
    let with = |chain: Pem, key: Pem| error(crate::server().certificate(chain, key));
    assert_eq!(with(good.pems().0, other.pems().1), "is not the key of the certificate");
    assert!(with(old.pems().0, old.pems().1).starts_with("the certificate expired "));
    assert!(with(young.pems().0, young.pems().1).starts_with("the certificate is not valid before "));
    assert_eq!(with("rubbish".into(), good.pems().1), "has no certificate");
    assert_eq!(with(good.pems().0, "rubbish".into()), "has no private key");
    let cut = &good.chain[..good.chain.len() / 2];
    assert!(with(cut.into(), good.pems().1).starts_with("is no PEM file: "));
    let junk = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    assert!(with(junk.into(), good.pems().1).starts_with("has a certificate that cannot be read: "));
    assert_eq!(error(crate::server()), "there is no certificate: give one to `Tls::certificate`");
    let named = |name: &str| error(crate::server().certificate_for(name, good.pems().0, good.pems().1));
    assert!(named("a..b").starts_with("`a..b` is no name for a certificate"));
    assert!(named("www.*.org").starts_with("`www.*.org` is no name"));
    let alpn = crate::server().certificate(good.pems().0, good.pems().1).alpn([""]);
    assert_eq!(error(alpn), "a protocol of ALPN has 0 bytes; it must have 1 to 255");
}

#[test]
fn configuration_without_connections_is_refused_at_the_start() {
    let authority = Authority::new("authority");
    let config = crate::pair::listener_of(Tls::server(), &authority).config();
    let with = |change: fn(&mut ServerConfig)| {
        let mut config = (*config).clone();
        change(&mut config);
        TlsListener::new(Tls::from_config(Arc::new(config))).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(with(|_| {}), Ok(()));
    let early = "the configuration takes early data, which can be replayed: set `max_early_data_size` to 0";
    assert_eq!(with(|config| config.max_early_data_size = 1), Err(early.into()));
    let fragment = with(|config| config.max_fragment_size = Some(1)).unwrap_err();
    assert_eq!(fragment, rustls::Error::BadMaxFragmentSize.to_string());
}

#[test]
fn file_with_a_fault_is_named() {
    let missing = Pem::file("/no/such/cert.pem").unwrap_err();
    assert!(missing.to_string().starts_with("/no/such/cert.pem: cannot be read: "));
    let authority = Authority::new("authority");
    let dir = std::env::temp_dir().join(format!("ringserve-tls-names-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (chain, key) = (dir.join("cert.pem"), dir.join("key.pem"));
    std::fs::write(&chain, authority.ecdsa(&["localhost"]).chain).unwrap();
    std::fs::write(&key, authority.ecdsa(&["localhost"]).key).unwrap();
    let error = error(crate::server().certificate(Pem::file(&chain).unwrap(), Pem::file(&key).unwrap()));
    assert_eq!(error, format!("{}: is not the key of the certificate in {}", key.display(), chain.display()));
    std::fs::remove_dir_all(&dir).unwrap();
}
