//! The state of a connection whose stream was given away.

use std::time::Duration;

use ringserve_core::{CloseReason, ConnShared, Reservation};

use super::byte_stream::Stream;
use crate::client_info::ClientInfo;
use crate::shard::tasks::session::StreamSession;

impl Stream {
    /// Bytes of one owned piece that may be queued; see `Outlet::owned_room`.
    pub(crate) fn owned_room(&self, window: Duration) -> usize {
        self.shared.owned_room(window)
    }

    /// The state of the connection, for code that gives the stream away.
    pub(crate) fn fate(&self) -> Fate {
        Fate { shared: self.shared.clone() }
    }
}

/// See [`Stream::fate`].
pub(crate) struct Fate {
    shared: ConnShared<StreamSession>,
}

impl Fate {
    /// True if the peer sends nothing more: it sent FIN, or the connection ended.
    pub(crate) fn nothing_comes(&self) -> bool {
        self.shared.body().nothing_comes()
    }

    /// Notes the reason for which the connection will end.
    pub(crate) fn ends_for(&self, reason: CloseReason) {
        self.shared.note_reason(reason);
    }

    /// True if bytes came that were not read.
    pub(crate) fn has_unread(&self) -> bool {
        self.shared.body().has_unread()
    }

    /// Bytes that hyper holds now.
    pub(crate) fn set_held(&self, bytes: usize) {
        self.shared.set_service_bytes(bytes);
    }

    /// True if the shard has memory for `bytes` more.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.shared.lane().shard().has_room(bytes)
    }

    /// Memory of the shard that may be waited for.
    pub(crate) fn reservation(&self) -> Reservation {
        Reservation::new(self.shared.head())
    }

    /// Bytes that the kernel has not taken yet.
    pub(crate) fn outbox_bytes(&self) -> usize {
        self.shared.outbox_bytes()
    }

    /// Queues bytes, as [`Stream::queue`].
    pub(crate) fn queue(&self, bytes: &[u8]) {
        self.shared.reply(bytes.into());
    }

    /// Counts a request that was answered without the service.
    pub(crate) fn count_shed(&self) {
        self.shared.count_shed();
    }

    /// The facts of the connection, for code that runs anywhere.
    pub(crate) fn client_info(&self, shard: usize) -> ClientInfo {
        ClientInfo::of(&self.shared, shard)
    }

    /// Resets the connection, as [`Stream::abort`].
    pub(crate) fn abort(&self) {
        self.shared.abort();
    }
}
