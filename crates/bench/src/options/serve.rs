//! Options of `serve`.

use std::io;
use std::net::SocketAddr;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{known, refused};
use crate::{process, servers};

/// Run one server in the foreground until it is killed.
///
/// The first line of output has the address: `listening 127.0.0.1:43211`.
#[derive(Args)]
pub(crate) struct ServeOptions {
    /// The server to run.
    #[arg(value_parser = PossibleValuesParser::new(servers::all().map(|server| server.name)))]
    server: String,
    /// Loopback address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// CPU to run on [default: any].
    #[arg(long)]
    cpu: Option<usize>,
    /// Shards, for servers on the io_uring driver of ringserve.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    shards: u16,
    /// End with the process that started it.
    #[arg(long, hide = true)]
    child: bool,
    /// Never preempt the generator.
    #[arg(long, hide = true)]
    lock_step: bool,
}

impl ServeOptions {
    /// Serves until the process ends.
    pub(crate) fn run(&self) -> io::Result<()> {
        let server = known(&self.server)?;
        if self.shards > 1 && !server.has_shards() {
            return Err(refused(format!("--shards {}: {} has one", self.shards, server.name)));
        }
        process::raise_open_files()?;
        if let Some(cpu) = self.cpu {
            process::pin_to(cpu)?;
        }
        if self.child {
            process::die_with_parent()?;
        }
        if self.lock_step {
            process::set_batch_policy()?;
        }
        servers::serve(server, self.listen, usize::from(self.shards))
    }
}
