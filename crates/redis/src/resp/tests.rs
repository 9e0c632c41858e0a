use proptest::prelude::*;
use ringserve_buf::Lease;
use ringserve_server::framing::{Cut, TypedFraming};
use ringserve_server::limits::LimitError;
use ringserve_server::{Frame, Limits};

use super::request::{length, long_length, words};
use super::*;
use crate::FrameFields;
use crate::scatter::Merge;

fn resp() -> Resp {
    Resp::new(600 << 20)
}

/// A request as an array of strings.
fn request(words: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut out = Vec::new();
    Writer::to_vec(&mut out, Version::Two).reply(|out| out.bulks(words));
    out
}

/// Decodes all of `wire`, showing the framing one more piece at a time, until it errs.
fn decoded(wire: &[u8], cuts: &[usize]) -> (Vec<Vec<Vec<u8>>>, Option<String>) {
    let mut requests = Vec::new();
    let (mut start, mut scanned) = (0, 0);
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (wire.len() + 1)).chain([wire.len()]).collect();
    ends.sort_unstable();
    let mut wanted = 0;
    for end in ends {
        if end < wanted {
            continue;
        }
        loop {
            match resp().cut(&mut (), &wire[start..end], scanned) {
                Ok(Cut::More(more)) => {
                    assert!(more >= 1);
                    scanned = end - start;
                    wanted = end + more;
                    break;
                }
                Ok(Cut::Frame { head, .. }) if head.error().is_some() => {
                    return (requests, head.error().map(str::to_owned));
                }
                Ok(Cut::Frame { skip, len, consumed, head }) => {
                    assert!(skip == 0 && len <= consumed && consumed >= 1 && consumed <= end - start);
                    requests.push(args(&wire[start..start + len], &head));
                    start += consumed;
                    scanned = 0;
                }
                Ok(Cut::Piece { .. }) => panic!("a request comes whole"),
                Err(error) => panic!("{error}"),
            }
        }
    }
    (requests, None)
}

fn args(frame: &[u8], head: &Request) -> Vec<Vec<u8>> {
    let frame = Frame::new(Lease::copy_of(frame), 0, frame.len());
    head.args(&frame).from(0).map(<[u8]>::to_vec).collect()
}

fn refusal(wire: &str) -> String {
    match decoded(wire.as_bytes(), &[]) {
        (requests, Some(bad)) if requests.is_empty() => bad,
        other => panic!("{wire:?} gave {other:?}"),
    }
}

#[test]
fn short_lengths_are_read_as_long_ones() {
    let bytes = b"0159x\r\n";
    for n in 0..bytes.len().pow(4) {
        let line: Vec<u8> =
            [b'$'].into_iter().chain((0..4).map(|at| bytes[n / 7_usize.pow(at) % 7])).collect();
        for len in 1..=line.len() {
            for max in [0, 7, 52, 1000] {
                let (line, read) = (&line[..len], |read: Result<_, std::borrow::Cow<'_, str>>| read.ok());
                assert_eq!(
                    read(length(line, max, "bad")),
                    read(long_length(line, max, "bad")),
                    "{line:?}, {max}"
                );
            }
        }
    }
}

#[test]
fn protocol_errors_are_named_as_in_redis() {
    let cases = [
        ("*20000000\r\n", "invalid multibulk length"),
        ("*3000000000\r\n", "invalid multibulk length"),
        ("*99999999999999999999999\r\n", "invalid multibulk length"),
        ("*abc\r\n", "invalid multibulk length"),
        ("*\r\n", "invalid multibulk length"),
        ("*01\r\n", "invalid multibulk length"),
        ("*\0", "invalid multibulk length"),
        ("*3\r\n$3\r\nSET\r\n$1\r\nx\r\nfooz\r\n", "expected '$', got 'f'"),
        ("*1\r\nfoo\r\n", "expected '$', got 'f'"),
        ("*1\r\n\r\n", "expected '$', got '\r'"),
        ("*1\r\né", "expected '$', got 'Ã'"),
        ("*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$-10\r\n", "invalid bulk length"),
        ("*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$2000000000\r\n", "invalid bulk length"),
        ("*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$blabla\r\n", "invalid bulk length"),
        ("*1\r\n$\0", "invalid bulk length"),
        ("set \"unbalanced\r\n", "unbalanced quotes in request"),
    ];
    for (wire, expected) in cases {
        assert_eq!(refusal(wire), expected, "{wire:?}");
    }
    for start in ["\0", "$\0", "x"] {
        assert_eq!(refusal(&(start.to_owned() + &"A".repeat(64 << 10))), "too big inline request");
    }
    assert_eq!(refusal(&("A".repeat((64 << 10) + 1) + "\r\n")), "too big inline request");
}

#[test]
fn empty_requests_are_requests_without_arguments() {
    let (requests, error) = decoded(b"\r\n*0\r\n*-10\r\n\n   \r\nPING\r\n", &[]);
    assert_eq!(error, None);
    assert_eq!(requests, [vec![], vec![], vec![], vec![], vec![], vec![b"PING".to_vec()]]);
}

#[test]
fn missing_bytes_are_told_as_far_as_certain() {
    let more = |wire: &[u8]| match resp().cut(&mut (), wire, 0) {
        Ok(Cut::More(more)) => more,
        other => panic!("{other:?}"),
    };
    assert_eq!(more(b"*2\r\n$3\r\nGE"), 3);
    assert_eq!(more(b"*2\r\n$100\r\n"), 102);
    assert_eq!(more(b"*2\r\n$10000\r\n1"), 10001);
    for unfinished in ["*", "*-", "*1", "*1\r", "*1\r\n", "*1\r\n$", "*1\r\n$1\r", "PING\r"] {
        assert_eq!(more(unfinished.as_bytes()), 1, "the next byte may be wrong: {unfinished:?}");
    }
    let many = request(&vec![b"x"; 1000]);
    assert!((100..110).contains(&more(&many[..1600])), "a sixteenth");
    assert_eq!(more(&many[..many.len() - 2]), 2);
}

#[test]
fn trickling_request_is_not_walked_for_each_byte() {
    let wire = request(&vec![b"x"; 100_000]);
    let (mut seen, mut scanned, mut walked) = (1, 0, 0);
    loop {
        walked += seen;
        match resp().cut(&mut (), &wire[..seen], scanned).unwrap() {
            Cut::More(more) => {
                scanned = seen;
                seen += more;
            }
            Cut::Frame { consumed, .. } | Cut::Piece { consumed, .. } => {
                break assert_eq!(consumed, wire.len());
            }
        }
    }
    assert!(walked < 25 * wire.len(), "{} times its length", walked / wire.len());
}

fn any_request() -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop::collection::vec(prop::collection::vec(any::<u8>(), 0..150), 1..8)
}

proptest! {
    #[test]
    fn any_split_gives_the_same_requests(
        requests in prop::collection::vec(any_request(), 0..10),
        cuts in prop::collection::vec(any::<usize>(), 0..60),
    ) {
        let wire: Vec<u8> = requests.iter().flat_map(|args| request(args)).collect();
        prop_assert_eq!(decoded(&wire, &cuts), (requests, None));
    }

    #[test]
    fn single_bytes_give_the_same_requests(requests in prop::collection::vec(any_request(), 0..4)) {
        let wire: Vec<u8> = requests.iter().flat_map(|args| request(args)).collect();
        let cuts: Vec<usize> = (0..wire.len()).collect();
        prop_assert_eq!(decoded(&wire, &cuts), (requests, None));
    }

    #[test]
    fn any_split_gives_the_same_lines(
        lines in prop::collection::vec("[a-z]{1,9}( [a-z0-9]{1,9}){0,5}", 0..10),
        cuts in prop::collection::vec(any::<usize>(), 0..60),
        crlf in any::<bool>(),
    ) {
        let wire: String = lines.iter().map(|line| line.clone() + if crlf { "\r\n" } else { "\n" }).collect();
        let expected: Vec<Vec<Vec<u8>>> =
            lines.iter().map(|line| line.split(' ').map(|word| word.as_bytes().to_vec()).collect()).collect();
        prop_assert_eq!(decoded(wire.as_bytes(), &cuts), (expected, None));
    }

    #[test]
    fn garbage_never_panics_or_loops_and_reads_alike_in_any_split(
        wire in "([*$\\-0-9]{1,4}(\r\n)?|[a-z\"' ]{0,6}(\r\n|\n)?){0,12}",
        cuts in prop::collection::vec(any::<usize>(), 0..40),
    ) {
        prop_assert_eq!(decoded(wire.as_bytes(), &cuts), decoded(wire.as_bytes(), &[]));
    }

    #[test]
    fn any_bytes_read_the_same_in_any_split(
        wire in prop::collection::vec(prop::sample::select(b"*$0123-\r\nab\0\xff".as_slice()), 0..60),
        cuts in prop::collection::vec(any::<usize>(), 0..40),
    ) {
        prop_assert_eq!(decoded(&wire, &cuts), decoded(&wire, &[]));
    }
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
        let expected =
            expected.map(|words| words.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>());
        assert_eq!(words(line.as_bytes()).map(|head| args(line.as_bytes(), &head)), expected, "{line}");
    }
}

fn written(version: Version, write: impl Fn(&mut Writer<'_, '_>) -> ReplyResult) -> String {
    let mut text = Vec::new();
    write(&mut Writer::to_vec(&mut text, version)).unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn each_version_has_its_types() {
    let both = |write: fn(&mut Writer<'_, '_>) -> ReplyResult| {
        [Version::Two, Version::Three].map(|v| written(v, write))
    };
    assert_eq!(both(|out| out.null()), ["$-1\r\n", "_\r\n"]);
    assert_eq!(both(|out| out.null_array()), ["*-1\r\n", "_\r\n"]);
    assert_eq!(both(|out| out.map(2)), ["*4\r\n", "%2\r\n"]);
    assert_eq!(both(|out| out.set(2)), ["*2\r\n", "~2\r\n"]);
    assert_eq!(both(|out| out.push(2)), ["*2\r\n", ">2\r\n"]);
    assert_eq!(both(|out| out.array(1)), ["*1\r\n", "*1\r\n"]);
    assert_eq!(both(|out| out.boolean(true)), [":1\r\n", "#t\r\n"]);
    assert_eq!(both(|out| out.boolean(false)), [":0\r\n", "#f\r\n"]);
    assert_eq!(both(|out| out.verbatim("txt", "a b")), ["$3\r\na b\r\n", "=7\r\ntxt:a b\r\n"]);
    assert_eq!(both(|out| out.simple("string")), ["+string\r\n", "+string\r\n"]);
    assert_eq!(both(|out| out.bulk_integer(70)), ["$2\r\n70\r\n", "$2\r\n70\r\n"]);
    assert_eq!(both(|out| out.bulks([b"a", b"b"])), ["*2\r\n$1\r\na\r\n$1\r\nb\r\n"; 2]);
}

#[test]
fn doubles_are_short_and_read_back() {
    let double = |value| written(Version::Three, |out| out.double(value));
    let cases = [
        (0.0, "0"),
        (-1.5, "-1.5"),
        (10.0, "10"),
        (1e300, "1e300"),
        (1.25e-7, "1.25e-7"),
        (f64::INFINITY, "inf"),
        (f64::NEG_INFINITY, "-inf"),
        (f64::NAN, "nan"),
    ];
    for (value, text) in cases {
        assert_eq!(double(value), format!(",{text}\r\n"));
        assert_eq!(written(Version::Two, |out| out.double(value)), format!("${}\r\n{text}\r\n", text.len()));
    }
}

#[test]
#[should_panic(expected = "three letters")]
fn format_of_a_verbatim_string_has_three_letters() {
    written(Version::Three, |out| out.verbatim("text", "a"));
}

#[test]
fn error_of_a_command_is_its_reply() {
    let mut text = Vec::new();
    Writer::to_vec(&mut text, Version::Three).reply(|_| Err("ERR no".into()));
    assert_eq!(text, b"-ERR no\r\n");
}

#[test]
fn replies_of_several_shards_become_one() {
    let merged = |replies: &[&str]| {
        let (mut merged, mut text) = (MergedReply::default(), Vec::new());
        replies.iter().for_each(|reply| merged.add(reply.as_bytes()));
        merged.write(&mut text);
        String::from_utf8(text).unwrap()
    };
    assert_eq!(merged(&[":1\r\n", ":0\r\n", ":12\r\n"]), ":13\r\n");
    assert_eq!(merged(&["+OK\r\n", "+OK\r\n"]), "+OK\r\n");
    assert_eq!(merged(&["*1\r\n$1\r\na\r\n", "*0\r\n", "*1\r\n$1\r\nb\r\n"]), "*2\r\n$1\r\na\r\n$1\r\nb\r\n");
    assert_eq!(merged(&[":1\r\n", "-ERR a\r\n", ":1\r\n", "-ERR b\r\n"]), "-ERR a\r\n");
    for null in ["*-1\r\n", "_\r\n"] {
        assert_eq!(merged(&[null, null]), null);
        assert_eq!(merged(&[null, "*1\r\n+a\r\n", null]), "*1\r\n+a\r\n");
        assert_eq!(merged(&[null, "-ERR a\r\n", null]), "-ERR a\r\n");
    }
    // What no shard says is merged too, somehow.
    assert_eq!(merged(&[":5\r\n", "+OK\r\n", "*1\r\n+a\r\n"]), "*1\r\n+a\r\n");
    assert_eq!(merged(&["", ":", ":9223372036854775807\r\n", ":1\r\n"]), ":9223372036854775807\r\n");
}

#[test]
fn bytes_of_a_request_are_within_limits() {
    let check =
        |bytes: usize, frame: usize| Resp::new(bytes).check_limits(&Limits::default().frame_bytes_max(frame));
    assert_eq!(check(1 << 20, 1 << 20), Ok(()));
    assert!(matches!(check(1000, 1 << 20), Err(LimitError::Range { name: "Resp::request_bytes_max", .. })));
    assert!(matches!(check(5 << 30, 1 << 20), Err(LimitError::Range { .. })), "spans have 32 bits");
    assert!(matches!(
        check(2 << 20, 1 << 20),
        Err(LimitError::Order { small: "Resp::request_bytes_max", .. })
    ));
}

#[test]
fn keys_with_the_same_tag_are_together() {
    for (key, tag) in
        [("a", "a"), ("{a}b", "a"), ("x{a}{b}", "a"), ("{}b", "{}b"), ("a{b", "a{b"), ("}{c}", "c")]
    {
        assert_eq!(hash_tag(key.as_bytes()), tag.as_bytes(), "{key}");
    }
    // Wherever it is.
    for (before, behind) in (0..20).flat_map(|before| (0..20).map(move |behind| (before, behind))) {
        let key = format!("{}{{tag}}{}", "|".repeat(before), "z".repeat(behind));
        assert_eq!(hash_tag(key.as_bytes()), b"tag", "{key}");
        let key = key.replace('{', "|");
        assert_eq!(hash_tag(key.as_bytes()), key.as_bytes(), "{key}");
    }
}

#[test]
fn error_is_one_line_whatever_the_client_sent() {
    assert_eq!(written(Version::Two, |out| out.error("ERR a\r\n+OK")), "-ERR a  +OK\r\n");
}

#[test]
fn strings_of_every_length_are_whole() {
    for len in (0..300).chain([4095, 70_000]) {
        let bytes = vec![b'x'; len];
        assert_eq!(
            written(Version::Three, |out| out.bulk(&bytes)),
            format!("${len}\r\n{}\r\n", "x".repeat(len))
        );
    }
}

proptest! {
    #[test]
    fn a_number_is_read_back(value in any::<i64>(), shift in 0..64u32) {
        let value = value >> shift;
        let reply = written(Version::Two, |out| out.integer(value));
        prop_assert_eq!(&reply, &format!(":{value}\r\n"));
        prop_assert_eq!(number(&reply.as_bytes()[1..reply.len() - 2]), Some(value));
        let mut text = Vec::new();
        write_number(value, &mut text);
        prop_assert_eq!(number(&text), Some(value));
    }

    #[test]
    fn text_is_a_number_exactly_if_that_number_is_written_so(text in "-?[0-9]{0,21}|[ -~]{0,4}") {
        let expected = text.parse::<i64>().ok().filter(|value| value.to_string() == text);
        prop_assert_eq!(number(text.as_bytes()), expected);
    }
}

#[test]
fn the_ends_of_the_range_are_read_and_nothing_beyond() {
    for value in [0, 1, -1, i64::MAX, i64::MIN] {
        assert_eq!(number(value.to_string().as_bytes()), Some(value));
    }
    for text in
        ["9223372036854775808", "-9223372036854775809", "99999999999999999999", "", "-", "-0", "01", "+1"]
    {
        assert_eq!(number(text.as_bytes()), None, "{text}");
    }
}

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

fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let pattern = Pattern::new(pattern).expect("it is short");
    let is_match = pattern.matches(text);
    assert_eq!(in_steps(&pattern, text, 1).0, is_match, "{pattern:?}, step by step");
    is_match
}

/// Whether a text matches, found out with `steps` at once, and how many it took.
fn in_steps(pattern: &Pattern, text: &[u8], steps: usize) -> (bool, usize) {
    let (mut matching, mut all) = (GlobMatch::default(), 0);
    loop {
        let mut left = steps;
        let is_match = matching.go_on(pattern, text, &mut left);
        all += steps - left;
        match is_match {
            Some(is_match) => return (is_match, all),
            None => assert_eq!(left, 0, "{pattern:?} stops early"),
        }
    }
}

#[test]
fn pattern_takes_no_more_steps_than_it_says() {
    let text = b"a".repeat(100_000);
    let sets = b"[ab]".repeat(1000);
    let patterns = [
        ([&b"a*".repeat(50)[..], b"c*"].concat(), 1),
        ([b"*", &b"a".repeat(30_000)[..], b"b*"].concat(), 1),
        ([b"*", &sets[..], b"c*"].concat(), 17 + 3),
        ([b"*", &sets[..], b"c*", &sets, b"d*"].concat(), 33 + 3),
        ([b"*", &b"?".repeat(60)[..], b"b*"].concat(), 1 + 2),
        (b"*[b]".repeat(10_000), 1 + 2),
        (b"*[!-~]".repeat(10_000), 1 + 95),
        (b"*[^!-~]".repeat(9000), 1 + 95),
        (b"*[^b]".repeat(10_000), 1 + 2),
        (b"*a[^b][ab]?".repeat(5000), 1 + 2),
    ];
    for (pattern, each) in patterns {
        let pattern = Pattern::new(&[&pattern[..], b"b"].concat()).unwrap();
        assert_eq!(pattern.steps_for_a_byte(), each);
        // The ends stand there, so that the middle is looked for.
        let text = [&text[..], b"b"].concat();
        let (_, steps) = in_steps(&pattern, &text, 10_000);
        let most = text.len() * each + pattern.as_bytes().len() + 10_000;
        assert!(steps <= most, "{steps} of {most} steps for {each} a byte");
    }
}

#[test]
fn segment_that_is_found_early_takes_no_steps_for_the_rest() {
    let pattern = Pattern::new(&b"*[b]".repeat(10_000)).unwrap();
    let (is_match, steps) = in_steps(&pattern, &b"b".repeat(100_000), 10_000);
    assert!(is_match && steps <= 50_000, "{steps} steps");
}

#[test]
fn sets_take_steps_before_they_are_looked_for() {
    let pattern = Pattern::new(&b"*[a-z]*".repeat(1000)).unwrap();
    let (is_match, steps) = in_steps(&pattern, &b"a".repeat(10_000), 10_000);
    assert!(is_match && steps >= 26 * 1000, "{steps} steps");
}

#[test]
fn longest_pattern_is_bounded_and_a_longer_one_is_refused() {
    let longest = b"[ab".repeat(1 << 20);
    assert_eq!(Pattern::new(&longest[..Pattern::BYTES_MAX + 1]).unwrap_err(), PatternTooLong);
    let different: Vec<u8> =
        (0..=255_u8).flat_map(|a| (a..=255).flat_map(move |b| [b'[', a, b, b']'])).collect();
    for longest in [&longest[..Pattern::BYTES_MAX], &different[..Pattern::BYTES_MAX]] {
        let pattern = Pattern::new(longest).unwrap();
        assert!(pattern.held_bytes() <= 1 << 20, "{} bytes", pattern.held_bytes());
    }
}

/// Says of each beginning of the pattern whether it takes what there is of the text. As [`Pattern`]
/// reads it, without a set.
fn defined(pattern: &[u8], text: &[u8]) -> bool {
    let stars = pattern.iter().take_while(|byte| **byte == b'*').count();
    let mut takes: Vec<bool> = (0..=pattern.len()).map(|len| len <= stars).collect();
    for byte in text {
        let mut longer = vec![false];
        for (at, token) in pattern.iter().enumerate() {
            longer.push(match token {
                b'*' => takes[at + 1] || longer[at],
                token => takes[at] && (*token == b'?' || token == byte),
            });
        }
        takes = longer;
    }
    takes[pattern.len()]
}

proptest! {
    #[test]
    fn any_pattern_ends(pattern in "[*?a\\[\\]^\\\\-]{0,12}", text in "[a\\-^]{0,12}") {
        matches(pattern.as_bytes(), text.as_bytes());
    }

    #[test]
    fn stars_match_as_the_definition_says(pattern in "[*?ab]{0,7}", text in "[ab]{0,7}") {
        let is_match = defined(pattern.as_bytes(), text.as_bytes());
        prop_assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), is_match);
    }

    #[test]
    fn long_segments_match_as_the_definition_says(
        pattern in "(a{0,70}[?b]?){0,3}(\\*(a{0,70}[?b]?[?b]?){0,3}){0,3}",
        text in "(a{0,150}b?b?){0,4}",
    ) {
        let is_match = defined(pattern.as_bytes(), text.as_bytes());
        prop_assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), is_match);
        // So it is where each byte is a set.
        let sets: String = pattern.chars().map(|c| if c == 'a' { "[a]".to_owned() } else { c.into() }).collect();
        prop_assert_eq!(matches(sets.as_bytes(), text.as_bytes()), is_match);
    }

    #[test]
    fn texts_made_of_a_pattern_match_it(
        middle in "(a{60,70}\\?b?){1,3}", filled in "[ab]", before in "[ab]{0,200}", behind in "[ab]{0,200}",
    ) {
        let text = [&before, &middle.replace('?', &filled), &behind].map(|part| &**part).concat();
        let pattern = format!("*{middle}*");
        prop_assert!(matches(pattern.as_bytes(), text.as_bytes()));
    }

    #[test]
    fn an_escaped_text_matches_itself_alone(text in "[ -~]{0,12}", other in "[ -~]{0,12}") {
        let pattern: Vec<u8> = text.bytes().flat_map(|byte| [b'\\', byte]).collect();
        prop_assert!(matches(&pattern, text.as_bytes()));
        prop_assert_eq!(matches(&pattern, other.as_bytes()), text == other);
    }
}

#[test]
fn names_are_found_in_any_letters_and_nothing_else_is() {
    let names = Names::new([("get", 1), ("set", 2), ("punsubscribe", 3), ("abcdefghijklmnop", 4)]);
    for (name, found) in [("GET", 1), ("sEt", 2), ("PUNSUBSCRIBE", 3), ("abcdefghijklmnoP", 4)] {
        assert_eq!(names.get(name.as_bytes()), Some(found));
    }
    for other in
        ["", "ge", "gets", " get", "get ", "\0get", "g\x05t", "'et", "abcdefghijklmnopq", "punsubscribe\0"]
    {
        assert_eq!(names.get(other.as_bytes()), None, "{other:?}");
    }
    // Each letter counts, in a name of any length.
    for len in 1..=16 {
        let name = &"abcdefghijklmnop"[..len];
        let names = Names::new([(name, len)]);
        assert_eq!(names.get(name.to_uppercase().as_bytes()), Some(len));
        for at in 0..len {
            let mut other = name.as_bytes().to_vec();
            other[at] = b'z';
            assert_eq!(names.get(&other), None, "{name}, {at}");
        }
    }
}

#[test]
#[should_panic(expected = "\"get\" is there twice")]
fn name_is_there_once() {
    Names::new([("GET", 1), ("get", 2)]);
}

#[test]
#[should_panic(expected = "no name of 1 to 16 letters")]
fn name_has_letters_alone() {
    Names::new([("get0", 1)]);
}

#[test]
fn unknown_commands_are_told_back_up_to_a_length() {
    let said = |words: &[&str]| {
        let (text, mut at) = (words.concat(), 0);
        let spans: Vec<_> = words
            .iter()
            .map(|word| {
                at += word.len() as u32;
                (at - word.len() as u32, at)
            })
            .collect();
        let parts = FrameFields::new(text.as_bytes(), &spans);
        (unknown_command(parts), unknown_subcommand(parts))
    };
    let (command, subcommand) = said(&["foo", "a", "b"]);
    assert_eq!(command, "ERR unknown command 'foo', with args beginning with: 'a' 'b' ");
    assert_eq!(subcommand, "ERR unknown subcommand 'a'. Try FOO HELP.");
    let (command, _) = said(&[&"x".repeat(1000), &"y".repeat(1000)]);
    assert_eq!(command.len(), "ERR unknown command '', with args beginning with: ".len() + 2 * 128);
}

#[test]
fn string_that_may_not_be_there_is_null_then() {
    assert_eq!(written(Version::Three, |out| out.bulk_or_null(None::<&str>)), "_\r\n");
    assert_eq!(written(Version::Two, |out| out.bulk_or_null(Some("a"))), "$1\r\na\r\n");
}
