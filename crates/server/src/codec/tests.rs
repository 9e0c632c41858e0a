use std::convert::Infallible;

use tokio_util::codec::LinesCodec;

use super::spare::KEPT_BYTES_MAX;
use super::*;

struct Nothing;

impl CodecService for Nothing {
    type Codec = LinesCodec;
    type Session = ();
    type Error = Infallible;

    fn codec(&self) -> LinesCodec {
        LinesCodec::new()
    }

    async fn call(&self, _cx: &CodecCx<'_, Self>, _line: String) -> Result<(), Infallible> {
        Ok(())
    }
}

/// State of a new connection.
fn session() -> CodecSession<Nothing> {
    CodecSession::new((), Place::default())
}

/// Handles received bytes, as [`WithCodec::call`] does.
fn receive(with: &WithCodec<Nothing>, state: &CodecSession<Nothing>, bytes: &[u8]) {
    state.take_in(bytes, &with.spare_in);
    while with.next(state, false).unwrap().is_some() {}
}

/// A service whose shard has a buffer that is distinct from a new one.
fn with_buffer() -> WithCodec<Nothing> {
    let with = WithCodec::new(Nothing);
    with.spare_in.keep(BytesMut::with_capacity(KEPT_BYTES_MAX), KEPT_BYTES_MAX);
    assert!(has_buffer(&with));
    with
}

/// True if the shard has that buffer still, or again.
fn has_buffer(with: &WithCodec<Nothing>) -> bool {
    let mut buffer = with.spare_in.take(0);
    let is_large = buffer.try_reclaim(KEPT_BYTES_MAX);
    let room = buffer.capacity();
    with.spare_in.keep(buffer, room);
    is_large
}

fn held(state: &CodecSession<Nothing>) -> usize {
    state.bytes.borrow().capacity()
}

#[test]
fn one_buffer_serves_all_connections_that_hold_none() {
    let with = with_buffer();
    for n in 1..100 {
        let state = session();
        receive(&with, &state, &b"hello\n".repeat(n * 20));
        assert_eq!(held(&state), 0);
        assert!(has_buffer(&with), "another one was made");
    }
}

#[test]
fn the_start_of_an_item_waits_in_a_block_of_its_own() {
    let (with, state) = (with_buffer(), session());
    receive(&with, &state, &[&b"hello\n".repeat(2000)[..], b"beg"].concat());
    assert_eq!(&state.bytes.borrow()[..], b"beg");
    assert!(held(&state) < 64, "{}", held(&state));
    assert!(has_buffer(&with));
    receive(&with, &state, b"in\n");
    assert_eq!(held(&state), 0, "the item went to the service");
}

#[test]
fn a_large_item_is_not_copied_with_each_piece_of_it() {
    let (with, state) = (WithCodec::new(Nothing), session());
    let (mut moves, mut place) = (0, std::ptr::null());
    for _ in 0..60 {
        receive(&with, &state, &[b'x'; 16 << 10]);
        let now = state.bytes.borrow().as_ptr();
        moves += usize::from(now != place);
        place = now;
    }
    assert!(moves < 12, "the shared moved {moves} times, where doubling it 6 times suffices");
}

#[test]
fn a_buffer_that_grew_large_is_not_kept() {
    let (with, state) = (with_buffer(), session());
    let line = [vec![b'x'; 500_000], b"\nrest".to_vec()].concat();
    for piece in line.chunks(16 << 10) {
        receive(&with, &state, piece);
    }
    assert_eq!(&state.bytes.borrow()[..], b"rest");
    assert!(held(&state) < 64, "{}", held(&state));
    assert!(!has_buffer(&with), "it grew, and the shard has none now");
}

#[test]
fn more_than_bytes_max_is_refused_and_as_much_is_not() {
    let (with, state) = (WithCodec::new(Nothing).bytes_max(10), session());
    receive(&with, &state, &b"whole\n".repeat(100));
    receive(&with, &state, b"a line that is longer than ten bytes, but whole\n0123456789");
    state.take_in(b"x", &with.spare_in);
    let error = with.next(&state, false).unwrap_err();
    assert!(matches!(error, CodecError::TooLarge { bytes: 11, max: 10 }));
    assert_eq!(error.to_string(), "11 bytes are no whole item, and bytes_max of the service is 10");
}
