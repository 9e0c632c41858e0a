//! Puts the values of MGET, which come from several shards in parts, into the order of their keys.
//!
//! ```text
//!   order  0 1 0 2 1              from shard 0   $1 a $1 c
//!          │ │ │ │ │                   shard 1   $1 b         rest: $1 e
//!          a b c d ask shard 1         shard 2   $1 d
//! ```
//!
//! A shard sends up to [`ANSWER_BYTES_MAX`](crate::reply::ANSWER_BYTES_MAX) and one value at once, and is asked for
//! more when that has been written: so a reply of any length takes that much memory for each shard, and no more.

use crate::message::{Answer, Work};
use crate::number::Digits;
use crate::route::{element_len, number_line};

/// A reply that is being put together.
pub struct Gather {
    /// For each value the part that it comes from.
    order: Vec<u16>,
    /// Values before this one are written.
    at: usize,
    parts: Vec<Part>,
}

/// What came from one shard.
struct Part {
    shard: usize,
    bytes: Vec<u8>,
    /// Bytes before this one are written.
    at: usize,
    rest: Option<Work>,
    /// Stands in the place of each value that does not come any more.
    error: Option<Vec<u8>>,
}

impl Gather {
    /// Of the first answers of the parts, each with its shard. None is an error.
    pub fn new(order: Vec<u16>, answers: Vec<(usize, Answer)>) -> Gather {
        let part = |(shard, answer): (usize, Answer)| {
            // Behind the line that tells how many values there are.
            let at = number_line(&answer.bytes, b'*').map(|(_, values)| answer.bytes.len() - values.len());
            let error = at.is_none().then(|| OTHER_FORM.to_vec());
            Part { shard, at: at.unwrap_or_default(), bytes: answer.bytes, rest: answer.rest, error }
        };
        Gather { order, at: 0, parts: answers.into_iter().map(part).collect() }
    }

    /// The next bytes of the reply, and what they lack: a part, its shard, and what to ask it. `None` behind the last
    /// bytes.
    pub fn next_piece(&mut self) -> (Vec<u8>, Option<(usize, usize, Work)>) {
        let mut piece = match self.at {
            0 => [b"*", Digits::of(self.order.len() as i64).bytes(), b"\r\n"].concat(),
            _ => Vec::new(),
        };
        while let Some(which) = self.order.get(self.at) {
            let which = usize::from(*which);
            let part = &mut self.parts[which];
            if let Some(work) = part.write_next(&mut piece) {
                return (piece, Some((which, part.shard, work)));
            }
            self.at += 1;
        }
        (piece, None)
    }

    /// What a part gave when it was asked. An error stands in the place of each value it does not give.
    pub fn more(&mut self, part: usize, answer: Answer) {
        let part = &mut self.parts[part];
        part.error = (answer.bytes.first() == Some(&b'-')).then(|| answer.bytes.clone());
        (part.bytes, part.at, part.rest) = (answer.bytes, 0, answer.rest);
    }
}

/// Stands in the place of a value, so that the reply keeps its number of values.
const OTHER_FORM: &[u8] = b"-ERR another shard gave an answer of another form\r\n";

impl Part {
    /// Writes one value, or returns what to ask first.
    fn write_next(&mut self, out: &mut Vec<u8>) -> Option<Work> {
        if self.error.is_none() {
            let values = &self.bytes[self.at..];
            if values.is_empty()
                && let Some(work) = self.rest.take()
            {
                return Some(work);
            }
            match element_len(values).and_then(|len| values.get(..len)) {
                Some(value) => {
                    out.extend_from_slice(value);
                    self.at += value.len();
                    return None;
                }
                None => self.error = Some(OTHER_FORM.to_vec()),
            }
        }
        out.extend_from_slice(self.error.as_deref().unwrap_or(OTHER_FORM));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::Protocol;

    fn work(skip: usize) -> Work {
        Work { request: Vec::new(), protocol: Protocol::Resp2, skip }
    }

    fn answer(bytes: &str, rest: Option<usize>) -> Answer {
        Answer { bytes: bytes.as_bytes().to_vec(), rest: rest.map(work) }
    }

    fn text(piece: Vec<u8>) -> String {
        String::from_utf8(piece).unwrap().replace("\r\n", " ")
    }

    #[test]
    fn values_come_in_the_order_of_their_keys() {
        let answers =
            vec![(4, answer("*2\r\n$-1\r\n$2\r\nhi\r\n", None)), (7, answer("*2\r\n$1\r\n$\r\n_\r\n", None))];
        let (piece, rest) = Gather::new(vec![1, 0, 1, 0], answers).next_piece();
        assert_eq!((text(piece), rest), ("*4 $1 $ $-1 _ $2 hi ".to_owned(), None));
    }

    #[test]
    fn part_that_is_used_up_is_asked_for_more() {
        let answers = vec![(4, answer("*3\r\n$1\r\na\r\n", Some(1))), (7, answer("*1\r\n$1\r\nb\r\n", None))];
        let mut gather = Gather::new(vec![0, 1, 0, 0], answers);
        let (piece, rest) = gather.next_piece();
        assert_eq!((text(piece), rest), ("*4 $1 a $1 b ".to_owned(), Some((0, 4, work(1)))));
        gather.more(0, answer("$1\r\nc\r\n", Some(2)));
        let (piece, rest) = gather.next_piece();
        assert_eq!((text(piece), rest), ("$1 c ".to_owned(), Some((0, 4, work(2)))));
        gather.more(0, answer("$1\r\nd\r\n", None));
        let (piece, rest) = gather.next_piece();
        assert_eq!((text(piece), rest), ("$1 d ".to_owned(), None));
    }

    #[test]
    fn error_stands_for_each_value_that_does_not_come() {
        let answers = vec![(4, answer("*3\r\n$1\r\na\r\n", Some(1))), (7, answer("*1\r\n$1\r\nb\r\n", None))];
        let mut gather = Gather::new(vec![0, 0, 1, 0], answers);
        assert_eq!(text(gather.next_piece().0), "*4 $1 a ");
        gather.more(0, answer("-ERR shard 4 has ended\r\n", None));
        let (piece, rest) = gather.next_piece();
        let error = "-ERR shard 4 has ended ";
        assert_eq!((text(piece), rest), (format!("{error}$1 b {error}"), None));
    }

    #[test]
    fn answer_of_another_form_is_an_error_in_each_place() {
        for bytes in ["+OK\r\n", "*1\r\n", "*1\r\n$5\r\nabc\r\n", "*1", ""] {
            let (piece, rest) = Gather::new(vec![0, 0], vec![(0, answer(bytes, None))]).next_piece();
            assert_eq!(rest, None, "{bytes:?}");
            assert_eq!(text(piece).matches("-ERR another shard").count(), 2, "{bytes:?}");
        }
    }
}
