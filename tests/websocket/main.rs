//! WebSocket below any service, and services of whole messages.

mod client;
mod ends;
mod floods;
mod lines;
mod messages;
mod seeds;
mod slow;
mod streams;
mod tls;
