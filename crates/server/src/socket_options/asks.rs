//! Questions to the kernel about accepted sockets.

/// Facts that the kernel is asked for about each accepted socket, in addition to its peer's
/// address.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SocketQueries {
    /// The address that the peer connected to.
    pub(crate) local: bool,
    /// The process at the other end of a Unix socket.
    pub(crate) credentials: bool,
}

impl SocketQueries {
    /// The facts that either of them asks for.
    pub(crate) fn or(self, other: SocketQueries) -> SocketQueries {
        SocketQueries { local: self.local || other.local, credentials: self.credentials || other.credentials }
    }
}
