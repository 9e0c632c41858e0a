//! Target `resp`: any bytes of a Redis client.
//!
//! ```text
//!   request_bytes_max (1 byte)  count (1 byte)  cuts (2 bytes each) ...  stream
//! ```
//!
//! However they are cut, the requests must equal those of a naive reading of the whole stream, and
//! so must the reason why the bytes after them are none. An array of strings must read as the same
//! strings that were written. The first two arguments of a request are a pattern and a text, whose
//! match must equal that of a naive matcher.

use ringserve_buf::Lease;
use ringserve_core::Frame;
use ringserve_core::framing::{Cut, TypedFraming};
use ringserve_redis::FrameFields;
use ringserve_redis::resp::{
    GlobMatch, Pattern, Resp, Version, Writer, number, unknown_command, unknown_subcommand, write_number,
};

use crate::input::Input;

/// The limit of Redis until 7.
const ARGS_MAX: usize = 1 << 20;

type Args = Vec<Vec<u8>>;

/// The end of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// Nothing follows, or a part of a request.
    Waits,
    /// The next bytes are no request.
    Refused(String),
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let max = input.pick(&[1024, 1100, 2048, 1 << 20]);
    let cuts: Vec<usize> = (0..input.byte() % 32).map(|_| input.wide()).collect();
    let stream = input.rest();
    let (requests, end) = read_all(stream, max);
    for cuts in [&[], &cuts[..], &Vec::from_iter(0..stream.len())] {
        let (cut, cut_end, wanted) = cut_all(stream, cuts, max);
        assert_eq!(cut, requests, "requests of the stream as a whole");
        // Bytes that are missing in any case are waited for before the others are read.
        let waits = cut_end == End::Waits && wanted > stream.len();
        assert!(waits || cut_end == end, "{cut_end:?} in place of {end:?}");
    }
    for args in &requests {
        check(args);
    }
}

/// Decodes a stream that arrives piece by piece, as a connection does. Returns the length for which
/// it waits at the end, too.
fn cut_all(stream: &[u8], cuts: &[usize], max: usize) -> (Vec<Args>, End, usize) {
    let (resp, mut requests) = (Resp::new(max), Vec::new());
    let (mut start, mut scanned, mut wanted) = (0, 0, 1);
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
    ends.push(stream.len());
    ends.sort_unstable();
    for end in ends {
        while end >= wanted {
            match resp.cut(&mut (), &stream[start..end], scanned).expect("what is no request is told by one")
            {
                Cut::More(missing) => {
                    assert!(missing > 0);
                    (scanned, wanted) = (end - start, end + missing);
                }
                Cut::Frame { skip, len, consumed, head } => {
                    let payload = &stream[start..end][skip..][..len];
                    if let Some(error) = head.error() {
                        return (requests, End::Refused(error.to_owned()), wanted);
                    }
                    assert!(skip + len <= consumed && consumed > 0);
                    let frame = Frame::new(Lease::copy_of(payload), 0, len);
                    let args = head.args(&frame);
                    requests.push(args.from(0).map(<[u8]>::to_vec).collect::<Args>());
                    assert_eq!(
                        (args.len(), args.get(args.len())),
                        (requests[requests.len() - 1].len(), &b""[..])
                    );
                    start += consumed;
                    (scanned, wanted) = (0, start + 1);
                }
                Cut::Piece { .. } => panic!("a request comes whole"),
            }
        }
    }
    (requests, End::Waits, wanted)
}

/// Reads a stream as a whole.
fn read_all(mut stream: &[u8], max: usize) -> (Vec<Args>, End) {
    let mut requests = Vec::new();
    while let Some(first) = stream.first() {
        match if *first == b'*' { array(stream, max) } else { line(stream) } {
            Ok((args, len)) => {
                requests.push(args);
                stream = &stream[len..];
            }
            Err(end) => return (requests, end),
        }
    }
    (requests, End::Waits)
}

fn array(stream: &[u8], max: usize) -> Result<(Args, usize), End> {
    let refused = |why: &str| Err(End::Refused(why.to_owned()));
    let is_negative = stream.get(1) == Some(&b'-');
    let (count, mut at) = header(stream, 1 + usize::from(is_negative), ARGS_MAX, "invalid multibulk length")?;
    let mut args = Args::new();
    while !is_negative && args.len() < count {
        match stream.get(at) {
            Some(b'$') => {}
            Some(other) => return refused(&format!("expected '$', got '{}'", char::from(*other))),
            None => return Err(End::Waits),
        }
        let (len, from) = header(stream, at + 1, max, "invalid bulk length")?;
        at = from + len + 2;
        if at > max {
            return refused("invalid bulk length");
        }
        let Some(arg) = stream.get(from..at) else { return Err(End::Waits) };
        args.push(arg[..len].to_vec());
    }
    Ok((args, at))
}

/// The number that begins at `from`, and the bytes after its line, whose end may be `\r` and any
/// byte.
fn header(stream: &[u8], from: usize, max: usize, refused: &str) -> Result<(usize, usize), End> {
    let digits = stream[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let text = str::from_utf8(&stream[from..][..digits]).expect("digits");
    let is_written_so = digits < 2 || !text.starts_with('0');
    // Numbers with more digits are above any limit.
    let value = if digits < 20 { text.parse::<u64>().unwrap_or(0) } else { u64::MAX };
    let fits = is_written_so && value <= max as u64;
    match stream[from + digits..] {
        [] if fits => Err(End::Waits),
        [b'\r'] if fits && digits > 0 => Err(End::Waits),
        [b'\r', _, ..] if fits && digits > 0 => Ok((value as usize, from + digits + 2)),
        _ => Err(End::Refused(refused.to_owned())),
    }
}

fn line(stream: &[u8]) -> Result<(Args, usize), End> {
    let refused = |why: &str| End::Refused(why.to_owned());
    match stream.iter().position(|byte| *byte == b'\n') {
        Some(end) if end <= 64 << 10 => {
            let words = words(&stream[..end]).ok_or_else(|| refused("unbalanced quotes in request"))?;
            Ok((words, end + 1))
        }
        None if stream.len() <= 64 << 10 => Err(End::Waits),
        _ => Err(refused("too big inline request")),
    }
}

/// The words of a line, byte by byte as in Redis.
fn words(line: &[u8]) -> Option<Args> {
    let (mut words, mut at) = (Args::new(), 0);
    let is_space = |at: usize| line.get(at).is_some_and(u8::is_ascii_whitespace);
    loop {
        while is_space(at) {
            at += 1;
        }
        if at == line.len() {
            return Some(words);
        }
        let (mut word, mut quote) = (Vec::new(), None);
        while at < line.len() && (quote.is_some() || !is_space(at)) {
            let (byte, next) = (line[at], line.get(at + 1).copied());
            at += 1;
            match (quote, byte, next) {
                (None, b'"' | b'\'', _) => quote = Some(byte),
                (Some(b'"'), b'\\', Some(b'x')) if hex(line, at + 1).is_some() => {
                    word.extend(hex(line, at + 1));
                    at += 3;
                }
                (Some(b'"'), b'\\', Some(escape)) => {
                    word.push(match escape {
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        b'b' => 0x08,
                        b'a' => 0x07,
                        other => other,
                    });
                    at += 1;
                }
                (Some(b'\''), b'\\', Some(b'\'')) => {
                    word.push(b'\'');
                    at += 1;
                }
                (Some(open), close, _) if open == close => {
                    if at < line.len() && !is_space(at) {
                        return None;
                    }
                    quote = None;
                }
                (_, byte, _) => word.push(byte),
            }
        }
        if quote.is_some() {
            return None;
        }
        words.push(word);
    }
}

/// The byte of two hexadecimal digits.
fn hex(line: &[u8], at: usize) -> Option<u8> {
    let digits = line.get(at..at + 2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
    u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
}

fn check(args: &Args) {
    let mut written = Vec::new();
    Writer::to_vec(&mut written, Version::Two).reply(|out| out.bulks(args));
    assert_eq!(read_all(&written, usize::MAX), (vec![args.clone()], End::Waits), "what is written");
    for value in args.iter().filter_map(|arg| Some((number(arg)?, arg))) {
        let mut text = Vec::new();
        write_number(value.0, &mut text);
        assert_eq!(text, *value.1);
    }
    if let [pattern, text, ..] = &args[..] {
        let is_match = naively_matches(pattern, text);
        if let Ok(compiled) = Pattern::new(pattern) {
            assert_eq!(compiled.matches(text), is_match, "{pattern:x?} and {text:x?}");
            let mut matching = GlobMatch::default();
            let by_steps = std::iter::repeat_with(|| matching.go_on(&compiled, text, &mut 7));
            assert_eq!(by_steps.take(1 << 20).flatten().next(), Some(is_match), "{pattern:x?} and {text:x?}");
        }
    }
    let all = args.concat();
    let mut at = 0;
    let spans: Vec<(u32, u32)> = args
        .iter()
        .map(|arg| {
            (at, {
                at += arg.len() as u32;
                at
            })
        })
        .collect();
    let parts = FrameFields::new(&all, &spans);
    for error in [unknown_command(parts), unknown_subcommand(parts)] {
        let mut reply = Vec::new();
        let _ = Writer::to_vec(&mut reply, Version::Three).error(&error);
        let line = reply.strip_suffix(b"\r\n").expect("the end of a line");
        assert!(!line.contains(&b'\r') && !line.contains(&b'\n'), "an error of one line");
    }
}

/// A part of a pattern.
enum Token {
    Star,
    /// A byte in these ranges, or outside all of them.
    One {
        ranges: Vec<(u8, u8)>,
        is_negated: bool,
    },
}

/// Computes which prefixes of the pattern match the prefixes of the text, one after another.
fn naively_matches(pattern: &[u8], text: &[u8]) -> bool {
    let tokens = tokens(pattern);
    // For each prefix, whether it matches the text so far.
    let mut takes: Vec<bool> = (0..=tokens.len())
        .map(|len| tokens[..len].iter().all(|token| matches!(token, Token::Star)))
        .collect();
    for byte in text {
        let mut longer = vec![false];
        for (at, token) in tokens.iter().enumerate() {
            longer.push(match token {
                Token::Star => takes[at + 1] || longer[at],
                Token::One { ranges, is_negated } => {
                    let is_in = ranges.iter().any(|(low, high)| (low..=high).contains(&byte));
                    takes[at] && is_in != *is_negated
                }
            });
        }
        takes = longer;
    }
    takes[tokens.len()]
}

fn tokens(pattern: &[u8]) -> Vec<Token> {
    let (mut tokens, mut at) = (Vec::new(), 0);
    let one = |byte| Token::One { ranges: vec![(byte, byte)], is_negated: false };
    while at < pattern.len() {
        let rest = &pattern[at..];
        let (token, len) = match (rest[0], rest.get(1)) {
            (b'*', _) => (Token::Star, 1),
            (b'?', _) => (Token::One { ranges: vec![(0, 255)], is_negated: false }, 1),
            (b'\\', Some(escaped)) => (one(*escaped), 2),
            (b'[', next) => {
                let is_negated = next == Some(&b'^');
                let (mut ranges, mut len) = (Vec::new(), 1 + usize::from(is_negated));
                // A missing end counts as present.
                while len < rest.len() && rest[len] != b']' {
                    let (range, long) = match rest[len..] {
                        [b'\\', escaped, ..] => ((escaped, escaped), 2),
                        [from, b'-', to, ..] => ((from.min(to), from.max(to)), 3),
                        [byte, ..] => ((byte, byte), 1),
                        [] => unreachable!("there is a byte"),
                    };
                    ranges.push(range);
                    len += long;
                }
                (Token::One { ranges, is_negated }, (len + 1).min(rest.len()))
            }
            (byte, _) => (one(byte), 1),
        };
        tokens.push(token);
        at += len;
    }
    tokens
}
