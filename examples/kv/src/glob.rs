//! Patterns of KEYS, SCAN and CONFIG GET.

/// True if `text` matches `pattern` as Redis reads it: `*` is any text, `?` any byte, `[abc]`, `[^abc]` and
/// `[a-z]` a byte of a set, and `\` takes the next byte as it is.
///
/// Only the last `*` is ever tried again, so the time is at most the product of both lengths.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on after the last `*`, and how much of the text it has taken.
    let mut star = None;
    loop {
        if pattern.get(p) == Some(&b'*') {
            p += 1;
            star = Some((p, t));
            continue;
        }
        let next = match text.get(t) {
            Some(byte) => step(&pattern[p..], *byte),
            None if p == pattern.len() => return true,
            None => return false,
        };
        match (next, &mut star) {
            (Some(len), _) => {
                p += len;
                t += 1;
            }
            (None, Some((after, taken))) => {
                *taken += 1;
                (p, t) = (*after, *taken);
            }
            (None, None) => return false,
        }
    }
}

/// Bytes of the pattern's first element, if `byte` matches it.
fn step(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [] => None,
        [b'?', ..] => Some(1),
        [b'[', set @ ..] => in_set(set, byte).map(|len| len + 1),
        [b'\\', escaped, ..] => (*escaped == byte).then_some(2),
        [literal, ..] => (*literal == byte).then_some(1),
    }
}

/// Bytes of a set after its `[`, with the `]`, if `byte` is in it. A set may lack the `]` at the end.
fn in_set(set: &[u8], byte: u8) -> Option<usize> {
    let negated = set.first() == Some(&b'^');
    let mut at = usize::from(negated);
    let mut found = false;
    loop {
        match &set[at..] {
            [] => break,
            [b']', ..] => {
                at += 1;
                break;
            }
            [b'\\', escaped, ..] => {
                found |= *escaped == byte;
                at += 2;
            }
            [low, b'-', high, ..] => {
                found |= (*low.min(high)..=*low.max(high)).contains(&byte);
                at += 3;
            }
            [literal, ..] => {
                found |= *literal == byte;
                at += 1;
            }
        }
    }
    (found != negated).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_match_as_in_redis() {
        let cases: &[(&str, &str, bool)] = &[
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("h?llo", "hallo", true),
            ("h?llo", "hllo", false),
            ("h*llo", "heeeello", true),
            ("h[ae]llo", "hello", true),
            ("h[ae]llo", "hillo", false),
            ("h[^e]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[b-a]llo", "hallo", true),
            ("a\\*c", "a*c", true),
            ("a\\*c", "abc", false),
            ("[\\]]", "]", true),
            ("a[bc", "ab", true),
            ("*a*b*c", "xxaxxbxxc", true),
            ("*a*b*c", "xxaxxcxxb", false),
            ("user:*", "user:1", true),
            ("user:*", "usr:1", false),
            ("**", "x", true),
            ("a\\", "a\\", true),
        ];
        for (pattern, text, expected) in cases {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), *expected, "{pattern} {text}");
        }
    }

    #[test]
    fn many_stars_do_not_take_forever() {
        let pattern = b"a*".repeat(50);
        assert!(!matches(&[&pattern[..], b"b"].concat(), &b"a".repeat(1000)));
    }

    proptest! {
        #[test]
        fn any_pattern_ends(pattern in "[*?a\\[\\]^\\\\-]{0,12}", text in "[a\\-^]{0,12}") {
            matches(pattern.as_bytes(), text.as_bytes());
        }

        #[test]
        fn stars_match_as_the_definition_says(pattern in "[*?ab]{0,7}", text in "[ab]{0,7}") {
            fn defined(pattern: &[u8], text: &[u8]) -> bool {
                match pattern {
                    [] => text.is_empty(),
                    [b'*', rest @ ..] => (0..=text.len()).any(|taken| defined(rest, &text[taken..])),
                    [first, rest @ ..] => {
                        text.first().is_some_and(|byte| matches!(first, b'?') || first == byte)
                            && defined(rest, &text[1..])
                    }
                }
            }
            prop_assert_eq!(
                matches(pattern.as_bytes(), text.as_bytes()),
                defined(pattern.as_bytes(), text.as_bytes())
            );
        }

        #[test]
        fn an_escaped_text_matches_itself_alone(text in "[ -~]{0,12}", other in "[ -~]{0,12}") {
            let pattern: Vec<u8> = text.bytes().flat_map(|byte| [b'\\', byte]).collect();
            prop_assert!(matches(&pattern, text.as_bytes()));
            prop_assert_eq!(matches(&pattern, other.as_bytes()), text == other);
        }
    }
}
