//! Whole numbers as the protocol writes them, without the formatting machinery.

/// Digits and sign of the longest `i64`.
const LEN_MAX: usize = 20;

/// A number as text, on the stack.
pub struct Digits {
    text: [u8; LEN_MAX],
    start: u8,
}

impl Digits {
    /// The decimal digits of `value`, with a `-` before them if it is negative.
    #[inline]
    pub fn of(value: i64) -> Digits {
        let mut digits = Digits::of_unsigned(value.unsigned_abs());
        if value < 0 {
            digits.start -= 1;
            digits.text[usize::from(digits.start)] = b'-';
        }
        digits
    }

    /// The decimal digits of `value`, which has at most 19 of them.
    #[inline]
    fn of_unsigned(mut value: u64) -> Digits {
        let mut text = [0; LEN_MAX];
        let mut start = LEN_MAX;
        loop {
            start -= 1;
            text[start] = b'0' + (value % 10) as u8;
            value /= 10;
            if value == 0 {
                return Digits { text, start: start as u8 };
            }
        }
    }

    /// The text.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.text[usize::from(self.start)..]
    }
}

/// Reads a number the way Redis does: an optional `-`, no `+`, no leading zero, no space, and nothing beyond
/// the range of `i64`.
#[inline]
pub fn parse(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    let value = match digits {
        [b'0'] if !negative => 0,
        [b'1'..=b'9', ..] if digits.len() < LEN_MAX => {
            // 19 digits fit a u64.
            let mut value = 0u64;
            for digit in digits {
                let digit = digit.wrapping_sub(b'0');
                if digit > 9 {
                    return None;
                }
                value = value * 10 + u64::from(digit);
            }
            value
        }
        _ => return None,
    };
    if negative { 0i64.checked_sub_unsigned(value) } else { i64::try_from(value).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_number_is_read_back(value in any::<i64>(), shift in 0..64u32) {
            let value = value >> shift;
            let (digits, expected) = (Digits::of(value), value.to_string());
            prop_assert_eq!(digits.bytes(), expected.as_bytes());
            prop_assert_eq!(parse(digits.bytes()), Some(value));
        }

        #[test]
        fn text_is_a_number_exactly_when_it_is_how_that_number_is_written(text in "-?[0-9]{0,21}|[ -~]{0,4}") {
            let expected = text.parse::<i64>().ok().filter(|value| value.to_string() == text);
            prop_assert_eq!(parse(text.as_bytes()), expected);
        }
    }

    #[test]
    fn the_ends_of_the_range_are_read_and_nothing_beyond() {
        for value in [0, 1, -1, i64::MAX, i64::MIN] {
            assert_eq!(parse(value.to_string().as_bytes()), Some(value));
        }
        for text in
            ["9223372036854775808", "-9223372036854775809", "99999999999999999999", "", "-", "-0", "01", "+1"]
        {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }
}
