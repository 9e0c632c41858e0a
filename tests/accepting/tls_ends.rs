//! Ends of connections below TLS, on both drivers: the last bytes to the peer, and the reason that
//! the server reports.

use std::convert::Infallible;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use http_body_util::BodyExt;
use ringserve::framing::Lines;
use ringserve::http::hyper::body::Incoming;
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Request, Response};
use ringserve::server::Driver;
use ringserve::tls::Tls;
use ringserve::tls::rustls::version::{TLS12, TLS13};
use ringserve::tls::rustls::{AlertDescription, ClientConfig, Error};
use ringserve::{CloseReason, Cx, Frame, Limits, Server, ServerHandle, Service, Stream, http, stream};
use ringserve_tests::SOON;
use ringserve_tests::watch::closed_for;

use super::tls::{Believed, TlsStream, Who, any_port, connect, drivers, line, shut_down};

fn serve(tls: Tls, driver: Driver) -> ServerHandle {
    let server = Server::bind(any_port()).tls(tls).framing(Lines::default());
    server.driver(driver).shards(1).start(|_shard| Who).unwrap()
}

/// A connection of each version to a server on each driver.
fn each(tls: impl Fn(&Believed) -> Tls, check: impl Fn(&ServerHandle, TlsStream)) {
    let believed = Believed::new();
    for driver in drivers() {
        for version in [&TLS12, &TLS13] {
            let server = serve(tls(&believed), driver);
            let config = Arc::new(believed.client_of(&[version]));
            let mut stream = connect(&config, server.local_addrs()[0], "");
            assert_eq!(line(&mut stream, "hello\n"), "hello");
            check(&server, stream);
            shut_down(server);
        }
    }
}

/// The records of `plain`.
fn sealed(stream: &mut TlsStream, plain: &[u8]) -> Vec<u8> {
    stream.conn.writer().write_all(plain).unwrap();
    let mut bytes = Vec::new();
    while stream.conn.wants_write() {
        stream.conn.write_tls(&mut bytes).unwrap();
    }
    bytes
}

/// Reads to the end: the bytes, and whether the server announced the end.
fn rest(stream: &mut TlsStream) -> (Vec<u8>, io::Result<usize>) {
    let mut heard = Vec::new();
    let end = stream.read_to_end(&mut heard);
    (heard, end)
}

/// The alert of `error`.
fn alert(error: &io::Error) -> Option<AlertDescription> {
    match error.get_ref()?.downcast_ref()? {
        Error::AlertReceived(alert) => Some(*alert),
        _ => None,
    }
}

#[test]
fn fin_without_close_notify_is_judged_by_where_it_falls() {
    for (last, reason) in [
        ("", CloseReason::PeerClosed),
        ("half a li", CloseReason::PeerClosedMidFrame),
        ("half a record\n", CloseReason::PeerClosedMidFrame),
    ] {
        each(Believed::tls, |server, mut stream| {
            let mut bytes = sealed(&mut stream, last.as_bytes());
            if last.ends_with('\n') {
                bytes.truncate(bytes.len() - 1);
            }
            stream.sock.write_all(&bytes).unwrap();
            stream.sock.shutdown(Shutdown::Write).unwrap();
            let (heard, end) = rest(&mut stream);
            assert_eq!((heard, end.unwrap()), (Vec::new(), 0), "{last:?}: the server announces its end");
            closed_for(server, reason, 1);
        });
    }
}

#[test]
fn fin_without_the_required_close_notify_is_a_truncation() {
    let strict = |believed: &Believed| believed.tls().require_close_notify(true);
    each(strict, |server, stream| {
        stream.sock.shutdown(Shutdown::Write).unwrap();
        closed_for(server, CloseReason::TlsTruncated, 1);
    });
    each(strict, |server, mut stream| {
        stream.conn.send_close_notify();
        stream.flush().unwrap();
        assert_eq!(rest(&mut stream).1.unwrap(), 0);
        drop(stream);
        closed_for(server, CloseReason::PeerClosed, 1);
    });
}

#[test]
fn bytes_behind_close_notify_are_ignored() {
    each(Believed::tls, |server, mut stream| {
        let mut bytes = sealed(&mut stream, b"last\n");
        stream.conn.send_close_notify();
        stream.conn.write_tls(&mut bytes).unwrap();
        bytes.extend_from_slice(b"what is no record");
        stream.sock.write_all(&bytes).unwrap();
        let (heard, end) = rest(&mut stream);
        assert_eq!((&*heard, end.unwrap()), (&b"last\n"[..], 5));
        drop(stream);
        closed_for(server, CloseReason::PeerClosed, 1);
    });
}

#[test]
fn damaged_record_hears_its_alert_and_no_reset() {
    each(Believed::tls, |server, mut stream| {
        let mut bytes = sealed(&mut stream, b"changed on its way\n");
        *bytes.last_mut().unwrap() ^= 1;
        // Unread bytes make the close of a socket a reset.
        bytes.extend_from_slice(&[23; 5000]);
        stream.sock.write_all(&bytes).unwrap();
        let (heard, end) = rest(&mut stream);
        assert_eq!(heard, b"");
        assert_eq!(alert(&end.unwrap_err()), Some(AlertDescription::BadRecordMac));
        drop(stream);
        closed_for(server, CloseReason::TlsBadRecord, 1);
    });
}

#[test]
fn alert_of_the_peer_is_the_reason() {
    let (believed, other) = (Believed::new(), Believed::new());
    for driver in drivers() {
        let server = serve(believed.tls(), driver);
        let config: Arc<ClientConfig> = Arc::new(other.client());
        let mut stream = connect(&config, server.local_addrs()[0], "");
        assert_eq!(stream.write_all(b"x").unwrap_err().kind(), ErrorKind::InvalidData, "it believes another");
        stream.flush().unwrap_err();
        drop(stream);
        closed_for(&server, CloseReason::TlsAlertReceived(0), 1);
        shut_down(server);
    }
}

#[test]
fn handshake_that_does_not_end_is_timed_out() {
    let believed = Believed::new();
    for driver in drivers() {
        let mut limits = Limits::default();
        (limits.handshake_timeout, limits.proxy_header_timeout) = (Some(Duration::from_millis(50)), None);
        let server = Server::bind(any_port()).tls(believed.tls()).framing(Lines::default()).limits(limits);
        let server = server.driver(driver).shards(1).start(|_shard| Who).unwrap();
        let mut socket = TcpStream::connect(server.local_addrs()[0]).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        // The head of a ClientHello.
        socket.write_all(&[22, 3, 1, 1, 0, 1, 0, 0, 252]).unwrap();
        closed_for(&server, CloseReason::HandshakeTimeout, 1);
        assert_eq!(server.stats_now().counters.handshakes_timed_out, 1);
        shut_down(server);
    }
}

/// Gives each line a meaning: the end of one side, or of all.
struct Ending;

impl Service for Ending {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match &*frame {
            b"close" => {
                cx.reply("goodbye");
                cx.close();
            }
            b"abort" => cx.abort(),
            _ => cx.reply(frame),
        }
        Ok(())
    }
}

#[test]
fn close_is_announced_and_an_abort_is_not() {
    let believed = Believed::new();
    for driver in drivers() {
        let server = Server::bind(any_port()).tls(believed.tls()).framing(Lines::default());
        let server = server.driver(driver).shards(1).start(|_shard| Ending).unwrap();
        for version in [&TLS12, &TLS13] {
            let config = Arc::new(believed.client_of(&[version]));
            let mut stream = connect(&config, server.local_addrs()[0], "");
            stream.write_all(b"close\n").unwrap();
            let (heard, end) = rest(&mut stream);
            assert_eq!((&*heard, end.unwrap()), (&b"goodbye\n"[..], 8));
            let mut stream = connect(&config, server.local_addrs()[0], "");
            stream.write_all(b"abort\n").unwrap();
            let (heard, end) = rest(&mut stream);
            assert_eq!(heard, b"");
            let kind = end.unwrap_err().kind();
            assert!(matches!(kind, ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof), "{kind}");
        }
        closed_for(&server, CloseReason::Closed, 2);
        closed_for(&server, CloseReason::Aborted, 2);
        shut_down(server);
    }
}

/// The bytes or error that a stream receives after the end of its side.
type Heard = Result<Vec<u8>, ErrorKind>;

/// Ends its side at the first line, and reports the bytes that it then receives.
async fn half_close(mut stream: Stream, told: Sender<Heard>) -> io::Result<()> {
    let mut heard = Vec::new();
    stream.read_frame().await?;
    stream.queue("last words\n");
    stream.end_writing();
    let end = loop {
        match stream.read_frame().await {
            Ok(Some(frame)) => heard.extend_from_slice(&frame),
            Ok(None) => break Ok(heard),
            Err(error) => break Err(error.kind()),
        }
    };
    told.send(end).unwrap();
    Ok(())
}

/// A server of such streams, which accepts no end without a close_notify if it is `strict`.
fn half_closing(believed: &Believed, driver: Driver, strict: bool) -> (ServerHandle, Receiver<Heard>) {
    let (told, hears) = channel();
    let tls = believed.tls().require_close_notify(strict);
    let server = Server::bind(any_port()).tls(tls).driver(driver).shards(1);
    let server = server.start(move |_shard| {
        let told = told.clone();
        stream(move |one| half_close(one, told.clone()))
    });
    (server.unwrap(), hears)
}

#[test]
fn stream_that_ended_its_side_hears_the_rest() {
    let believed = Believed::new();
    for driver in drivers() {
        let (server, hears) = half_closing(&believed, driver, true);
        let config = Arc::new(believed.client_of(&[&TLS13]));
        for is_whole in [true, false] {
            let mut stream = connect(&config, server.local_addrs()[0], "");
            stream.write_all(b"go\n").unwrap();
            let (heard, end) = rest(&mut stream);
            assert_eq!((&*heard, end.unwrap()), (&b"last words\n"[..], 11));
            stream.write_all(b"and mine").unwrap();
            if is_whole {
                stream.conn.send_close_notify();
            }
            stream.flush().unwrap();
            stream.sock.shutdown(Shutdown::Write).unwrap();
            let told = hears.recv_timeout(SOON).unwrap();
            let expected = if is_whole { Ok(b"and mine".to_vec()) } else { Err(ErrorKind::UnexpectedEof) };
            assert_eq!(told, expected);
        }
        shut_down(server);
    }
}

#[test]
fn fin_without_close_notify_ends_a_stream_as_without_tls() {
    let believed = Believed::new();
    for driver in drivers() {
        let (server, hears) = half_closing(&believed, driver, false);
        let config = Arc::new(believed.client_of(&[&TLS13]));
        for is_whole in [true, false] {
            let mut stream = connect(&config, server.local_addrs()[0], "");
            stream.write_all(b"go\n").unwrap();
            assert_eq!(rest(&mut stream).0, b"last words\n");
            let mut bytes = sealed(&mut stream, b"and mine");
            if !is_whole {
                bytes.pop();
            }
            stream.sock.write_all(&bytes).unwrap();
            stream.sock.shutdown(Shutdown::Write).unwrap();
            let told = hears.recv_timeout(SOON).unwrap();
            let expected = if is_whole { Ok(b"and mine".to_vec()) } else { Err(ErrorKind::UnexpectedEof) };
            assert_eq!(told, expected, "a record that was cut");
        }
        closed_for(&server, CloseReason::HandlerError, 0);
        shut_down(server);
    }
}

#[test]
fn answer_to_the_end_of_a_side_ends_the_other() {
    let believed = Believed::new();
    for driver in drivers() {
        let (server, hears) = half_closing(&believed, driver, true);
        // Peers of 1.2 have to end their side as soon as they receive the end, according to the
        // standard.
        for version in [&TLS12, &TLS13] {
            let config = Arc::new(believed.client_of(&[version]));
            let mut stream = connect(&config, server.local_addrs()[0], "");
            stream.write_all(b"go\n").unwrap();
            assert_eq!(rest(&mut stream).0, b"last words\n");
            stream.conn.send_close_notify();
            stream.flush().unwrap();
            // No FIN, which follows only once the server's own is there.
            assert_eq!(hears.recv_timeout(SOON).unwrap(), Ok(Vec::new()));
        }
        shut_down(server);
    }
}

#[test]
fn request_that_is_cut_off_is_none_and_a_whole_one_is_answered() {
    let believed = Believed::new();
    for driver in drivers() {
        let (told, hears) = channel();
        let server = Server::bind(any_port()).tls(believed.tls()).driver(driver).shards(1);
        let server = server
            .start(move |_shard| {
                let told = told.clone();
                http(service_fn(move |request: Request<Incoming>| {
                    let told = told.clone();
                    async move {
                        let body = request.into_body().collect().await.map(|body| body.to_bytes());
                        told.send(body.as_ref().map(|body| body.to_vec()).map_err(drop)).unwrap();
                        body.map(|_| Response::new("thanks".to_owned()))
                    }
                }))
            })
            .unwrap();
        let config = Arc::new(believed.client());
        // The body has a length, so that the missing close_notify means nothing.
        for (body, heard) in [("all of it", Ok(b"all of it".to_vec())), ("half", Err(()))] {
            let mut stream = connect(&config, server.local_addrs()[0], "");
            let head = "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\nconnection: close\r\n\r\n";
            stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
            stream.flush().unwrap();
            stream.sock.shutdown(Shutdown::Write).unwrap();
            assert_eq!(hears.recv_timeout(SOON).unwrap(), heard);
            let answer = String::from_utf8(rest(&mut stream).0).unwrap();
            assert_eq!(answer.ends_with("thanks"), heard.is_ok(), "{answer}");
        }
        shut_down(server);
    }
}
