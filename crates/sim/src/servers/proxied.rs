//! Clients behind proxies, whose headers come in any pieces, and intruders: peers of proxy
//! listeners that are not proxies.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ringserve_core::proxy::{CommandV2, Ends, write_v1, write_v2};
use ringserve_server::listen::ProxyProtocol;
use ringserve_server::stats::ServerStats;
use ringserve_server::testing::{ClientStream, Net, Sim};
use ringserve_server::{CloseReason, Peer};

use super::ADDR;
use super::cover::Cover;
use super::plan::{CLIENT_NUMBERS, Plan};

/// The address at which the first service of two expects proxies, none of which is a client.
pub const UNTRUSTED: ([u8; 4], u16) = ([10, 0, 0, 1], 7002);

/// The address that clients claim.
const CLIENTS: [u8; 4] = [203, 0, 113, 1];

/// The destination that they claim.
const DESTINATION: ([u8; 4], u16) = ([198, 51, 100, 7], 443);

/// The port of the client with number 0.
const PORT: u16 = 10_000;

/// The hosts of clients.
pub fn trusted() -> ProxyProtocol {
    ProxyProtocol::from(["10.128.0.0/9"]).keep_tlvs()
}

/// No host.
pub fn untrusted() -> ProxyProtocol {
    ProxyProtocol::from(["10.0.0.0/9"])
}

/// The header of the client whose requests begin with this number, and whether it names the client.
pub fn header(first: u32) -> (Vec<u8>, bool) {
    let port = PORT + (first / CLIENT_NUMBERS) as u16;
    let ends = Ends { source: (CLIENTS, port).into(), destination: DESTINATION.into() };
    let mut out = Vec::new();
    let id: (u8, &[u8]) = (0x05, b"id");
    let kind = first / CLIENT_NUMBERS % 5;
    match kind {
        0 => write_v2(&mut out, CommandV2::Local, []),
        1 => write_v1(&mut out, None),
        2 => write_v1(&mut out, Some(ends)),
        _ => write_v2(&mut out, CommandV2::Proxy(Some(ends)), [id]),
    }
    (out, kind > 1)
}

pub async fn send_in_pieces(net: &Net, stream: &mut ClientStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let piece = 1 + (net.random() % bytes.len() as u64) as usize;
        stream.send(&bytes[..piece]).await?;
        bytes = &bytes[piece..];
        if net.random().is_multiple_of(3) {
            net.sleep(Duration::from_millis(net.random() % 50)).await;
        }
    }
    Ok(())
}

/// Checks, in a call of request `number`, that the peer is the one of its header, and no other.
pub fn check_peer(peer: &Peer, number: u32, is_proxied: bool, cover: &Cover) {
    let first = number / CLIENT_NUMBERS * CLIENT_NUMBERS;
    let of_client = SocketAddr::from((CLIENTS, PORT + (first / CLIENT_NUMBERS) as u16));
    let is_client = is_proxied && header(first).1;
    assert_eq!(peer.addr() == Some(of_client), is_client, "{peer:?} is the peer of request {number}");
    assert_eq!((peer.via().is_some(), peer.local_addr().is_some()), (is_client, is_client), "{peer:?}");
    if is_proxied {
        cover.count("did", if is_client { "client behind a proxy" } else { "proxy itself" });
    }
}

/// The behaviour of intruders.
const INTRUDERS: [&str; 5] = ["silent", "half a header", "no header", "fin", "untrusted"];

/// Makes some intruders connect.
pub fn intrude(sim: &Sim, plan: &Plan) {
    if !plan.proxied {
        return;
    }
    for number in 0..sim.random() % 4 {
        let what = INTRUDERS[(sim.random() % INTRUDERS.len() as u64) as usize];
        let (what, addr) = match what {
            "untrusted" if plan.second.is_some() => (what, UNTRUSTED),
            // There is no such listener.
            "untrusted" => ("silent", ADDR),
            _ => (what, ADDR),
        };
        sim.client(format!("intruder {number}"), async move |net| {
            net.sleep(Duration::from_micros(net.random() % 20_000_000)).await;
            // Whatever its result: the server may be gone.
            if let Ok(mut me) = net.connect(SocketAddr::from(addr)).await {
                let (whole, _) = header(2 * CLIENT_NUMBERS);
                let half = 1 + (net.random() % (whole.len() as u64 - 1)) as usize;
                let _ = match what {
                    "half a header" => send_in_pieces(&net, &mut me, &whole[..half]).await,
                    "no header" => me.send("GET / HTTP/1.1\r\n\r\n").await,
                    "fin" => me.finish(),
                    "untrusted" => me.send(&whole).await,
                    _ => Ok(()),
                };
                if let Ok(heard) = net.timeout(Duration::from_secs(60), me.closed()).await {
                    assert_eq!(heard.unwrap_or_default(), b"", "an intruder is told something");
                }
            }
            Ok(())
        });
    }
}

/// Checks at the end that connections whose service was not called ended before their header was
/// complete.
pub fn check(stats: &ServerStats, plan: &Plan, opened: u64, cover: &Cover) {
    use CloseReason::{ProxyNoHeader, ProxyTimeout, ProxyUntrusted};
    let counters = &stats.services[0].counters;
    let bad = CloseReason::ProxyBadHeader(ringserve_core::proxy::HeaderError::NotProxy);
    let turned_away: u64 = [ProxyUntrusted, ProxyTimeout, ProxyNoHeader, bad]
        .map(|reason| counters.closed_for(reason))
        .iter()
        .sum();
    let unasked = counters.opened - opened;
    assert!(
        turned_away <= unasked,
        "{turned_away} have no header, and the service was not asked for {unasked}"
    );
    assert!(
        plan.proxied || plan.layers.is_some() || unasked == 0,
        "the service was not asked for {unasked} connections"
    );
    for (name, count) in counters.reasons().filter(|(name, _)| name.starts_with("proxy")) {
        cover.add("close", name, count);
    }
}
