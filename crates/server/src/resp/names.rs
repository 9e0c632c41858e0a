//! Commands by their names.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use crate::parts::Parts;

/// Letters of an unknown command, and of its arguments, that are told back.
const TOLD_MAX: usize = 128;

/// What has names of 1 to 16 letters, found by them in small or capital letters: the commands of a server.
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
    /// With these names.
    ///
    /// # Panics
    /// If one is there twice, is longer, or has something else than letters in it.
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

    /// What has this name.
    #[inline]
    pub fn get(&self, name: &[u8]) -> Option<T> {
        // A space or a zero before a name looks like nothing in a word, and the end of a long one is not seen.
        self.by_word.get(&word(name)).filter(|(len, _)| *len == name.len()).map(|(_, what)| *what)
    }
}

/// A name as a number, in which small and capital letters are the same. What is behind 16 bytes is left out.
#[inline]
fn word(name: &[u8]) -> u128 {
    name.iter().take(16).fold(0, |word, byte| word << 8 | u128::from(byte & 0xDF))
}

/// What Redis says of a command that it does not know, with the first of its arguments: an [error](super::Writer::error).
pub fn unknown_command(args: Parts<'_>) -> String {
    let text = |n| String::from_utf8_lossy(args.get(n)).chars().take(TOLD_MAX).collect::<String>();
    let (name, all) = (text(0), (1..args.len().min(TOLD_MAX)).map(|n| format!("'{}' ", text(n))));
    let told: String = all.collect::<String>().chars().take(TOLD_MAX).collect();
    format!("ERR unknown command '{name}', with args beginning with: {told}")
}

/// What Redis says of a command that has no such subcommand, or not with that many arguments.
pub fn unknown_subcommand(args: Parts<'_>) -> String {
    let (name, given) = (args.word(0).to_uppercase(), String::from_utf8_lossy(args.get(1)));
    format!("ERR unknown subcommand '{given}'. Try {name} HELP.")
}
