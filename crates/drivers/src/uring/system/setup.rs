//! Creating a ring: the best mode the kernel has, the file table, the buffer ring, restrictions.

use std::io;
use std::thread;
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, opcode, squeue};

use super::buffer_ring::BufferRing;
use crate::shared::process::Resource;
use crate::shared::report::log;
use crate::shared::report::{SetupError, soft_limit};
use crate::uring::UringConfig;

/// The buffer groups of a ring. One is in use; the other is for the moment in which the ring of
/// buffers is replaced.
pub(super) const GROUPS: [u16; 2] = [0, 1];

/// Attempts, 10 ms apart, before ENOMEM is reported: the memory of a ring closed a moment ago is
/// returned to `RLIMIT_MEMLOCK` asynchronously. A restart was seen to need less than 100 ms.
const MEMORY_TRIES: u32 = 50;
const MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// The ring's features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mode {
    pub(super) defer_taskrun: bool,
    pub(super) no_sqarray: bool,
    pub(super) no_iowait: bool,
    pub(super) restricted: bool,
}

/// A ring ready for operations, and its buffer ring.
pub(super) struct ReadyRing {
    pub(super) buffers: BufferRing,
    pub(super) ring: IoUring,
    pub(super) mode: Mode,
}

pub(super) fn make(config: &UringConfig) -> Result<ReadyRing, SetupError> {
    let mut restrict = config.restrict;
    loop {
        match make_once(config, restrict) {
            Err(SetupError::Failed { what: RESTRICT, error }) if restrict => {
                log::debug!(%error, "the ring runs without restrictions");
                restrict = false;
            }
            made => return made,
        }
    }
}

const RESTRICT: &str = "restricting the ring";

fn make_once(config: &UringConfig, restrict: bool) -> Result<ReadyRing, SetupError> {
    let (ring, mut mode) = retried(|| build(config, restrict)).map_err(|error| {
        too_old(error, "single-issuer rings and multishot receives", "6.0", "io_uring_setup")
    })?;
    let params = ring.params();
    if !(params.is_feature_ext_arg() && params.is_feature_submit_stable() && params.is_feature_nodrop()) {
        let error = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        return Err(SetupError::TooOld { missing: "timed waits", since: "6.0", error });
    }
    if !config.plain_descriptors {
        ring.submitter().register_files_sparse(config.connections).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EMFILE) => {
                    let limit = soft_limit(Resource::Descriptors);
                    SetupError::Table { connections: config.connections, limit }
                }
                _ => SetupError::from_call("the ring's file table", error),
            }
        })?;
    }
    let buffers = BufferRing::new(config.buffer_ring_entries(), config.pool.buffer_bytes)
        .map_err(|error| SetupError::from_call("the buffer ring's memory", error))?;
    retried(|| register(&ring, &buffers, GROUPS[0]))
        .map_err(|error| too_old(error, "buffer rings", "6.0", "registering a buffer ring"))?;
    if restrict {
        ring.submitter().register_restrictions(&mut restrictions()).map_err(SetupError::failed(RESTRICT))?;
        // The enabling thread owns the ring from here on.
        ring.submitter().register_enable_rings().map_err(SetupError::failed(RESTRICT))?;
        mode.restricted = true;
    }
    Ok(ReadyRing { buffers, ring, mode })
}

fn too_old(error: io::Error, missing: &'static str, since: &'static str, what: &'static str) -> SetupError {
    match error.raw_os_error() {
        Some(libc::EINVAL) => SetupError::TooOld { missing, since, error },
        _ => SetupError::from_call(what, error),
    }
}

/// Tries the best mode first and falls back to the next on EINVAL.
fn build(config: &UringConfig, restrict: bool) -> io::Result<(IoUring, Mode)> {
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for (defer_taskrun, no_sqarray) in [(true, true), (true, false), (false, false)] {
        let mut builder: Builder = IoUring::builder();
        builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        builder.setup_clamp().setup_cqsize(config.completion_entries);
        if defer_taskrun {
            builder.setup_defer_taskrun();
        }
        if no_sqarray {
            builder.setup_no_sqarray();
        }
        if restrict {
            builder.setup_r_disabled();
        }
        match builder.build(config.submission_entries) {
            Ok(ring) => {
                let no_iowait = ring.params().is_feature_no_iowait();
                return Ok((ring, Mode { defer_taskrun, no_sqarray, no_iowait, restricted: false }));
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}

/// Registers a new, empty buffer ring in the place of this one, in the other group. No receive is
/// in flight.
pub(super) fn renew(ring: &IoUring, old: &BufferRing, group: u16) -> io::Result<(BufferRing, u16)> {
    let new = BufferRing::new(old.entries(), old.buffer_bytes())?;
    let next = GROUPS[usize::from(group == GROUPS[0])];
    register(ring, &new, next)?;
    if let Err(error) = ring.submitter().unregister_buf_ring(group) {
        ring.submitter().unregister_buf_ring(next)?;
        return Err(error);
    }
    Ok((new, next))
}

fn register(ring: &IoUring, buffers: &BufferRing, group: u16) -> io::Result<()> {
    // SAFETY: the mapping is page aligned and `entries` long. The kernel pins its pages, and
    // addresses in entries are buffers that stay lent until the kernel named them in a completion
    // or the ring finished (see `SystemKernel`).
    unsafe { ring.submitter().register_buf_ring_with_flags(buffers.address(), buffers.entries(), group, 0) }
}

#[expect(clippy::disallowed_methods, reason = "a ring is made before its shard runs")]
fn retried<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 0..MEMORY_TRIES {
        match attempt() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => thread::sleep(MEMORY_PAUSE),
            done => return done,
        }
    }
    attempt()
}

/// Allows everything the driver does, and the planned use of more buffer rings.
fn restrictions() -> Vec<Restriction> {
    /// Register operations by their numbers in `linux/io_uring.h`: unregister files, register and
    /// unregister eventfd, register and unregister a buffer ring, synchronous cancel.
    const REGISTER: [u8; 6] = [3, 4, 5, 22, 23, 24];
    let operations = [
        opcode::Nop::CODE,
        opcode::AcceptMulti::CODE,
        opcode::FilesUpdate::CODE,
        opcode::Connect::CODE,
        opcode::Close::CODE,
        opcode::RecvMulti::CODE,
        opcode::Send::CODE,
        opcode::SendMsg::CODE,
        opcode::Shutdown::CODE,
        opcode::SetSockOpt::CODE,
        opcode::AsyncCancel2::CODE,
        opcode::Read::CODE,
        opcode::Timeout::CODE,
        opcode::TimeoutUpdate::CODE,
    ];
    let flags = squeue::Flags::FIXED_FILE | squeue::Flags::BUFFER_SELECT | squeue::Flags::SKIP_SUCCESS;
    let mut all: Vec<Restriction> = operations.map(Restriction::sqe_op).into();
    all.extend(REGISTER.map(Restriction::register_op));
    all.push(Restriction::sqe_flags_allowed(flags.bits()));
    all
}
