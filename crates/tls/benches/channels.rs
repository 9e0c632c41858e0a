//! Cost of a channel in addition to rustls itself, in memory and on one thread:
//!
//! ```sh
//! cargo bench -p ringserve-tls [--features graviola]
//! ```
//!
//! With `echoes N BYTES` it sends N records back in each way and measures nothing: the functions
//! `echo_by_channel` and `echo_by_rustls` are for callgrind to count
//! (`--toggle-collect=*echo_by*`).
//!
//! Handshakes: the server's part alone, of this channel and of a rustls connection. Records: one
//! way, compared with the cipher's own time, which is measured by sealing and opening with rustls'
//! record layer and nothing around it.

#[path = "../tests/channels/pair.rs"]
#[allow(dead_code)]
mod pair;

use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use pair::{Authority, Pair, client_config};
use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, TransportConn, TransportEvent};
use ringserve_tls::rustls::crypto::CryptoProvider;
use ringserve_tls::rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundPlainMessage,
};
use ringserve_tls::rustls::pki_types::ServerName;
use ringserve_tls::rustls::version::TLS13;
use ringserve_tls::rustls::{
    ClientConfig, ClientConnection, ContentType, ProtocolVersion, ServerConfig, ServerConnection,
    SupportedCipherSuite,
};
use ringserve_tls::{Tls, TlsListener};

/// Runs, of which the fastest counts.
const RUNS: usize = 15;

/// Bytes of the records of a run of [`records`] and [`raw`]: twice as many fit in the cache
/// together with their keys.
const AT_ONCE: usize = 128 << 10;

fn server() -> Tls {
    Tls::server()
}

fn main() {
    // Cargo adds an option.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    if let [what, count, bytes] = &args[..]
        && what == "echoes"
    {
        let number = |text: &String| text.parse().expect("a number of records, and one of bytes");
        return echoes(number(count), number(bytes));
    }
    measure("rustls 0.23", server());
}

/// Measures all of `tls`, compared with rustls 0.23 and its cipher.
fn measure(rustls: &str, tls: Tls) {
    let authority = Authority::new("authority");
    let plain = {
        let (chain, key) = authority.ecdsa(&["localhost"]).pems();
        TlsListener::new(server().certificate(chain, key)).unwrap().config()
    };
    println!("{rustls}");
    println!("the server's part of a handshake, TLS 1.3, each");
    for (name, cert) in
        [("ECDSA P-256", authority.ecdsa(&["localhost"])), ("RSA 2048", authority.rsa(&["localhost"]))]
    {
        let (chain, key) = cert.pems();
        let listener = TlsListener::new(tls.clone().certificate(chain.clone(), key.clone())).unwrap();
        let plain = TlsListener::new(server().certificate(chain, key)).unwrap().config();
        for resumed in [false, true] {
            let config = || {
                let mut config = client_config(&authority, &[&TLS13], None);
                if !resumed {
                    config.resumption = ringserve_tls::rustls::client::Resumption::disabled();
                }
                Arc::new(config)
            };
            let (ours, theirs) = (config(), config());
            // Alternates, so that a busy machine affects both equally.
            let (mut channel, mut rustls) = (Vec::new(), Vec::new());
            handshakes_of_channels(&listener, &ours, 20);
            handshakes_of_rustls(&plain, &theirs, 20);
            for _ in 0..RUNS {
                channel.push(handshakes_of_channels(&listener, &ours, 100));
                rustls.push(handshakes_of_rustls(&plain, &theirs, 100));
            }
            let (channel, rustls) = (least(channel), least(rustls));
            println!(
                "  {name:11} {:7} channel {channel:7.1} us, rustls {rustls:7.1} us: {:.2} of its speed",
                if resumed { "resumed" } else { "full" },
                rustls / channel
            );
        }
    }
    println!("records of TLS 1.3, each, the cipher in brackets");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let listener = TlsListener::new(tls.certificate(chain, key)).unwrap();
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    for size in [64, 1024, 16 * 1024] {
        let mut pair = Pair::new(&listener, &config, "localhost").connected();
        let (seal, open) = records(&mut pair, size);
        let (raw_seal, raw_open) = raw(plain.crypto_provider(), size);
        println!("  {size:5} bytes: seal {seal:.2} ({raw_seal:.2}) us, open {open:.2} ({raw_open:.2}) us");
    }
}

/// Sends `count` records of `bytes` bytes back by each way.
fn echoes(count: usize, bytes: usize) {
    let authority = Authority::new("authority");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    let all = [server()];
    let plain = vec![7; bytes];
    for tls in all {
        let listener = TlsListener::new(tls.certificate(chain.clone(), key.clone())).unwrap();
        let mut pair = Pair::new(&listener, &config, "localhost").connected();
        let (mut batch, mut out) = (Batch::new(), Vec::new());
        for _ in 0..count {
            pair.client.writer().write_all(&plain).unwrap();
            let wire = LeaseMut::try_copy_of(&pair.client_bytes()).unwrap();
            echo_by_channel(&mut *pair.channel, wire, &mut batch, &mut out);
            out.clear();
        }
    }
    let listener = TlsListener::new(server().certificate(chain, key)).unwrap();
    let mut client = ClientConnection::new(config, ServerName::try_from("localhost").unwrap()).unwrap();
    let mut rustls = ServerConnection::new(listener.config()).unwrap();
    let (mut wire, mut out, mut back) = (Vec::new(), Vec::new(), vec![0; bytes]);
    while client.is_handshaking() || rustls.is_handshaking() {
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        let mut left = &wire[..];
        while !left.is_empty() {
            rustls.read_tls(&mut left).unwrap();
            rustls.process_new_packets().unwrap();
        }
        wire.clear();
        while rustls.wants_write() {
            rustls.write_tls(&mut out).unwrap();
        }
        hear(&mut client, &out);
        out.clear();
    }
    for _ in 0..count {
        client.writer().write_all(&plain).unwrap();
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        echo_by_rustls(&mut rustls, &wire, &mut back, &mut out);
        wire.clear();
        out.clear();
    }
}

#[inline(never)]
fn echo_by_channel(
    channel: &mut dyn TransportConn,
    mut wire: LeaseMut,
    batch: &mut Batch,
    out: &mut Vec<u8>,
) {
    while let TransportEvent::Plain(plain) = channel.decode(&mut wire, out) {
        batch.put(&plain);
    }
    channel.encode(batch, out).unwrap();
    batch.clear();
}

#[inline(never)]
fn echo_by_rustls(rustls: &mut ServerConnection, mut wire: &[u8], plain: &mut [u8], out: &mut Vec<u8>) {
    while !wire.is_empty() {
        rustls.read_tls(&mut wire).unwrap();
        rustls.process_new_packets().unwrap();
    }
    rustls.reader().read_exact(plain).unwrap();
    rustls.writer().write_all(plain).unwrap();
    rustls.write_tls(out).unwrap();
}

/// The CPU time of this thread: other processes may use the machine meanwhile.
struct Cpu(Duration);

impl Cpu {
    fn now() -> Cpu {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Cpu(Duration::new(now.tv_sec as u64, now.tv_nsec as u32))
    }

    fn elapsed(&self) -> Duration {
        Cpu::now().0 - self.0
    }
}

fn least(figures: Vec<f64>) -> f64 {
    figures.into_iter().fold(f64::INFINITY, f64::min)
}

/// Microseconds of each.
fn each(time: Duration, count: usize) -> f64 {
    time.as_secs_f64() * 1e6 / count as f64
}

fn handshakes_of_channels(listener: &TlsListener, config: &Arc<ClientConfig>, count: usize) -> f64 {
    use ringserve_core::Transport;
    let transport = listener.transport();
    let mut spent = Duration::ZERO;
    for _ in 0..count {
        let mut client =
            ClientConnection::new(config.clone(), ServerName::try_from("localhost").unwrap()).unwrap();
        let mut out = Vec::new();
        let start = Cpu::now();
        let mut channel = transport.begin(&mut out).unwrap();
        spent += start.elapsed();
        let mut ready = false;
        while !ready {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            let mut wire = LeaseMut::try_copy_of(&bytes).unwrap();
            let start = Cpu::now();
            assert!(matches!(channel.decode(&mut wire, &mut out), TransportEvent::Work));
            ready = matches!(channel.work(&mut out), TransportEvent::Ready);
            spent += start.elapsed();
            hear(&mut client, &out);
            out.clear();
        }
        let start = Cpu::now();
        drop(channel);
        spent += start.elapsed();
    }
    each(spent, count)
}

fn handshakes_of_rustls(config: &Arc<ServerConfig>, client: &Arc<ClientConfig>, count: usize) -> f64 {
    let mut spent = Duration::ZERO;
    for _ in 0..count {
        let mut client =
            ClientConnection::new(client.clone(), ServerName::try_from("localhost").unwrap()).unwrap();
        let start = Cpu::now();
        let mut server = ServerConnection::new(config.clone()).unwrap();
        spent += start.elapsed();
        while server.is_handshaking() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            let mut out = Vec::new();
            let start = Cpu::now();
            let mut left = &bytes[..];
            while !left.is_empty() {
                server.read_tls(&mut left).unwrap();
                server.process_new_packets().unwrap();
            }
            while server.wants_write() {
                server.write_tls(&mut out).unwrap();
            }
            spent += start.elapsed();
            hear(&mut client, &out);
        }
        let start = Cpu::now();
        drop(server);
        spent += start.elapsed();
    }
    each(spent, count)
}

fn hear(client: &mut ClientConnection, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        client.read_tls(&mut bytes).unwrap();
        client.process_new_packets().unwrap();
    }
}

/// Times of sealing and opening a record of `size` bytes.
fn records(pair: &mut Pair, size: usize) -> (f64, f64) {
    let count = AT_ONCE / size.max(512);
    let plain = vec![7; size];
    let mut batch = Batch::new();
    batch.put(&plain);
    let (mut seals, mut opens) = (Vec::new(), Vec::new());
    let mut out = Vec::new();
    pair.client.set_buffer_limit(None);
    for _ in 0..4 * RUNS {
        let start = Cpu::now();
        for _ in 0..count {
            out.clear();
            pair.channel.encode(&batch, &mut out).unwrap();
            black_box(&out);
        }
        seals.push(each(start.elapsed(), count));
        for _ in 0..count {
            pair.client.writer().write_all(&plain).unwrap();
        }
        let mut wire = LeaseMut::try_from_vec(pair.client_bytes()).unwrap();
        // A server does not return its buffers to the system either.
        let mut opened = Vec::with_capacity(count);
        let start = Cpu::now();
        while let TransportEvent::Plain(plain) = pair.channel.decode(&mut wire, &mut out) {
            opened.push(black_box(plain));
        }
        opens.push(each(start.elapsed(), count));
        drop(opened);
        while let Ok(1..) = pair.client.reader().read(&mut [0; 4096]) {}
    }
    (least(seals), least(opens))
}

/// The cipher alone, with the buffers that rustls' traits ask for.
fn raw(provider: &CryptoProvider, size: usize) -> (f64, f64) {
    let suite = provider.cipher_suites.iter().find_map(|suite| match suite {
        SupportedCipherSuite::Tls13(suite) if suite.aead_alg.key_len() == 32 => Some(*suite),
        _ => None,
    });
    let aead = suite.unwrap().aead_alg;
    let key = || (AeadKey::from([1; 32]), Iv::new([2; 12]));
    let mut encrypter: Box<dyn MessageEncrypter> = aead.encrypter(key().0, key().1);
    let mut decrypter: Box<dyn MessageDecrypter> = aead.decrypter(key().0, key().1);
    let plain = vec![7; size];
    let count = AT_ONCE / size.max(512);
    let (mut seals, mut opens) = (Vec::new(), Vec::new());
    let message = || OutboundPlainMessage {
        typ: ContentType::ApplicationData,
        version: ProtocolVersion::TLSv1_2,
        payload: plain[..].into(),
    };
    for _ in 0..4 * RUNS {
        let start = Cpu::now();
        for seq in 0..count as u64 {
            black_box(encrypter.encrypt(message(), seq).unwrap());
        }
        seals.push(each(start.elapsed(), count));
        let mut sealed: Vec<Vec<u8>> = (0..count as u64)
            // As far into a block as a header is long.
            .map(|seq| [&[0; 5], encrypter.encrypt(message(), seq).unwrap().payload.as_ref()].concat())
            .collect();
        let start = Cpu::now();
        for (seq, record) in sealed.iter_mut().enumerate() {
            let record = InboundOpaqueMessage::new(
                ContentType::ApplicationData,
                ProtocolVersion::TLSv1_2,
                &mut record[5..],
            );
            black_box(decrypter.decrypt(record, seq as u64).unwrap().payload);
        }
        opens.push(each(start.elapsed(), count));
    }
    (least(seals), least(opens))
}
