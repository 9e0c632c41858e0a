//! Lengths that a peer only claims, which must cost nothing.
//!
//! The allocator counts for the whole process, so there is one test in this file.

use ringserve::CloseReason;
use ringserve::framing::{FrameError, LengthPrefix};
use ringserve_tests::client::End;
use ringserve_tests::{Lab, On, alone, no_time_limits};
use stats_alloc::Region;

/// The largest frame that the server accepts.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// Lengths beyond it, by their bytes: just above, the ends of 32 bits, of 63 and of 64.
const CLAIMS: [u64; 5] = [(1 << 20) + 1, (1 << 31) - 1, (1 << 32) - 1, 1 << 63, u64::MAX];

#[test]
fn a_claimed_length_allocates_nothing() {
    if !alone(a_claimed_length_allocates_nothing) {
        return;
    }
    let limits = no_time_limits().frame_bytes_max(FRAME_BYTES_MAX);
    let lab = Lab::of(On::default().server(limits.unwatched()).framing(LengthPrefix::bytes(8)));
    // Everything that is made once exists.
    claim(&lab, CLAIMS[0]);
    for length in CLAIMS {
        let region = Region::new(crate::ALLOCATOR);
        claim(&lab, length);
        let change = region.change();
        let bytes = change.bytes_allocated;
        assert!(bytes <= FRAME_BYTES_MAX, "{length} bytes are claimed and {bytes} are allocated");
    }
    let claims = CLAIMS.len() as u64 + 1;
    lab.closed_for(CloseReason::BadFrame(FrameError::TooLarge { bytes: 0, max: 0 }), claims);
    lab.finish();
}

fn claim(lab: &Lab, length: u64) {
    let mut client = lab.client();
    client.write(&length.to_be_bytes());
    client.write(b"and a few bytes of it");
    assert_ne!(client.end_after_all(), End::Reset, "the connection is closed in order");
}
