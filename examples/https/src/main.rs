//! Serves HTTP/1.1 and HTTP/2 over TLS with hyper.
//!
//!     cargo run --release -p example-https
//!     curl --cacert /tmp/ringserve-https.pem https://localhost:8443/
//!     curl --cacert /tmp/ringserve-https.pem --http1.1 https://localhost:8443/bytes/1000000 -o /dev/null

use std::convert::Infallible;
use std::error::Error;
use std::fs;
use std::future::ready;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use ringserve::http::hyper::body::Incoming;
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Method, Request, Response, StatusCode};
use ringserve::log::LogOptions;
use ringserve::tls::{Pem, Tls};
use ringserve::{Driver, Server, http};

/// An HTTPS server: GET / says which protocol was spoken, GET /bytes/N sends N bytes.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:8443", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The certificate and those between it and its authority, as PEM. Without it the server makes one, for localhost.
    #[arg(long, requires = "key", value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its private key, as PEM.
    #[arg(long, requires = "cert", value_name = "FILE")]
    key: Option<PathBuf>,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

fn answer(request: &Request<Incoming>) -> Response<String> {
    let (status, body) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/") => (StatusCode::OK, format!("hello by {:?}\n", request.version())),
        (&Method::GET, path) => match path.strip_prefix("/bytes/").map(str::parse::<u32>) {
            // 16 MiB at most, since it is made before it is sent.
            Some(Ok(count @ ..=16_777_216)) => (StatusCode::OK, "x".repeat(count as usize)),
            _ => (StatusCode::NOT_FOUND, String::new()),
        },
        _ => (StatusCode::METHOD_NOT_ALLOWED, String::new()),
    };
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
}

/// A certificate for localhost, which no authority has signed.
fn self_signed() -> Result<(Pem, Pem), Box<dyn Error>> {
    let made = rcgen::generate_simple_self_signed(["localhost".into()])?;
    let file = std::env::temp_dir().join("ringserve-https.pem");
    fs::write(&file, made.cert.pem())?;
    // Not `println!`, which panics where nothing reads.
    let _ =
        writeln!(stdout(), "made a certificate for localhost; clients believe it with {}", file.display());
    Ok((made.cert.pem().into(), made.signing_key.serialize_pem().into()))
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let (cert, key) = match (&args.cert, &args.key) {
        (Some(cert), Some(key)) => (Pem::file(cert)?, Pem::file(key)?),
        _ => self_signed()?,
    };
    let tls = Tls::server().certificate(cert, key).watch_files(Duration::from_secs(10));
    let mut server = Server::bind(args.listen).tls(tls).driver(args.driver);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    let service = |request: Request<Incoming>| ready(Ok::<_, Infallible>(answer(&request)));
    Ok(server.serve(move |_shard| http(service_fn(service)))?)
}
