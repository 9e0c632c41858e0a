//! The command line: one file for the options of each subcommand, and for the plan that they make.

mod churn;
mod compare;
mod cores;
mod fanout;
mod idle;
mod load;
mod lockstep;
mod measuring;
mod rivals;
mod serve;
mod speaking;

use std::io;
use std::path::Path;

pub(crate) use churn::ChurnOptions;
pub(crate) use compare::CompareOptions;
pub(crate) use cores::CoresOptions;
pub(crate) use fanout::FanoutOptions;
pub(crate) use idle::{HoldOptions, IdleOptions};
pub(crate) use load::LoadOptions;
pub(crate) use lockstep::LockstepOptions;
pub(crate) use serve::ServeOptions;

use crate::load::Target;
use crate::servers::{self, SERVERS, Server, Speaks, TLS_SERVERS, WEBSOCKET_SERVERS};
use crate::wire::Layer;

/// The most bytes of one connection in one step. The generator sends all before it reads any: more
/// than fits into the socket buffers of both sides would deadlock.
pub(crate) const STEP_BYTES_MAX: usize = 64 * 1024;

pub(crate) fn known(name: &str) -> io::Result<&'static Server> {
    servers::find(name).ok_or_else(|| refused(format!("there is no server {name}")))
}

/// The servers `named`, or all that speak the layer: each has to speak `layer`.
fn chosen(named: Vec<&'static Server>, layer: Layer, lines: bool) -> io::Result<Vec<&'static Server>> {
    for server in &named {
        let name = server.name;
        match (server.speaks, layer) {
            (Speaks::Lines, Layer::Plain) if !lines => {
                return Err(refused(format!("{name} speaks lines: add --lines")));
            }
            (Speaks::Tls, Layer::Tls(_)) | (Speaks::WebSocket, Layer::WebSocket) => {}
            (Speaks::Tls, _) => return Err(refused(format!("{name} speaks TLS: add --tls"))),
            (Speaks::WebSocket, _) => {
                return Err(refused(format!("{name} speaks WebSocket: add --websocket")));
            }
            (_, Layer::Plain | Layer::Exchange(_)) => {}
            (_, Layer::Tls(_)) => return Err(refused(format!("{name} speaks no TLS: leave --tls out"))),
            (_, Layer::WebSocket) => {
                return Err(refused(format!("{name} speaks no WebSocket: leave --websocket out")));
            }
        }
    }
    if !named.is_empty() {
        return Ok(named);
    }
    Ok(match layer {
        Layer::Tls(_) => TLS_SERVERS.iter().collect(),
        Layer::WebSocket => WEBSOCKET_SERVERS.iter().collect(),
        Layer::Plain | Layer::Exchange(_) => {
            SERVERS.iter().filter(|server| lines || server.speaks == Speaks::Raw).collect()
        }
    })
}

/// The same as targets, followed by the rivals in that directory.
fn chosen_beside(
    rivals: Option<&Path>,
    named: &[String],
    layer: Layer,
    lines: bool,
) -> io::Result<Vec<Target>> {
    let named = named.iter().map(|name| known(name)).collect::<io::Result<Vec<_>>>()?;
    let servers = chosen(named, layer, lines)?.into_iter().map(Target::Known);
    Ok(servers.chain(rivals.map_or_else(Vec::new, |place| rivals::targets(place, layer, lines))).collect())
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}
