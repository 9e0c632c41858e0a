//! Connections that several calls use at once.
// May use: the pool's settings, the view. Begin with: `ask.rs`.
// `slots` matches answers to questions, pure; `line` is a connection with the task that reads it;
// `ask` chooses and tries again; `keeper` is the task that looks each second.

mod ask;
mod keeper;
mod line;
mod slots;

pub(super) use ask::Asker;
pub(super) use slots::Matcher;
