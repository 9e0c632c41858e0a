//! UTF-8 that arrives in pieces.

/// Checks text piece by piece, so that an error is found in the piece that has it. Keeps the start
/// of a character whose end has not arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Utf8 {
    /// The unfinished character, and how many bytes of it are there: at most three.
    begun: [u8; 4],
    have: u8,
}

impl Utf8 {
    /// True if the text may continue with `bytes`.
    #[inline]
    pub fn takes(&mut self, mut bytes: &[u8]) -> bool {
        while self.have > 0 {
            let Some((&byte, rest)) = bytes.split_first() else { return true };
            (self.begun[usize::from(self.have)], bytes) = (byte, rest);
            self.have += 1;
            match core::str::from_utf8(&self.begun[..usize::from(self.have)]) {
                Ok(_) => self.have = 0,
                // Four bytes are a character or none.
                Err(error) if error.error_len().is_some() => return false,
                Err(_) => {}
            }
        }
        let Err(error) = simdutf8::compat::from_utf8(bytes) else { return true };
        if error.error_len().is_some() {
            return false;
        }
        let start = &bytes[error.valid_up_to()..];
        self.begun[..start.len()].copy_from_slice(start);
        // At most three.
        self.have = start.len() as u8;
        true
    }

    /// True if no character is unfinished.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.have == 0
    }
}

/// True if `bytes` are text. The fastest way for whole messages.
#[inline]
pub fn is_text(bytes: &[u8]) -> bool {
    simdutf8::basic::from_utf8(bytes).is_ok()
}

/// The text of bytes that were checked before; empty for other bytes.
#[inline]
pub fn as_text(bytes: &[u8]) -> &str {
    simdutf8::basic::from_utf8(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes that are nearly text.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let arbitrary = prop::collection::vec(any::<u8>(), 0..12);
        let text =
            (any::<String>(), any::<Option<(prop::sample::Index, u8)>>()).prop_map(|(text, change)| {
                let mut bytes = text.into_bytes();
                if let Some((at, byte)) = change.filter(|_| !bytes.is_empty()) {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
                bytes
            });
        prop_oneof![arbitrary, text]
    }

    proptest! {
        #[test]
        fn pieces_are_text_if_the_whole_is(bytes in bytes(), cuts in any::<[prop::sample::Index; 3]>()) {
            let mut cuts = cuts.map(|cut| cut.index(bytes.len() + 1));
            cuts.sort_unstable();
            let [a, b, c] = cuts;
            let mut text = Utf8::default();
            let takes = [&bytes[..a], &bytes[a..b], &bytes[b..c], &bytes[c..]].iter().all(|piece| text.takes(piece));
            prop_assert_eq!(takes && text.is_whole(), core::str::from_utf8(&bytes).is_ok());
            prop_assert_eq!(is_text(&bytes), core::str::from_utf8(&bytes).is_ok());
        }
    }

    #[test]
    fn what_is_no_text_is_found_in_its_piece() {
        let mut text = Utf8::default();
        assert!(text.takes(b"gr\xc3") && !text.is_whole());
        assert!(
            text.takes(b"\xbc\xc3\x9fe \xf0\x9f")
                && text.takes(b"")
                && text.takes(b"\xa6")
                && !text.is_whole()
        );
        assert!(text.takes(b"\x80!") && text.is_whole());
        // A surrogate, detected at its second byte; an overlong form; a character that never
        // begins.
        for wrong in [&[&b"\xed"[..], b"\xa0"][..], &[b"\xf4", b"\x90"], &[b"a\xc0"], &[b"\x80"]] {
            let mut text = Utf8::default();
            let (last, begin) = wrong.split_last().unwrap();
            assert!(begin.iter().all(|piece| text.takes(piece)), "{wrong:x?}");
            assert!(!text.takes(last), "{wrong:x?}");
        }
    }
}
