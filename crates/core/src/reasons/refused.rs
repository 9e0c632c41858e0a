//! The causes for which a connection is refused.

/// The cause that refused a connection before the service had it. Counted in
/// [`ConnStats::refused_by`](crate::ConnStats::refused_by).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusedBy {
    /// Its address is on the server's deny list.
    DenyList,
    /// Its address has as many connections as it may.
    AddressCount,
    /// Its address opened connections faster than it may.
    AddressRate,
    /// It was gone before the kernel reported its address, by which it would have been limited.
    AddressUnknown,
    /// The program, when it was accepted.
    Admit,
    /// The service, in its `open`.
    Open,
    /// The system had no memory for it.
    Memory,
    /// The server was stopping.
    Stopping,
    /// Its service or listener has as many connections as it may.
    ConnectionCount,
    /// Connections of its service or listener came faster than they may.
    ConnectionRate,
    /// The server had more connections, or more memory held, than it can handle, and has a
    /// rejection message for that.
    Load,
}

impl RefusedBy {
    /// All causes.
    pub const ALL: [RefusedBy; 11] = [
        RefusedBy::DenyList,
        RefusedBy::AddressCount,
        RefusedBy::AddressRate,
        RefusedBy::AddressUnknown,
        RefusedBy::Admit,
        RefusedBy::Open,
        RefusedBy::Memory,
        RefusedBy::Stopping,
        RefusedBy::ConnectionCount,
        RefusedBy::ConnectionRate,
        RefusedBy::Load,
    ];

    /// The name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            RefusedBy::DenyList => "deny_list",
            RefusedBy::AddressCount => "address_count",
            RefusedBy::AddressRate => "address_rate",
            RefusedBy::AddressUnknown => "address_unknown",
            RefusedBy::Admit => "admit",
            RefusedBy::Open => "open",
            RefusedBy::Memory => "memory",
            RefusedBy::Stopping => "stopping",
            RefusedBy::ConnectionCount => "connection_count",
            RefusedBy::ConnectionRate => "connection_rate",
            RefusedBy::Load => "load",
        }
    }

    /// True if an admission is the cause, before the connection could take part in the rate of the
    /// server.
    pub(crate) fn is_by_admission(self) -> bool {
        use RefusedBy::{
            AddressCount, AddressRate, AddressUnknown, ConnectionCount, ConnectionRate, DenyList,
        };
        matches!(
            self,
            DenyList | AddressCount | AddressRate | AddressUnknown | ConnectionCount | ConnectionRate
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_counted_in_their_order() {
        for (n, by) in RefusedBy::ALL.into_iter().enumerate() {
            assert_eq!(by as usize, n, "{}", by.name());
        }
    }
}
