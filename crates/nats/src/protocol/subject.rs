//! Subjects: tokens between dots.

/// The longest line of a client that a server takes by default (`max_control_line`).
pub(crate) const LINE_BYTES_MAX: usize = 4096;

/// The longest subject. Two of them and the numbers fit into a line.
const SUBJECT_BYTES_MAX: usize = 1024;

/// True for a subject to publish to: tokens that are not empty and have neither blanks nor
/// wildcards.
pub(crate) fn is_subject(subject: &str) -> bool {
    let mut before = b'.';
    for byte in subject.bytes() {
        match byte {
            b'.' if before == b'.' => return false,
            b'*' | b'>' | 0..=b' ' | 0x7f => return false,
            _ => before = byte,
        }
    }
    before != b'.' && subject.len() <= SUBJECT_BYTES_MAX
}

/// True for a subject to subscribe to: in addition `*` may stand for a token, and `>` for the last
/// ones.
pub(crate) fn is_pattern(pattern: &str) -> bool {
    let mut tokens = pattern.split('.').peekable();
    while let Some(token) = tokens.next() {
        let fits = match token {
            "*" => true,
            ">" => tokens.peek().is_none(),
            _ => is_subject(token),
        };
        if !fits {
            return false;
        }
    }
    pattern.len() <= SUBJECT_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_have_no_wildcards_and_no_empty_tokens() {
        for subject in ["a", "a.b", "$SYS.REQ", "grüße.7", "_INBOX.1.2"] {
            assert!(is_subject(subject) && is_pattern(subject), "{subject}");
        }
        for neither in ["", ".", "a.", ".a", "a..b", "a b", "a\r\nPUB b 0", "a\t", "a\u{7f}"] {
            assert!(!is_subject(neither) && !is_pattern(neither), "{neither}");
        }
        assert!(is_subject(&"a".repeat(1024)) && !is_subject(&"a".repeat(1025)));
        assert!(!is_pattern(&"a.".repeat(600)));
    }

    #[test]
    fn patterns_have_wildcards_as_whole_tokens() {
        for pattern in ["*", ">", "a.*", "*.b.>", "a.*.c"] {
            assert!(is_pattern(pattern) && !is_subject(pattern), "{pattern}");
        }
        for neither in ["a*", "*a", "a.>.b", ">.a", "a>", "**"] {
            assert!(!is_pattern(neither), "{neither}");
        }
    }
}
