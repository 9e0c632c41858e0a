//! Sends lines back over TLS, and over plain TCP on another port, with one service.
//!
//!     cargo run --release -p example-tls-echo
//!     printf 'hello\n' | openssl s_client -quiet -connect 127.0.0.1:7443 -CAfile /tmp/ringserve-cert.pem
//!
//! With a certificate of an authority, and clients that must have one too:
//!
//!     cargo run --release -p example-tls-echo -- --cert cert.pem --key key.pem --clients ca.pem

use std::convert::Infallible;
use std::error::Error;
use std::fs;
use std::future::poll_fn;
use std::io;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::listen::{Endpoint, endpoints, tcp};
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::tls::{Clients, Pem, Tickets, Tls, TlsInfo};
use ringserve::{Cx, Frame, Server, Service, Stream, stream};

/// An echo server over TLS: a line comes back as it is, `who` is answered with the facts of the
/// connection.
#[derive(Parser)]
struct Args {
    /// Address and port for TLS; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7443", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address and port for plain TCP; without it there is none.
    #[arg(long, value_name = "ADDR:PORT")]
    plain: Option<SocketAddr>,
    /// The certificate and those between it and its authority, as PEM. Without it the server makes
    /// one, for localhost.
    #[arg(long, requires = "key", value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its private key, as PEM.
    #[arg(long, requires = "cert", value_name = "FILE")]
    key: Option<PathBuf>,
    /// A second certificate, such as one for an RSA key in addition to one for ECDSA.
    #[arg(long, requires = "key2", value_name = "FILE")]
    cert2: Option<PathBuf>,
    /// Its private key.
    #[arg(long, requires = "cert2", value_name = "FILE")]
    key2: Option<PathBuf>,
    /// Authorities of clients, as PEM: each client must have a certificate.
    #[arg(long, value_name = "FILE")]
    clients: Option<PathBuf>,
    /// At least 32 random bytes: sessions are resumed after a restart too.
    #[arg(long, value_name = "FILE")]
    tickets: Option<PathBuf>,
    /// Milliseconds between two looks at the files of certificates; 0 for none.
    #[arg(long, default_value_t = 10_000, value_name = "MS")]
    watch: u64,
    /// Treat a connection that ends without close_notify as cut off.
    #[arg(long)]
    require_close_notify: bool,
    /// Serve streams of bytes instead of frames. From outside they are the same.
    #[arg(long)]
    stream: bool,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The most bytes of a line of a stream, with its end.
const LINE_BYTES_MAX: usize = 64 << 10;

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        if *line == *b"who" {
            cx.reply(who(cx.tls()));
        } else {
            cx.reply(line);
        }
        Ok(())
    }
}

/// Sends lines of a stream back. No framing bounds its lines, and no lane ends it in a drain: it
/// does both.
async fn echo(mut stream: Stream) -> io::Result<()> {
    let mut line = Vec::new();
    let mut draining = stream.draining();
    loop {
        // Bytes that are there are read first.
        let bytes = poll_fn(|task| match stream.poll_read_frame(task) {
            Poll::Pending => Pin::new(&mut draining).poll(task).map(|()| Ok(None)),
            bytes => bytes,
        });
        let Some(bytes) = bytes.await? else { return Ok(()) };
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if line.len() + part.len() > LINE_BYTES_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line of more than 64 KiB"));
            }
            line.extend_from_slice(part);
            if !part.ends_with(b"\n") {
                continue;
            }
            stream.ready().await?;
            match &line[..] {
                b"who\n" => stream.queue(format!("{}\n", who(stream.tls())).as_bytes()),
                line => stream.queue(line),
            }
            line.clear();
        }
    }
}

/// The facts about the peer of a connection.
fn who(tls: Option<Rc<TlsInfo>>) -> String {
    let Some(tls) = tls else { return "plain".into() };
    let names: Vec<_> = tls.identity().into_iter().flat_map(|identity| identity.dns_names()).collect();
    format!(
        "{} {} name {} resumed {} client {}",
        tls.version(),
        tls.cipher_suite(),
        tls.server_name().unwrap_or("none"),
        tls.is_resumed(),
        if names.is_empty() { "none".into() } else { names.join(",") }
    )
}

/// A certificate for localhost, which no authority has signed.
fn self_signed() -> Result<(Pem, Pem), Box<dyn Error>> {
    let made = rcgen::generate_simple_self_signed(["localhost".into()])?;
    let file = std::env::temp_dir().join("ringserve-cert.pem");
    fs::write(&file, made.cert.pem())?;
    // Not `println!`, which panics if nothing reads.
    let _ =
        writeln!(stdout(), "made a certificate for localhost; clients believe it with {}", file.display());
    Ok((made.cert.pem().into(), made.signing_key.serialize_pem().into()))
}

fn tls(args: &Args) -> Result<Tls, Box<dyn Error>> {
    let (cert, key) = match (&args.cert, &args.key) {
        (Some(cert), Some(key)) => (Pem::file(cert)?, Pem::file(key)?),
        _ => self_signed()?,
    };
    let mut tls = Tls::server().certificate(cert, key).require_close_notify(args.require_close_notify);
    if let (Some(cert), Some(key)) = (&args.cert2, &args.key2) {
        tls = tls.certificate(Pem::file(cert)?, Pem::file(key)?);
    }
    if let Some(authorities) = &args.clients {
        tls = tls.clients(Clients::required(authorities)?);
    }
    if let Some(file) = &args.tickets {
        tls = tls.tickets(Tickets::from_file(file)?);
    }
    if args.watch > 0 {
        tls = tls.watch_files(Duration::from_millis(args.watch));
    }
    Ok(tls)
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let mut listen: Vec<Endpoint> = vec![tcp(args.listen).tls(tls(&args)?)];
    listen.extend(args.plain.map(tcp));
    let server = match args.stream {
        false => {
            Server::new().service(endpoints(listen).framing(Lines::default()).name("echo"), |_shard| Echo)
        }
        true => Server::new().service(endpoints(listen).name("echo"), |_shard| stream(echo)),
    };
    let mut server = server.driver(args.driver);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    Ok(server.serve()?)
}
