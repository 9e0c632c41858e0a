//! Boxes that the system may refuse: if a peer decides how much memory is used, running out of it
//! must end its connection, and `Box::new` would end the process.

use alloc::alloc::{Layout, alloc_zeroed};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr::NonNull;

/// Moves `value` into a box. `None` if the system has no memory for it; then `value` is dropped.
///
/// ```
/// assert_eq!(ringserve_buf::try_box([7; 100]).as_deref(), Some(&[7; 100]));
/// ```
pub fn try_box<T>(value: T) -> Option<Box<T>> {
    let mut one = Vec::new();
    one.try_reserve_exact(1).ok()?;
    one.push(value);
    let one: *mut [T] = Box::into_raw(one.into_boxed_slice());
    // SAFETY: the pointer is to a boxed slice of exactly one `T`, which nothing else owns; a slice
    // of one has the layout of the value alone, so it may be freed as that. For a `T` without a
    // size nothing is allocated or freed.
    Some(unsafe { Box::from_raw(one.cast::<T>()) })
}

/// Allocates `bytes` bytes of zeros, whose pages the system provides at their first use. `None` if
/// it has no memory for them.
pub(crate) fn try_zeroed(bytes: usize) -> Option<Vec<u8>> {
    let layout = Layout::array::<u8>(bytes).ok()?;
    if bytes == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout's size is not zero.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: just allocated with the layout of as many bytes, all of them zero, and nothing else
    // owns it.
    Some(unsafe { Vec::from_raw_parts(start.as_ptr(), bytes, bytes) })
}

/// Memory that is left for others when a `T` is allocated: lists of names, boxes of a few words and
/// the like, which cannot fail, for many turns of a shard.
const MARGIN: usize = 64 << 10;

/// True if the system has memory for a `T` in an `Rc` or an `Arc`, and 64 KiB in addition. The
/// memory is returned at once, so that the next allocation finds it, including one that cannot
/// fail.
pub fn has_room_for<T>() -> bool {
    Vec::<u8>::new().try_reserve_exact(size_of::<T>() + MARGIN).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_holds_its_value_and_is_freed_as_any_other() {
        let text = alloc::string::String::from("text");
        let boxed = try_box((7u8, text)).unwrap();
        assert_eq!((boxed.0, boxed.1.as_str()), (7, "text"));
        assert_eq!(*try_box(()).unwrap(), ());
        assert!(has_room_for::<[u8; 1000]>());
    }
}
