use super::*;

fn bounds() -> Bounds {
    Bounds::new(&HttpOptions::default().body_bytes_per_second_min(100))
}

#[test]
fn ticks_cover_each_limit() {
    let bounds = bounds();
    assert_eq!(bounds.tick, Duration::from_secs(6));
    assert_eq!((bounds.window, bounds.window_bytes, bounds.tick_bytes), (5, 3000, 600));
    assert_eq!((bounds.answer, bounds.request, bounds.idle), (10, u32::MAX, 100));
    let answer = Some(Duration::from_millis(10));
    let brief = Bounds::new(&HttpOptions::default().response_timeout(answer));
    assert_eq!((brief.tick, brief.answer, brief.window), (Duration::from_millis(10), 1, 3000));
}

#[test]
fn rate_is_judged_after_a_whole_window_of_waiting() {
    let (bounds, mut rate) = (bounds(), Rate::default());
    let lows: Vec<bool> = (0..6).map(|_| rate.is_low(7, &bounds)).collect();
    assert_eq!(lows, [false, false, false, false, false, true]);
    // Exactly enough in the next one, and a byte less in that behind it.
    assert!(!(0..5).any(|n| rate.is_low(7 + 600 * (n + 1), &bounds)));
    assert!((0..5).any(|n| rate.is_low(3007 + n * 749, &bounds)));
}

#[test]
fn entry_of_a_finished_request_serves_the_next_one() {
    let watch = Watch::new(bounds(), None);
    for _ in 0..1000 {
        watch.begin(false);
    }
    assert_eq!(watch.requests.borrow().len(), 1);
    let held: Vec<_> = (0..10).map(|_| watch.begin(false)).collect();
    assert_eq!(watch.requests.borrow().len(), 10);
    drop(held);
    assert_eq!(watch.tick(0), Next::Pause);
    assert!(watch.requests.borrow().is_empty());
}

#[cfg(feature = "websocket")]
#[test]
fn what_a_socket_took_is_not_held() {
    let watch = Watch::new(bounds(), None);
    watch.set_http2();
    let request = watch.begin(true);
    request.set_upgraded();
    for _ in 0..100 {
        watch.read(16 << 10, false);
        request.all_read();
    }
    assert_eq!(watch.tick(0), Next::GoOn);
    assert_eq!(watch.counted.get(), 16 << 10);
    // What it leaves unread is.
    watch.read(100 << 10, false);
    assert_eq!(watch.counted.get(), 116 << 10);
}

#[test]
fn connection_without_requests_holds_no_upload() {
    let watch = Watch::new(bounds(), None);
    watch.read(100, false);
    let request = watch.begin(true);
    for _ in 0..100 {
        watch.read(16 << 10, false);
    }
    drop(request);
    let mut ticks = 1;
    while watch.tick(0) != Next::Pause {
        ticks += 1;
    }
    assert_eq!((ticks, watch.counted.get()), (2, 0));
}
