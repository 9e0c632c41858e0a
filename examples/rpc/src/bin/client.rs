//! Logs in to `example-rpc`, sends all calls at once, and prints the replies as they come.
//!
//!     cargo run --release -p example-rpc --bin example-rpc-client -- --token secret \
//!         '{"method": "wait", "millis": 500}' '{"method": "get", "key": "greeting"}'

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::thread;

use clap::Parser;
use serde_json::{Map, Value, json};

/// A client of the server of remote calls.
#[derive(Parser)]
struct Args {
    /// Address and port of the server.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    connect: SocketAddr,
    /// The user's token.
    #[arg(long)]
    token: String,
    /// Calls, each a JSON object: its method and parameters.
    #[arg(value_parser = call, value_name = "CALL")]
    calls: Vec<Map<String, Value>>,
}

fn call(arg: &str) -> Result<Map<String, Value>, serde_json::Error> {
    serde_json::from_str(arg)
}

fn frame(payload: &[u8]) -> Result<Vec<u8>, std::num::TryFromIntError> {
    Ok([&u32::try_from(payload.len())?.to_be_bytes(), payload].concat())
}

fn read_frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut payload = Vec::new();
    stream.take(u32::from_be_bytes(length).into()).read_to_end(&mut payload)?;
    Ok(payload)
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let args = Args::parse();
    let mut stream = TcpStream::connect(args.connect)?;
    let mut frames =
        frame(json!({ "id": 0, "method": "login", "token": args.token }).to_string().as_bytes())?;
    let replies = 1 + args.calls.len();
    for (id, mut call) in (1..).zip(args.calls) {
        call.insert("id".to_owned(), Value::from(id));
        frames.extend(frame(&serde_json::to_vec(&call)?)?);
    }
    // While replies are read: a server does not take requests for ever from a peer that takes no
    // replies.
    let mut requests = stream.try_clone()?;
    thread::spawn(move || requests.write_all(&frames));
    let mut code = ExitCode::SUCCESS;
    for _ in 0..replies {
        let reply: Value = serde_json::from_slice(&read_frame(&mut stream)?)?;
        println!("{reply}");
        if reply.get("error").is_some() {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}
