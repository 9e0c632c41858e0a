//! Requests typed by hand: words, with quotes as in a shell.

/// True if every quote in `line` is closed, and followed by a space or the end.
pub fn is_balanced(line: &[u8]) -> bool {
    !line.iter().any(|byte| matches!(byte, b'"' | b'\'')) || Words(line).all(|word| word.is_ok())
}

/// The words of a line whose quotes are balanced; none if it is blank.
pub fn words(line: &[u8]) -> Vec<Vec<u8>> {
    Words(line).map_while(Result::ok).collect()
}

/// The words of a line.
struct Words<'a>(&'a [u8]);

/// A quote was not closed, or a word goes on right behind it.
struct Unbalanced;

impl Iterator for Words<'_> {
    type Item = Result<Vec<u8>, Unbalanced>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.0.iter().position(|byte| !is_space(*byte))?;
        self.0 = &self.0[start..];
        Some(self.word())
    }
}

impl Words<'_> {
    fn word(&mut self) -> Result<Vec<u8>, Unbalanced> {
        let mut word = Vec::new();
        loop {
            match self.take() {
                None => return Ok(word),
                Some(space) if is_space(space) => return Ok(word),
                Some(b'"') => return self.double_quoted(word),
                Some(b'\'') => return self.single_quoted(word),
                Some(byte) => word.push(byte),
            }
        }
    }

    fn double_quoted(&mut self, mut word: Vec<u8>) -> Result<Vec<u8>, Unbalanced> {
        loop {
            match self.take().ok_or(Unbalanced)? {
                b'"' => return self.closed(word),
                b'\\' => word.push(self.escaped()?),
                byte => word.push(byte),
            }
        }
    }

    fn single_quoted(&mut self, mut word: Vec<u8>) -> Result<Vec<u8>, Unbalanced> {
        loop {
            match self.take().ok_or(Unbalanced)? {
                b'\'' => return self.closed(word),
                b'\\' if self.0.first() == Some(&b'\'') => {
                    self.take();
                    word.push(b'\'');
                }
                byte => word.push(byte),
            }
        }
    }

    fn closed(&mut self, word: Vec<u8>) -> Result<Vec<u8>, Unbalanced> {
        if self.take().is_none_or(is_space) { Ok(word) } else { Err(Unbalanced) }
    }

    /// What stands behind a `\` in double quotes.
    fn escaped(&mut self) -> Result<u8, Unbalanced> {
        if let [b'x', high, low, rest @ ..] = self.0
            && let (Some(high), Some(low)) = (hex(*high), hex(*low))
        {
            self.0 = rest;
            return Ok(high << 4 | low);
        }
        Ok(match self.take().ok_or(Unbalanced)? {
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'b' => 8,
            b'a' => 7,
            other => other,
        })
    }

    fn take(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 11 | 12)
}

fn hex(digit: u8) -> Option<u8> {
    (digit as char).to_digit(16).map(|value| value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_words(line: &str) -> Option<Vec<String>> {
        let found: Result<Vec<Vec<u8>>, Unbalanced> = Words(line.as_bytes()).collect();
        assert_eq!(is_balanced(line.as_bytes()), found.is_ok(), "{line}");
        Some(found.ok()?.into_iter().map(|word| String::from_utf8(word).unwrap()).collect())
    }

    #[test]
    fn words_and_quotes_are_read_as_in_redis() {
        let cases: &[(&str, Option<&[&str]>)] = &[
            ("  set  a b\r", Some(&["set", "a", "b"])),
            ("", Some(&[])),
            (" \t\r", Some(&[])),
            (r#"set k "a b""#, Some(&["set", "k", "a b"])),
            (r#"set k "\x41\n\q\"""#, Some(&["set", "k", "A\nq\""])),
            (r#"set k "\xzz""#, Some(&["set", "k", "xzz"])),
            (r"set k 'a\'b\n'", Some(&["set", "k", r"a'b\n"])),
            (r#"x"y z""#, Some(&["xy z"])),
            (r#"set "" ''"#, Some(&["set", "", ""])),
            (r#"set "k"#, None),
            (r"set 'k", None),
            (r#"set "k"v"#, None),
            (r#"set "k\"#, None),
        ];
        for (line, expected) in cases {
            let expected = expected.map(|words| words.iter().map(|word| word.to_string()).collect());
            assert_eq!(all_words(line), expected, "{line}");
        }
    }
}
