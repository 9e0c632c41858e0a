//! Bytes as a source of decisions.

/// The rest of the fuzzer's bytes. Past the end every answer is 0, so that a shorter input is a
/// simpler one.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Reads from the start.
    pub fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    /// The next byte, if there is one.
    pub fn next_byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next byte, or 0.
    pub fn byte(&mut self) -> u8 {
        self.next_byte().unwrap_or(0)
    }

    /// The next two bytes as a number.
    pub fn wide(&mut self) -> usize {
        usize::from(self.byte()) << 8 | usize::from(self.byte())
    }

    /// One of these, by the next byte.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }

    /// At most `count` bytes unchanged.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// All remaining bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}
