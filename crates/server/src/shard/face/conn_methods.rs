//! The methods that every context of a connection has, whether it has a session yet or not.

/// The methods, for a type with a `head` and a `shard`.
macro_rules! conn_methods {
    () => {
        /// Queues one reply, encoded by the service's framing. A [`Frame`](crate::Frame) of 4 KiB
        /// or more and owned bytes (`Bytes`, `Vec<u8>`, `String`, `Arc<[u8]>`) of 32 KiB or more
        /// are kept until they are sent, without a copy. A payload that the framing cannot express
        /// closes the connection
        /// ([`CloseReason::ReplyNotFramed`](crate::CloseReason::ReplyNotFramed)).
        #[inline(always)]
        pub fn reply<'p>(&self, payload: impl Into<ringserve_core::Payload<'p>>) {
            self.head.reply(payload.into());
        }

        /// Queues one reply whose payload `write` writes in place, where it is sent from. If
        /// `write` returns an error, nothing of the frame is sent and the error is returned; the
        /// connection stays open.
        ///
        /// ```
        /// use std::fmt;
        /// use ringserve::{Cx, Frame, Service};
        ///
        /// struct Count;
        ///
        /// impl Service for Count {
        ///     type Session = ();
        ///     type Error = fmt::Error;
        ///
        ///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), fmt::Error> {
        ///         cx.reply_with(|out| write!(out, "{} bytes from {:?}", frame.len(), cx.peer().addr()))
        ///     }
        /// }
        /// ```
        ///
        /// A payload without a frame, such as one longer than its length prefix can say, closes the
        /// connection as in [`reply`](Self::reply), and nothing of it is sent. Once the connection
        /// takes no more replies, `write` is not called and the result is `Ok`.
        ///
        /// # Panics
        /// If `write` panics, replies to this connection, or asks for its
        /// [`outbox_bytes`](crate::Cx::outbox_bytes). The connection is reset then.
        pub fn reply_with<R: ringserve_core::framing::WriteResult>(
            &self,
            write: impl FnOnce(&mut ringserve_buf::ReplyWriter<'_>) -> R,
        ) -> R {
            self.head.reply_with(write)
        }

        /// Queues one reply whose payload comes in parts, as in `cx.reply_parts([head, body])`.
        /// Each part is copied or kept as in [`reply`](Self::reply).
        pub fn reply_parts<'p, P: Into<ringserve_core::Payload<'p>>>(
            &self,
            parts: impl IntoIterator<Item = P>,
        ) {
            self.head.reply_parts(parts);
        }

        /// Queues one reply that other connections of this shard get too, encoded once.
        pub fn reply_shared(&self, payload: &ringserve_core::SharedPayload) {
            self.head.reply_shared(payload);
        }

        /// Queues bytes as they are, copied or kept as in [`reply`](Self::reply).
        #[inline]
        pub fn write<'p>(&self, bytes: impl Into<ringserve_core::Payload<'p>>) {
            self.head.write_payload(bytes.into());
        }

        /// Queues bytes as they are, written in place as in [`reply_with`](Self::reply_with).
        ///
        /// # Panics
        /// As [`reply_with`](Self::reply_with).
        pub fn write_with<R: ringserve_core::framing::WriteResult>(
            &self,
            write: impl FnOnce(&mut ringserve_buf::ReplyWriter<'_>) -> R,
        ) -> R {
            self.head.write_with(write)
        }

        /// The other end of the connection.
        pub fn peer(&self) -> ringserve_base::peer::Peer {
            ringserve_base::peer::Peer::of(self.head)
        }

        /// Fields that the proxy sent about the peer in addition to its address, if the peer came
        /// through one and [`ProxyProtocol::keep_tlvs`](crate::listen::ProxyProtocol::keep_tlvs) is
        /// on.
        pub fn tlvs(&self) -> Option<ringserve_core::proxy::Tlvs> {
            self.head.tlvs()
        }

        /// Facts from the handshake of the connection's [transport](crate::transport), if they are
        /// a `T`.
        #[doc(alias = "facts")]
        pub fn transport_info<T: 'static>(&self) -> Option<std::rc::Rc<T>> {
            ringserve_core::facts_as(self.head.transport_info()?)
        }

        /// The id of the connection, unique on its shard.
        pub fn id(&self) -> ringserve_core::ConnId {
            self.head.id()
        }

        /// True once the server shuts down: a good moment for a goodbye.
        pub fn is_draining(&self) -> bool {
            self.head.lane().shard().is_draining()
        }

        /// Keeps the connection open after the peer's FIN, until [`close`](crate::Cx::close). The
        /// service learns of the FIN by [`Service::input_ended`](crate::Service::input_ended). For
        /// protocols in which a peer closes its half and goes on reading after its last call. A
        /// drain waits for such a connection, up to
        /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout).
        pub fn hold_open(&self) {
            self.head.hold_open();
        }

        /// Gives this connection limits that differ from its service's, until others are set: the
        /// keep-alive that a client asked for, small frames before a login, a call that may take as
        /// long as its peer stays. A limit that is not set here keeps the value of
        /// [`Limits`](crate::Limits), and a [deadline](crate::limits::ConnLimits::deadline) stays
        /// as it is. The new limits hold from the next frame on, and for pending calls. They
        /// allocate some 150 bytes, which stay until the connection ends, and cost a few
        /// instructions for each frame; a deadline alone does neither.
        ///
        /// # Errors
        /// A value out of its range, or one that contradicts another limit. Nothing is changed
        /// then.
        pub fn set_limits(
            &self,
            limits: &ringserve_core::ConnLimits,
        ) -> Result<(), ringserve_core::LimitError> {
            self.head.set_limits(limits)
        }

        /// The shard of this connection.
        pub fn shard(&self) -> &'a $crate::shard::face::handle::Shard {
            self.shard
        }

        /// Runs a future that ends with this connection: it is dropped after the connection ended
        /// and before [`Service::close`](crate::Service::close). For subscriptions and pushes that
        /// serve this peer alone. A panic in it resets the connection, as a panic in a call does.
        ///
        /// A pending task keeps no connection open: an idle or drained one is closed, unless it is
        /// [held open](Self::hold_open). No time limit ends a task, and
        /// [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max) does not
        /// count it. A connection without tasks has no byte for them.
        ///
        /// # Errors
        /// [`SpawnError::Full`](crate::task::SpawnError::Full) if the connection has
        /// [`Limits::connection_tasks_max`](crate::Limits::connection_tasks_max) tasks,
        /// [`SpawnError::Gone`](crate::task::SpawnError::Gone) if it is ending. The future is
        /// dropped then.
        pub fn spawn_on_connection<T: 'static>(
            &self,
            future: impl Future<Output = T> + 'static,
        ) -> Result<$crate::shard::tasks::join::JoinHandle<T>, $crate::shard::tasks::join::SpawnError> {
            self.shard.spawn_on(self.head, future)
        }

        /// Sleeps for at least `time`; may overshoot by about 1 ms. Frames of this connection wait
        /// meanwhile, up to [`Limits::inbox_bytes_high`](crate::Limits::inbox_bytes_high); other
        /// connections go on.
        pub fn sleep(&self, time: std::time::Duration) -> $crate::shard::wakes::timers::Sleep {
            self.shard.sleep(time)
        }

        /// Runs a future for at most `time`, then drops it. A future that does not wait costs no
        /// timer and no clock read.
        ///
        /// # Errors
        /// [`Elapsed`](crate::time::Elapsed) if `time` was over first.
        #[inline]
        pub fn timeout<F: Future>(
            &self,
            time: std::time::Duration,
            future: F,
        ) -> $crate::shard::wakes::timers::Timeout<'a, F> {
            self.shard.timeout(time, future)
        }

        /// A handle that pushes to this connection from any thread, and may be kept after the call.
        /// The first one of a connection allocates.
        pub fn handle(&self) -> $crate::shard::face::conn_handle::ConnHandle {
            $crate::shard::face::conn_handle::ConnHandle::new(self.head, self.shard)
        }

        /// A handle that pushes to this connection from its own shard. It costs nothing to make,
        /// and a push is a copy into the outbox.
        pub fn local_handle(&self) -> $crate::shard::face::conn_handle::LocalHandle {
            $crate::shard::face::conn_handle::LocalHandle::new(self.head, self.shard)
        }
    };
}

pub(crate) use conn_methods;
