//! Tables of TOML whose settings are taken by name, so that one that is not taken is an error with
//! its place.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::error::ConfigError;

/// The text of a file.
pub(super) struct Source<'s> {
    pub(super) file: &'s Path,
    pub(super) text: &'s str,
}

/// A table.
pub(super) struct Section<'s> {
    source: &'s Source<'s>,
    /// As it is written, with the tables around it.
    name: String,
    span: Range<usize>,
    entries: Vec<Entry<'s>>,
    /// Names that were asked for.
    known: RefCell<Vec<&'static str>>,
}

struct Entry<'s> {
    key: &'s str,
    key_span: Range<usize>,
    value: &'s Spanned<DeValue<'s>>,
    is_taken: Cell<bool>,
}

/// A value with its place.
#[derive(Clone)]
pub(super) struct Value<'s> {
    source: &'s Source<'s>,
    name: String,
    value: &'s DeValue<'s>,
    pub(super) span: Range<usize>,
}

type Result<T> = std::result::Result<T, ConfigError>;

impl<'s> Section<'s> {
    pub(super) fn root(source: &'s Source<'s>, table: &'s Spanned<DeTable<'s>>) -> Section<'s> {
        Section::new(source, String::new(), table.span(), table.get_ref())
    }

    fn new(source: &'s Source<'s>, name: String, span: Range<usize>, table: &'s DeTable<'s>) -> Section<'s> {
        let entries = table.iter().map(|(key, value)| Entry {
            key: key.get_ref(),
            key_span: key.span(),
            value,
            is_taken: Cell::new(false),
        });
        Section { source, name, span, entries: entries.collect(), known: RefCell::default() }
    }

    /// A setting, if it is there.
    pub(super) fn take(&self, key: &'static str) -> Option<Value<'s>> {
        self.known.borrow_mut().push(key);
        let entry = self.entries.iter().find(|entry| entry.key == key)?;
        entry.is_taken.set(true);
        Some(self.value(entry))
    }

    /// All settings, whose names are the file's own.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'s str, Value<'s>)> {
        self.entries.iter().map(|entry| {
            entry.is_taken.set(true);
            (entry.key, self.value(entry))
        })
    }

    fn value(&self, entry: &Entry<'s>) -> Value<'s> {
        let name = format!("{}{}", self.prefix(), entry.key);
        // A table has the place of its name, where a reader looks for it.
        let span = match entry.value.get_ref() {
            DeValue::Table(_) => entry.key_span.clone(),
            _ => entry.value.span(),
        };
        Value { source: self.source, name, value: entry.value.get_ref(), span }
    }

    fn prefix(&self) -> String {
        if self.name.is_empty() { String::new() } else { format!("{}.", self.name) }
    }

    /// The place of the table.
    pub(super) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    pub(super) fn error(&self, text: impl fmt::Display) -> ConfigError {
        let text = format!(
            "{}{text}",
            if self.name.is_empty() { String::new() } else { format!("{}: ", self.name) }
        );
        ConfigError::at(self.source.file, self.source.text, &self.span, text)
    }

    /// All settings were asked for.
    ///
    /// # Errors
    /// The first that is none, with the name that is most like it.
    pub(super) fn end(&self) -> Result<()> {
        let Some(entry) = self.entries.iter().find(|entry| !entry.is_taken.get()) else { return Ok(()) };
        let known = self.known.borrow();
        let near = known.iter().map(|name| (strsim::damerau_levenshtein(name, entry.key), name));
        let near = near.min_by_key(|(distance, _)| *distance).filter(|(distance, _)| *distance <= 3);
        let hint = match near {
            Some((_, name)) => format!("{name}?"),
            None => format!("there are {}", known.join(", ")),
        };
        let text = format!("{}{}: there is no such setting; {hint}", self.prefix(), entry.key);
        Err(ConfigError::at(self.source.file, self.source.text, &entry.key_span, text))
    }
}

impl<'s> Value<'s> {
    pub(super) fn error(&self, text: impl fmt::Display) -> ConfigError {
        let text = format!("{}: {text}", self.name);
        ConfigError::at(self.source.file, self.source.text, &self.span, text)
    }

    fn wrong<T>(&self, wanted: impl fmt::Display) -> Result<T> {
        let found = match self.value {
            DeValue::String(text) => format!("{text:?}"),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            DeValue::Boolean(is_true) => is_true.to_string(),
            DeValue::Datetime(time) => time.to_string(),
            DeValue::Array(_) => "a list".into(),
            DeValue::Table(_) => "a table".into(),
        };
        Err(self.error(format!("{found} is not {wanted}")))
    }

    pub(super) fn string(&self) -> Result<&'s str> {
        match self.value {
            DeValue::String(text) => Ok(text),
            _ => self.wrong("a text"),
        }
    }

    /// A text that is one of these.
    pub(super) fn one_of<T: Copy>(&self, all: &[(&str, T)]) -> Result<T> {
        let names: Vec<String> = all.iter().map(|(name, _)| format!("{name:?}")).collect();
        let found = match self.value {
            DeValue::String(text) => all.iter().find(|(name, _)| *name == &**text),
            _ => None,
        };
        match found {
            Some((_, value)) => Ok(*value),
            None => self.wrong(names.join(" or ")),
        }
    }

    pub(super) fn boolean(&self) -> Result<bool> {
        match self.value {
            DeValue::Boolean(is_true) => Ok(*is_true),
            _ => self.wrong("true or false"),
        }
    }

    pub(super) fn is_table(&self) -> bool {
        matches!(self.value, DeValue::Table(_))
    }

    pub(super) fn is_string(&self) -> bool {
        matches!(self.value, DeValue::String(_))
    }

    /// A number within a range.
    pub(super) fn number(&self, range: RangeInclusive<u64>) -> Result<u64> {
        let number = match self.value {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
            _ => None,
        };
        match number.filter(|number| range.contains(number)) {
            Some(number) => Ok(number),
            None => self.wrong(format!("a number from {} to {}", range.start(), range.end())),
        }
    }

    pub(super) fn count(&self, range: RangeInclusive<u32>) -> Result<u32> {
        let number = self.number(u64::from(*range.start())..=u64::from(*range.end()))?;
        Ok(u32::try_from(number).unwrap_or(u32::MAX))
    }

    /// One of these numbers.
    pub(super) fn one_of_numbers(&self, all: &[u16]) -> Result<u16> {
        let number = self.number(0..=u64::from(u16::MAX));
        match number.ok().and_then(|number| all.iter().find(|known| u64::from(**known) == number)) {
            Some(number) => Ok(*number),
            None => self.wrong(all.iter().map(u16::to_string).collect::<Vec<_>>().join(" or ")),
        }
    }

    /// A time, such as `"250ms"`, `"2s"`, `"10m"` or `"1h"`.
    pub(super) fn time(&self) -> Result<Duration> {
        let parsed = match self.value {
            DeValue::String(text) => time_of(text),
            _ => None,
        };
        parsed.map_or_else(|| self.wrong("a time such as \"250ms\", \"2s\", \"10m\" or \"1h\""), Ok)
    }

    /// Bytes, as a number or such as `"64KiB"`.
    pub(super) fn bytes(&self) -> Result<u64> {
        let parsed = match self.value {
            DeValue::String(text) => bytes_of(text),
            DeValue::Integer(number) => number.as_str().parse().ok(),
            _ => None,
        };
        parsed.map_or_else(|| self.wrong("a number of bytes, or such as \"64KiB\" or \"10MiB\""), Ok)
    }

    /// The value that a text is parsed to.
    pub(super) fn parsed<T: std::str::FromStr>(&self, wanted: &str) -> Result<T> {
        match self.string()?.parse() {
            Ok(parsed) => Ok(parsed),
            Err(_) => self.wrong(wanted),
        }
    }

    /// The values of a list, or the one value that is none.
    pub(super) fn list(&self) -> Vec<Value<'s>> {
        let values: &DeArray<'s> = match self.value {
            DeValue::Array(values) => values,
            _ => return vec![self.clone()],
        };
        let value = |value: &'s Spanned<DeValue<'s>>| Value {
            source: self.source,
            name: self.name.clone(),
            value: value.get_ref(),
            span: value.span(),
        };
        values.iter().map(value).collect()
    }

    pub(super) fn strings(&self) -> Result<Vec<&'s str>> {
        self.list().iter().map(Value::string).collect()
    }

    pub(super) fn parsed_list<T: std::str::FromStr>(&self, wanted: &str) -> Result<Vec<T>> {
        self.list().iter().map(|value| value.parsed(wanted)).collect()
    }

    pub(super) fn section(&self) -> Result<Section<'s>> {
        match self.value {
            DeValue::Table(table) => {
                Ok(Section::new(self.source, self.name.clone(), self.span.clone(), table))
            }
            _ => self.wrong("a table"),
        }
    }
}

fn time_of(text: &str) -> Option<Duration> {
    let unit = text.find(|digit: char| !digit.is_ascii_digit() && digit != '.')?;
    let (number, unit) = text.split_at(unit);
    let seconds = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return None,
    };
    let time = number.parse::<f64>().ok()? * seconds;
    (0.001..=31_536_000.0).contains(&time).then(|| Duration::from_secs_f64(time))
}

fn bytes_of(text: &str) -> Option<u64> {
    let unit = text.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    let shift = match unit.trim_start() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T>(text: &str, with: impl FnOnce(&Section<'_>) -> Result<T>) -> std::result::Result<T, String> {
        let source = Source { file: Path::new("a.toml"), text };
        let table = DeTable::parse(text).expect("TOML");
        with(&Section::root(&source, &table)).map_err(|error| error.to_string())
    }

    #[test]
    fn setting_that_is_none_has_its_place_and_the_nearest_name() {
        let known = |section: &Section<'_>| {
            section.take("idle_timeout");
            section.take("name");
            section.end()
        };
        assert_eq!(read("name = 1\n", known), Ok(()));
        assert_eq!(
            read("name = 1\n  idel_timeout = 2\n", known),
            Err("a.toml:2:3: idel_timeout: there is no such setting; idle_timeout?".into())
        );
        assert_eq!(
            read("something = 2\n", known),
            Err("a.toml:1:1: something: there is no such setting; there are idle_timeout, name".into())
        );
    }

    #[test]
    fn values_say_what_is_allowed() {
        let of = |text: &str| {
            read(&format!("[a]\nb = {text}"), |root| {
                let section = root.take("a").expect("a table").section()?;
                let value = section.take("b").expect("a value");
                Ok((value.time().map_err(|error| error.to_string()), value.bytes(), value.number(1..=5)))
            })
            .expect("a table")
        };
        assert_eq!(of("\"1.5s\"").0, Ok(Duration::from_millis(1500)));
        assert_eq!(
            of("\"1 day\"").0.unwrap_err(),
            "a.toml:2:5: a.b: \"1 day\" is not a time such as \"250ms\", \"2s\", \"10m\" or \"1h\""
        );
        assert_eq!(of("\"10MiB\"").1, Ok(10 << 20));
        assert_eq!(of("512").1, Ok(512));
        assert_eq!(of("5").2, Ok(5));
        assert_eq!(of("6").2.unwrap_err().to_string(), "a.toml:2:5: a.b: 6 is not a number from 1 to 5");
        for wrong in ["\"0s\"", "\"s\"", "\"9e9h\"", "\"\"", "3"] {
            assert!(of(wrong).0.is_err(), "{wrong}");
        }
        assert!(of("\"99999999999999999999\"").1.is_err() && of("\"17179869184GiB\"").1.is_err());
    }
}
