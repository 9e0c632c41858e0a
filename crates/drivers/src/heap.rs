//! What the allocator keeps.

/// Has the C library's allocator give the free memory that it keeps back to the system, for the whole process. Takes about a
/// millisecond for each 4 MiB that go, in which an arena is locked. Nothing happens where it is not glibc's, and to memory of
/// a program's other allocator.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a number, may be called by any thread at any time, and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}
