//! Which shard works on what, and how the answers of several become one reply.

use crate::commands::{Command, Reach};
use crate::number::{self, Digits};
use crate::resp::{self, Args};
use crate::store::{Key, Keyer};

/// Which shard this is, and of how many.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// From 0.
    pub index: usize,
    /// At least 1.
    pub shards: usize,
}

/// Who owns a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This shard.
    Here,
    /// Another one.
    There(usize),
}

impl Place {
    /// Who owns a key.
    #[inline]
    pub fn owner(self, key: Key<'_>) -> Owner {
        if self.shards == 1 { Owner::Here } else { self.seen_from_here(key.owner(self.shards)) }
    }

    /// Which shard a cursor of SCAN names. Mesh are scanned one after the other.
    fn owner_of_cursor(self, cursor: usize) -> Owner {
        self.seen_from_here(cursor % self.shards)
    }

    /// Where on this shard a cursor stands, 0 for its start.
    pub fn position(self, cursor: usize) -> usize {
        cursor / self.shards
    }

    /// The cursor for a position on this shard; 0 means that this shard is done.
    pub fn cursor(self, position: usize) -> usize {
        match position {
            0 => (self.index + 1) % self.shards,
            _ => position * self.shards + self.index,
        }
    }

    fn seen_from_here(self, shard: usize) -> Owner {
        if shard == self.index { Owner::Here } else { Owner::There(shard) }
    }
}

/// What is to be asked of which shards.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// One for each shard that has a part in it, this one perhaps among them.
    pub parts: Vec<Part>,
    /// How the answers become one.
    pub merge: Merge,
}

/// A request to one shard.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    /// Which shard.
    pub shard: usize,
    /// The request, in array form.
    pub request: Vec<u8>,
}

/// How answers become one reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Merge {
    /// There is only one.
    Only,
    /// They are numbers; the reply is their sum.
    Sum,
    /// Each is `OK`, and so is the reply.
    Ok,
    /// They are arrays, one after the other.
    Join,
    /// They are arrays; the next element of the reply comes from the part that is named here. One part may send its array in
    /// several answers.
    Order(Vec<u16>),
}

impl Plan {
    /// The request as it is, to one other shard.
    pub fn forward(shard: usize, request: &[u8]) -> Plan {
        Plan { parts: vec![Part { shard, request: request.to_vec() }], merge: Merge::Only }
    }

    /// What `request` needs of other shards; `None` if nothing, or if this shard can tell what is wrong with it.
    pub fn of(command: Command, request: &[u8], place: Place, keyer: &Keyer) -> Option<Plan> {
        let mut args = Args::of(request);
        let name = args.next()?;
        match command.spec().reach {
            Reach::Nothing => None,
            Reach::Key => match place.owner(keyer.key(args.next()?)) {
                Owner::Here => None,
                Owner::There(shard) => Some(Plan::forward(shard, request)),
            },
            Reach::Keys { step } => {
                split(command, name, args, step, |key| keyer.key(key).owner(place.shards))
                    .filter(|plan| plan.parts.iter().any(|part| part.shard != place.index))
            }
            Reach::Cursor => {
                let cursor = usize::try_from(number::parse(args.next()?)?).ok()?;
                match place.owner_of_cursor(cursor) {
                    Owner::Here => None,
                    Owner::There(shard) => Some(Plan::forward(shard, request)),
                }
            }
            Reach::Everything => {
                let part = |shard| Part { shard, request: request.to_vec() };
                let merge = match command {
                    Command::Keys => Merge::Join,
                    Command::DbSize => Merge::Sum,
                    _ => Merge::Ok,
                };
                (place.shards > 1).then(|| Plan { parts: (0..place.shards).map(part).collect(), merge })
            }
        }
    }
}

/// Deals the keys of a request out to their owners, each with the `step - 1` arguments that follow it. `None` if the
/// arguments do not come out even.
pub fn split<'a>(
    command: Command,
    name: &'a [u8],
    mut args: Args<'a>,
    step: usize,
    owner: impl Fn(&[u8]) -> usize,
) -> Option<Plan> {
    if !args.len().is_multiple_of(step) {
        return None;
    }
    let mut shards: Vec<(usize, Vec<&[u8]>)> = Vec::new();
    let mut order = Vec::new();
    while let Some(key) = args.next() {
        let owner = owner(key);
        let part = shards.iter().position(|(shard, _)| *shard == owner).unwrap_or_else(|| {
            shards.push((owner, vec![name]));
            shards.len() - 1
        });
        shards[part].1.push(key);
        shards[part].1.extend(args.by_ref().take(step - 1));
        order.push(part as u16);
    }
    let parts: Vec<Part> = shards
        .into_iter()
        .map(|(shard, args)| Part { shard, request: resp::request(args.into_iter()) })
        .collect();
    let merge = match command {
        Command::MGet => Merge::Order(order),
        _ if parts.len() == 1 => Merge::Only,
        Command::MSet => Merge::Ok,
        _ => Merge::Sum,
    };
    Some(Plan { parts, merge })
}

/// Makes one reply of the answers to the parts of a plan, in their order. The first error is the reply if there is one.
pub fn merge(merge: &Merge, mut answers: Vec<Vec<u8>>) -> Vec<u8> {
    if let Some(error) = answers.iter().position(|answer| answer.first() == Some(&b'-')) {
        return answers.swap_remove(error);
    }
    let merged = match merge {
        Merge::Only | Merge::Ok => answers.into_iter().next(),
        Merge::Sum => sum(&answers),
        Merge::Join => join(&answers),
        // That is a reply of several pieces, of the module `gather`.
        Merge::Order(_) => None,
    };
    merged.unwrap_or_else(|| b"-ERR another shard gave an answer of another form\r\n".to_vec())
}

fn sum(answers: &[Vec<u8>]) -> Option<Vec<u8>> {
    let mut sum = 0;
    for answer in answers {
        sum += number_line(answer, b':')?.0;
    }
    Some([b":", Digits::of(sum).bytes(), b"\r\n"].concat())
}

fn join(answers: &[Vec<u8>]) -> Option<Vec<u8>> {
    let mut elements = 0;
    let mut rests = Vec::new();
    for answer in answers {
        let (count, rest) = number_line(answer, b'*')?;
        elements += count;
        rests.push(rest);
    }
    let mut out = [b"*", Digits::of(elements).bytes(), b"\r\n"].concat();
    rests.into_iter().for_each(|rest| out.extend_from_slice(rest));
    Some(out)
}

/// Bytes of the string or null at the start of `bytes`.
pub fn element_len(bytes: &[u8]) -> Option<usize> {
    if bytes.starts_with(b"_\r\n") {
        return Some(3);
    }
    let (len, rest) = number_line(bytes, b'$')?;
    let header = bytes.len() - rest.len();
    Some(if len < 0 { header } else { header + len as usize + 2 })
}

/// The number in the line at the start of `bytes`, and what is behind it.
pub fn number_line(bytes: &[u8], kind: u8) -> Option<(i64, &[u8])> {
    let line = bytes.strip_prefix(&[kind])?;
    let end = line.iter().position(|byte| *byte == b'\r')?;
    Some((number::parse(&line[..end])?, line.get(end + 2..)?))
}

#[cfg(test)]
#[path = "route_tests.rs"]
mod tests;
