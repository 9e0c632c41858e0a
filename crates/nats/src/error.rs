//! Why a message was not taken.

use std::fmt;

/// The reason why a message was not taken, or has no answer.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NatsError {
    /// There is no connection, or it was lost before the answer came. What was asked may have been
    /// done.
    Disconnected,
    /// As much waits to be sent as
    /// [`NatsOptions::pending_bytes_max`](crate::NatsOptions::pending_bytes_max) allows.
    Full,
    /// No service listens to the subject that was asked.
    NoResponders,
    /// A subject has an empty token, a blank or a wildcard where none may be, or more than 1024
    /// bytes.
    BadSubject,
    /// A field of the headers has no name, a blank or a colon in its name, or a line end.
    BadHeader,
    /// The server takes no headers.
    NoHeaders,
    /// Headers and payload are larger than the server allows.
    TooLarge {
        /// The bound, in bytes: `max_payload` of the server, or 1 MiB before the first connection.
        bytes_max: usize,
    },
}

impl fmt::Display for NatsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NatsError::Disconnected => f.write_str("there is no connection to NATS, or it was lost"),
            NatsError::Full => f.write_str("too much waits to be sent to NATS"),
            NatsError::NoResponders => f.write_str("no service listens to this subject"),
            NatsError::BadSubject => f.write_str("this is no subject"),
            NatsError::BadHeader => f.write_str("this is no field of a header"),
            NatsError::NoHeaders => f.write_str("the server of NATS takes no headers"),
            NatsError::TooLarge { bytes_max } => {
                write!(f, "the message is larger than the {bytes_max} bytes that the server of NATS takes")
            }
        }
    }
}

impl fmt::Debug for NatsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for NatsError {}
