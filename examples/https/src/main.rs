//! Serves HTTP/1.1 and HTTP/2 over TLS with hyper.
//!
//!     cargo run --release -p example-https
//!     curl --cacert /tmp/ringserve-https.pem https://localhost:8443/
//!     curl --cacert /tmp/ringserve-https.pem --http1.1 https://localhost:8443/bytes/1000000 -o /dev/null
//!     curl --cacert /tmp/ringserve-https.pem --head https://localhost:8443/bytes/1000000
//!     curl --cacert /tmp/ringserve-https.pem https://localhost:8443/length -T FILE -H 'expect: 100-continue'

use std::error::Error;
use std::fs;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use http_body_util::BodyExt;
use ringserve::http::hyper::body::Incoming;
use ringserve::http::hyper::header::CONTENT_LENGTH;
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Error as HttpError, Method, Request, Response, StatusCode};
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::tls::{Pem, Tls};
use ringserve::{Server, http};

/// An HTTPS server: GET and HEAD of / say which protocol was spoken, and of /bytes/N send N bytes;
/// PUT or POST /length counts bytes.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:8443", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The certificate and those between it and its authority, as PEM. Without it the server makes
    /// one, for localhost.
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

async fn answer(request: Request<Incoming>) -> Result<Response<String>, HttpError> {
    let is_head = request.method() == Method::HEAD;
    let (status, body) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/") => {
            (StatusCode::OK, format!("hello by {:?}\n", request.version()))
        }
        (&Method::GET | &Method::HEAD, path) => match path.strip_prefix("/bytes/").map(str::parse::<u32>) {
            // At most 16 MiB, since it is made before it is sent.
            Some(Ok(count @ ..=16_777_216)) => (StatusCode::OK, "x".repeat(count as usize)),
            _ => (StatusCode::NOT_FOUND, String::new()),
        },
        // A client that waits for 100 is asked to go on when its body is read.
        (&Method::PUT | &Method::POST, "/length") => {
            (StatusCode::OK, format!("{} bytes\n", length(request.into_body()).await?))
        }
        _ => (StatusCode::METHOD_NOT_ALLOWED, String::new()),
    };
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    if is_head {
        // hyper leaves the body out with HTTP/1.1 alone.
        let len = std::mem::take(answer.body_mut()).len();
        answer.headers_mut().insert(CONTENT_LENGTH, len.into());
    }
    Ok(answer)
}

/// Reads a body to its end and keeps none of it.
async fn length(mut body: Incoming) -> Result<u64, HttpError> {
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        length += frame?.data_ref().map_or(0, |data| data.len() as u64);
    }
    Ok(length)
}

/// A certificate for localhost, which no authority has signed.
fn self_signed() -> Result<(Pem, Pem), Box<dyn Error>> {
    let made = rcgen::generate_simple_self_signed(["localhost".into()])?;
    let file = std::env::temp_dir().join("ringserve-https.pem");
    fs::write(&file, made.cert.pem())?;
    // Not `println!`, which panics if nothing reads.
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
    Ok(server.serve(|_shard| http(service_fn(answer)))?)
}

#[cfg(test)]
mod tests {
    use ringserve::testing::Sim;

    use super::*;

    #[test]
    fn head_has_no_body_and_100_comes_before_the_upload() {
        Sim::seeds(20).run(|sim| {
            let server = Server::bind("10.0.0.1:8080").shards(1);
            let addr = sim.serve(server, |_shard| http(service_fn(answer)));
            sim.client("head", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("HEAD /bytes/1000000 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
                let answer = String::from_utf8(me.closed().await?)?;
                assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n"), "{answer}");
                assert!(answer.contains("content-length: 1000000\r\n"), "{answer}");
                Ok(())
            });
            sim.client("upload", async move |net| {
                let mut me = net.connect(addr).await?;
                let head =
                    "PUT /length HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n";
                me.send(head).await?;
                assert_eq!(me.line().await?.as_deref(), Some("HTTP/1.1 100 Continue"));
                assert_eq!(me.line().await?.as_deref(), Some(""));
                me.send("hello").await?;
                me.finish()?;
                let answer = String::from_utf8(me.closed().await?)?;
                assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("5 bytes\n"), "{answer}");
                Ok(())
            });
            sim.run_until_done();
        });
    }
}
