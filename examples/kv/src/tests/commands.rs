use super::*;
use proptest::prelude::*;

#[test]
fn every_command_is_found_by_its_name_in_any_letters() {
    for (n, spec) in SPECS.iter().enumerate() {
        for name in [spec.name.to_owned(), spec.name.to_uppercase()] {
            assert_eq!(find(name.as_bytes()).map(|command| command as usize), Some(n), "{name}");
        }
    }
    assert_eq!(find(b"GeT"), Some(Command::Get));
}

proptest! {
    #[test]
    fn nothing_else_is_a_command(name in "pexpirea?t?x?|[gG'\x00 ][eE\x05][tT4 \x00]?[ \x00sS]{0,7}") {
        let expected = SPECS.iter().position(|spec| spec.name.eq_ignore_ascii_case(&name));
        prop_assert_eq!(find(name.as_bytes()).map(|command| command as usize), expected);
    }
}

#[test]
fn an_arity_is_a_number_or_a_least_number() {
    let fits = |command: Command, args| command.spec().fits(args);
    assert!(fits(Command::Get, 2) && !fits(Command::Get, 1) && !fits(Command::Get, 3));
    assert!(fits(Command::Set, 3) && fits(Command::Set, 9) && !fits(Command::Set, 2));
}
