use proptest::prelude::*;

use super::*;

/// Decodes all of `wire`, showing the framing one more piece at a time, until it errs.
fn decoded(wire: &[u8], cuts: &[usize]) -> (Vec<Vec<Vec<u8>>>, Option<FrameError>) {
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
            match Resp.decode(&wire[start..end], scanned) {
                Ok(Decode::More(more)) => {
                    assert!(more >= 1);
                    scanned = end - start;
                    wanted = end + more;
                    break;
                }
                Ok(Decode::Frame { skip, len, consumed }) => {
                    assert!(skip == 0 && len <= consumed && consumed >= 1 && consumed <= end - start);
                    requests.push(args(&wire[start..start + len]));
                    start += consumed;
                    scanned = 0;
                }
                Err(error) => return (requests, Some(error)),
            }
        }
    }
    (requests, None)
}

fn args(frame: &[u8]) -> Vec<Vec<u8>> {
    let line;
    let frame = if frame.first() == Some(&b'*') {
        frame
    } else {
        line = request_of_line(frame);
        &line
    };
    let args = Args::of(frame);
    let count = args.len();
    let args: Vec<Vec<u8>> = args.map(<[u8]>::to_vec).collect();
    assert_eq!(args.len(), count, "an argument is missing in {frame:?}");
    args
}

fn refusal(wire: &str) -> String {
    match decoded(wire.as_bytes(), &[]) {
        (requests, Some(FrameError::Malformed(text))) if requests.is_empty() => text.to_owned(),
        other => panic!("{wire:?} gave {other:?}"),
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
        ("*1\r\n\r\n", "expected '$', got ' '"),
        ("*1\r\né", "expected '$', got a byte above 127"),
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
    let more = |wire: &[u8]| match Resp.decode(wire, 0) {
        Ok(Decode::More(more)) => more,
        other => panic!("{other:?}"),
    };
    assert_eq!(more(b"*2\r\n$3\r\nGE"), 3);
    assert_eq!(more(b"*2\r\n$100\r\n"), 102);
    assert_eq!(more(b"*2\r\n$10000\r\n1"), 10001);
    for unfinished in ["*", "*-", "*1", "*1\r", "*1\r\n", "*1\r\n$", "*1\r\n$1\r", "PING\r"] {
        assert_eq!(more(unfinished.as_bytes()), 1, "the next byte may be wrong: {unfinished:?}");
    }
    let many = request((0..1000).map(|_| &b"x"[..]));
    assert!((100..110).contains(&more(&many[..1600])), "a sixteenth");
    assert_eq!(more(&many[..many.len() - 2]), 2);
}

#[test]
fn trickling_request_is_not_walked_for_each_byte() {
    let wire = request((0..100_000).map(|_| &b"x"[..]));
    let (mut seen, mut scanned, mut walked) = (1, 0, 0);
    loop {
        walked += seen;
        match Resp.decode(&wire[..seen], scanned).unwrap() {
            Decode::More(more) => {
                scanned = seen;
                seen += more;
            }
            Decode::Frame { consumed, .. } => break assert_eq!(consumed, wire.len()),
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
        let wire: Vec<u8> = requests.iter().flat_map(|args| request(args.iter().map(Vec::as_slice))).collect();
        prop_assert_eq!(decoded(&wire, &cuts), (requests, None));
    }

    #[test]
    fn single_bytes_give_the_same_requests(requests in prop::collection::vec(any_request(), 0..4)) {
        let wire: Vec<u8> = requests.iter().flat_map(|args| request(args.iter().map(Vec::as_slice))).collect();
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
    fn garbage_never_panics_never_loops_and_reads_the_same_in_any_split(
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
fn line_becomes_an_array() {
    assert_eq!(request_of_line(b"get 'a b'\r"), b"*2\r\n$3\r\nget\r\n$3\r\na b\r\n");
    assert_eq!(request_of_line(b" \r"), b"*0\r\n");
}
