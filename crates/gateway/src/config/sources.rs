//! The texts of a configuration: the file, those that it includes, and variables of the
//! environment.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use super::reader::{Section, Source, Value};

/// The begin of the variables, which have a `__` between the names of tables and settings. Others,
/// such as `RINGSERVE_DRIVER`, are no settings of the file.
const VARIABLE: &str = "RINGSERVE_";

/// The tables that an included file may have.
const INCLUDED: [&str; 2] = ["upstream", "route"];

/// All texts, in the order in which later ones override.
pub(super) struct Sources(Vec<Text>);

struct Text {
    file: PathBuf,
    text: String,
    is_variable: bool,
}

impl Text {
    fn of_file(file: PathBuf) -> Result<Text, ConfigError> {
        match std::fs::read_to_string(&file) {
            Ok(text) => Ok(Text { file, text, is_variable: false }),
            Err(error) => Err(ConfigError::of_file(&file, error)),
        }
    }

    fn source(&self) -> Source<'_> {
        Source { file: &self.file, text: &self.text, is_variable: self.is_variable }
    }

    fn table(&self) -> Result<Spanned<DeTable<'_>>, ConfigError> {
        DeTable::parse(&self.text)
            .map_err(|error| self.source().error(&error.span().unwrap_or_default(), error.message()))
    }
}

impl Sources {
    /// Reads the file and those that it includes.
    ///
    /// # Errors
    /// One cannot be read, or has what only the first file may have.
    pub(super) fn read(file: &Path) -> Result<Sources, ConfigError> {
        let first = Text::of_file(file.into())?;
        let mut all = Vec::new();
        for included in included(&first)? {
            let text = Text::of_file(included)?;
            has_what_it_may(&text)?;
            all.push(text);
        }
        all.insert(0, first);
        all.extend(variables(std::env::vars_os()));
        Ok(Sources(all))
    }

    /// Their tables.
    ///
    /// # Errors
    /// One is not TOML.
    pub(super) fn tables(&self) -> Result<Vec<(Source<'_>, Spanned<DeTable<'_>>)>, ConfigError> {
        self.0.iter().map(|text| Ok((text.source(), text.table()?))).collect()
    }
}

/// The files that a file includes.
fn included(first: &Text) -> Result<Vec<PathBuf>, ConfigError> {
    let tables = [(first.source(), first.table()?)];
    let Some(value) = Section::root(&tables).take("include") else { return Ok(Vec::new()) };
    let folder = first.file.parent().unwrap_or(Path::new(""));
    let mut all = Vec::new();
    for pattern in value.list() {
        all.extend(matching(&pattern, folder)?);
    }
    Ok(all)
}

/// The files that a pattern stands for, by name: it is a path with one `*` at most, in its last
/// part.
fn matching(pattern: &Value<'_>, folder: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let path = folder.join(pattern.string()?);
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return Err(pattern.error("it is no path of files"));
    };
    let Some((begin, end)) = name.split_once('*') else { return Ok(vec![path]) };
    let parent = path.parent().unwrap_or(Path::new(""));
    if end.contains('*') || parent.to_string_lossy().contains('*') {
        return Err(pattern.error("it has one `*`, in the name of files: \"routes.d/*.toml\""));
    }
    let wrong = |error| pattern.error(format!("{}: {error}", parent.display()));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(parent).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        let is_meant = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| {
            name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
        });
        if is_meant && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn has_what_it_may(text: &Text) -> Result<(), ConfigError> {
    let table = text.table()?;
    let other = table.get_ref().iter().find(|(key, _)| !INCLUDED.contains(&&**key.get_ref()));
    let Some((key, _)) = other else { return Ok(()) };
    let error = format!("{}: an included file has {} alone", key.get_ref(), INCLUDED.join(" and "));
    Err(text.source().error(&key.span(), error))
}

/// The settings of the environment, by name.
fn variables(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<Text> {
    let text = |(name, value): (OsString, OsString)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        let key = setting(&name)?;
        Some(Text { text: format!("{key} = {}", written(&value)), file: name.into(), is_variable: true })
    };
    let mut found: Vec<Text> = all.filter_map(text).collect();
    found.sort_by(|one, other| one.file.cmp(&other.file));
    found
}

/// The setting of a variable: `server.shards` of `RINGSERVE_SERVER__SHARDS`.
fn setting(variable: &str) -> Option<String> {
    let names: Vec<&str> = variable.strip_prefix(VARIABLE)?.split("__").collect();
    let is_name = |name: &&str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    (names.len() > 1 && names.iter().all(is_name)).then(|| names.join(".").to_ascii_lowercase())
}

/// A value as TOML has it: as it is where that is a value, and as a text else.
fn written(value: &str) -> String {
    let line = format!("a = {value}");
    // A second line would be a second setting.
    let is_value = !value.contains(['\n', '\r', '#'])
        && DeTable::parse(&line).is_ok_and(|table| {
            table.get_ref().values().all(|value| !matches!(value.get_ref(), DeValue::Datetime(_)))
        });
    if is_value {
        return value.into();
    }
    let mut text = String::from("\"");
    for character in value.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            character if character.is_control() => text.push_str(&format!("\\u{:04x}", u32::from(character))),
            character => text.push(character),
        }
    }
    text + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variable_is_the_setting_of_its_name() {
        let of = |name: &str, value: &str| {
            let all = variables([(name.into(), value.into())].into_iter());
            all.first().map(|text| text.text.clone())
        };
        assert_eq!(of("RINGSERVE_SERVER__SHARDS", "4").as_deref(), Some("server.shards = 4"));
        assert_eq!(
            of("RINGSERVE_ADMIN__LISTEN", "127.0.0.1:9000").as_deref(),
            Some("admin.listen = \"127.0.0.1:9000\"")
        );
        assert_eq!(
            of("RINGSERVE_UPSTREAM__API_NEXT__QUEUE", "2s").as_deref(),
            Some("upstream.api_next.queue = \"2s\"")
        );
        for none in ["RINGSERVE_DRIVER", "RINGSERVE_", "RINGSERVE___", "RINGSERVE_A__", "OTHER_A__B"] {
            assert_eq!(of(none, "1"), None, "{none}");
        }
    }

    #[test]
    fn value_of_a_variable_is_one_value() {
        assert_eq!(written("true"), "true");
        assert_eq!(written("[\"a\", \"b\"]"), "[\"a\", \"b\"]");
        assert_eq!(written("1\nb = 2"), "\"1\\u000ab = 2\"");
        assert_eq!(written("a \"b\" \\"), "\"a \\\"b\\\" \\\\\"");
        for value in ["1 # b", "", "1979-05-27", "x = 1"] {
            let line = format!("a = {}", written(value));
            let table = DeTable::parse(&line).expect("TOML");
            assert!(
                matches!(table.get_ref()["a"].get_ref(), DeValue::String(text) if *text == value),
                "{value}"
            );
        }
    }
}
