//! Names of topics, which are subjects of a message broker too.

use std::fmt::Write as _;

/// Bytes of a name at most, and its tokens.
const BYTES_MAX: usize = 255;
const TOKENS_MAX: usize = 16;

/// True for the name of a topic: 1 to 16 tokens with dots between them, 255 bytes at most. A token
/// has letters and digits of ASCII, `-`, `_`, `$`, `=`, `~` and `%`, and is not empty. Other texts
/// are names once they are [escaped](escape).
pub fn is_name(name: &str) -> bool {
    let (mut tokens, mut has_byte) = (1, false);
    for byte in name.bytes() {
        match byte {
            b'.' if has_byte => (tokens, has_byte) = (tokens + 1, false),
            byte if is_plain(byte) || byte == b'%' => has_byte = true,
            _ => return false,
        }
    }
    has_byte && tokens <= TOKENS_MAX && name.len() <= BYTES_MAX
}

/// One token of a name from any bytes: those that a token has not, with dots and `%` among them,
/// become `%` and two digits. So different bytes are different tokens. A text without a byte
/// becomes `%`.
///
/// ```
/// use ringserve::topics::{escape, is_name};
///
/// let name = format!("room.{}", escape("kitchen > 2.5 °C"));
/// assert_eq!(name, "room.kitchen%20%3E%202%2E5%20%C2%B0C");
/// assert!(is_name(&name));
/// ```
pub fn escape(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    let mut token = String::with_capacity(bytes.len());
    for byte in bytes {
        match is_plain(*byte) {
            true => token.push(char::from(*byte)),
            // A string takes everything.
            false => drop(write!(token, "%{byte:02X}")),
        }
    }
    if token.is_empty() { "%".into() } else { token }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_$=~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_other_texts() {
        let many = ["t"; TOKENS_MAX].join(".");
        let long = "x".repeat(BYTES_MAX);
        for name in ["a", "room.7", "$SYS.x-y_z", "a%20b", &many, &long] {
            assert!(is_name(name), "{name}");
        }
        let (more, longer) = (format!("{many}.t"), format!("{long}x"));
        for name in ["", ".", "a.", ".a", "a..b", "a b", "a*", ">", "a.>", "é", "a/b", "a\n", &more, &longer]
        {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    fn escaped_bytes_are_tokens_and_differ() {
        let texts: [&[u8]; 9] = [b"", b"%", b".", b" ", b"*", b">", b"\xff\0", b"a", b"%25"];
        let tokens = texts.map(escape);
        for (n, token) in tokens.iter().enumerate() {
            assert!(is_name(token) && !token.contains('.'), "{token}");
            assert!(!tokens[..n].contains(token), "{token}");
        }
    }
}
