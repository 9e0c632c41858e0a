//! Findings, about this machine or a server's process.

use ringserve::Server;
use ringserve_report::{Finding, Severity};

use crate::args::DoctorOptions;
use crate::client::{Endpoint, Failure};
use crate::text::plain;

/// Examines, prints, and returns 0 if there are only notes, 1 for a warning or a check that could
/// not be made, 2 for an error.
pub fn run(there: Option<&Endpoint>, options: &DoctorOptions, json: bool) -> Result<u8, Failure> {
    let mut findings = match there {
        Some(endpoint) => of_server(endpoint, options)?,
        None => of_machine(options),
    };
    if options.quiet {
        findings.retain(|found| found.severity != Severity::Info);
    }
    if json {
        let text = serde_json::to_string_pretty(&findings).map_err(|error| Failure(error.to_string()))?;
        println!("{text}");
    } else {
        let whose = there.map_or("this machine".to_owned(), |endpoint| endpoint.place().to_string());
        print!("{}", page(&findings, &whose));
    }
    Ok(code(&findings))
}

fn code(findings: &[Finding]) -> u8 {
    let code = |finding: &Finding| match finding.severity {
        Severity::Info => 0,
        // A check that was not made is no pass.
        Severity::NotChecked | Severity::Warn => 1,
        // A severity that this version does not know is treated as the worst.
        _ => 2,
    };
    findings.iter().map(code).max().unwrap_or(0)
}

fn of_server(endpoint: &Endpoint, options: &DoctorOptions) -> Result<Vec<Finding>, Failure> {
    let expected = options.expected.to_string();
    let path = if expected.is_empty() { "/doctor".to_owned() } else { format!("/doctor?for={expected}") };
    endpoint.get_json(&path)
}

fn of_machine(options: &DoctorOptions) -> Vec<Finding> {
    let server =
        Server::bind("127.0.0.1:0").shards(options.shards.map(usize::from)).share_port(options.share_port);
    let severity = |severity| match severity {
        ringserve::doctor::Severity::Info => Severity::Info,
        ringserve::doctor::Severity::NotChecked => Severity::NotChecked,
        ringserve::doctor::Severity::Warn => Severity::Warn,
        _ => Severity::Error,
    };
    let shown = |found: ringserve::doctor::Finding| Finding {
        check: found.check.to_owned(),
        severity: severity(found.severity),
        what: found.what,
        value: found.value,
        needed: found.needed,
        otherwise: found.otherwise,
        fix: found.fix,
        certainty: found.certainty.to_string(),
    };
    let findings = server.doctor_for(&options.expected).into_iter();
    // That check is about the build of this tool.
    findings.filter(|found| found.check != "build").map(shown).collect()
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warn => "warning",
        Severity::Info => "note",
        Severity::NotChecked => "not checked",
        _ => "finding",
    }
}

/// All findings as text, and a line that counts them.
fn page(findings: &[Finding], whose: &str) -> String {
    let mut text = String::new();
    for finding in findings {
        let of_check = match finding.severity {
            Severity::NotChecked => format!("{}: ", plain(&finding.check)),
            _ => String::new(),
        };
        let (what, value) = (plain(&finding.what), plain(&finding.value));
        text += &format!("{}: {of_check}{what} is {value}\n", word(finding.severity));
        for (name, part) in [
            ("needed", &finding.needed),
            ("otherwise", &finding.otherwise),
            ("do", &finding.fix),
            ("sure", &finding.certainty),
        ] {
            if !part.is_empty() {
                text += &format!("  {name:<10}{}\n", plain(part));
            }
        }
        text.push('\n');
    }
    let count = |severity| findings.iter().filter(|found| found.severity == severity).count();
    let checks = ringserve::doctor::checks().len();
    let (errors, warnings, notes) = (count(Severity::Error), count(Severity::Warn), count(Severity::Info));
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let missing = match count(Severity::NotChecked) {
        0 => String::new(),
        count => format!("; {count} could not look"),
    };
    text += &format!(
        "{whose}: {errors} error{}, {warnings} warning{}, {notes} note{} of {checks} checks{missing}\n",
        plural(errors),
        plural(warnings),
        plural(notes)
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(severity: Severity) -> Finding {
        Finding {
            severity,
            what: "a thing".into(),
            value: "7".into(),
            certainty: "seen".into(),
            ..Finding::default()
        }
    }

    #[test]
    fn code_is_that_of_the_worst() {
        assert_eq!(code(&[]), 0);
        assert_eq!(code(&[found(Severity::Info), found(Severity::Info)]), 0);
        assert_eq!(code(&[found(Severity::Warn), found(Severity::Info)]), 1);
        assert_eq!(code(&[found(Severity::NotChecked)]), 1, "it is no pass");
        assert_eq!(code(&[found(Severity::Warn), found(Severity::Error)]), 2);
    }

    #[test]
    fn page_has_each_part_that_is_known() {
        let text = page(&[found(Severity::Warn)], "this machine");
        assert!(
            text.starts_with(
                "warning: a thing is 7\n  sure      seen\n\nthis machine: 0 errors, 1 warning, 0 notes of "
            ),
            "{text}"
        );
    }

    #[test]
    fn check_that_could_not_look_is_named_and_counted() {
        let text = page(&[Finding { check: "clock".into(), ..found(Severity::NotChecked) }], "this machine");
        assert!(
            text.starts_with("not checked: clock: a thing is 7\n") && text.ends_with("; 1 could not look\n"),
            "{text}"
        );
    }
}
