//! Options of the balancer, and its errors about those that cannot be.

use super::*;

fn refused(options: &[&str]) -> String {
    match Args::try_parse_from(["balancer"].iter().chain(options)) {
        Err(error) => error.to_string(),
        Ok(args) => {
            let made = Balancer::new(args).and_then(|balancer| server(&Arc::new(balancer)).map(drop));
            made.expect_err("it cannot be").to_string()
        }
    }
}

#[test]
fn what_cannot_be_is_said_in_one_line() {
    for (options, wanted) in [
        (
            &["--upstream", "127.0.0.1:80", "--upstream", "127.0.0.1:80"][..],
            "upstream 127.0.0.1:80 is given twice",
        ),
        (
            &["--upstream", "127.0.0.1:80", "--upstream", "a=127.0.0.1:80"],
            "upstream 127.0.0.1:80 is given twice",
        ),
        (&["--upstream", "localhost"], "upstream localhost: invalid socket address"),
        (&["--upstream", "localhost:port"], "upstream localhost:port: invalid port value"),
        (&["--upstream", "127.0.0.1:80", "--cert", "none.pem"], "none.pem: cannot be read"),
        (&["--upstream", "127.0.0.1:80", "--upstream-ca", "none.pem"], "none.pem: cannot be read"),
    ] {
        let said = refused(options);
        assert!(said.contains(wanted) && !said.contains('\n'), "{options:?}: {said}");
    }
}

#[test]
fn options_that_contradict_each_other_are_named() {
    for (options, wanted) in [
        (&[][..], "--upstream <[NAME,..=]HOST:PORT>"),
        (&["--upstream", "127.0.0.1:80", "--check-send", "ping"], "--check-expect <TEXT>"),
        (&["--upstream", "127.0.0.1:80", "--check-expect", ""], "--check-expect"),
        (&["--upstream", "127.0.0.1:80", "--send-proxy", "3"], "3 is not in 1..=2"),
        (&["--upstream", "127.0.0.1:80", "--fall", "0"], "--fall"),
        (&["--upstream", "127.0.0.1:80", "--idle-timeout", "0"], "it must be 0.001 to 31536000"),
        (&["--upstream", "127.0.0.1:80", "--idle-timeout", "NaN"], "it must be 0.001 to 31536000"),
    ] {
        let said = refused(options);
        assert!(said.contains(wanted), "{options:?}: {said}");
    }
}

#[test]
fn upstream_is_for_the_names_before_it() {
    let read = |text: &str| (Names::new(text).of, Names::new(text).names.join(" "));
    assert_eq!(read("one:80"), ("one:80".to_owned(), String::new()));
    assert_eq!(read("A.example,b.example=one:443"), ("one:443".to_owned(), "a.example b.example".to_owned()));
}
