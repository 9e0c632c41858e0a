//! Channels at both ends: a server that connects to another one.

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, CloseReason, Transport, TransportConn, TransportError, TransportEvent};
use ringserve_tls::{Clients, Tls, TlsClient, TlsListener};

use crate::pair::Authority;

struct End {
    channel: Box<dyn TransportConn>,
    out: Vec<u8>,
    ready: bool,
    closed: bool,
    fault: Option<CloseReason>,
    plain: Vec<u8>,
}

impl End {
    fn new(transport: &impl Transport) -> End {
        let mut out = Vec::new();
        let channel = transport.begin(&mut out).unwrap();
        End { channel, out, ready: false, closed: false, fault: None, plain: Vec::new() }
    }

    fn feed(&mut self, bytes: &[u8]) {
        let mut wire = LeaseMut::try_copy_of(bytes).unwrap();
        while self.fault.is_none() && !self.closed {
            let mut unsealed = self.channel.decode(&mut wire, &mut self.out);
            if matches!(unsealed, TransportEvent::Work) {
                unsealed = self.channel.work(&mut self.out);
            }
            match unsealed {
                TransportEvent::Plain(plain) => self.plain.extend_from_slice(&plain),
                TransportEvent::Ready => self.ready = true,
                TransportEvent::Closed => self.closed = true,
                TransportEvent::Fault(TransportError(reason)) => self.fault = Some(reason),
                TransportEvent::More | TransportEvent::Work if wire.is_empty() => return,
                TransportEvent::More | TransportEvent::Work | TransportEvent::Speaks => {}
            }
        }
    }

    fn say(&mut self, plain: &[u8]) {
        let mut batch = Batch::new();
        batch.put(plain);
        self.channel.encode(&batch, &mut self.out).unwrap();
    }
}

/// Exchanges bytes, in pieces of `size`, until neither side has anything to send.
fn exchange(one: &mut End, other: &mut End, size: usize) {
    while !one.out.is_empty() || !other.out.is_empty() {
        std::mem::take(&mut one.out).chunks(size).for_each(|part| other.feed(part));
        std::mem::take(&mut other.out).chunks(size).for_each(|part| one.feed(part));
    }
}

fn ends(client: &TlsClient, listener: &TlsListener, name: &str, size: usize) -> (End, End) {
    let mut client = End::new(&*client.to(name).unwrap());
    let mut server = End::new(&listener.transport());
    exchange(&mut client, &mut server, size);
    (client, server)
}

#[test]
fn client_and_server_understand_each_other() {
    let authority = Authority::new("authority");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let clients = Clients::of(authority.pem().as_str().into(), true);
    let listener = TlsListener::new(crate::server().certificate(chain, key).clients(clients)).unwrap();
    let (chain, key) = authority.ecdsa(&["client.example.org"]).pems();
    let client = Tls::client_with(authority.pem().as_str().into(), chain, key).unwrap();
    for size in [1, 100, 1 << 20] {
        let (mut client, mut server) = ends(&client, &listener, "localhost", size);
        assert!(client.ready && server.ready, "{:?} {:?}", client.fault, server.fault);
        client.say(&[1; 50_000]);
        server.say(&[2; 70_000]);
        exchange(&mut client, &mut server, size);
        assert!(server.plain == [1; 50_000] && client.plain == [2; 70_000]);
        client.channel.finish(&mut client.out);
        exchange(&mut client, &mut server, size);
        assert!(server.closed);
    }
}

#[test]
fn server_of_another_name_or_authority_is_refused() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let listener = crate::pair::listener(&ours);
    for (authority, name, alert) in [(&ours, "example.org", 42), (&theirs, "localhost", 48)] {
        let client = Tls::client(authority.pem().as_str().into()).unwrap();
        let (client, server) = ends(&client, &listener, name, 1 << 20);
        assert!(!client.ready && !server.ready);
        assert_eq!(client.fault, Some(CloseReason::TlsHandshakeFailed(alert)));
        assert_eq!(server.fault, Some(CloseReason::TlsAlertReceived(alert)));
    }
    let client = Tls::client(ours.pem().as_str().into()).unwrap();
    assert_eq!(
        client.to("no name").unwrap_err().to_string(),
        "`no name` is no name of a server: one is as `db.example.org`, or an address"
    );
    assert_eq!(Tls::client("rubbish".into()).unwrap_err().to_string(), "has no certificate");
}
