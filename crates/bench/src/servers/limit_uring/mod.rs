//! The limit of io_uring: a bare loop that echoes raw bytes, the yardstick of the product.
//!
//! One turn, one `io_uring_enter`, and the path of a buffer through it:
//!
//! 1. A multishot receive completes with a buffer out of the ring (`receive_completed`).
//! 2. It is sent straight from there: `MSG_DONTWAIT`, so that the kernel tries while it takes the
//!    operation and never later, and without a completion when all of it fits (`try_send`).
//! 3. When the enter returns, the send is over, and the buffer goes back (`settle`).
//! 4. If there was a completion after all, the rest that did not fit is sent again with
//!    `MSG_WAITALL` and completes when the peer has read (`sent_part`); bytes that arrive meanwhile
//!    are queued.
//!
//! A connection has one send in flight, so replies keep their order. It is closed after the last
//! completion of its receive and its sends, so that its slot can be reused at once.

mod connection;
mod memory;

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsRawFd;

use io_uring::squeue::{Entry, Flags};
use io_uring::types::{CancelBuilder, Fd, Fixed};
use io_uring::{CompletionQueue, EnterFlags, IoUring, SubmissionQueue, Submitter, cqueue, opcode};

use self::connection::{Chunk, Connection};
use self::memory::{BUFFER_BYTES, GROUP, Memory};
use crate::process;

/// Entries of the submission queue. A wait runs task work of about 20 sockets, so that a turn
/// queues about 20 sends; 512 and 4096 entries measured the same.
const SUBMISSIONS: u32 = 64;

/// Entries of the completion queue: far more than a turn makes, so that it does not overflow.
const COMPLETIONS: u32 = 4096;

/// The most connections, also limited by the limit of open files, which limits the ring's table.
const CONNECTIONS_MAX: u32 = 64 * 1024;

/// Buffers that may wait for one connection's peer to read; above it the receive is cancelled until
/// all are sent. Twice the 32 that the kernel receives for one socket before it serves others.
const QUEUE_BUFFERS_HIGH: usize = 64;

/// The kind of a completion, in the upper half of `user_data`; the lower half is the slot.
mod kind {
    pub(super) const RECEIVE: u64 = 0;
    /// The first try of a send.
    pub(super) const SEND: u64 = 1 << 32;
    /// The rest of a send that did not fit, which waits for room.
    pub(super) const TAIL: u64 = 2 << 32;
    pub(super) const ACCEPT: u64 = 3 << 32;
    pub(super) const CLOSE: u64 = 4 << 32;
    pub(super) const CANCEL: u64 = 5 << 32;
    pub(super) const MASK: u64 = !(u32::MAX as u64);
}

/// Serves `listener` until the process ends.
pub(super) fn run(listener: TcpListener) -> io::Result<()> {
    let table = u32::try_from(process::raise_open_files()?).unwrap_or(u32::MAX).min(CONNECTIONS_MAX);
    let mut ring = set_up()?;
    ring.submitter().register_files_sparse(table)?;
    let mut flags = EnterFlags::GETEVENTS;
    if ring.params().is_feature_no_iowait() {
        flags |= EnterFlags::NO_IOWAIT;
    }
    let (mut submitter, submissions, completions) = ring.split();
    // Saves looking up the descriptor at each enter (1-2 % with one connection). Optional.
    let _ = submitter.register_ring_fd();
    let memory = Memory::new(&submitter)?;
    Loop {
        listener,
        submitter,
        submissions,
        completions,
        flags,
        memory,
        connections: (0..table).map(|_| Connection::default()).collect(),
        turn: 1,
        hurry: false,
        sent: Vec::new(),
        settling: Vec::new(),
        received: Vec::new(),
        parked: VecDeque::new(),
        accepting: false,
    }
    .run()
}

/// Creates a ring with the flags that work best, except those that an older kernel does not know.
fn set_up() -> io::Result<IoUring> {
    let build = |no_array: bool, defer: bool| {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETIONS).setup_clamp().setup_submit_all();
        builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag();
        if defer {
            builder.setup_defer_taskrun();
        }
        if no_array {
            builder.setup_no_sqarray();
        }
        builder.build(SUBMISSIONS)
    };
    build(true, true).or_else(|_| build(false, true)).or_else(|_| build(false, false))
}

/// The server: its ring, and its connections by their index in the ring's table of files.
struct Loop<'a> {
    listener: TcpListener,
    submitter: Submitter<'a>,
    submissions: SubmissionQueue<'a>,
    completions: CompletionQueue<'a>,
    /// Flags of every enter.
    flags: EnterFlags,
    memory: Memory,
    connections: Vec<Connection>,
    /// Number of the turn, counted on after each enter.
    turn: u64,
    /// True if a connection continues when this turn's sends are over, which has no completion.
    hurry: bool,
    /// First tries of this turn. After the enter they are over.
    sent: Vec<(u32, Chunk)>,
    /// First tries of the previous turn, while they are settled.
    settling: Vec<(u32, Chunk)>,
    /// This turn's completions except those of first tries.
    received: Vec<cqueue::Entry>,
    /// Connections whose receive ended for lack of buffers, first in, first out.
    parked: VecDeque<u32>,
    /// True exactly while a multishot accept is with the kernel.
    accepting: bool,
}

impl Loop<'_> {
    fn run(&mut self) -> io::Result<()> {
        self.accept();
        loop {
            let want = usize::from(!std::mem::take(&mut self.hurry));
            self.enter(want)?;
            self.drain()?;
            self.turn += 1;
            self.settle();
            let mut received = std::mem::take(&mut self.received);
            for completion in received.drain(..) {
                self.complete(&completion);
            }
            self.received = received;
            self.memory.lend();
            self.unpark();
        }
    }

    /// Passes the queued operations to the kernel and waits for `want` completions.
    fn enter(&mut self, want: usize) -> io::Result<()> {
        self.submissions.sync();
        let count = self.submissions.len();
        // SAFETY: no argument is passed. The kernel reads the queued operations; `push` argues for
        // the memory that they point to.
        let result = unsafe {
            self.submitter.enter::<libc::sigset_t>(count as u32, want as u32, self.flags.bits(), None)
        };
        self.submissions.sync();
        match result {
            Ok(_) => Ok(()),
            // Not failures: operations that were not taken are still queued, and `drain` enters
            // again.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Takes all completions, until every queued operation was taken by the kernel and nothing is
    /// left beyond the completion queue: only then is it known which first tries fell short.
    fn drain(&mut self) -> io::Result<()> {
        loop {
            self.completions.sync();
            for completion in &mut self.completions {
                let data = completion.user_data();
                if data & kind::MASK == kind::SEND {
                    let slow = &mut self.connections[data as u32 as usize].slow;
                    slow.get_or_insert_default().short = Some(completion.result());
                } else {
                    self.received.push(completion);
                }
            }
            if self.submissions.is_empty() && !self.submissions.cq_overflow() {
                return Ok(());
            }
            self.enter(0)?;
        }
    }

    /// Returns the buffers of last turn's first tries, or sends the rest of them.
    fn settle(&mut self) {
        std::mem::swap(&mut self.sent, &mut self.settling);
        let mut settling = std::mem::take(&mut self.settling);
        for (slot, chunk) in settling.drain(..) {
            let connection = &mut self.connections[slot as usize];
            if connection.slow.is_none() && connection.armed {
                self.memory.recycle(chunk.buffer);
                continue;
            }
            let short = connection.slow.as_mut().and_then(|slow| slow.short.take());
            self.sent_part(slot, chunk, short.unwrap_or(i32::from(chunk.len)));
        }
        self.settling = settling;
    }

    /// Handles the result of a send, and continues with the connection.
    fn sent_part(&mut self, slot: u32, mut chunk: Chunk, result: i32) {
        let connection = &mut self.connections[slot as usize];
        let done = match result {
            result if result >= 0 => result as u16,
            result if [libc::EAGAIN, libc::EINTR].contains(&-result) => 0,
            _ => {
                connection.broken = true;
                chunk.len
            }
        };
        chunk.start += done;
        chunk.len -= done;
        if chunk.len == 0 {
            self.memory.recycle(chunk.buffer);
            self.advance(slot);
            return;
        }
        connection.slow.get_or_insert_default().tail = Some(chunk);
        let entry = self
            .send(slot, chunk)
            .flags(libc::MSG_WAITALL | libc::MSG_NOSIGNAL)
            .build()
            .user_data(kind::TAIL | u64::from(slot));
        self.push(&entry);
    }

    /// A send of `chunk`.
    fn send(&self, slot: u32, chunk: Chunk) -> opcode::Send {
        debug_assert!(usize::from(chunk.start) + usize::from(chunk.len) <= BUFFER_BYTES);
        let address = self.memory.address(chunk.buffer).wrapping_add(usize::from(chunk.start));
        opcode::Send::new(Fixed(slot), address, u32::from(chunk.len))
    }

    /// Takes the connection's next step when it has no send in flight.
    fn advance(&mut self, slot: u32) {
        let connection = &mut self.connections[slot as usize];
        if connection.turn == self.turn {
            self.hurry = true;
            return;
        }
        if let Some(slow) = &mut connection.slow {
            if slow.tail.is_some() {
                return;
            }
            if connection.broken {
                while let Some(chunk) = slow.queue.pop_front() {
                    self.memory.recycle(chunk.buffer);
                }
            }
            if let Some(chunk) = slow.queue.pop_front() {
                self.try_send(slot, chunk);
                return;
            }
            if slow.cancelling {
                return;
            }
            connection.slow = None;
        }
        if connection.armed {
            if connection.broken {
                connection.slow.get_or_insert_default().cancelling = true;
                self.cancel(slot);
            }
        } else if connection.ended || connection.broken {
            let entry = opcode::Close::new(Fixed(slot)).build();
            self.push(&entry.user_data(kind::CLOSE | u64::from(slot)));
        } else if !connection.parked {
            self.receive(slot);
        }
    }

    /// Queues the first try of a send.
    fn try_send(&mut self, slot: u32, chunk: Chunk) {
        let connection = &mut self.connections[slot as usize];
        connection.turn = self.turn;
        self.hurry |= connection.slow.is_some();
        // MSG_WAITALL makes a short send a failure, which completes in spite of SKIP_SUCCESS; its
        // result is the number of bytes sent.
        let flags = libc::MSG_DONTWAIT | libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let entry = self.send(slot, chunk).flags(flags).build();
        let entry = entry.user_data(kind::SEND | u64::from(slot)).flags(Flags::SKIP_SUCCESS);
        self.push(&entry);
        self.sent.push((slot, chunk));
    }

    /// Handles one completion that is not a first try.
    fn complete(&mut self, completion: &cqueue::Entry) {
        let data = completion.user_data();
        let slot = data as u32;
        match data & kind::MASK {
            kind::RECEIVE => self.receive_completed(slot, completion),
            kind::TAIL => {
                let slow = self.connections[slot as usize].slow.as_mut();
                if let Some(chunk) = slow.and_then(|slow| slow.tail.take()) {
                    self.sent_part(slot, chunk, completion.result());
                }
            }
            kind::ACCEPT => {
                if completion.result() >= 0 {
                    let slot = completion.result() as u32;
                    self.connections[slot as usize] = Connection::default();
                    self.receive(slot);
                }
                self.accepting = cqueue::more(completion.flags());
                // Without room in the table, the next close accepts again.
                let full = [libc::ENFILE, libc::EMFILE].contains(&-completion.result());
                if !self.accepting && !full {
                    self.accept();
                }
            }
            kind::CLOSE if !self.accepting => self.accept(),
            _ => {}
        }
    }

    /// Handles a completion of a multishot receive.
    fn receive_completed(&mut self, slot: u32, completion: &cqueue::Entry) {
        let (result, flags) = (completion.result(), completion.flags());
        let connection = &mut self.connections[slot as usize];
        if let Some(buffer) = cqueue::buffer_select(flags) {
            self.memory.taken();
            if result <= 0 || connection.broken {
                self.memory.recycle(buffer);
            } else {
                let chunk = Chunk { buffer, start: 0, len: result as u16 };
                if connection.slow.is_none() && connection.turn != self.turn {
                    self.try_send(slot, chunk);
                } else {
                    let slow = connection.slow.get_or_insert_default();
                    slow.queue.push_back(chunk);
                    self.hurry = true;
                    if slow.queue.len() > QUEUE_BUFFERS_HIGH && connection.armed && !slow.cancelling {
                        slow.cancelling = true;
                        self.cancel(slot);
                    }
                }
            }
        }
        if cqueue::more(flags) && result != -libc::ECANCELED {
            return;
        }
        let connection = &mut self.connections[slot as usize];
        connection.armed = false;
        if let Some(slow) = &mut connection.slow {
            slow.cancelling = false;
        }
        match result {
            0 => connection.ended = true,
            result if result > 0 || result == -libc::ECANCELED => {}
            result if result == -libc::ENOBUFS => {
                connection.parked = true;
                self.parked.push_back(slot);
                self.memory.ran_dry();
            }
            _ => (connection.ended, connection.broken) = (true, true),
        }
        self.advance(slot);
    }

    /// Arms the receives that ran out of buffers, as far as there are buffers again.
    fn unpark(&mut self) {
        for _ in 0..self.memory.lent() {
            let Some(slot) = self.parked.pop_front() else { return };
            let connection = &mut self.connections[slot as usize];
            // Not if the connection was closed meanwhile, and perhaps its slot reused.
            if std::mem::take(&mut connection.parked) && !connection.broken {
                self.receive(slot);
            }
        }
    }

    /// Arms the accept, into slots that the kernel chooses.
    fn accept(&mut self) {
        self.accepting = true;
        let listener = Fd(self.listener.as_raw_fd());
        let entry = opcode::AcceptMulti::new(listener).allocate_file_index(true).build();
        self.push(&entry.user_data(kind::ACCEPT));
    }

    /// Arms the receive of a connection.
    fn receive(&mut self, slot: u32) {
        self.connections[slot as usize].armed = true;
        let entry = opcode::RecvMulti::new(Fixed(slot), GROUP).build();
        self.push(&entry.user_data(kind::RECEIVE | u64::from(slot)));
    }

    /// Asks for the end of a connection's receive, which then completes once more.
    fn cancel(&mut self, slot: u32) {
        let receive = CancelBuilder::user_data(kind::RECEIVE | u64::from(slot));
        let entry = opcode::AsyncCancel2::new(receive).build();
        self.push(&entry.user_data(kind::CANCEL | u64::from(slot)));
    }

    /// Queues an operation, submitting the queued ones first when the queue is full.
    fn push(&mut self, entry: &Entry) {
        loop {
            // SAFETY: operations point to nothing but the buffers of `Memory`, which are never
            // unmapped. A buffer is given to the kernel for writing again (`recycle`, `lend`) only
            // when its send is over: a tail when it has completed; a first try when `drain` has
            // seen it taken, since with MSG_DONTWAIT the kernel tries it then and never later.
            if unsafe { self.submissions.push(entry) }.is_ok() {
                return;
            }
            if let Err(error) = self.enter(0) {
                eprintln!("limit-uring: cannot submit: {error}");
                std::process::exit(1);
            }
        }
    }
}
