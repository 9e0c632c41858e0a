//! Lines of JSON.

use std::fmt::{self, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The version of the names: one changes with it, and new ones come without.
const VERSION: u32 = 1;

/// Names of the line itself. A field of an event with one of them gets `_` behind it.
const OWN: [&str; 6] = ["v", "ts", "level", "target", "spans", "msg"];

/// An event as one line: an object of the moment, the level, the target, and the event's fields as
/// they are named.
pub(super) struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        write!(line, "{{\"v\":{VERSION},\"ts\":\"")?;
        SystemTime.format_time(&mut line)?;
        let level = metadata.level().as_str().to_ascii_lowercase();
        write!(line, "\",\"level\":\"{level}\",\"target\":")?;
        quoted(&mut line, format_args!("{}", metadata.target()))?;
        if let Some(scope) = context.event_scope() {
            for (number, span) in scope.from_root().enumerate() {
                line.write_str(if number == 0 { ",\"spans\":[" } else { "," })?;
                quoted(&mut line, format_args!("{}", span.name()))?;
            }
            line.write_char(']')?;
        }
        let mut fields = Fields { line: &mut line, result: Ok(()) };
        event.record(&mut fields);
        fields.result?;
        line.write_str("}\n")
    }
}

struct Fields<'a, 'w> {
    line: &'a mut Writer<'w>,
    result: fmt::Result,
}

impl Fields<'_, '_> {
    fn add(&mut self, field: &Field, write: impl FnOnce(&mut Writer<'_>) -> fmt::Result) {
        let name = match field.name() {
            "message" => "msg",
            name => name,
        };
        let behind = if field.name() != "message" && OWN.contains(&name) { "_" } else { "" };
        if self.result.is_ok() {
            self.result = self.line.write_char(',');
            self.result = self.result.and_then(|()| quoted(self.line, format_args!("{name}{behind}")));
            self.result = self.result.and_then(|()| self.line.write_char(':'));
            self.result = self.result.and_then(|()| write(self.line));
        }
    }
}

impl Visit for Fields<'_, '_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, |line| quoted(line, format_args!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, |line| quoted(line, format_args!("{value}")));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, |line| write!(line, "{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, |line| write!(line, "{value}"));
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.add(field, |line| write!(line, "{value}"));
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.add(field, |line| write!(line, "{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, |line| write!(line, "{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, |line| match value.is_finite() {
            true => write!(line, "{value}"),
            false => line.write_str("null"),
        });
    }
}

/// Writes a string of JSON.
fn quoted(line: &mut Writer<'_>, text: fmt::Arguments<'_>) -> fmt::Result {
    line.write_char('"')?;
    Escaped(line).write_fmt(text)?;
    line.write_char('"')
}

/// Escapes what is written through it.
struct Escaped<'a, 'w>(&'a mut Writer<'w>);

impl Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(|c: char| c < ' ' || c == '"' || c == '\\') {
            let (plain, special) = rest.split_at(at);
            self.0.write_str(plain)?;
            match special.as_bytes()[0] {
                b'\n' => self.0.write_str("\\n")?,
                b'\r' => self.0.write_str("\\r")?,
                b'\t' => self.0.write_str("\\t")?,
                byte @ (b'"' | b'\\') => write!(self.0, "\\{}", char::from(byte))?,
                byte => write!(self.0, "\\u{byte:04x}")?,
            }
            rest = &special[1..];
        }
        self.0.write_str(rest)
    }
}
