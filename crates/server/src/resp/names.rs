//! Commands by their names.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use crate::parts::Parts;

/// Letters of an unknown command, and of its arguments, that the error repeats.
const TOLD_MAX: usize = 128;

/// Values with names of 1 to 16 letters, found in small or capital letters: the commands of a server.
///
/// ```
/// use ringserve::resp::Names;
///
/// let commands = Names::new([("get", 1), ("getset", 2)]);
/// assert_eq!([b"GET".as_slice(), b"GetSet", b"ge"].map(|name| commands.get(name)), [Some(1), Some(2), None]);
/// ```
#[derive(Clone, Debug)]
pub struct Names<T> {
    by_word: HashMap<u128, (usize, T), FixedState>,
}

impl<T: Copy> Names<T> {
    /// Makes the table.
    ///
    /// # Panics
    /// If a name is there twice, is longer than 16 letters, or has other characters.
    pub fn new(all: impl IntoIterator<Item = (&'static str, T)>) -> Names<T> {
        let mut by_word = HashMap::default();
        for (name, what) in all {
            let is_name =
                (1..=16).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphabetic());
            assert!(is_name, "{name:?} is no name of 1 to 16 letters");
            let before = by_word.insert(word(name.as_bytes()), (name.len(), what));
            assert!(before.is_none(), "{name:?} is there twice");
        }
        Names { by_word }
    }

    /// The value with this name.
    #[inline]
    pub fn get(&self, name: &[u8]) -> Option<T> {
        // A space or a zero before a name looks like nothing in a word, and a word does not hold the end of a long name.
        self.by_word.get(&word(name)).filter(|(len, _)| *len == name.len()).map(|(_, what)| *what)
    }
}

/// A name as a number, the same for small and capital letters. Bytes behind the 16th are left out.
#[inline]
fn word(name: &[u8]) -> u128 {
    name.iter().take(16).fold(0, |word, byte| word << 8 | u128::from(byte & 0xDF))
}

/// The [error](super::Writer::error) of Redis for an unknown command, with the first of its arguments.
pub fn unknown_command(args: Parts<'_>) -> String {
    let text = |n| String::from_utf8_lossy(args.get(n)).chars().take(TOLD_MAX).collect::<String>();
    let (name, all) = (text(0), (1..args.len().min(TOLD_MAX)).map(|n| format!("'{}' ", text(n))));
    let told: String = all.collect::<String>().chars().take(TOLD_MAX).collect();
    format!("ERR unknown command '{name}', with args beginning with: {told}")
}

/// The error of Redis for a command without such a subcommand, or not with that many arguments.
pub fn unknown_subcommand(args: Parts<'_>) -> String {
    let (name, given) = (args.word(0).to_uppercase(), String::from_utf8_lossy(args.get(1)));
    format!("ERR unknown subcommand '{given}'. Try {name} HELP.")
}
