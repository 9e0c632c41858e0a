//! Masking: each byte of a client's payload is combined with one of four, in turn.

/// Combines `bytes` with `mask`, in place. A second call undoes the first. The first byte meets the
/// first of the mask: a call in the middle of a payload needs [the mask from there](from).
#[inline]
pub fn apply(bytes: &mut [u8], mask: [u8; 4]) {
    let four = u32::from_ne_bytes(mask);
    let wide = u128::from(four) * 0x0000_0001_0000_0001_0000_0001_0000_0001;
    let mut chunks = bytes.chunks_exact_mut(16);
    for chunk in &mut chunks {
        if let Ok(block) = <&mut [u8; 16]>::try_from(chunk) {
            *block = (u128::from_ne_bytes(*block) ^ wide).to_ne_bytes();
        }
    }
    for (byte, by) in chunks.into_remainder().iter_mut().zip(mask.iter().cycle()) {
        *byte ^= by;
    }
}

/// Returns the mask as it continues after `done` bytes of payload.
#[inline]
pub fn from(mask: [u8; 4], done: usize) -> [u8; 4] {
    // At most 3.
    let by = (done % 4) as u32 * 8;
    u32::from_le_bytes(mask).rotate_right(by).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_are_masked_one_by_one_however_they_are_cut(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            mask in any::<[u8; 4]>(),
            cut in 0.0..=1.0f64,
        ) {
            let expected: Vec<u8> = bytes.iter().enumerate().map(|(at, byte)| byte ^ mask[at % 4]).collect();
            let mut masked = bytes.clone();
            let cut = (bytes.len() as f64 * cut) as usize;
            apply(&mut masked[..cut], mask);
            apply(&mut masked[cut..], from(mask, cut));
            prop_assert_eq!(masked, expected);
        }
    }
}
