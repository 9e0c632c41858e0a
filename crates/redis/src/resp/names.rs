//! Commands by their names.

use crate::FrameFields;

/// Letters of an unknown command, and of its arguments, that the error repeats.
const TOLD_MAX: usize = 128;

/// Spreads words over the places: an odd number without a pattern, the fraction of the golden
/// ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Values with names of 1 to 16 letters, found in small or capital letters: the commands of a
/// server.
///
/// ```
/// use ringserve::resp::Names;
///
/// let commands = Names::new([("get", 1), ("getset", 2)]);
/// assert_eq!([b"GET".as_slice(), b"GetSet", b"ge"].map(|name| commands.get(name)), [Some(1), Some(2), None]);
/// ```
#[derive(Clone, Debug)]
pub struct Names<T> {
    /// Each name at the place that its word gives, or at the next free one. Half of the places are
    /// free, at least.
    places: Box<[Option<CommandName<T>>]>,
}

#[derive(Clone, Copy, Debug)]
struct CommandName<T> {
    word: u128,
    len: usize,
    what: T,
}

impl<T: Copy> Names<T> {
    /// Makes the table.
    ///
    /// # Panics
    /// If a name is there twice, is longer than 16 letters, or has other characters.
    pub fn new(all: impl IntoIterator<Item = (&'static str, T)>) -> Names<T> {
        let all: Vec<_> = all.into_iter().collect();
        let mut names = Names { places: vec![None; (2 * all.len()).next_power_of_two()].into() };
        for (name, what) in all {
            let is_name =
                (1..=16).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphabetic());
            assert!(is_name, "{name:?} is no name of 1 to 16 letters");
            let (len, word) = (name.len(), word(name.as_bytes()));
            let at = names.place_of(word, len);
            assert!(names.places[at].is_none(), "{name:?} is there twice");
            names.places[at] = Some(CommandName { word, len, what });
        }
        names
    }

    /// The value with this name.
    #[inline]
    pub fn get(&self, name: &[u8]) -> Option<T> {
        self.places[self.place_of(word(name), name.len())].map(|named| named.what)
    }

    /// The place of a name, or the one that it would have.
    #[inline]
    fn place_of(&self, word: u128, len: usize) -> usize {
        let last = self.places.len() - 1;
        // Names of eight letters are the same in both halves.
        let mut at = word as u64 ^ ((word >> 64) as u64).rotate_left(32) ^ len as u64;
        at = at.wrapping_mul(SPREAD) >> 32;
        loop {
            let place = at as usize & last;
            if self.places[place].is_none_or(|named| named.word == word && named.len == len) {
                return place;
            }
            at += 1;
        }
    }
}

/// A name of 1 to 16 letters as a number, the same for small and capital letters, and for no other
/// name of that length. It is made of the first and the last bytes, which may be the same ones:
/// that takes no loop.
#[inline]
fn word(name: &[u8]) -> u128 {
    let small = u128::from_ne_bytes([0x20; 16]);
    let all = if let (Some(first), Some(last)) = (name.first_chunk(), name.last_chunk()) {
        u128::from(u64::from_le_bytes(*first)) | u128::from(u64::from_le_bytes(*last)) << 64
    } else if let (Some(first), Some(last)) = (name.first_chunk(), name.last_chunk()) {
        u128::from(u32::from_le_bytes(*first)) | u128::from(u32::from_le_bytes(*last)) << 32
    } else if let (Some(first), Some(last)) = (name.first(), name.last()) {
        u128::from(*first) | u128::from(name[name.len() / 2]) << 8 | u128::from(*last) << 16
    } else {
        0
    };
    all & !small
}

/// The [error](super::Writer::error) of Redis for an unknown command, with the first of its
/// arguments.
pub fn unknown_command(args: FrameFields<'_>) -> String {
    let text = |n| String::from_utf8_lossy(args.get(n)).chars().take(TOLD_MAX).collect::<String>();
    let (name, all) = (text(0), (1..args.len().min(TOLD_MAX)).map(|n| format!("'{}' ", text(n))));
    let told: String = all.collect::<String>().chars().take(TOLD_MAX).collect();
    format!("ERR unknown command '{name}', with args beginning with: {told}")
}

/// The error of Redis for a command without such a subcommand, or not with that many arguments.
pub fn unknown_subcommand(args: FrameFields<'_>) -> String {
    let (name, given) = (args.word(0).to_uppercase(), String::from_utf8_lossy(args.get(1)));
    format!("ERR unknown subcommand '{given}'. Try {name} HELP.")
}
