//! What a stream's future may return.

use std::fmt;

/// What the future of a [`Stream`](crate::Stream) may return: nothing, or a `Result` whose error is logged and closes the
/// connection as [`HandlerError`](crate::CloseReason::HandlerError).
pub trait StreamResult {
    /// Why it failed.
    type Error: fmt::Display;

    /// The error, if there is one.
    fn error(self) -> Option<Self::Error>;
}

impl StreamResult for () {
    type Error = std::convert::Infallible;

    fn error(self) -> Option<Self::Error> {
        None
    }
}

impl<T, E: fmt::Display> StreamResult for Result<T, E> {
    type Error = E;

    fn error(self) -> Option<E> {
        self.err()
    }
}
