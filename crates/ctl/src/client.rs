//! Requests to the admin endpoint, over TCP or a Unix socket.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// Time limit of an answer. The endpoint waits at most half a second for a shard that is blocked.
const WITHIN: Duration = Duration::from_secs(5);

/// The largest answer: a report has some 100 KiB.
const ANSWER_MAX: usize = 64 << 20;

/// The port where none is given.
const PORT: u16 = 9000;

/// The address of an admin endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A host and a port.
    Tcp(String),
    /// A path; one that begins with `@` is a name without a file.
    Unix(String),
}

impl Default for Place {
    fn default() -> Place {
        Place::Tcp(format!("127.0.0.1:{PORT}"))
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Place, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path.is_empty() {
                true => Err("give a path behind unix:, as in unix:/run/app.sock".to_owned()),
                false => Ok(Place::Unix(path.to_owned())),
            };
        }
        if text.starts_with("https:") {
            return Err(
                "the endpoint speaks no TLS: reach it by a tunnel, such as `ssh -L 9000:127.0.0.1:9000 HOST`"
                    .to_owned(),
            );
        }
        let authority = text.strip_prefix("http://").unwrap_or(text);
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let wrong = || Err(format!("{text:?} is no address: give http://HOST:PORT, HOST:PORT or unix:/PATH"));
        if authority.is_empty() || authority.contains(['/', '@', '?', '#', ' ']) {
            return wrong();
        }
        // The colons of an IPv6 address are in brackets.
        let rest = authority.rsplit(']').next().unwrap_or(authority);
        match rest.split_once(':') {
            None => Ok(Place::Tcp(format!("{authority}:{PORT}"))),
            Some((host, port)) if port.parse::<u16>().is_ok() && (!host.is_empty() || rest != authority) => {
                Ok(Place::Tcp(authority.to_owned()))
            }
            Some(_) => wrong(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Tcp(authority) => write!(f, "http://{authority}"),
            Place::Unix(path) => write!(f, "unix:{path}"),
        }
    }
}

impl Place {
    /// The address as the server's program writes it.
    fn in_program(&self) -> String {
        match self {
            Place::Tcp(authority) => authority.clone(),
            Place::Unix(path) => format!("unix:{path}"),
        }
    }
}

/// The reason why a command failed: a sentence that names the cause and the fix.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure(error.to_string())
    }
}

/// The admin endpoint of a server.
#[derive(Clone, Debug)]
pub struct Endpoint {
    place: Place,
    token: Option<String>,
    within: Duration,
}

impl Endpoint {
    pub fn new(place: Place, token: Option<String>) -> Endpoint {
        Endpoint { place, token, within: WITHIN }
    }

    /// Sets another time limit for each answer.
    pub fn within(self, within: Duration) -> Endpoint {
        Endpoint { within, ..self }
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The answer to a GET, as text.
    pub fn get(&self, path: &str) -> Result<String, Failure> {
        self.ask(Method::GET, path)
    }

    /// The answer to a GET, which is JSON.
    pub fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let text = self.get(path)?;
        serde_json::from_str(&text).map_err(|error| {
            Failure(format!("{} answers {path} with something else than a report ({error})", self.place))
        })
    }

    /// Orders the server to act. Returns its answer.
    pub fn post(&self, path: &str) -> Result<String, Failure> {
        self.ask(Method::POST, path)
    }

    fn ask(&self, method: Method, path: &str) -> Result<String, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            match tokio::time::timeout(self.within, self.exchange(method, path)).await {
                Ok(answer) => answer,
                Err(_) => Err(Failure(format!("{} did not answer within {:?}", self.place, self.within))),
            }
        })
    }

    async fn exchange(&self, method: Method, path: &str) -> Result<String, Failure> {
        match &self.place {
            Place::Tcp(authority) => {
                let stream = TcpStream::connect(authority).await.map_err(|error| self.not_reached(&error))?;
                self.over(stream, authority, method, path).await
            }
            Place::Unix(name) => {
                // A name without a file begins with a zero.
                let name = name.strip_prefix('@').map_or(name.clone(), |name| format!("\0{name}"));
                let stream = UnixStream::connect(name).await.map_err(|error| self.not_reached(&error))?;
                self.over(stream, "localhost", method, path).await
            }
        }
    }

    async fn over<S>(&self, stream: S, host: &str, method: Method, path: &str) -> Result<String, Failure>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let broken = |error: &dyn fmt::Display| {
            Failure(format!("{} is no admin endpoint, or broke off: {error}", self.place))
        };
        let (mut sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|error| broken(&error))?;
        let connection = tokio::spawn(connection);
        let mut request = Request::builder().method(&method).uri(path).header(HOST, host);
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if method == Method::POST {
            // A browser's page cannot send it without being asked.
            request = request.header("x-ringserve", "1");
        }
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|error| Failure(format!("the request cannot be written: {error}")))?;
        let response = sender.send_request(request).await.map_err(|error| broken(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX).collect().await;
        connection.abort();
        let body = body.map_err(|error| broken(&error))?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if status.is_success() { Ok(text) } else { Err(self.refused(status, path, &text)) }
    }

    fn not_reached(&self, error: &io::Error) -> Failure {
        use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
        let (place, program) = (&self.place, self.place.in_program());
        Failure(match error.kind() {
            ConnectionRefused | NotFound => format!(
                "no admin endpoint at {place} ({error}): start the server with Server::admin({program:?}), or say where it is \
                 by --at"
            ),
            PermissionDenied => {
                format!("{place} may not be opened by this user ({error}): run as the user of the server")
            }
            _ => format!("{place} cannot be reached: {error}"),
        })
    }

    fn refused(&self, status: StatusCode, path: &str, text: &str) -> Failure {
        let place = &self.place;
        // One sentence of it is enough.
        let why = text.lines().next().unwrap_or_default().trim();
        Failure(match (status, &self.token) {
            (StatusCode::UNAUTHORIZED, None) => {
                format!("{place} has a token: set RINGSERVE_ADMIN_TOKEN to it")
            }
            (StatusCode::UNAUTHORIZED, Some(_)) => {
                format!("{place} has another token than that in RINGSERVE_ADMIN_TOKEN")
            }
            _ if why.is_empty() => format!("{place} answers {path} with {status}"),
            _ => format!("{place} answers {path} with {status}: {why:.300}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_users_write_them() {
        let tcp = |text: &str| Ok(Place::Tcp(text.to_owned()));
        for (text, place) in [
            ("http://127.0.0.1:9000", tcp("127.0.0.1:9000")),
            ("http://127.0.0.1:9000/", tcp("127.0.0.1:9000")),
            ("localhost:80", tcp("localhost:80")),
            ("admin.internal", tcp("admin.internal:9000")),
            ("http://[::1]:7", tcp("[::1]:7")),
            ("[::1]", tcp("[::1]:9000")),
            ("unix:/run/app.sock", Ok(Place::Unix("/run/app.sock".into()))),
            ("unix:///run/app.sock", Ok(Place::Unix("/run/app.sock".into()))),
            ("unix:@app", Ok(Place::Unix("@app".into()))),
        ] {
            assert_eq!(text.parse(), place, "{text}");
        }
        for text in
            ["", "unix:", "https://a", "http://", "a:b", "http://a:1/x", "a b", "u@a:1", ":9000", "a:1:2"]
        {
            assert!(text.parse::<Place>().is_err(), "{text:?}");
        }
        assert_eq!(Place::default().to_string(), "http://127.0.0.1:9000");
    }
}
