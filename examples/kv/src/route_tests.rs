use proptest::prelude::*;

use super::*;

fn text(plan: &Plan) -> Vec<(usize, String)> {
    let words = |request: &[u8]| {
        let args: Vec<String> =
            Args::of(request).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        args.join(" ")
    };
    plan.parts.iter().map(|part| (part.shard, words(&part.request))).collect()
}

fn split_line(command: Command, line: &str) -> Option<Plan> {
    let request = crate::resp::request_of_line(line.as_bytes());
    let mut args = Args::of(&request);
    let name = args.next().unwrap();
    let Reach::Keys { step } = command.spec().reach else { panic!("{command:?} has one key") };
    // The owner is the digit a key ends in.
    split(command, name, args, step, |key| usize::from(key[key.len() - 1] - b'0'))
}

#[test]
fn keys_are_dealt_out_to_their_owners_in_their_order() {
    let plan = split_line(Command::MGet, "mget a1 b0 c1 d2 a1").unwrap();
    assert_eq!(text(&plan), [(1, "mget a1 c1 a1".into()), (0, "mget b0".into()), (2, "mget d2".into())]);
    assert_eq!(plan.merge, Merge::Order(vec![0, 1, 0, 2, 0]));

    let plan = split_line(Command::MGet, "mget a1 b1").unwrap();
    assert_eq!(
        plan.merge,
        Merge::Order(vec![0, 0]),
        "a long array comes in several answers of one shard too"
    );

    let plan = split_line(Command::MSet, "MSET a1 x b0 y c1 z").unwrap();
    assert_eq!(text(&plan), [(1, "MSET a1 x c1 z".into()), (0, "MSET b0 y".into())]);
    assert_eq!(plan.merge, Merge::Ok);

    let plan = split_line(Command::Del, "del a1 b1").unwrap();
    assert_eq!((text(&plan), plan.merge), (vec![(1, "del a1 b1".into())], Merge::Only));
    assert_eq!(split_line(Command::Exists, "exists a1 b0").unwrap().merge, Merge::Sum);
    assert_eq!(split_line(Command::MSet, "mset a1 x b0"), None, "the owner says what is wrong");
}

#[test]
fn single_shard_asks_no_other() {
    let (place, keyer) = (Place { index: 0, shards: 1 }, Keyer::default());
    for line in ["get a", "mget a b c", "mset a 1 b 2", "keys *", "dbsize", "scan 7", "flushall", "ping"] {
        let request = crate::resp::request_of_line(line.as_bytes());
        let command = crate::commands::find(line.split(' ').next().unwrap().as_bytes()).unwrap();
        assert_eq!(Plan::of(command, &request, place, &keyer), None, "{line}");
    }
}

#[test]
fn answers_become_one_reply() {
    let merged = |how: Merge, answers: &[&str]| {
        let answers = answers.iter().map(|answer| answer.as_bytes().to_vec()).collect();
        String::from_utf8(merge(&how, answers)).unwrap()
    };
    assert_eq!(merged(Merge::Only, &["$1\r\nx\r\n"]), "$1\r\nx\r\n");
    assert_eq!(merged(Merge::Sum, &[":2\r\n", ":40\r\n"]), ":42\r\n");
    assert_eq!(merged(Merge::Ok, &["+OK\r\n", "+OK\r\n"]), "+OK\r\n");
    assert_eq!(merged(Merge::Ok, &["+OK\r\n", "-ERR no\r\n"]), "-ERR no\r\n");
    assert_eq!(
        merged(Merge::Join, &["*1\r\n$1\r\na\r\n", "*0\r\n", "*1\r\n$1\r\nb\r\n"]),
        "*2\r\n$1\r\na\r\n$1\r\nb\r\n"
    );
    let other = "-ERR another shard gave an answer of another form\r\n";
    assert_eq!(merged(Merge::Sum, &["+OK\r\n"]), other);
    assert_eq!(merged(Merge::Join, &["*1"]), other);
}

#[test]
fn a_cursor_goes_through_all_shards_and_ends() {
    let shards = 3;
    let (mut cursor, mut seen) = (0, Vec::new());
    loop {
        let here = Place { index: cursor % shards, shards };
        let position = here.position(cursor);
        seen.push((here.index, position));
        // Each shard has three parts, and is looked at from its end.
        cursor = here.cursor(match position {
            0 => 20,
            20 => 10,
            _ => 0,
        });
        if cursor == 0 {
            break;
        }
    }
    let expected: Vec<_> =
        (0..shards).flat_map(|shard| [0, 20, 10].map(|position| (shard, position))).collect();
    assert_eq!(seen, expected);
}

proptest! {
    #[test]
    fn answers_in_any_form_never_panic(
        answers in prop::collection::vec("[*:$_0-9\r\nx-]{0,20}", 1..4),
    ) {
        let answers: Vec<Vec<u8>> = answers.into_iter().map(String::into_bytes).collect();
        for how in [Merge::Only, Merge::Sum, Merge::Ok, Merge::Join] {
            merge(&how, answers.clone());
        }
    }
}
