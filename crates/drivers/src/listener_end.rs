//! The end of a listener from outside its driver.

use std::sync::{Arc, Weak};

use crate::shared::accept::{Listener, ListeningSocket};

/// Ends a listener, from any thread, whose own driver cannot because a call blocks its shard.
#[derive(Clone, Debug)]
pub struct ListenerEnd {
    /// Weak, since a descriptor here would keep the socket listening after its driver closed it.
    socket: Weak<ListeningSocket>,
}

impl ListenerEnd {
    /// Returns the end of a listener.
    pub fn of(listener: &Listener) -> ListenerEnd {
        ListenerEnd { socket: Arc::downgrade(listener.socket()) }
    }

    /// Shuts the listener down, unless its driver closed it: new connections are refused, and those
    /// in its queue are reset. An adopted listener and a Unix socket are left alone, since others
    /// accept from their queues.
    pub fn shut_down(&self) {
        if let Some(socket) = self.socket.upgrade() {
            socket.shut_down();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn own_listener_refuses_newcomers_and_an_adopted_one_does_not() {
        for is_own in [true, false] {
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            let addr = socket.local_addr().unwrap();
            let listener = if is_own { Listener::own(socket) } else { Listener::adopted(socket) };
            let end = ListenerEnd::of(&listener);
            TcpStream::connect(addr).unwrap();
            end.shut_down();
            assert_eq!(TcpStream::connect(addr).is_err(), is_own);
            drop(listener);
            end.shut_down();
        }
    }
}
