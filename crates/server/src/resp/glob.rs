//! Patterns.

/// True if `text` matches `pattern` as Redis reads it: `*` is any text, `?` any byte, `[abc]`, `[^abc]` and `[a-z]` a byte of a set,
/// and `\` takes the next byte as it is. Takes at most the product of both lengths in steps, since only the last `*` is ever tried
/// again, and no memory.
///
/// ```
/// use ringserve::resp::matches;
///
/// assert!(matches(b"user:[0-9]*", b"user:7:name") && !matches(b"user:[^0-9]*", b"user:7:name"));
/// ```
pub fn matches(mut pattern: &[u8], mut text: &[u8]) -> bool {
    // Where to go on after the last `*`, and the text that it has not taken.
    let mut star = None;
    loop {
        let rest = match (pattern, text) {
            ([b'*', rest @ ..], _) => {
                (pattern, star) = (rest, Some((rest, text)));
                continue;
            }
            (rest, []) => return rest.is_empty(),
            ([b'?', rest @ ..], _) => Some(rest),
            ([b'[', set @ ..], [byte, ..]) => behind_set(set, *byte),
            ([b'\\', escaped, rest @ ..] | [escaped, rest @ ..], [byte, ..]) => {
                (escaped == byte).then_some(rest)
            }
            ([], _) => None,
        };
        match (rest, star) {
            (Some(rest), _) => (pattern, text) = (rest, &text[1..]),
            (None, Some((after, [_, left @ ..]))) => {
                (pattern, text, star) = (after, left, Some((after, left)));
            }
            _ => return false,
        }
    }
}

/// What follows a set, given from behind its `[` on, if `byte` is in it. A set may lack the `]` at the end.
fn behind_set(set: &[u8], byte: u8) -> Option<&[u8]> {
    let (negated, mut set) = set.strip_prefix(b"^").map_or((false, set), |set| (true, set));
    let mut found = false;
    loop {
        (found, set) = match set {
            [] | [b']', ..] => return (found != negated).then(|| set.get(1..).unwrap_or_default()),
            [b'\\', escaped, rest @ ..] => (found | (*escaped == byte), rest),
            [low, b'-', high, rest @ ..] => (found | (*low.min(high)..=*low.max(high)).contains(&byte), rest),
            [literal, rest @ ..] => (found | (*literal == byte), rest),
        };
    }
}
