//! A channel and a rustls client, with the bytes between them in memory.

use std::io::{Read, Write};
use std::rc::Rc;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, CloseReason, Transport, TransportConn, TransportError, TransportEvent};
use ringserve_tls::rustls::crypto::CryptoProvider;
use ringserve_tls::rustls::pki_types::pem::PemObject;
use ringserve_tls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use ringserve_tls::rustls::{self, ClientConfig, ClientConnection, RootCertStore, SupportedProtocolVersion};
use ringserve_tls::{Pem, Tls, TlsInfo, TlsListener};

/// A certificate with its key, as text.
#[derive(Clone)]
pub struct Cert {
    pub chain: String,
    pub key: String,
}

impl Cert {
    pub fn pems(&self) -> (Pem, Pem) {
        (self.chain.as_str().into(), self.key.as_str().into())
    }
}

/// An authority, which both ends may trust.
pub struct Authority {
    pub issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub fn new(name: &str) -> Authority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::CrlSign];
        Authority { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    pub fn ecdsa(&self, names: &[&str]) -> Cert {
        self.sign(names, KeyPair::generate().unwrap(), |_| {})
    }

    pub fn rsa(&self, names: &[&str]) -> Cert {
        self.sign(names, KeyPair::from_pem(include_str!("keys/rsa.pem")).unwrap(), |_| {})
    }

    pub fn sign(&self, names: &[&str], key: KeyPair, change: impl FnOnce(&mut CertificateParams)) -> Cert {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.contains("://") {
                true => SanType::URI((*name).try_into().unwrap()),
                false => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        change(&mut params);
        let chain = params.signed_by(&key, &self.issuer).unwrap().pem();
        Cert { chain, key: key.serialize_pem() }
    }
}

/// A client that trusts `authority`.
pub fn client_config(
    authority: &Authority,
    versions: &[&'static SupportedProtocolVersion],
    cert: Option<&Cert>,
) -> ClientConfig {
    client_config_of(rustls::crypto::ring::default_provider(), authority, versions, cert)
}

pub fn client_config_of(
    provider: CryptoProvider,
    authority: &Authority,
    versions: &[&'static SupportedProtocolVersion],
    cert: Option<&Cert>,
) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots);
    match cert {
        None => config.with_no_client_auth(),
        Some(cert) => {
            let chain =
                CertificateDer::pem_slice_iter(cert.chain.as_bytes()).collect::<Result<_, _>>().unwrap();
            let key = PrivateKeyDer::from_pem_slice(cert.key.as_bytes()).unwrap();
            config.with_client_auth_cert(chain, key).unwrap()
        }
    }
}

/// The state of a channel.
#[derive(Debug, Default)]
pub struct Seen {
    pub ready: usize,
    pub closed: bool,
    pub fault: Option<CloseReason>,
    pub steps: usize,
    pub plain: Vec<u8>,
}

/// A server's channel as a shard uses it, and a client.
pub struct Pair {
    pub channel: Box<dyn TransportConn>,
    pub client: ClientConnection,
    pub seen: Seen,
    /// Bytes that the server has to send.
    pub out: Vec<u8>,
    /// Bytes that the client received.
    pub heard: Vec<u8>,
    pub client_error: Option<rustls::Error>,
    /// Numbers of bytes that come together, the next one first; then all that are there.
    pub splits: Vec<usize>,
}

impl Pair {
    pub fn new(listener: &TlsListener, config: &Arc<ClientConfig>, name: &str) -> Pair {
        let mut out = Vec::new();
        let channel = listener.transport().begin(&mut out).unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        Pair {
            channel,
            client: ClientConnection::new(config.clone(), name).unwrap(),
            seen: Seen::default(),
            out,
            heard: Vec::new(),
            client_error: None,
            splits: Vec::new(),
        }
    }

    /// Passes `wire` to the channel, as a shard does.
    pub fn feed(&mut self, wire: &[u8]) {
        if self.seen.fault.is_some() || self.seen.closed {
            return;
        }
        let mut wire = LeaseMut::try_copy_of(wire).unwrap();
        loop {
            let mut unsealed = self.channel.decode(&mut wire, &mut self.out);
            if matches!(unsealed, TransportEvent::Work) {
                assert_eq!(self.seen.ready, 0, "work behind the handshake");
                self.seen.steps += 1;
                unsealed = self.channel.work(&mut self.out);
            }
            match unsealed {
                TransportEvent::Plain(plain) => {
                    assert_eq!(self.seen.ready, 1, "plaintext before the handshake is through");
                    self.seen.plain.extend_from_slice(&plain);
                }
                TransportEvent::More if wire.is_empty() => return,
                TransportEvent::More => {}
                TransportEvent::Ready => self.seen.ready += 1,
                TransportEvent::Work | TransportEvent::Speaks => panic!("work that makes work"),
                TransportEvent::Closed => {
                    self.seen.closed = true;
                    return;
                }
                TransportEvent::Fault(TransportError(reason)) => {
                    self.seen.fault = Some(reason);
                    return;
                }
            }
        }
    }

    /// The bytes that the client has to send.
    pub fn client_bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.client.wants_write() {
            self.client.write_tls(&mut bytes).unwrap();
        }
        bytes
    }

    /// Shows the server's bytes to the client.
    pub fn hear(&mut self) {
        let sent = std::mem::take(&mut self.out);
        let mut left = &sent[..];
        while !left.is_empty() && self.client_error.is_none() {
            if self.client.read_tls(&mut left).unwrap() == 0 {
                break;
            }
            match self.client.process_new_packets() {
                Ok(_) => {
                    let mut heard = [0; 4096];
                    while let Ok(count @ 1..) = self.client.reader().read(&mut heard) {
                        self.heard.extend_from_slice(&heard[..count]);
                    }
                }
                Err(error) => self.client_error = Some(error),
            }
        }
    }

    /// Exchanges bytes until neither side has anything to send.
    pub fn exchange(&mut self) {
        loop {
            let bytes = self.client_bytes();
            let mut left = &bytes[..];
            while !left.is_empty() {
                let count = self.splits.pop().unwrap_or(left.len()).clamp(1, left.len());
                self.feed(&left[..count]);
                left = &left[count..];
            }
            if bytes.is_empty() && self.out.is_empty() {
                return;
            }
            self.hear();
        }
    }

    pub fn say(&mut self, plain: &[u8]) {
        self.client.set_buffer_limit(None);
        self.client.writer().write_all(plain).unwrap();
        self.exchange();
    }

    pub fn reply(&mut self, batch: &Batch) {
        self.channel.encode(batch, &mut self.out).unwrap();
        self.hear();
    }

    pub fn reply_bytes(&mut self, bytes: &[u8]) {
        let mut batch = Batch::new();
        batch.put(bytes);
        self.reply(&batch);
    }

    pub fn info(&self) -> Rc<TlsInfo> {
        self.channel.info().unwrap().downcast().unwrap()
    }

    pub fn connected(mut self) -> Pair {
        self.exchange();
        assert_eq!((self.seen.ready, &self.seen.fault, &self.client_error), (1, &None, &None));
        self
    }
}

/// A listener with one certificate of `authority`.
pub fn listener(authority: &Authority) -> TlsListener {
    listener_of(crate::server(), authority)
}

pub fn listener_of(tls: Tls, authority: &Authority) -> TlsListener {
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    TlsListener::new(tls.certificate(chain, key)).unwrap()
}
