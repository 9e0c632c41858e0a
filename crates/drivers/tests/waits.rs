//! Waits of a turn, the timer that serves many of them, and the wakes that end them.

use std::time::{Duration, Instant};

use ringserve_core::{Budget, Driver, Wait};
use ringserve_drivers::{Epoll, EpollConfig, Uring, UringConfig};

const HOUR: Duration = Duration::from_secs(60 * 60);

fn turn(driver: &mut impl Driver, wait: Duration) {
    driver.turn(Wait::For(wait), Budget { completions: 100, bytes: 1 << 20 }, &mut Vec::new()).unwrap();
}

/// Each wait comes after one that was longer and ended early, and left its timer behind.
fn waits_end_in_time(mut driver: impl Driver) {
    let waker = driver.waker();
    for millis in [100, 30, 1, 60, 25, 10, 80] {
        waker.wake_by_ref();
        turn(&mut driver, HOUR);
        let (start, time) = (Instant::now(), Duration::from_millis(millis));
        let mut turns = 0;
        while let Some(left) = time.checked_sub(start.elapsed()) {
            turn(&mut driver, left);
            turns += 1;
        }
        assert!(start.elapsed() < HOUR / 60, "{:?} instead of {time:?}", start.elapsed());
        // The wake-up is taken note of, and the kernel may be a moment early.
        assert!(turns <= 3, "{turns} turns to wait for {time:?}");
    }
}

#[test]
fn a_wait_after_a_longer_one_ends_in_time_on_io_uring() {
    let driver = Uring::new(&UringConfig::default(), Vec::new()).unwrap();
    waits_end_in_time(driver);
}

#[test]
fn a_wait_after_a_longer_one_ends_in_time_on_epoll() {
    let driver = Epoll::new(&EpollConfig::default(), Vec::new()).unwrap();
    waits_end_in_time(driver);
}
