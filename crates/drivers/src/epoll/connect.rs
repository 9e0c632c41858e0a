//! Connecting.

use ringserve_core::{Address, Completion, ConnId};
use socket2::Socket;

use super::Epoll;
use crate::shared::connect::{errno, to_kernel};

impl Epoll {
    pub(super) fn connect(&mut self, id: ConnId, address: &Address) {
        assert!(id.slot() < self.connections_max, "slot {} is beyond connections_max", id.slot());
        let (socket, result) = match self.begin_connect(address) {
            Ok((socket, result)) => (Some(socket), result),
            Err(errno) => (None, Err(errno)),
        };
        let Some(port) = self.ports.open(id, socket) else { return Self::unknown(id, "connect") };
        port.connecting = result == Err(libc::EINPROGRESS);
        if port.connecting {
            port.writable = false;
        } else {
            self.ready.push_back(Completion::Connected { id, result });
        }
        self.register(id);
    }

    fn begin_connect(&mut self, address: &Address) -> Result<(Socket, Result<(), i32>), i32> {
        let to = to_kernel(address)?;
        self.stats.calls += 3;
        let socket = self.before_connect.open_socket(address)?;
        socket.set_nonblocking(true).map_err(|error| errno(&error))?;
        let result = socket.connect(&to).map_err(|error| errno(&error));
        Ok((socket, result))
    }

    pub(super) fn connect_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a connect") };
        if std::mem::replace(&mut port.connecting, false) {
            self.ready.push_back(Completion::Connected { id, result: Err(libc::ECANCELED) });
        }
    }

    /// The socket of a connect in flight has something to tell.
    #[cold]
    pub(super) fn on_connected(&mut self, slot: u32) {
        let Some(port) = self.ports.at(slot) else { return };
        let (id, Some(socket)) = (port.id(), &port.socket) else { return };
        self.stats.calls += 1;
        let result = match socket.take_error() {
            Ok(None) => Ok(()),
            Ok(Some(error)) | Err(error) => Err(errno(&error)),
        };
        port.connecting = false;
        self.ready.push_back(Completion::Connected { id, result });
    }
}
