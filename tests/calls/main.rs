//! Calls: those that wait, several at once, those that panic, and the layers around them.

mod held_open;
mod in_flight;
mod middleware;
mod panics;
mod sleeping;
mod tasks;
mod tower;
mod waiting;
