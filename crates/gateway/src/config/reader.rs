//! Tables of TOML whose settings are taken by name, so that one that is not taken is an error with
//! its place.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::error::{ConfigError, place};

/// The text of a file, or of a variable of the environment.
pub(super) struct Source<'s> {
    pub(super) file: &'s Path,
    pub(super) text: &'s str,
    /// It is a variable, which has no lines.
    pub(super) is_variable: bool,
}

impl Source<'_> {
    pub(super) fn error(&self, span: &Range<usize>, text: impl fmt::Display) -> ConfigError {
        if self.is_variable {
            return ConfigError::of_file(self.file, text);
        }
        ConfigError::at(self.file, self.text, span, text)
    }
}

/// A place in a source.
#[derive(Clone)]
pub(super) struct Spot<'s> {
    source: &'s Source<'s>,
    span: Range<usize>,
}

impl Spot<'_> {
    pub(super) fn error(&self, text: impl fmt::Display) -> ConfigError {
        self.source.error(&self.span, text)
    }

    /// As another error names it: by its line, and by its file if that is another one.
    pub(super) fn seen_from(&self, other: &Spot<'_>) -> String {
        let (line, _) = place(self.source.text, self.span.start);
        if self.source.file == other.source.file {
            return format!("line {line}");
        }
        format!("{}:{line}", self.source.file.display())
    }
}

/// A table, of all sources that have it.
pub(super) struct Section<'s> {
    /// As it is written, with the tables around it.
    name: String,
    source: &'s Source<'s>,
    span: Range<usize>,
    entries: Vec<Entry<'s>>,
    /// Names that were asked for.
    known: RefCell<Vec<&'static str>>,
}

struct Entry<'s> {
    key: &'s str,
    places: Vec<Place<'s>>,
    is_taken: Cell<bool>,
}

/// A value in one of the sources.
#[derive(Clone)]
struct Place<'s> {
    source: &'s Source<'s>,
    key_span: Range<usize>,
    value: &'s Spanned<DeValue<'s>>,
}

impl Place<'_> {
    /// A table has the place of its name, where a reader looks for it.
    fn span(&self) -> Range<usize> {
        match self.value.get_ref() {
            DeValue::Table(_) => self.key_span.clone(),
            _ => self.value.span(),
        }
    }
}

/// A value with its place. Where several sources have it, that of the last one counts; tables and
/// lists of tables are those of all.
#[derive(Clone)]
pub(super) struct Value<'s> {
    source: &'s Source<'s>,
    name: String,
    value: &'s DeValue<'s>,
    span: Range<usize>,
    places: Vec<Place<'s>>,
}

type Result<T> = std::result::Result<T, ConfigError>;

impl<'s> Section<'s> {
    /// The root of these sources, of which each overrides those before it.
    pub(super) fn root(tables: &'s [(Source<'s>, Spanned<DeTable<'s>>)]) -> Section<'s> {
        let (source, first) = &tables[0];
        let all = tables.iter().map(|(source, table)| (source, table.get_ref()));
        Section::new(String::new(), source, first.span(), all)
    }

    fn new(
        name: String,
        source: &'s Source<'s>,
        span: Range<usize>,
        tables: impl Iterator<Item = (&'s Source<'s>, &'s DeTable<'s>)>,
    ) -> Section<'s> {
        let mut entries: Vec<Entry<'s>> = Vec::new();
        for (source, table) in tables {
            for (key, value) in table {
                let place = Place { source, key_span: key.span(), value };
                let key: &'s str = key.get_ref();
                match entries.iter_mut().find(|entry| entry.key == key) {
                    Some(entry) => entry.places.push(place),
                    None => entries.push(Entry { key, places: vec![place], is_taken: Cell::new(false) }),
                }
            }
        }
        Section { name, source, span, entries, known: RefCell::default() }
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
        let last = entry.places.last().expect("an entry is in one source at least");
        Value {
            source: last.source,
            name: format!("{}{}", self.prefix(), entry.key),
            value: last.value.get_ref(),
            span: last.span(),
            places: entry.places.clone(),
        }
    }

    fn prefix(&self) -> String {
        if self.name.is_empty() { String::new() } else { format!("{}.", self.name) }
    }

    pub(super) fn spot(&self) -> Spot<'s> {
        Spot { source: self.source, span: self.span.clone() }
    }

    pub(super) fn error(&self, text: impl fmt::Display) -> ConfigError {
        let text = format!(
            "{}{text}",
            if self.name.is_empty() { String::new() } else { format!("{}: ", self.name) }
        );
        self.source.error(&self.span, text)
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
        let place = entry.places.last().expect("an entry is in one source at least");
        Err(place.source.error(&place.key_span, text))
    }
}

impl<'s> Value<'s> {
    pub(super) fn spot(&self) -> Spot<'s> {
        Spot { source: self.source, span: self.span.clone() }
    }

    pub(super) fn error(&self, text: impl fmt::Display) -> ConfigError {
        self.source.error(&self.span, format!("{}: {text}", self.name))
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

    /// The values of a list, or the one value that is none. Lists of tables are those of all
    /// sources.
    pub(super) fn list(&self) -> Vec<Value<'s>> {
        let DeValue::Array(values) = self.value else { return vec![self.clone()] };
        let has_tables = values.iter().all(|value| matches!(value.get_ref(), DeValue::Table(_)));
        let places: &[Place<'s>] = match self.places.len() {
            0 => return self.items(self.source, values).collect(),
            len if has_tables => &self.places[..len],
            len => &self.places[len - 1..],
        };
        let mut all = Vec::new();
        for place in places {
            if let DeValue::Array(values) = place.value.get_ref() {
                all.extend(self.items(place.source, values));
            }
        }
        all
    }

    fn items(&self, source: &'s Source<'s>, values: &'s DeArray<'s>) -> impl Iterator<Item = Value<'s>> {
        values.iter().map(move |value| Value {
            source,
            name: self.name.clone(),
            value: value.get_ref(),
            span: value.span(),
            places: Vec::new(),
        })
    }

    /// The second file in which a table is, if it is in two.
    pub(super) fn second_file(&self) -> Option<ConfigError> {
        let second = self.places.iter().filter(|place| !place.source.is_variable).nth(1)?;
        Some(second.source.error(&second.span(), format!("{}: it is in another file too", self.name)))
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
                let tables = self.places.iter().filter_map(|place| match place.value.get_ref() {
                    DeValue::Table(table) => Some((place.source, table)),
                    _ => None,
                });
                // An item of a list is in one source alone.
                let item = self.places.is_empty().then_some((self.source, table));
                let tables = tables.chain(item);
                Ok(Section::new(self.name.clone(), self.source, self.span.clone(), tables))
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
        let source = Source { file: Path::new("a.toml"), text, is_variable: false };
        let tables = [(source, DeTable::parse(text).expect("TOML"))];
        with(&Section::root(&tables)).map_err(|error| error.to_string())
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
    fn later_source_overrides_and_tables_are_those_of_all() {
        let texts = ["a = { b = 1, c = 2 }\nd = [1, 2]\n[[e]]\nf = 1", "d = [3]\n[[e]]\nf = 2", "a.b = 7"];
        let tables = texts.map(|text| {
            let source = Source { file: Path::new("a.toml"), text, is_variable: false };
            (source, DeTable::parse(text).expect("TOML"))
        });
        let root = Section::root(&tables);
        let a = root.take("a").expect("a table").section().expect("a table");
        let number = |value: &Value<'_>| value.number(0..=9).expect("a number");
        let of = |key| number(&a.take(key).expect("a value"));
        assert_eq!((of("b"), of("c")), (7, 2));
        let list = |key| root.take(key).expect("a list").list();
        assert_eq!(list("d").iter().map(number).collect::<Vec<_>>(), [3]);
        let f = |value: &Value<'_>| number(&value.section().expect("a table").take("f").expect("a value"));
        assert_eq!(list("e").iter().map(f).collect::<Vec<_>>(), [1, 2]);
        assert!(root.end().is_ok() && a.end().is_ok());
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
