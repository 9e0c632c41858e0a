//! The command line: one file for the options of each subcommand, and the plan that they make.

mod churn;
mod compare;
mod fanout;
mod idle;
mod load;
mod lockstep;
mod measuring;
mod rivals;
mod serve;

use std::io;

pub(crate) use churn::ChurnOptions;
pub(crate) use compare::CompareOptions;
pub(crate) use fanout::FanoutOptions;
pub(crate) use idle::{HoldOptions, IdleOptions};
pub(crate) use load::LoadOptions;
pub(crate) use lockstep::LockstepOptions;
pub(crate) use serve::ServeOptions;

use crate::process;
use crate::servers::{self, SERVERS, Server, Speaks, TLS_SERVERS};
use crate::wire::Handshakes;

/// Most bytes of one connection in one step. The generator sends all before it reads any: more than
/// fits into the socket buffers of both sides would stand still.
pub(crate) const STEP_BYTES_MAX: usize = 64 * 1024;

/// Descriptors of this process that are not connections: pipes, `/proc`, standard streams.
const OTHER_FILES: u64 = 64;

pub(crate) fn known(name: &str) -> io::Result<&'static Server> {
    servers::find(name).ok_or_else(|| refused(format!("there is no server {name}")))
}

/// The servers `named`, or all that speak what is sent: each is to be below TLS, or none.
fn chosen(
    named: Vec<&'static Server>,
    tls: Option<Handshakes>,
    lines: bool,
) -> io::Result<Vec<&'static Server>> {
    for server in &named {
        let name = server.name;
        match (server.speaks, tls) {
            (Speaks::Lines, None) if !lines => {
                return Err(refused(format!("{name} speaks lines: add --lines")));
            }
            (Speaks::Tls, None) => return Err(refused(format!("{name} speaks TLS: add --tls"))),
            (Speaks::Tls, Some(_)) | (_, None) => {}
            (_, Some(_)) => return Err(refused(format!("{name} speaks no TLS: leave --tls out"))),
        }
    }
    let all = if tls.is_some() { TLS_SERVERS } else { SERVERS };
    let fits = |server: &&Server| tls.is_some() || lines || server.speaks == Speaks::Raw;
    Ok(if named.is_empty() { all.iter().filter(fits).collect() } else { named })
}

pub(crate) fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// Refuses more connections than this process may have files.
pub(crate) fn enough_files(option: &str, connections: usize) -> io::Result<()> {
    let (files, needed) = (process::raise_open_files()?, connections as u64 + OTHER_FILES);
    if needed <= files {
        return Ok(());
    }
    Err(refused(format!(
        "{option}: {connections} connections need {needed} open files, and the hard limit is {files}; raise it (ulimit -Hn) or ask for fewer"
    )))
}
