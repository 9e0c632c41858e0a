//! What the kernel is told about listening and accepted sockets.

pub(crate) mod apply;
pub(crate) mod check;
pub(crate) mod options;
