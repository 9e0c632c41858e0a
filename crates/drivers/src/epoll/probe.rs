//! A probe of whether epoll works here.

use std::os::unix::net::UnixStream;

use ringserve_buf::PoolConfig;
use ringserve_core::{ConnId, Driver, Op, Wait};
use socket2::Socket;

use super::{Epoll, EpollConfig};
use crate::shared::accept::accept;
use crate::shared::report::SetupError;
use crate::shared::report::is_refused;
use crate::shared::trial::{Steps, Trial};

const EPOLL: Steps =
    Steps { wait: "epoll_pwait", receive: "recvfrom", send: "sendto", refused: SetupError::from_epoll };

/// Tries epoll with everything the driver needs (accept, receive, send) on Unix sockets.
///
/// # Errors
/// Names the call that is refused.
pub fn probe_epoll() -> Result<(), SetupError> {
    let pool = PoolConfig { buffer_bytes: 256, buffers_max: 4, poison: false };
    let config = EpollConfig { connections: 4, pool, ..EpollConfig::default() };
    let failed = |call| move |error| SetupError::from_epoll(call, error);
    let (mut near, far) = UnixStream::pair().map_err(failed("socketpair"))?;
    // The socket does not listen, so this fails with EINVAL where nothing refuses the call.
    let asked = accept(&Socket::from(far.try_clone().map_err(failed("fcntl"))?), true);
    if let Err(error) = asked
        && is_refused(&error)
    {
        return Err(SetupError::Epoll { call: "accept", error });
    }
    let mut trial = Trial::new(Epoll::new(&config, Vec::new())?, EPOLL);
    far.set_nonblocking(true).map_err(failed("fcntl"))?;
    let socket = trial.driver.take_over(far.into());
    let id = ConnId::new(0, 1);
    trial.driver.submit(Op::Adopt { id, socket });
    trial.driver.submit(Op::Receive { id });
    trial.turn(Wait::No)?;
    trial.receives(&mut near, id)?;
    trial.sends(&mut near, id)
}
