//! Layers of the generator on a socket: plain bytes, TLS, or WebSocket.
//!
//! TLS is always the same, so that servers can be compared: version 1.3, AES-128-GCM, P-256. The
//! generator trusts every certificate, and the cost of its end is not counted.

use std::io::{self, ErrorKind, Read, Write};
use std::sync::{Arc, OnceLock};

use clap::ValueEnum;
use ringserve::tls::rustls::client::Resumption;
use ringserve::tls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use ringserve::tls::rustls::crypto::{CryptoProvider, ring};
use ringserve::tls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use ringserve::tls::rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme, StreamOwned,
};

use crate::websocket::Upgrade;

/// The handshakes that the generator makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Handshakes {
    /// Each is a full one.
    Full,
    /// After the first they resume a session, if the server sends tickets.
    Resumed,
}

/// The layer below the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    /// None: the messages are the bytes of the socket.
    Plain,
    Tls(Handshakes),
    /// The bytes written are frames, and so are those that are read.
    WebSocket,
    /// Each message is the request, and the returned bytes are the reply.
    Exchange(&'static Exchange),
}

/// A request of a protocol and its one answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) request: &'static [u8],
    /// Position of eight digits in it that are the number of the connection.
    pub(crate) number_at: Option<usize>,
    /// A zero byte matches any byte.
    pub(crate) reply: &'static [u8],
}

/// A socket, and its layer.
pub(crate) enum Wire<S: Read + Write> {
    Plain(S),
    Tls(Box<StreamOwned<ClientConnection, S>>),
    /// `Some` until the server accepts it.
    WebSocket(S, Option<Box<Upgrade>>),
}

impl<S: Read + Write> Wire<S> {
    /// Creates a wire. The handshake is made with the first bytes.
    pub(crate) fn new(socket: S, layer: Layer) -> io::Result<Wire<S>> {
        let handshakes = match layer {
            Layer::Plain | Layer::Exchange(_) => return Ok(Wire::Plain(socket)),
            Layer::WebSocket => return Ok(Wire::WebSocket(socket, Some(Box::default()))),
            Layer::Tls(handshakes) => handshakes,
        };
        let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
        let client = ClientConnection::new(config(handshakes), name).map_err(io::Error::other)?;
        Ok(Wire::Tls(Box::new(StreamOwned::new(client, socket))))
    }

    pub(crate) fn socket(&self) -> &S {
        match self {
            Wire::Plain(socket) | Wire::WebSocket(socket, _) => socket,
            Wire::Tls(stream) => &stream.sock,
        }
    }

    /// Waits for the end of the handshake, if the socket blocks.
    pub(crate) fn shake_hands(&mut self) -> io::Result<()> {
        match self {
            Wire::Plain(_) | Wire::WebSocket(_, None) => Ok(()),
            Wire::Tls(stream) => stream.flush(),
            Wire::WebSocket(socket, upgrade @ Some(_)) => {
                upgrade.as_mut().map_or(Ok(()), |upgrade| upgrade.go_on(socket))?;
                *upgrade = None;
                Ok(())
            }
        }
    }

    /// Announces the end, as TLS requires of an end that closes. Bytes that the socket does not
    /// take are not sent.
    pub(crate) fn announce_end(&mut self) -> io::Result<()> {
        let Wire::Tls(stream) = self else { return Ok(()) };
        stream.conn.send_close_notify();
        match stream.flush() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            flushed => flushed,
        }
    }
}

/// On a non-blocking socket, fewer bytes than there is space for are all that there are, as with a
/// plain socket. A blocking one waits for all of the space.
impl<S: Read + Write> Read for Wire<S> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let stream = match self {
            Wire::Plain(socket) | Wire::WebSocket(socket, _) => return socket.read(space),
            Wire::Tls(stream) => stream,
        };
        let mut count = 0;
        while count < space.len() {
            match stream.read(&mut space[count..]) {
                Ok(0) => break,
                Ok(more) => count += more,
                Err(error) if error.kind() == ErrorKind::WouldBlock && count > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(count)
    }
}

impl<S: Read + Write> Write for Wire<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Wire::WebSocket(_, Some(_)) = self {
            self.shake_hands()?;
        }
        match self {
            Wire::Plain(socket) | Wire::WebSocket(socket, _) => socket.write(bytes),
            // Bytes that the socket does not take are sent at the next read or write.
            Wire::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Wire::Plain(socket) | Wire::WebSocket(socket, _) => socket.flush(),
            Wire::Tls(stream) => stream.flush(),
        }
    }
}

fn config(handshakes: Handshakes) -> Arc<ClientConfig> {
    static CONFIGS: [OnceLock<Arc<ClientConfig>>; 2] = [const { OnceLock::new() }; 2];
    let make = || {
        let mut provider = ring::default_provider();
        provider.cipher_suites = vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256];
        provider.kx_groups = vec![ring::kx_group::SECP256R1];
        let provider = Arc::new(provider);
        let mut config = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("the suite is of TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Believing(provider)))
            .with_no_client_auth();
        if handshakes == Handshakes::Full {
            config.resumption = Resumption::disabled();
        }
        Arc::new(config)
    };
    CONFIGS[handshakes as usize].get_or_init(make).clone()
}

/// Trusts every certificate: the measured server is on this machine.
#[derive(Debug)]
struct Believing(Arc<CryptoProvider>);

impl ServerCertVerifier for Believing {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
