//! Conversion of operations to submission queue entries.

use std::{mem, ptr};

use io_uring::opcode;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{self, TimeoutFlags, Timespec};
use ringserve_core::Batch;
use socket2::SockAddr;

use crate::uring::kernel::SendMode;

/// Pieces of a batch in one send; the kernel takes 1024. A batch has at most 129.
const PIECES_MAX: usize = 1024;

/// Bytes in one send. The kernel cuts at 2 GiB less a page; the rest is sent separately.
const SEND_BYTES_MAX: usize = 1 << 30;

/// Makes close send RST and drop the bytes that were not sent.
static RESET_ON_CLOSE: libc::linger = libc::linger { l_onoff: 1, l_linger: 0 };

/// Memory that entries point to until the kernel has consumed them (`IORING_FEAT_SUBMIT_STABLE`).
///
/// Invariants: what belongs to an entry is written only before the entry is pushed, and again only
/// when the queue place it was written for comes around, which is after it was consumed; iovec
/// blocks are reused, and addresses freed, only when the queue is empty. Boxes are never replaced.
pub(super) struct Staging {
    /// By place in the submission queue.
    descriptors: Box<[i32]>,
    headers: Box<[libc::msghdr]>,
    /// Blocks of `PIECES_MAX`, filled in order; freed at once when the queue is empty.
    iovecs: Vec<Box<[libc::iovec]>>,
    /// Addresses of connects whose entries are not consumed.
    // Boxed so that none moves when another one comes.
    #[allow(clippy::vec_box)]
    addresses: Vec<Box<SockAddr>>,
    /// The block in use, and how much of it is used.
    block: usize,
    used: usize,
}

impl Staging {
    pub(super) fn new(entries: usize) -> Staging {
        // SAFETY: a msghdr of zeros is an empty message: null pointers with lengths of zero.
        let header: libc::msghdr = unsafe { mem::zeroed() };
        Staging {
            descriptors: vec![-1; entries].into(),
            headers: vec![header; entries].into(),
            iovecs: Vec::new(),
            addresses: Vec::new(),
            block: 0,
            used: 0,
        }
    }

    /// Forgets all pointers that were returned, since the queue is empty.
    #[inline]
    pub(super) fn consumed(&mut self) {
        (self.block, self.used) = (0, 0);
        if !self.addresses.is_empty() {
            self.addresses.clear();
        }
    }

    /// Keeps an address until every entry is consumed.
    fn address(&mut self, address: SockAddr) -> &SockAddr {
        self.addresses.push(Box::new(address));
        self.addresses.last().expect("it was just put there")
    }

    /// Stores a descriptor, at this place of the queue.
    pub(super) fn descriptor(&mut self, place: usize, fd: i32) -> *const i32 {
        self.descriptors[place] = fd;
        &raw const self.descriptors[place]
    }

    /// Returns a message with the pieces of the batch, and how many bytes they are. Valid until the
    /// entry at this place is consumed.
    fn message(&mut self, place: usize, batch: &Batch) -> (*const libc::msghdr, usize) {
        if self.iovecs.get(self.block).is_some_and(|block| block.len() - self.used < PIECES_MAX / 4) {
            (self.block, self.used) = (self.block + 1, 0);
        }
        if self.iovecs.len() == self.block {
            let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            self.iovecs.push(vec![none; PIECES_MAX].into());
        }
        let room = &mut self.iovecs[self.block][self.used..];
        let (mut count, mut bytes) = (0, 0);
        for (iovec, piece) in room.iter_mut().zip(batch.pieces()) {
            *iovec = libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
            count += 1;
            bytes += piece.len();
        }
        let first = room.as_mut_ptr();
        self.used += count;
        let header = &mut self.headers[place];
        (header.msg_iov, header.msg_iovlen) = (first, count as _);
        (&raw const *header, bytes)
    }
}

/// A connection's descriptor: its place in the ring's file table, or a plain one.
#[derive(Clone, Copy)]
pub(super) struct On {
    pub(super) number: i32,
    pub(super) fixed: bool,
}

impl On {
    fn fd(self) -> types::Fd {
        types::Fd(self.number)
    }

    /// Marks the entry's descriptor as a table place, where it is one.
    fn mark(self, entry: Entry) -> Entry {
        if self.fixed { entry.flags(Flags::FIXED_FILE) } else { entry }
    }
}

pub(super) fn accept(listener: i32) -> Entry {
    opcode::AcceptMulti::new(types::Fd(listener)).flags(libc::SOCK_CLOEXEC).build()
}

/// Accepts one connection, and ends.
pub(super) fn accept_one(listener: i32) -> Entry {
    let accept = opcode::Accept::new(types::Fd(listener), ptr::null_mut(), ptr::null_mut());
    accept.flags(libc::SOCK_CLOEXEC).build()
}

/// Installs `fd`, which stays valid until the entry is consumed.
pub(super) fn install(slot: u32, fd: *const i32) -> Entry {
    opcode::FilesUpdate::new(fd, 1).offset(slot as i32).build().flags(Flags::SKIP_SUCCESS)
}

pub(super) fn close_descriptor(fd: i32) -> Entry {
    opcode::Close::new(types::Fd(fd)).build()
}

pub(super) fn close_slot(slot: u32) -> Entry {
    opcode::Close::new(types::Fixed(slot)).build()
}

pub(super) fn quietly(entry: Entry) -> Entry {
    entry.flags(Flags::SKIP_SUCCESS)
}

/// Goes off at this time of the monotonic clock.
pub(super) fn timeout(until: &Timespec) -> Entry {
    opcode::Timeout::new(until).flags(TimeoutFlags::ABS).build()
}

/// Sets the timeout of that name to another time.
pub(super) fn set_timeout(until: &Timespec, user_data: u64) -> Entry {
    quietly(opcode::TimeoutUpdate::new(user_data, until).flags(TimeoutFlags::ABS).build())
}

/// Connects. The address is kept in `staging`, and read by the kernel when it consumes the entry.
pub(super) fn connect(on: On, address: SockAddr, staging: &mut Staging) -> Entry {
    let address = staging.address(address);
    on.mark(opcode::Connect::new(on.fd(), address.as_ptr().cast(), address.len()).build())
}

pub(super) fn reset_on_close(on: On) -> Entry {
    let value = (&raw const RESET_ON_CLOSE).cast();
    let (level, name) = (libc::SOL_SOCKET as u32, libc::SO_LINGER as u32);
    let size = size_of::<libc::linger>() as u32;
    on.mark(quietly(opcode::SetSockOpt::new(on.fd(), level, name, value, size).build()))
}

pub(super) fn receive(on: On, group: u16) -> Entry {
    on.mark(opcode::RecvMulti::new(on.fd(), group).build())
}

/// Receives into one buffer of the group.
pub(super) fn receive_once(on: On, group: u16) -> Entry {
    let receive = opcode::Recv::new(on.fd(), ptr::null_mut(), 0).buf_group(group);
    on.mark(receive.build().flags(Flags::BUFFER_SELECT))
}

/// Receives into `into`, which stays valid, and is touched by nothing else, until the completion.
pub(super) fn receive_into(on: On, into: &mut [u8]) -> Entry {
    let len = into.len().min(i32::MAX as usize) as u32;
    on.mark(opcode::Recv::new(on.fd(), into.as_mut_ptr(), len).build())
}

/// Peeks into `byte`, which stays valid until the completion.
pub(super) fn peek(on: On, byte: *mut u8) -> Entry {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    on.mark(opcode::Recv::new(on.fd(), byte, 1).flags(flags).build())
}

/// Sends the batch, which stays where it is until the completion; `place` is the entry's in the
/// queue. Also returns its length in bytes.
#[inline]
pub(super) fn send(
    on: On,
    batch: &Batch,
    mode: SendMode,
    staging: &mut Staging,
    place: usize,
) -> (Entry, usize) {
    let flags = libc::MSG_NOSIGNAL
        | match mode {
            SendMode::Try => libc::MSG_DONTWAIT,
            // With WAITALL a short send counts as failed, so that its completion is not skipped.
            SendMode::TryQuietly => libc::MSG_DONTWAIT | libc::MSG_WAITALL,
            SendMode::All => libc::MSG_WAITALL,
        };
    let (entry, bytes) = match batch.single() {
        Some(bytes) => {
            let len = bytes.len().min(SEND_BYTES_MAX);
            (opcode::Send::new(on.fd(), bytes.as_ptr(), len as u32).flags(flags).build(), len)
        }
        None => {
            let (message, bytes) = staging.message(place, batch);
            (opcode::SendMsg::new(on.fd(), message).flags(flags as u32).build(), bytes)
        }
    };
    let entry = on.mark(entry);
    (if mode == SendMode::TryQuietly { quietly(entry) } else { entry }, bytes)
}

pub(super) fn shutdown(on: On, side: i32) -> Entry {
    on.mark(opcode::Shutdown::new(on.fd(), side).build())
}

pub(super) fn cancel(user_data: u64) -> Entry {
    opcode::AsyncCancel::new(user_data).build()
}

pub(super) fn cancel_everything() -> Entry {
    quietly(opcode::AsyncCancel2::new(types::CancelBuilder::any().all()).build())
}

/// Reads into `buffer`, which is 8 bytes and stays valid until the completion.
pub(super) fn read_wake(fd: i32, buffer: *mut u8) -> Entry {
    opcode::Read::new(types::Fd(fd), buffer, 8).build()
}
