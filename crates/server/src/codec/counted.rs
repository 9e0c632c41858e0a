//! A view of the bytes after an item while something waits.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::{CodecCx, CodecService};

pin_project! {
    /// A future behind whose item bytes may wait: before it waits itself, they take no more memory
    /// than they have to, and count.
    pub(super) struct Counted<'a, S: CodecService, F> {
        #[pin]
        future: F,
        cx: &'a CodecCx<'a, S>,
        // The sizes of buffers that its item pins.
        pinned: usize,
    }

    impl<'a, S: CodecService, F> PinnedDrop for Counted<'a, S, F> {
        fn drop(this: Pin<&mut Self>) {
            if this.pinned > 0 {
                this.cx.release(this.pinned);
            }
        }
    }
}

impl<'a, S: CodecService, F> Counted<'a, S, F> {
    #[inline]
    pub(super) fn new(future: F, cx: &'a CodecCx<'a, S>) -> Counted<'a, S, F> {
        Counted { future, cx, pinned: 0 }
    }
}

impl<S: CodecService, F: Future> Future for Counted<'_, S, F> {
    type Output = F::Output;

    #[inline]
    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let polled = this.future.poll(task);
        if polled.is_pending() {
            *this.pinned += this.cx.leave_behind();
        }
        polled
    }
}
