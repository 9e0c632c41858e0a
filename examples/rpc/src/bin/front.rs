//! Speaks lines with its clients, and asks servers of `example-rpc` for them: the calls of all
//! clients share a few connections, and their ids tell which reply is whose.
//!
//!     cargo run --release -p example-rpc --bin example-rpc-front -- --server 127.0.0.1:7000 --token secret
//!     printf '{"method": "get", "key": "greeting"}\n' | nc -N 127.0.0.1 7001
//!
//! A line is a call without an id, and so is the line that answers it; answers come in the order of
//! the calls. Calls that read may be sent twice where a connection is lost. Several servers have to
//! share a database.

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::{LengthPrefix, Lines};
use ringserve::log::LogOptions;
use ringserve::net::Framed;
use ringserve::upstream::{Check, Multiplexed, Request, Upstream};
use ringserve::{Cx, Frame, Server, Service, Shard};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A front of servers of remote calls.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7001", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// A server of `example-rpc`; any number of times.
    #[arg(long = "server", required = true, value_name = "NAME:PORT")]
    servers: Vec<String>,
    /// The token of the user whose keys are read and written.
    #[arg(long)]
    token: String,
}

/// A reply of a server, or of its login.
#[derive(Deserialize)]
struct Reply {
    id: Option<u64>,
    result: Option<Value>,
    error: Option<Value>,
}

fn read(frame: &[u8]) -> Result<Reply, serde_json::Error> {
    serde_json::from_slice(frame)
}

/// A client of the servers on a shard, which logs in on each connection.
fn client(servers: &Upstream, shard: &Shard, token: String) -> Multiplexed<LengthPrefix> {
    let id = |reply: &Frame| read(reply).ok()?.id;
    let write = |id: u64, call: &[u8], out: &mut Vec<u8>| {
        // It was read before, so it is an object.
        let mut call: Map<String, Value> = serde_json::from_slice(call).unwrap_or_default();
        call.insert("id".to_owned(), id.into());
        out.extend_from_slice(Value::from(call).to_string().as_bytes());
    };
    let login = async move |connection: &mut Framed<LengthPrefix>| {
        let login = json!({ "id": 0, "method": "login", "token": token }).to_string();
        connection.queue(login.as_bytes()).map_err(io::Error::other)?;
        let reply = connection.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
        match read(&reply)?.error {
            None => Ok(()),
            Some(why) => Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("no login: {why}"))),
        }
    };
    servers.multiplexed(shard, LengthPrefix::default(), id, write).setup(login)
}

struct Front {
    servers: Multiplexed<LengthPrefix>,
}

impl Front {
    async fn ask(&self, line: &[u8]) -> Result<Value, Value> {
        let call: Map<String, Value> = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let reads = call.get("method").is_some_and(|method| method == "get" || method == "wait");
        let request = Request::new(line);
        let request = if reads { request.idempotent() } else { request };
        let reply = self.servers.ask(request).await.map_err(|error| error.to_string())?;
        let reply = read(&reply).map_err(|error| error.to_string())?;
        reply.error.map_or(Ok(reply.result.unwrap_or_default()), Err)
    }
}

impl Service for Front {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let answer = match self.ask(&line).await {
            Ok(result) => json!({ "result": result }),
            Err(error) => json!({ "error": error }),
        };
        cx.reply(answer.to_string());
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let servers = Upstream::new("rpc", args.servers.iter().map(String::as_str))
        .check(Check::connect())
        .answer_timeout(Duration::from_secs(30));
    let token = args.token;
    let server = Server::bind(args.listen).framing(Lines::default()).upstream(&servers);
    server.serve(move |shard| Front { servers: client(&servers, shard, token.clone()) })?;
    Ok(())
}
