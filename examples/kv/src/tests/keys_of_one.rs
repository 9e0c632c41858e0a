use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ringserve::framing::{Cut, TypedFraming};
use ringserve::resp::{Resp, Version};
use ringserve::testing::frame;

use super::*;
use crate::commands;
use crate::commands::Run;
use crate::tests::keyer_of;
use crate::walk::{FOUND_BYTES_MAX, Found, Query, STEPS, Walk};

/// A shard without a connection.
struct Lab {
    store: Store,
    millis: Rc<Cell<u64>>,
    /// Milliseconds by which the clock of the wall was set forward.
    set_by: Rc<Cell<i64>>,
}

impl Lab {
    fn new() -> Lab {
        let millis = Rc::new(Cell::new(1_000_001_000_000_u64));
        let clock = millis.clone();
        let (shard, set_by) = (millis.clone(), Rc::new(Cell::new(0)));
        let set = set_by.clone();
        let wall = move || Duration::from_millis(shard.get().saturating_add_signed(set.get()));
        Lab { store: Store::new(keyer_of(1, 2), move || clock.get(), wall, (0, 1), 100), millis, set_by }
    }

    /// The reply to a line, on one line.
    fn ask(&mut self, line: &str) -> String {
        let line = frame(format!("{line}\n"));
        let Ok(Cut::Frame { head, .. }) = Resp::new(1 << 20).cut(&mut (), &line, 0) else {
            panic!("no request")
        };
        let args = head.args(&line);
        let command = commands::find(args.get(0)).expect("a command");
        let (mut text, mut keys) = (Vec::new(), Vec::new());
        Writer::to_vec(&mut text, Version::Two).reply(|out| match command.run {
            Run::Store(run) => run(&mut self.store, args, out),
            Run::Walk(to_query) => {
                let query = to_query(args)?;
                let is_scan = query.shard(1).is_some();
                let mut walk = Walk::begin(&mut self.store, query, &Arc::default());
                let found = std::iter::repeat_with(|| walk.go_on(&self.store, 3)).flatten().next();
                let found = found.expect("it ends")?;
                if is_scan {
                    out.array(2)?;
                    out.bulk_integer(found.cursor)?;
                }
                keys = found.keys.concat();
                out.array(found.count)
            }
            _ => panic!("it is about no key"),
        });
        text.extend(keys);
        self.store.invariants();
        String::from_utf8(text).unwrap().trim_end().replace("\r\n", " ")
    }

    fn check(&mut self, cases: &[(&str, &str)]) {
        for (line, expected) in cases {
            assert_eq!(self.ask(line), *expected, "{line}");
        }
    }
}

#[test]
fn strings_are_set_and_read() {
    Lab::new().check(&[
        ("get k", "$-1"),
        ("set k v", "+OK"),
        ("get k", "$1 v"),
        ("set k '' get", "$1 v"),
        ("get k", "$0"),
        ("strlen k", ":0"),
        ("append k hello", ":5"),
        ("append new hi", ":2"),
        ("strlen k", ":5"),
        ("set a 1", "+OK"),
        ("type a", "+string"),
        ("type none", "+none"),
        ("exists a", ":1"),
        ("unlink a", ":1"),
        ("del a", ":0"),
        ("touch none", ":0"),
        ("dbsize", ":2"),
        ("flushall sync", "+OK"),
        ("flushdb fast", "-ERR syntax error"),
        ("dbsize", ":0"),
    ]);
}

#[test]
fn set_keeps_to_its_conditions() {
    Lab::new().check(&[
        ("set k v xx", "$-1"),
        ("set k v nx", "+OK"),
        ("set k w nx", "$-1"),
        ("set k w xx", "+OK"),
        ("set k x nx get", "$1 w"),
        ("get k", "$1 w"),
        ("set none x xx get", "$-1"),
        ("exists none", ":0"),
        ("set k v nx xx", "-ERR syntax error"),
        ("set k v ex", "-ERR syntax error"),
        ("set k v ex 1 px 1", "-ERR syntax error"),
        ("set k v ex 1 keepttl", "-ERR syntax error"),
        ("set k v keepttl ex 1", "-ERR syntax error"),
        ("set k v bogus", "-ERR syntax error"),
        ("set k v ex x", "-ERR value is not an integer or out of range"),
        ("set k v ex 0", "-ERR invalid expire time in 'set' command"),
        ("set k v px -1", "-ERR invalid expire time in 'set' command"),
        ("set k v ex 9223372036854775807", "-ERR invalid expire time in 'set' command"),
        ("set k v px 9223372036854775807", "-ERR invalid expire time in 'set' command"),
        ("set k v px x bogus", "-ERR syntax error"),
        ("set k v ex 0 ex 5", "+OK"),
    ]);
}

#[test]
fn set_takes_each_pair_of_ends_as_a_syntax_error() {
    let mut lab = Lab::new();
    let ends = ["ex 9", "px 9", "exat 9", "pxat 9", "keepttl"];
    for (n, first) in ends.iter().enumerate() {
        for (m, second) in ends.iter().enumerate() {
            let reply = lab.ask(&format!("set k v {first} {second} nx get"));
            assert_eq!(reply == "-ERR syntax error", n != m, "{first} {second}: {reply}");
            lab.ask("del k");
        }
    }
    for option in ["ex", "px", "exat", "pxat"] {
        assert_eq!(lab.ask(&format!("set k v {option}")), "-ERR syntax error");
        for (end, error) in [
            ("x", "-ERR value is not an integer or out of range"),
            ("0", "-ERR invalid expire time in 'set' command"),
            ("-1", "-ERR invalid expire time in 'set' command"),
        ] {
            assert_eq!(lab.ask(&format!("set k v {option} {end}")), error, "{option} {end}");
        }
    }
    lab.check(&[("exists k", ":0")]);
}

#[test]
fn set_ends_a_key_at_a_point_in_time() {
    // The clock stands at 1 000 001 000 000 ms of Unix time.
    let mut lab = Lab::new();
    lab.check(&[
        ("set k v exat 1000001010", "+OK"),
        ("ttl k", ":10"),
        ("set k w pxat 1000001020000 xx get", "$1 v"),
        ("pttl k", ":20000"),
        ("set k x keepttl", "+OK"),
        ("pttl k", ":20000"),
        ("set k y nx pxat 1000001030000 get", "$1 x"),
        ("pttl k", ":20000"),
        ("set k v pxat 9223372036854775807", "+OK"),
        ("pttl k", ":9223371036853775807"),
        ("set k v exat 9223372036854776", "-ERR invalid expire time in 'set' command"),
        // The past deletes.
        ("set k old exat 1", "+OK"),
        ("exists k", ":0"),
        ("dbsize", ":0"),
        ("set k v", "+OK"),
        ("set k old pxat 1000001000000 get", "$1 v"),
        ("dbsize", ":0"),
        ("set k old pxat 5 get", "$-1"),
        ("dbsize", ":0"),
    ]);
}

#[test]
fn numbers_are_counted_within_their_range() {
    Lab::new().check(&[
        ("incr n", ":1"),
        ("incrby n 41", ":42"),
        ("decr n", ":41"),
        ("decrby n 50", ":-9"),
        ("get n", "$2 -9"),
        ("set n 9223372036854775807", "+OK"),
        ("incr n", "-ERR increment or decrement would overflow"),
        ("set n -9223372036854775808", "+OK"),
        ("decr n", "-ERR increment or decrement would overflow"),
        ("decrby n -9223372036854775808", "-ERR decrement would overflow"),
        ("incrby n x", "-ERR value is not an integer or out of range"),
        ("set n 1.5", "+OK"),
        ("incr n", "-ERR value is not an integer or out of range"),
        ("set n ' 1'", "+OK"),
        ("incr n", "-ERR value is not an integer or out of range"),
    ]);
}

#[test]
fn keys_end_when_their_time_is_over() {
    let mut lab = Lab::new();
    lab.check(&[
        ("set k v ex 10", "+OK"),
        ("ttl k", ":10"),
        ("pttl k", ":10000"),
        ("set other v", "+OK"),
        ("ttl other", ":-1"),
        ("ttl none", ":-2"),
        ("pexpire other 500", ":1"),
        ("expire none 10", ":0"),
    ]);
    lab.millis.set(lab.millis.get() + 499);
    lab.check(&[("get other", "$1 v"), ("ttl other", ":0"), ("pttl other", ":1"), ("ttl k", ":10")]);
    lab.millis.set(lab.millis.get() + 1);
    lab.check(&[("dbsize", ":2"), ("get other", "$-1"), ("dbsize", ":1"), ("ttl k", ":10")]);
    lab.check(&[("set k w keepttl", "+OK"), ("append k x", ":2"), ("pttl k", ":9500")]);
    lab.check(&[
        ("set k 1", "+OK"),
        ("ttl k", ":-1"),
        ("expire k 5", ":1"),
        ("incr k", ":2"),
        ("ttl k", ":5"),
    ]);
    lab.millis.set(lab.millis.get() + 5000);
    lab.check(&[
        ("incr k", ":1"),
        ("ttl k", ":-1"),
        ("set k 1", "+OK"),
        ("expire k -1", ":1"),
        ("get k", "$-1"),
    ]);
    lab.check(&[("set k v px 5", "+OK")]);
    lab.millis.set(lab.millis.get() + 5);
    lab.check(&[("keys *", "*0"), ("scan 0", "*2 $1 0 *0"), ("set k v nx", "+OK"), ("ttl k", ":-1")]);
}

#[test]
fn expire_keeps_to_its_conditions() {
    Lab::new().check(&[
        ("set k v", "+OK"),
        ("expire k 10 xx", ":0"),
        ("expire k 10 gt", ":0"),
        ("expire k 10 nx", ":1"),
        ("expire k 20 nx", ":0"),
        ("expire k 5 gt", ":0"),
        ("expire k 20 gt", ":1"),
        ("expire k 30 lt", ":0"),
        ("expire k 10 xx lt", ":1"),
        ("ttl k", ":10"),
        ("expire k 1 nx xx", "-ERR NX and XX, GT or LT options at the same time are not compatible"),
        ("expire k 1 gt lt", "-ERR GT and LT options at the same time are not compatible"),
        ("expire k 1 bogus", "-ERR Unsupported option bogus"),
        ("expire k x", "-ERR value is not an integer or out of range"),
        ("expire k 9223372036854775807", "-ERR invalid expire time in 'expire' command"),
        ("pexpire k 9223372036854775807", "-ERR invalid expire time in 'pexpire' command"),
        ("expire k -9223372036854775807", "-ERR invalid expire time in 'expire' command"),
        ("set k v", "+OK"),
        ("expire k 10 lt", ":1"),
    ]);
}

#[test]
fn expire_refuses_an_end_beyond_what_redis_can_count() {
    // Redis adds the time to that of its clock, in milliseconds since 1970, and so do these limits.
    let mut lab = Lab::new();
    lab.check(&[("set k v", "+OK")]);
    let room = i64::MAX - 1_000_001_000_000;
    for (line, command) in [
        (format!("pexpire k {}", room + 1), "pexpire"),
        (format!("expire k {}", room / 1000 + 1), "expire"),
        ("expire k 9223372036854775".to_owned(), "expire"),
        ("expire k -9223372036854776".to_owned(), "expire"),
        ("expireat k 9223372036854776".to_owned(), "expireat"),
        ("expireat k -9223372036854776".to_owned(), "expireat"),
        (format!("set k v px {}", room + 1), "set"),
        (format!("set k v ex {}", room / 1000 + 1), "set"),
    ] {
        assert_eq!(lab.ask(&line), format!("-ERR invalid expire time in '{command}' command"), "{line}");
    }
    lab.check(&[("ttl k", ":-1")]);
    assert_eq!(lab.ask(&format!("pexpire k {room}")), ":1");
    assert_eq!(lab.ask("pttl k"), format!(":{room}"));
    assert_eq!(lab.ask(&format!("expire k {}", room / 1000)), ":1");
    lab.check(&[("pexpire k -9223372036854775808", ":1"), ("exists k", ":0")]);
}

#[test]
fn expireat_ends_a_key_at_a_point_in_time() {
    Lab::new().check(&[
        ("expireat none 2000000000", ":0"),
        ("set k v", "+OK"),
        ("expireat k 1000001010", ":1"),
        ("ttl k", ":10"),
        ("pexpireat k 1000001020000 gt", ":1"),
        ("pttl k", ":20000"),
        ("PEXPIREAT k 1000001010000 gt", ":0"),
        ("pexpireat k x", "-ERR value is not an integer or out of range"),
        ("pexpireat k 9223372036854775807", ":1"),
        ("pttl k", ":9223371036853775807"),
        ("expireat k 1", ":1"),
        ("exists k", ":0"),
        ("set k v", "+OK"),
        ("pexpireat k -9223372036854775808", ":1"),
        ("dbsize", ":0"),
    ]);
}

#[test]
fn times_since_1970_go_by_the_wall_and_spans_by_the_shard() {
    let mut lab = Lab::new();
    lab.check(&[
        ("time", "*2 $10 1000001000 $1 0"),
        ("set span v ex 100", "+OK"),
        ("set point v exat 1000001100", "+OK"),
        ("expiretime span", ":1000001100"),
    ]);
    // Both clocks are looked at one after the other.
    for millis in [1, -1, 49, -49] {
        lab.set_by.set(millis);
        lab.check(&[
            ("set k v pxat 1000001100007", "+OK"),
            ("pexpiretime k", ":1000001100007"),
            ("pttl k", ":100007"),
        ]);
    }
    // An hour forward: what was set ends when it was to end, and what names a time means the new
    // one.
    lab.set_by.set(3_600_000);
    lab.check(&[
        ("time", "*2 $10 1000004600 $1 0"),
        ("ttl span", ":100"),
        ("ttl point", ":100"),
        ("pexpiretime span", ":1000004700000"),
        ("set k v exat 1000004610", "+OK"),
        ("pttl k", ":10000"),
        ("set k v pxat 1000004620000", "+OK"),
        ("pttl k", ":20000"),
        ("pexpireat k 1000004630000", ":1"),
        ("pttl k", ":30000"),
        ("getex k exat 1000004640", "$1 v"),
        ("pttl k", ":40000"),
        ("expiretime k", ":1000004640"),
        ("set k v ex 10", "+OK"),
        ("pttl k", ":10000"),
        ("expire k 20", ":1"),
        ("pttl k", ":20000"),
        // By the clock of the shard that is to come, and by that of the wall over.
        ("expireat k 1000004600", ":1"),
        ("exists k", ":0"),
    ]);
    // And back by a day.
    lab.set_by.set(-86_400_000);
    lab.check(&[
        ("ttl span", ":100"),
        ("expiretime span", ":999914700"),
        ("set k v", "+OK"),
        ("expireat k 999914601", ":1"),
        ("pttl k", ":1000"),
        ("pexpireat k 9223372036854775807", ":1"),
        ("ttl k", ":9223371036853776"),
        ("pexpireat k -9223372036854775808", ":1"),
        ("exists k", ":0"),
    ]);
}

#[test]
fn each_number_may_be_as_large_as_a_client_writes_it() {
    let none = "-ERR value is not an integer or out of range";
    let (least, most) = ("-9223372036854775808", "9223372036854775807");
    let mut lab = Lab::new();
    for (command, at_least, at_most) in [
        ("incrby n", ":-9223372036854775808", ":9223372036854775807"),
        ("decrby n", "-ERR decrement would overflow", ":-9223372036854775807"),
        (
            "expire k",
            "-ERR invalid expire time in 'expire' command",
            "-ERR invalid expire time in 'expire' command",
        ),
        ("pexpire k", ":1", "-ERR invalid expire time in 'pexpire' command"),
        (
            "expireat k",
            "-ERR invalid expire time in 'expireat' command",
            "-ERR invalid expire time in 'expireat' command",
        ),
        ("pexpireat k", ":1", ":1"),
        (
            "set k v ex",
            "-ERR invalid expire time in 'set' command",
            "-ERR invalid expire time in 'set' command",
        ),
        (
            "set k v px",
            "-ERR invalid expire time in 'set' command",
            "-ERR invalid expire time in 'set' command",
        ),
        (
            "set k v exat",
            "-ERR invalid expire time in 'set' command",
            "-ERR invalid expire time in 'set' command",
        ),
        ("set k v pxat", "-ERR invalid expire time in 'set' command", "+OK"),
        (
            "getex k ex",
            "-ERR invalid expire time in 'getex' command",
            "-ERR invalid expire time in 'getex' command",
        ),
        ("getex k pxat", "-ERR invalid expire time in 'getex' command", "$5 Hello"),
        ("getrange k 0", "$1 H", "$5 Hello"),
        ("getrange k -1", "$0", "$1 o"),
        ("scan", "-ERR invalid cursor", "*2 $1 0 *1 $1 k"),
        ("scan 0 count", "-ERR syntax error", "*2 $1 0 *1 $1 k"),
    ] {
        for (number, expected) in [
            (least, at_least),
            (most, at_most),
            ("-9223372036854775809", none),
            ("9223372036854775808", none),
            ("18446744073709551616", none),
            ("1e3", none),
            ("+1", none),
            ("01", none),
            ("''", none),
        ] {
            lab.check(&[("flushall", "+OK"), ("set k Hello", "+OK")]);
            let expected =
                if command == "scan" && expected == none { "-ERR invalid cursor" } else { expected };
            assert_eq!(lab.ask(&format!("{command} {number}")), expected, "{command} {number}");
            // Whatever it did can be reported.
            for asks in ["ttl k", "pttl k", "expiretime k", "pexpiretime k"] {
                assert!(lab.ask(asks).starts_with(':'), "{asks} after {command} {number}");
            }
        }
    }
    let many = "-ERR string exceeds maximum allowed size (proto-max-bulk-len)";
    lab.check(&[
        ("set k Hello", "+OK"),
        ("pexpireat k 9223372036854775807", ":1"),
        ("expiretime k", ":9223372036854775"),
        ("pexpiretime k", ":9223372036854775807"),
        ("ttl k", ":9223371036853776"),
        ("pexpire k 9223371036853775807 gt", ":0"),
        ("pexpire k 9223371036853775806 lt", ":1"),
        ("setex k -9223372036854775808 v", "-ERR invalid expire time in 'setex' command"),
        ("psetex k 9223372036854775807 v", "-ERR invalid expire time in 'psetex' command"),
        ("getrange k -9223372036854775808 9223372036854775807", "$5 Hello"),
        ("getrange k 9223372036854775807 -9223372036854775808", "$0"),
        // Redis looks which is first before it looks where they are.
        ("getrange k -50 -100", "$0"),
        ("getrange k -100 -50", "$1 H"),
        ("setrange k 9223372036854775807 x", many),
        ("setrange k 9223372036854775807 ''", ":5"),
        ("setrange k -9223372036854775808 x", "-ERR offset is out of range"),
        ("setrange k 9223372036854775808 x", none),
        ("scan 9223372036854775807 count 9223372036854775807", "*2 $1 0 *1 $1 k"),
    ]);
}

#[test]
fn a_value_grows_no_longer_than_a_request_could_bring() {
    let mut lab = Lab::new();
    lab.ask(&format!("set k {}", "x".repeat(90)));
    lab.check(&[
        ("append k 0123456789", ":100"),
        ("append k x", "-ERR string exceeds maximum allowed size (proto-max-bulk-len)"),
        ("append k ''", ":100"),
    ]);
}

#[test]
fn keys_are_listed_whole_or_in_parts() {
    let mut lab = Lab::new();
    for n in 0..25 {
        lab.ask(&format!("set key:{n} v"));
    }
    assert_eq!(lab.ask("keys key:?4").matches("key:").count(), 2);
    let (mut cursor, mut seen) = ("0".to_owned(), BTreeSet::new());
    loop {
        let reply = lab.ask(&format!("scan {cursor} match key:1* count 7 type string"));
        let words: Vec<&str> = reply.split(' ').collect();
        cursor = words[2].to_owned();
        seen.extend(words.iter().filter(|word| word.starts_with("key:")).map(|word| word.to_string()));
        if cursor == "0" {
            break;
        }
    }
    assert_eq!(seen.len(), 11, "{seen:?}");
    lab.check(&[
        ("scan 0 type list", "*2 $2 15 *0"),
        ("scan x", "-ERR invalid cursor"),
        ("scan -1", "-ERR invalid cursor"),
        ("scan 0 count 0", "-ERR syntax error"),
        ("scan 0 count x", "-ERR value is not an integer or out of range"),
        ("scan 0 match", "-ERR syntax error"),
        ("scan 0 bogus x", "-ERR syntax error"),
    ]);
}

#[test]
fn parts_of_values_are_read_and_written() {
    Lab::new().check(&[
        ("setrange k 2 ab", ":4"),
        ("get k", "$4 \0\0ab"),
        ("set k 'Hello World'", "+OK"),
        ("getrange k 0 3", "$4 Hell"),
        ("getrange k -5 -1", "$5 World"),
        ("getrange k 5 3", "$0"),
        ("getrange k -500 9223372036854775807", "$11 Hello World"),
        ("getrange none 0 -1", "$0"),
        ("setrange k 6 Redis", ":11"),
        ("get k", "$11 Hello Redis"),
        ("setrange none 5 ''", ":0"),
        ("setrange k -1 x", "-ERR offset is out of range"),
        ("setrange k 99 xx", "-ERR string exceeds maximum allowed size (proto-max-bulk-len)"),
        ("setrange k 9223372036854775807 x", "-ERR string exceeds maximum allowed size (proto-max-bulk-len)"),
    ]);
}

#[test]
fn old_values_are_told_by_what_replaces_them() {
    Lab::new().check(&[
        ("getset k a", "$-1"),
        ("getset k b", "$1 a"),
        ("setnx k c", ":0"),
        ("setex k 100 d", "+OK"),
        ("setex k 0 d", "-ERR invalid expire time in 'setex' command"),
        ("psetex k 5000 e", "+OK"),
        ("pttl k", ":5000"),
        ("getex k ex 10", "$1 e"),
        ("ttl k", ":10"),
        ("expiretime k", ":1000001010"),
        ("pexpiretime k", ":1000001010000"),
        ("getex k persist", "$1 e"),
        ("persist k", ":0"),
        ("ttl k", ":-1"),
        ("getex k persist ex 1", "-ERR syntax error"),
        ("getex k nx", "-ERR syntax error"),
        ("getdel k", "$1 e"),
        ("getdel k", "$-1"),
    ]);
}

/// The keys that a walk finds, and the number of its parts. `between` changes the store after each.
fn walked(lab: &mut Lab, query: &[u8], mut between: impl FnMut(&mut Store)) -> (Vec<String>, usize) {
    let line = frame(query);
    let Ok(Cut::Frame { head, .. }) = Resp::new(1 << 20).cut(&mut (), &line, 0) else { panic!("no request") };
    let query = Query::of_keys(head.args(&line)).unwrap();
    let (mut walk, mut parts) = (Walk::begin(&mut lab.store, query, &Arc::default()), 1);
    loop {
        if let Some(found) = walk.go_on(&lab.store, STEPS) {
            let text = String::from_utf8(found.unwrap().keys.concat()).unwrap();
            let found: Vec<String> = text.lines().skip(1).step_by(2).map(str::to_owned).collect();
            return (found, parts);
        }
        between(&mut lab.store);
        lab.store.invariants();
        parts += 1;
    }
}

#[test]
fn keys_that_stay_during_a_walk_are_found_once() {
    let mut lab = Lab::new();
    for n in 0..50_000 {
        lab.store.change(format!("{}{n}", if n % 3 == 0 { "stays" } else { "goes" }).as_bytes(), |_| ());
    }
    let (mut next, mut new) = (0, 0);
    let (mut found, parts) = walked(&mut lab, b"keys stays*\n", |store| {
        for _ in 0..5000 {
            store.delete(format!("goes{next}").as_bytes());
            next += 1;
        }
        for _ in 0..1000 {
            store.change(format!("new{new}").as_bytes(), |_| ());
            new += 1;
        }
    });
    assert!(parts > 5, "{parts} parts");
    found.sort();
    let count = found.len();
    found.dedup();
    assert_eq!((found.len(), count), (16_667, 16_667));
}

#[test]
fn long_keys_and_many_keys_are_matched_in_parts() {
    let mut lab = Lab::new();
    for n in 0..20 {
        lab.store.change(format!("{n}{}", "a".repeat(100_000)).as_bytes(), |_| ());
    }
    // 17 steps for each byte.
    let pattern = format!("keys *{}c*\n", "[ab]".repeat(1000));
    let (found, parts) = walked(&mut lab, pattern.as_bytes(), |_| ());
    assert!(found.is_empty() && parts >= 20 * 16, "{parts} parts");
    lab.store.clear();
    for n in 0..100_000 {
        lab.store.change(format!("{n}").as_bytes(), |_| ());
    }
    let (found, parts) = walked(&mut lab, b"keys *\n", |_| ());
    assert!(found.len() == 100_000 && parts >= 10, "{parts} parts");
    let (found, _) = walked(&mut lab, b"keys *\n", Store::clear);
    assert!(found.len() < 20_000, "{} of a store that was cleared", found.len());
}

#[test]
fn what_walks_find_has_a_bound_until_it_is_dropped() {
    let mut lab = Lab::new();
    for n in 0..25 {
        lab.store.change(format!("{n}{}", "a".repeat(1 << 20)).as_bytes(), |_| ());
    }
    let held = Arc::new(AtomicUsize::new(0));
    let mut found = || -> Result<Found, Bad> {
        let line = frame(b"scan 0 count 1000\n");
        let Ok(Cut::Frame { head, .. }) = Resp::new(1 << 20).cut(&mut (), &line, 0) else {
            panic!("no request")
        };
        let mut walk = Walk::begin(&mut lab.store, Query::of_scan(head.args(&line))?, &held);
        std::iter::repeat_with(|| walk.go_on(&lab.store, STEPS)).flatten().next().expect("it ends")
    };
    for _ in 0..3 {
        let (one, other) = (found().unwrap(), found().unwrap());
        let bytes: usize = [&one, &other].iter().flat_map(|found| &found.keys).map(Vec::capacity).sum();
        let counted = held.load(Ordering::Relaxed);
        assert!((bytes..=FOUND_BYTES_MAX).contains(&counted), "{counted} counted of {bytes}");
        assert_eq!(found().err(), Some(NO_MEMORY));
        assert_eq!(held.load(Ordering::Relaxed), counted);
        drop((one, other));
        assert_eq!(held.load(Ordering::Relaxed), 0);
    }
}
