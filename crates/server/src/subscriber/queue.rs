//! The lines between the threads that log and the one that writes.

/// Bytes of a line, for the bound on bytes: one of the access log has 400.
const LINE_BYTES: usize = 512;

/// A buffer that a burst made larger than this is given back.
const KEPT_BYTES: usize = 64 << 10;

/// A bounded number of lines, of which those that the writer has taken and not written yet are a
/// part.
pub(super) struct Queue {
    bytes: Vec<u8>,
    lines: usize,
    lines_max: usize,
    /// The lines that the writer took and has not written.
    taken: Taken,
    /// Lines that were dropped, of which the log does not tell yet.
    untold: u64,
}

/// The size of a batch of lines.
#[derive(Clone, Copy, Default)]
struct Taken {
    lines: usize,
    bytes: usize,
}

impl Queue {
    pub(super) fn new(lines_max: usize) -> Queue {
        Queue { bytes: Vec::new(), lines: 0, lines_max, taken: Taken::default(), untold: 0 }
    }

    /// Appends a line with its end. False if there is no room, and it is dropped.
    pub(super) fn push(&mut self, line: &[u8]) -> bool {
        let lines = self.lines + self.taken.lines;
        let bytes = self.bytes.len() + self.taken.bytes + line.len();
        let has_room = lines < self.lines_max && bytes <= self.lines_max * LINE_BYTES;
        if has_room && self.bytes.try_reserve(line.len()).is_ok() {
            self.bytes.extend_from_slice(line);
            self.lines += 1;
            return true;
        }
        self.untold += 1;
        false
    }

    /// Moves all lines to the writer's empty buffer.
    pub(super) fn take(&mut self, batch: &mut Vec<u8>) {
        batch.shrink_to(KEPT_BYTES);
        std::mem::swap(&mut self.bytes, batch);
        self.taken = Taken { lines: std::mem::take(&mut self.lines), bytes: batch.len() };
    }

    /// The batch was written. Returns the number of lines that were dropped since the last time.
    pub(super) fn written(&mut self) -> u64 {
        self.taken = Taken::default();
        std::mem::take(&mut self.untold)
    }

    /// The batch was lost, to an output that nothing reads. Returns the number of its lines.
    pub(super) fn lost(&mut self) -> u64 {
        let lost = std::mem::take(&mut self.taken).lines as u64;
        self.untold += lost;
        lost
    }

    /// True if no line waits for the writer.
    pub(super) fn is_empty(&self) -> bool {
        self.lines == 0
    }

    /// True if each line is written.
    pub(super) fn is_written(&self) -> bool {
        self.is_empty() && self.taken.lines == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_bound_are_dropped_and_counted() {
        let (mut queue, mut batch) = (Queue::new(3), Vec::new());
        assert!(queue.push(b"one\n") && queue.push(b"two\n"));
        queue.take(&mut batch);
        assert_eq!(batch, b"one\ntwo\n");
        // The writer is blocked with two in its hands, so there is room for one more.
        assert!(queue.is_empty() && !queue.is_written());
        assert!(queue.push(b"three\n") && !queue.push(b"four\n") && !queue.push(b"five\n"));
        assert_eq!(queue.written(), 2);
        batch.clear();
        queue.take(&mut batch);
        assert_eq!((&batch[..], queue.written()), (&b"three\n"[..], 0));
        assert!(queue.is_written());
    }

    #[test]
    fn long_lines_are_bounded_by_their_bytes() {
        let mut queue = Queue::new(4);
        assert!(!queue.push(&[b'x'; 4 * LINE_BYTES + 1]), "longer than everything that may wait");
        assert!(queue.push(&[b'x'; 3 * LINE_BYTES]) && !queue.push(&[b'x'; LINE_BYTES + 1]));
        let mut batch = Vec::new();
        queue.take(&mut batch);
        assert!(!queue.push(&[b'x'; LINE_BYTES + 1]), "what the writer holds counts");
        assert_eq!(queue.written(), 3);
        assert!(queue.push(&[b'x'; LINE_BYTES + 1]));
    }

    #[test]
    fn lines_without_a_reader_count_as_dropped() {
        let (mut queue, mut batch) = (Queue::new(8), Vec::new());
        assert!(queue.push(b"one\n") && queue.push(b"two\n"));
        queue.take(&mut batch);
        assert_eq!(queue.lost(), 2);
        assert!(queue.is_written());
        assert!(queue.push(b"three\n"));
        batch.clear();
        queue.take(&mut batch);
        assert_eq!(queue.written(), 2, "told with the first line that is read");
    }

    #[test]
    fn buffer_of_a_burst_is_given_back() {
        let (mut queue, mut batch) = (Queue::new(8192), Vec::new());
        (0..1000).for_each(|_| assert!(queue.push(&[b'x'; LINE_BYTES])));
        queue.take(&mut batch);
        assert!(batch.capacity() > KEPT_BYTES);
        batch.clear();
        queue.take(&mut batch);
        assert!(queue.bytes.capacity() <= KEPT_BYTES);
    }
}
