//! Clients with certificates.

use std::sync::Arc;

use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber, date_time_ymd,
};
use ringserve_core::CloseReason;
use ringserve_tls::rustls::version::{TLS12, TLS13};
use ringserve_tls::rustls::{AlertDescription, Error};
use ringserve_tls::{Clients, TlsListener};

use crate::pair::{Authority, Cert, Pair, client_config};

fn listener(authority: &Authority, clients: Clients) -> TlsListener {
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    TlsListener::new(crate::server().certificate(chain, key).clients(clients)).unwrap()
}

fn alert(listener: &TlsListener, authority: &Authority, cert: Option<&Cert>) -> Vec<AlertDescription> {
    [&TLS12, &TLS13]
        .into_iter()
        .map(|version| {
            let config = Arc::new(client_config(authority, &[version], cert));
            let mut pair = Pair::new(listener, &config, "localhost");
            pair.exchange();
            let Some(Error::AlertReceived(alert)) = pair.client_error else {
                panic!("{:?}", pair.client_error)
            };
            assert_eq!(pair.seen.fault, Some(CloseReason::TlsHandshakeFailed(alert.into())));
            assert_eq!(pair.seen.ready, 0);
            alert
        })
        .collect()
}

#[test]
fn identity_is_the_verified_certificate() {
    let authority = Authority::new("authority");
    let listener = listener(&authority, Clients::of(authority.pem().into(), true));
    let cert = authority.ecdsa(&["client.example.org", "spiffe://example.org/billing"]);
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(client_config(&authority, &[version], Some(&cert)));
        let pair = Pair::new(&listener, &config, "localhost").connected();
        let info = pair.info();
        let identity = info.identity().unwrap();
        assert_eq!(identity.dns_names().collect::<Vec<_>>(), ["client.example.org"]);
        assert_eq!(identity.uris().collect::<Vec<_>>(), ["spiffe://example.org/billing"]);
        assert_eq!(identity.chain().count(), 1);
    }
}

#[test]
fn client_without_a_certificate_is_refused_unless_it_may() {
    let authority = Authority::new("authority");
    let required = listener(&authority, Clients::of(authority.pem().into(), true));
    assert_eq!(alert(&required, &authority, None), [AlertDescription::CertificateRequired; 2]);
    let optional = listener(&authority, Clients::of(authority.pem().into(), false));
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    let pair = Pair::new(&optional, &config, "localhost").connected();
    assert!(pair.info().identity().is_none());
}

#[test]
fn certificate_of_another_authority_is_refused_if_none_is_due() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let cert = theirs.ecdsa(&["client"]);
    for required in [true, false] {
        let listener = listener(&ours, Clients::of(ours.pem().into(), required));
        assert_eq!(alert(&listener, &ours, Some(&cert)), [AlertDescription::UnknownCA; 2]);
    }
}

#[test]
fn revoked_certificate_is_refused() {
    let authority = Authority::new("authority");
    let [good, bad] = [1, 2].map(|serial| {
        authority.sign(&["client"], KeyPair::generate().unwrap(), |params| {
            params.serial_number = Some(SerialNumber::from(serial));
        })
    });
    let list = CertificateRevocationListParams {
        this_update: date_time_ymd(2020, 1, 1),
        next_update: date_time_ymd(2099, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![RevokedCertParams {
            serial_number: SerialNumber::from(2),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        }],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = list.signed_by(&authority.issuer).unwrap().pem().unwrap();
    let clients = Clients::of(authority.pem().into(), true).revoked_by(list.as_str().into());
    let listener = listener(&authority, clients);
    assert_eq!(alert(&listener, &authority, Some(&bad)), [AlertDescription::CertificateRevoked; 2]);
    let config = Arc::new(client_config(&authority, &[&TLS13], Some(&good)));
    Pair::new(&listener, &config, "localhost").connected();
}

#[test]
fn authorities_with_rubbish_are_named_at_the_start() {
    let authority = Authority::new("authority");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let error = |clients: Clients| {
        let tls = crate::server().certificate(chain.clone(), key.clone()).clients(clients);
        TlsListener::new(tls).unwrap_err().to_string()
    };
    let junk = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    assert_eq!(error(Clients::of("rubbish".into(), true)), "has no certificate");
    assert!(error(Clients::of(junk.into(), true)).starts_with("has a certificate that is none: "));
    let revoked = |lists: &str| error(Clients::of(authority.pem().into(), true).revoked_by(lists.into()));
    assert_eq!(revoked("rubbish"), "has no revocation list");
    let junk = "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n";
    assert!(revoked(junk).starts_with("has a revocation list that is none: "));
    let missing = Clients::required("/no/such/ca.pem").unwrap_err().to_string();
    assert!(missing.starts_with("/no/such/ca.pem: cannot be read: "));
}
