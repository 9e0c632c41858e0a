//! Servers that run as child processes, since changes to them stay: signals, seccomp, limits of the
//! process.

mod accept_queue;
mod activation;
mod blocked;
mod descriptor_limit;
mod doctor;
mod late;
mod locked_memory;
mod logs;
mod memory_returns;
mod refused_memory;
mod sandboxes;
mod signals;
mod small_memory;
mod stalls;
mod starts;
mod unread_answers;
