//! Target `tls_bytes`: any bytes in place of a TLS client's.
//!
//! ```text
//!   progress of the handshake (1 byte: 0, 1 or 2 flights, or all)  size of pieces (1 byte)  stream
//! ```
//!
//! None of it is plaintext, it completes no handshake, and the kept part is bounded.

use std::cell::RefCell;
use std::sync::Arc;

use ringserve_buf::LeaseMut;
use ringserve_core::{Transport, TransportConn, TransportError, TransportEvent};
use ringserve_tls::rustls::pki_types::pem::PemObject;
use ringserve_tls::rustls::pki_types::{CertificateDer, ServerName};
use ringserve_tls::rustls::{ClientConfig, ClientConnection, RootCertStore};
use ringserve_tls::{Tls, TlsListener, TlsTransport};

/// The most kept bytes of an incomplete handshake, after which there is a fault.
const KEPT_MAX: usize = 2 * (64 * 1024 + 256);

/// The only certificate. Its key is no secret.
const CERT: &str = include_str!("tls_cert.pem");

struct Ends {
    transport: TlsTransport,
    client: Arc<ClientConfig>,
}

thread_local! {
    static ENDS: RefCell<Option<Ends>> = const { RefCell::new(None) };
}

fn ends() -> Ends {
    let tls = Tls::server().certificate(CERT.into(), include_str!("tls_key.pem").into());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(CERT.as_bytes()).expect("a certificate")).expect("an authority");
    let provider = Arc::new(ringserve_tls::rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let client = client.expect("versions").with_root_certificates(roots).with_no_client_auth();
    let transport = TlsListener::new(tls).expect("TLS").transport();
    Ends { transport, client: Arc::new(client) }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let [flights, size, stream @ ..] = input else { return };
    ENDS.with_borrow_mut(|ends| {
        let Ends { transport, client } = ends.get_or_insert_with(self::ends);
        let mut out = Vec::new();
        let mut channel = transport.begin(&mut out).expect("memory");
        let name = ServerName::try_from("localhost").expect("a name");
        let mut client = ClientConnection::new(client.clone(), name).expect("a client");
        let mut ready = false;
        for _ in 0..flights % 4 {
            let mut flight = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut flight).expect("memory");
            }
            assert!(feed(&mut *channel, &flight, &mut out, &mut ready), "of a client that is in order");
            let mut left = &std::mem::take(&mut out)[..];
            while !left.is_empty() {
                client.read_tls(&mut left).expect("memory");
                client.process_new_packets().expect("of a server that is in order");
            }
        }
        let was_ready = ready;
        for piece in stream.chunks(usize::from(*size).max(1)) {
            let goes_on = feed(&mut *channel, piece, &mut out, &mut ready);
            assert_eq!(ready, was_ready, "a handshake got through");
            assert!(channel.held_bytes() <= KEPT_MAX, "{} bytes are kept", channel.held_bytes());
            if !goes_on {
                assert_eq!(channel.held_bytes(), 0, "of a connection that is over");
                break;
            }
        }
        channel.finish(&mut out);
        let said = out.len();
        channel.finish(&mut out);
        assert_eq!(out.len(), said, "a second goodbye");
    });
}

/// Passes bytes to the channel. False once it has reported its end.
fn feed(channel: &mut dyn TransportConn, bytes: &[u8], out: &mut Vec<u8>, ready: &mut bool) -> bool {
    let mut wire = LeaseMut::try_copy_of(bytes).expect("memory");
    loop {
        let mut unsealed = channel.decode(&mut wire, out);
        if matches!(unsealed, TransportEvent::Work) {
            unsealed = channel.work(out);
        }
        match unsealed {
            TransportEvent::Plain(plain) => assert!(plain.is_empty(), "{} bytes of plaintext", plain.len()),
            TransportEvent::Ready => *ready = true,
            TransportEvent::More if wire.is_empty() => return true,
            TransportEvent::More => {}
            TransportEvent::Work | TransportEvent::Speaks => panic!("work that makes work"),
            TransportEvent::Closed | TransportEvent::Fault(TransportError(_)) => return false,
        }
    }
}
