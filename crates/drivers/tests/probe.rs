//! The probe, here and under seccomp filters. A filter holds for the thread that installs it.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use ringserve_drivers::{SetupError, Uring, UringConfig, probe};

#[test]
fn the_probe_succeeds_here_and_leaves_nothing_behind() {
    for _ in 0..20 {
        let found = probe().unwrap();
        assert!(found.direct_descriptors, "{found:?}");
        assert!(found.description.contains("DEFER_TASKRUN"), "{found:?}");
    }
}

/// Makes a system call fail permanently with this error on the calling thread.
fn block(call: libc::c_long, errno: i32) {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // The number of the call is at offset 0 of what a filter sees.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: this call has no pointer arguments.
    let done = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(done, 0);
    // SAFETY: the filter is a valid program that lives until the call returns; the kernel copies
    // it.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

fn probe_without(call: libc::c_long, errno: i32) -> String {
    let probed = thread::spawn(move || {
        block(call, errno);
        probe()
    });
    let error = probed.join().unwrap().unwrap_err();
    assert!(matches!(error, SetupError::Blocked { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn a_filtered_call_is_named_with_its_cause() {
    let text = probe_without(libc::SYS_io_uring_setup, libc::EPERM);
    assert!(text.starts_with("io_uring_setup is blocked") && text.contains("seccomp"), "{text}");
    let text = probe_without(libc::SYS_io_uring_setup, libc::ENOSYS);
    assert!(text.contains("or the kernel has no io_uring"), "{text}");
    let text = probe_without(libc::SYS_io_uring_enter, libc::EPERM);
    assert!(text.starts_with("io_uring_enter is blocked"), "{text}");
    let text = probe_without(libc::SYS_io_uring_register, libc::EPERM);
    assert!(text.contains("is blocked") && text.contains("io_uring_register"), "{text}");
}

#[test]
fn sizes_the_system_does_not_allow_are_named() {
    let table = UringConfig { connections: 1 << 22, ..UringConfig::default() };
    let error = Uring::new(&table, Vec::new()).err().unwrap();
    assert!(matches!(error, SetupError::Table { .. }), "{error}");
    assert!(error.to_string().contains("RLIMIT_NOFILE"), "{error}");
    let queue = UringConfig { submission_entries: 4, ..UringConfig::default() };
    let error = Uring::new(&queue, Vec::new()).err().unwrap();
    assert_eq!(error.to_string(), "submission_entries is 4; it must be 8 to 32768");
}

#[test]
fn a_ring_can_be_made_without_restrictions_and_says_so() {
    let restricted = Uring::new(&UringConfig::default(), Vec::new()).unwrap();
    assert!(restricted.describe().contains("restricted"), "{}", restricted.describe());
    let free = Uring::new(&UringConfig { restrict: false, ..UringConfig::default() }, Vec::new()).unwrap();
    assert!(!free.describe().contains("restricted"), "{}", free.describe());
}

/// The end of a ring is work for the thread that made it, some time later, and interrupts calls of
/// that thread that wait with a bound.
#[test]
fn the_probe_interrupts_no_call_of_its_thread() {
    for round in 0..10 {
        probe().unwrap();
        let (mut near, _far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let read = near.read(&mut [0; 4]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::WouldBlock), "round {round}");
    }
}
