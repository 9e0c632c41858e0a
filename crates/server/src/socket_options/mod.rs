//! Options of listening and accepted sockets.

pub(crate) mod apply;
pub(crate) mod asks;
pub(crate) mod check;
pub(crate) mod options;
