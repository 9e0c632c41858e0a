//! Fields that a route sets, adds and removes.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};

/// Changes to the fields of a message: first those that are removed, then those that are set, then
/// those that are added.
///
/// ```
/// use ringserve_gateway::FieldEdits;
///
/// let edits = FieldEdits::default().remove("x-debug")?.set("x-env", "live")?;
/// # let _ = edits;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct FieldEdits {
    removed: Vec<HeaderName>,
    set: Vec<(HeaderName, HeaderValue)>,
    added: Vec<(HeaderName, HeaderValue)>,
}

/// A field that the gateway decides itself, so that no route may change it: the message would have
/// two lengths or two ends.
fn is_ours(name: &HeaderName) -> bool {
    use hyper::header::{CONNECTION, CONTENT_LENGTH, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
    [CONNECTION, CONTENT_LENGTH, TE, TRAILER, TRANSFER_ENCODING, UPGRADE].contains(name)
}

fn name_of(name: &str) -> Result<HeaderName, FieldError> {
    match HeaderName::from_bytes(name.as_bytes()) {
        Ok(found) if is_ours(&found) => {
            Err(FieldError(format!("the field {found} is the gateway's own, and no route changes it")))
        }
        Ok(found) => Ok(found),
        Err(_) => Err(FieldError(format!("{name:?} is no name of a field"))),
    }
}

fn value_of(value: &str) -> Result<HeaderValue, FieldError> {
    HeaderValue::from_str(value).map_err(|_| FieldError(format!("{value:?} is no value of a field")))
}

/// A field that cannot be changed so.
#[derive(Clone, PartialEq, Eq)]
pub struct FieldError(String);

impl std::fmt::Display for FieldError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

ringserve_buf::debug_is_display!(FieldError);

impl std::error::Error for FieldError {}

impl FieldEdits {
    /// Removes a field.
    ///
    /// # Errors
    /// It is no name, or a field that the gateway decides: `connection`, `content-length`, `te`,
    /// `trailer`, `transfer-encoding` and `upgrade`.
    pub fn remove(mut self, name: &str) -> Result<FieldEdits, FieldError> {
        self.removed.push(name_of(name)?);
        Ok(self)
    }

    /// Sets a field, whatever it was before.
    ///
    /// # Errors
    /// Those of [`remove`](FieldEdits::remove), or it is no value.
    pub fn set(mut self, name: &str, value: &str) -> Result<FieldEdits, FieldError> {
        self.set.push((name_of(name)?, value_of(value)?));
        Ok(self)
    }

    /// Adds a field to those of this name.
    ///
    /// # Errors
    /// Those of [`set`](FieldEdits::set).
    pub fn add(mut self, name: &str, value: &str) -> Result<FieldEdits, FieldError> {
        self.added.push((name_of(name)?, value_of(value)?));
        Ok(self)
    }

    /// The fields that change.
    pub(crate) fn names(&self) -> impl Iterator<Item = &HeaderName> {
        let set = self.set.iter().chain(&self.added).map(|(name, _)| name);
        self.removed.iter().chain(set)
    }

    pub(crate) fn apply(&self, fields: &mut HeaderMap) {
        for name in &self.removed {
            fields.remove(name);
        }
        for (name, value) in &self.set {
            fields.insert(name.clone(), value.clone());
        }
        for (name, value) in &self.added {
            fields.append(name.clone(), value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_made_in_their_order() {
        let edits = FieldEdits::default().set("a", "2").unwrap().add("a", "3").unwrap().remove("b").unwrap();
        let mut fields = HeaderMap::new();
        fields.insert("a", HeaderValue::from_static("1"));
        fields.insert("b", HeaderValue::from_static("1"));
        edits.apply(&mut fields);
        assert_eq!(fields.get_all("a").iter().collect::<Vec<_>>(), ["2", "3"]);
        assert!(!fields.contains_key("b"));
    }

    #[test]
    fn framing_of_a_message_is_not_edited() {
        for name in ["content-length", "Transfer-Encoding", "connection", "a b", ""] {
            assert!(FieldEdits::default().set(name, "1").is_err(), "{name}");
        }
        assert!(FieldEdits::default().set("a", "b\r\nc: d").is_err());
    }
}
