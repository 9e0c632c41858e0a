//! Asking the shards for their connections.

use ringserve_base::clock::Deadline;
use ringserve_core::ConnId;

use crate::inspect::{Inspecting, Inspection, Query, Walk};
use crate::shard::remote::control::ServerControl;
use crate::shard::wakes::inbox::{ShardRequest, this_shard};

impl ServerControl {
    /// Asks each shard for its connections, and waits for the answers, [one second](Query::within)
    /// at most. A shard that does not answer by then, because a handler blocks it, is among the
    /// [silent ones](Inspection::silent_shards); the others' connections are there. See
    /// [`inspect`](crate::inspect).
    ///
    /// On a shard's own thread, in a handler or a task, it would block that shard: there it does
    /// not wait, and finds every shard silent. Use [`inspecting`](ServerControl::inspecting) there.
    pub fn inspect(&self, query: Query) -> Inspection {
        let within = query.within;
        let inspecting = self.inspecting(query);
        if this_shard().is_none() {
            inspecting.wait(Deadline::within(within));
        }
        inspecting.answer()
    }

    /// Asks each shard for its connections, for code that must not block: await
    /// [`done`](Inspecting::done), within a time limit of the caller's, and take what came.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use ringserve::Shard;
    /// use ringserve::inspect::{Inspection, Query};
    ///
    /// async fn waiting_calls(shard: &Shard) -> Inspection {
    ///     let inspecting = shard.server().inspecting(Query::calls_waiting());
    ///     let _ = shard.timeout(Duration::from_secs(1), inspecting.done()).await;
    ///     inspecting.answer()
    /// }
    /// ```
    pub fn inspecting(&self, query: Query) -> Inspecting {
        let inspecting = Inspecting::new(query.clone(), self.remotes().len());
        for (shard, remote) in self.remotes().iter().enumerate() {
            // One that ended drops it, and so says that it will not answer.
            let _ =
                remote.send(ShardRequest::Inspect(Box::new(Walk::new(&query, shard, inspecting.asked()))));
        }
        inspecting
    }

    /// Closes a connection after its queued replies, as
    /// [`ConnHandle::close`](crate::ConnHandle::close): `shard` and `id` are those of its
    /// [`ConnInfo`](crate::inspect::ConnInfo). Its shard does so in its next turn, unless the
    /// connection ended before: an id is never that of a later connection.
    ///
    /// False if there is no such shard, or it ended.
    pub fn close_connection(&self, shard: usize, id: ConnId) -> bool {
        self.remotes().get(shard).is_some_and(|remote| remote.send(ShardRequest::Close { id }).is_ok())
    }

    /// Resets a connection, as [`ConnHandle::abort`](crate::ConnHandle::abort); otherwise as
    /// [`close_connection`](ServerControl::close_connection).
    pub fn abort_connection(&self, shard: usize, id: ConnId) -> bool {
        self.remotes().get(shard).is_some_and(|remote| remote.send(ShardRequest::Abort { id }).is_ok())
    }
}
