//! The connection of a simulated peer, plain or through the toy transport, with the same calls as a
//! [`ClientStream`](ringserve_server::testing::ClientStream).

use std::io;
use std::time::Duration;

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, CloseReason, Transport, TransportConn, TransportError, TransportEvent};
use ringserve_server::testing::{ClientStream, Net};

/// The pieces in which a peer's bytes arrive at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// As they are written.
    Whole,
    /// One by one.
    Bytes,
    /// Drawn by the seed.
    Any,
    /// The same, with pauses.
    Crawl,
}

impl Pieces {
    /// All of them, the first one twice.
    pub const ALL: &[Pieces] = &[Pieces::Whole, Pieces::Whole, Pieces::Bytes, Pieces::Any, Pieces::Crawl];
}

/// Longer pieces of a peer that sends bytes one by one are cut in two, beyond these bytes: large
/// pieces are cut often enough.
const ONE_BY_ONE_MAX: usize = 200;

/// A connection of a simulated peer.
pub struct PeerStream {
    net: Net,
    stream: ClientStream,
    pieces: Pieces,
    layer: Option<Layer>,
    /// Received bytes, in the clear, that were not requested yet.
    unread: Vec<u8>,
    /// FIN was sent, after which nothing is answered.
    has_ended: bool,
    /// The error that a write found first, which a read does not find again.
    lost: Option<io::ErrorKind>,
    /// The server's sockets may be closed without an action of the server.
    may_be_cut: bool,
}

struct Layer {
    channel: Box<dyn TransportConn>,
    /// Bytes to be sent.
    out: Vec<u8>,
    /// Bytes of it that come before the transport.
    before: usize,
    is_ready: bool,
    /// The server announced its end.
    closed: bool,
    /// The server reported that it cannot continue.
    alerted: bool,
    finished: bool,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl PeerStream {
    /// Creates a plain connection.
    pub fn plain(net: &Net, stream: ClientStream) -> PeerStream {
        PeerStream {
            net: net.clone(),
            stream,
            pieces: Pieces::Whole,
            layer: None,
            unread: Vec::new(),
            has_ended: false,
            lost: None,
            may_be_cut: false,
        }
    }

    /// Creates a connection through a transport: the toy, or another one. The handshake begins with
    /// the first send or receive.
    pub fn layered(net: &Net, stream: ClientStream, by: &dyn Transport, pieces: Pieces) -> PeerStream {
        let mut out = Vec::new();
        let channel = by.begin(&mut out).expect("there is memory");
        let layer = Layer {
            channel,
            out,
            before: 0,
            is_ready: false,
            closed: false,
            alerted: false,
            finished: false,
        };
        PeerStream { pieces, layer: Some(layer), ..PeerStream::plain(net, stream) }
    }

    /// Sends bytes before all others, which are not the transport's: they may arrive in the segment
    /// in which that begins.
    pub fn begins_with(&mut self, bytes: &[u8]) {
        if let Some(layer) = &mut self.layer {
            layer.out.splice(..0, bytes.iter().copied());
            layer.before = bytes.len();
        }
    }

    /// Sets whether the server may die: then the kernel ends the connection.
    pub fn may_be_cut(&mut self, may: bool) {
        self.may_be_cut = may;
    }

    /// Completes the handshake. Its last bytes are not sent yet: they are sent with the first data.
    ///
    /// # Errors
    /// The connection's, or `UnexpectedEof` if it ends first.
    pub async fn shake_hands(&mut self) -> io::Result<()> {
        while self.layer.as_ref().is_some_and(|layer| !layer.is_ready) {
            self.flush().await?;
            if self.take_in().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Sends all of it.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        let bytes = bytes.as_ref();
        self.shake_hands().await?;
        match &mut self.layer {
            None => self.stream.send(bytes).await,
            Some(layer) => {
                if bytes.is_empty() {
                    return Ok(());
                }
                let mut batch = Batch::new();
                batch.put(bytes);
                layer
                    .channel
                    .encode(&batch, &mut layer.out)
                    .map_err(|_| broken("the channel does not seal"))?;
                self.flush().await
            }
        }
    }

    /// Sends bytes unchanged, after those of the transport.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.layer {
            None => self.stream.send(bytes).await,
            Some(layer) => {
                layer.out.extend_from_slice(bytes);
                self.flush().await
            }
        }
    }

    /// Sends the first bytes of the transport's first flight, and nothing after them.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn send_start(&mut self, bytes: usize) -> io::Result<()> {
        if let Some(layer) = &mut self.layer {
            layer.out.truncate(layer.before + bytes);
        }
        self.flush().await
    }

    /// Sends other bytes instead of the transport's first flight.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn send_instead(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(layer) = &mut self.layer {
            layer.out.truncate(layer.before);
        }
        self.send_raw(bytes).await
    }

    /// Bytes as the transport would send them, which are not sent.
    pub fn sealed(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut batch = Batch::new();
        batch.put(bytes);
        if let Some(layer) = &mut self.layer {
            layer.channel.encode(&batch, &mut out).expect("the channel seals");
        }
        out
    }

    /// All bytes up to the end, whether there was a handshake or not.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn bytes_to_the_end(&mut self) -> io::Result<Vec<u8>> {
        while self.take_in().await? > 0 {
            self.flush_answers().await;
        }
        Ok(std::mem::take(&mut self.unread))
    }

    /// Sends the bytes of the transport.
    async fn flush(&mut self) -> io::Result<()> {
        let Some(layer) = &mut self.layer else { return Ok(()) };
        let bytes = std::mem::take(&mut layer.out);
        self.send_pieces(&bytes).await
    }

    async fn send_pieces(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let any = 1 + (self.net.random() % bytes.len() as u64) as usize;
            let piece = match self.pieces {
                Pieces::Whole => bytes.len(),
                Pieces::Bytes if bytes.len() <= ONE_BY_ONE_MAX => 1,
                Pieces::Bytes | Pieces::Any | Pieces::Crawl => any,
            };
            self.stream.send(&bytes[..piece]).await?;
            bytes = &bytes[piece..];
            if self.pieces == Pieces::Crawl && self.net.random().is_multiple_of(3) {
                self.net.sleep(Duration::from_millis(self.net.random() % 50)).await;
            }
        }
        Ok(())
    }

    /// The received bytes, after a wait if there are none; empty at the end.
    ///
    /// # Errors
    /// Those of the connection, and violations of the transport's rules by the server.
    pub async fn some(&mut self) -> io::Result<Vec<u8>> {
        self.shake_hands().await?;
        if !self.has_ended {
            self.flush().await?;
        }
        while self.unread.is_empty() {
            if self.take_in().await? == 0 {
                break;
            }
            self.flush_answers().await;
        }
        Ok(std::mem::take(&mut self.unread))
    }

    /// Does [`ClientStream::line`].
    ///
    /// # Errors
    /// Those of [`some`](PeerStream::some), and `UnexpectedEof` within a line.
    pub async fn line(&mut self) -> io::Result<Option<String>> {
        let mut bytes = std::mem::take(&mut self.unread);
        loop {
            if let Some(at) = bytes.iter().position(|byte| *byte == b'\n') {
                self.unread = bytes.split_off(at + 1);
                bytes.truncate(at);
                let line = String::from_utf8(bytes).map_err(|_| broken("a line is no text"))?;
                return Ok(Some(line.trim_end_matches('\r').to_owned()));
            }
            match self.some().await? {
                more if !more.is_empty() => bytes.extend(more),
                _ if bytes.is_empty() => return Ok(None),
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }

    /// Exactly that many bytes.
    ///
    /// # Errors
    /// Those of [`some`](PeerStream::some), and `UnexpectedEof`.
    pub async fn exactly(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = std::mem::take(&mut self.unread);
        while bytes.len() < len {
            match self.some().await? {
                more if !more.is_empty() => bytes.extend(more),
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        self.unread = bytes.split_off(len);
        Ok(bytes)
    }

    /// Waits for the end, and returns what came before it.
    ///
    /// # Errors
    /// Those of [`some`](PeerStream::some).
    pub async fn closed(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        loop {
            match self.some().await? {
                more if !more.is_empty() => bytes.extend(more),
                _ => return Ok(bytes),
            }
        }
    }

    /// Sends the mark of the end and FIN.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.shake_hands().await?;
        if let Some(layer) = &mut self.layer
            && !layer.finished
        {
            layer.finished = true;
            layer.channel.finish(&mut layer.out);
        }
        self.flush().await?;
        self.cut_off()
    }

    /// Sends FIN, without a mark.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn cut_off(&mut self) -> io::Result<()> {
        self.has_ended = true;
        self.stream.finish()
    }

    /// Resets it.
    pub fn reset(self) {
        self.stream.reset();
    }

    /// True if the server reported that it cannot continue.
    pub fn was_alerted(&self) -> bool {
        self.layer.as_ref().is_some_and(|layer| layer.alerted)
    }

    /// True if the server marked its end.
    pub fn saw_mark(&self) -> bool {
        self.layer.as_ref().is_some_and(|layer| layer.closed)
    }

    /// Sends answers of the transport, for which no client waits: the server may be gone.
    async fn flush_answers(&mut self) {
        if !self.has_ended && self.layer.as_ref().is_some_and(|layer| !layer.out.is_empty()) {
            let found = self.flush().await.err().map(|error| error.kind());
            self.lost = self.lost.or(found);
        }
    }

    /// Receives the next piece and opens it with the transport. Returns its bytes on the wire.
    async fn take_in(&mut self) -> io::Result<usize> {
        let bytes = self.stream.some().await?;
        let len = bytes.len();
        let Some(layer) = &mut self.layer else {
            self.unread.extend(bytes);
            return Ok(len);
        };
        if len == 0 {
            // A server that announced its end closes after it lingered: earlier bytes are whole,
            // and need no answer.
            let is_late = |kind: &io::ErrorKind| layer.closed && *kind == io::ErrorKind::BrokenPipe;
            if let Some(kind) = self.lost.filter(|kind| !is_late(kind)) {
                return Err(kind.into());
            }
            let is_whole = !layer.channel.is_mid_record() || layer.alerted;
            assert!(is_whole || self.may_be_cut, "FIN in the middle of a record");
            // Before the server is ready it has no mark.
            let is_marked = layer.closed || layer.alerted || layer.channel.info().is_none();
            assert!(is_marked || self.may_be_cut, "FIN without the mark of the end before it");
            return Ok(0);
        }
        assert!(!layer.closed, "{len} bytes behind the mark of the end");
        assert!(!layer.alerted, "{len} bytes behind an alert");
        let mut wire = LeaseMut::try_from_vec(bytes).expect("there is memory");
        loop {
            match layer.channel.decode(&mut wire, &mut layer.out) {
                TransportEvent::Plain(bytes) => self.unread.extend_from_slice(&bytes),
                TransportEvent::Ready => layer.is_ready = true,
                TransportEvent::More => break,
                TransportEvent::Closed => {
                    assert!(wire.is_empty(), "{} bytes behind the mark of the end", wire.len());
                    layer.closed = true;
                }
                TransportEvent::Fault(TransportError(CloseReason::TlsAlertReceived(_))) => {
                    layer.alerted = true;
                    break;
                }
                TransportEvent::Fault(_) => panic!("the server breaks the rules of the transport"),
                TransportEvent::Work | TransportEvent::Speaks => unreachable!("a client needs no permit"),
            }
        }
        Ok(len)
    }
}
