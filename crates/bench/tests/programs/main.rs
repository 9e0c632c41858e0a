//! The programs of this package, run as a user runs them. One binary, since each of them usually
//! waits.

mod compare;
mod echo;
mod idle;
mod load;
