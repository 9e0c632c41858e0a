//! Accepting: starts, listeners, sockets and their options, full tables, several shards.

mod accept_queues;
mod admission;
mod adopted;
mod factories;
mod kernel_filter;
mod listeners;
mod peers;
mod proxy_protocol;
mod services;
mod several_shards;
mod socket_options;
mod starts;
mod table_limits;
mod tls;
mod tls_ends;
mod tls_floods;
mod unix_sockets;
mod words;
