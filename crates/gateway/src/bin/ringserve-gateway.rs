//! A reverse proxy of HTTP and a relay of TCP, as a file says.
//!
//!     cargo run --release -p ringserve-gateway --features bin -- --config examples/gateway.toml
//!     curl -H 'host: api.example.org' http://127.0.0.1:8080/v1/users
//!     kill -HUP PID                                       reads the file again, all of it or nothing
//!     curl -X POST -H 'X-Ringserve: 1' http://127.0.0.1:9000/gateway/reload   the same, with the error as the answer
//!
//! It exits with 0 after a drain, with 1 if it could not serve, and with 2 if the file is wrong:
//! the error has its line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ringserve_gateway::config::{GatewayFile, GatewayServer};
use ringserve_server::subscriber::{self, LogOptions};
use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;

/// A reverse proxy of HTTP and a relay of TCP, as a file says.
#[derive(Parser)]
struct Args {
    /// The file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Reads the file and all that it names, says what is wrong, and serves nothing.
    #[arg(long = "check")]
    is_check: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let file = match GatewayFile::read(&args.config) {
        Ok(file) => file,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    if args.is_check {
        let listeners: Vec<String> = file.listeners().map(|addr| addr.to_string()).collect();
        let upstreams = file.upstreams().count();
        println!(
            "{}: {} routes, {upstreams} upstreams, listens at {}",
            args.config.display(),
            file.routes(),
            listeners.join(", ")
        );
        return ExitCode::SUCCESS;
    }
    match serve(file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(1)
        }
    }
}

fn serve(file: GatewayFile) -> Result<(), Box<dyn std::error::Error>> {
    subscriber::init(LogOptions::default())?;
    let server = GatewayServer::new(file)?;
    let (reloader, mut signals) = (server.reloader(), Signals::new([SIGHUP])?);
    // It ends with the process.
    std::thread::spawn(move || signals.forever().for_each(|_| _ = reloader.reload_and_log()));
    Ok(server.serve()?)
}
