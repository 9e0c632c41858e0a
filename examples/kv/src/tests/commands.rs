use super::*;
use proptest::prelude::*;

#[test]
fn every_command_is_found_by_its_name_in_any_letters() {
    for command in COMMANDS {
        for name in [command.name.to_owned(), command.name.to_uppercase()] {
            assert_eq!(find(name.as_bytes()).map(|found| found.name), Some(command.name));
        }
    }
    assert_eq!(find(b"GeT").map(|found| found.name), Some("get"));
}

proptest! {
    #[test]
    fn nothing_else_is_a_command(name in "pexpirea?t?x?|[gG'\x00 ][eE\x05][tT4 \x00]?[ \x00sS]{0,7}") {
        let expected = COMMANDS.iter().find(|command| command.name.eq_ignore_ascii_case(&name));
        prop_assert_eq!(find(name.as_bytes()).map(|found| found.name), expected.map(|command| command.name));
    }
}

#[test]
fn an_arity_is_a_number_or_a_least_number() {
    let fits = |name: &str, args| find(name.as_bytes()).unwrap().fits(args);
    assert!(fits("get", 2) && !fits("get", 1) && !fits("get", 3));
    assert!(fits("set", 3) && fits("set", 9) && !fits("set", 2));
    assert!(fits("mset", 3) && fits("mset", 5) && !fits("mset", 4));
}
