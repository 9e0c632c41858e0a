//! Giving others a turn.

use std::future::poll_fn;
use std::task::Poll;

/// Lets others of the shard go first: calls and tasks that were woken, and connections with
/// something to read. For work that takes long, in parts of a millisecond at most: each call or
/// task that only yields goes on up to four times in a turn of the shard.
///
/// ```
/// async fn sum(numbers: &[u64]) -> u64 {
///     let mut sum = 0_u64;
///     for part in numbers.chunks(100_000) {
///         sum = part.iter().fold(sum, |sum, number| sum.wrapping_add(*number));
///         ringserve::task::yield_now().await;
///     }
///     sum
/// }
/// ```
pub async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|task| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        task.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}
