//! Which hosts and paths a route takes, and which of two patterns is the more specific one.

use std::cmp::Ordering;
use std::fmt;

/// The hosts of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostPattern {
    /// This one, in lower case.
    Exact(Box<str>),
    /// Those that end so, of any depth; with its dot.
    Suffix(Box<str>),
    Any,
}

/// The paths of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathPattern {
    segments: Vec<Segment>,
    /// Paths below are taken too.
    is_prefix: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Text(Box<str>),
    /// One segment that is not empty, whatever it is.
    Any(Box<str>),
}

/// A pattern that cannot be understood.
#[derive(Clone, PartialEq, Eq)]
pub struct PatternError(pub(super) String);

impl fmt::Display for PatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

ringserve_buf::debug_is_display!(PatternError);

impl std::error::Error for PatternError {}

impl HostPattern {
    /// From a name, `*.` and a suffix, or `*`.
    pub(crate) fn parse(text: &str) -> Result<HostPattern, PatternError> {
        let (name, is_suffix) = match text.strip_prefix('*') {
            Some("") => return Ok(HostPattern::Any),
            Some(suffix) => (suffix, true),
            None => (text, false),
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let is_literal = |text: &str| {
            text.starts_with('[') && text.ends_with(']') && text.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let is_whole = !name.is_empty() && (name.bytes().all(is_name) || is_literal(name));
        if !is_whole || (is_suffix && (!name.starts_with('.') || name.len() == 1)) {
            return Err(PatternError(format!(
                "{text:?} is no host: a name without a port, `*.` and the end of names, or `*`"
            )));
        }
        let name = name.trim_end_matches('.').to_ascii_lowercase().into();
        Ok(if is_suffix { HostPattern::Suffix(name) } else { HostPattern::Exact(name) })
    }

    /// True if it takes this host, which is in lower case and without a port.
    pub(crate) fn takes(&self, host: &str) -> bool {
        match self {
            HostPattern::Exact(name) => **name == *host,
            HostPattern::Suffix(suffix) => host.len() > suffix.len() && host.ends_with(&**suffix),
            HostPattern::Any => true,
        }
    }

    /// The more specific one is less.
    pub(crate) fn order(&self, other: &HostPattern) -> Ordering {
        let rank = |pattern: &HostPattern| match pattern {
            HostPattern::Exact(_) => (0, 0),
            HostPattern::Suffix(suffix) => (1, usize::MAX - suffix.len()),
            HostPattern::Any => (2, 0),
        };
        rank(self).cmp(&rank(other))
    }
}

impl PathPattern {
    /// From a path: `/a/b` is that one; `/a/*` is `/a` and what is below; `{name}` stands for one
    /// segment.
    pub(crate) fn parse(text: &str) -> Result<PathPattern, PatternError> {
        let wrong = |what: &str| Err(PatternError(format!("the path {text:?} {what}")));
        let Some(rest) = text.strip_prefix('/') else { return wrong("does not begin with `/`") };
        let (rest, is_prefix) = match rest.strip_suffix('*') {
            Some("") => ("", true),
            Some(rest) if rest.ends_with('/') => (&rest[..rest.len() - 1], true),
            Some(_) => return wrong("has a `*` that is not a whole segment"),
            None => (rest, false),
        };
        let mut segments = Vec::new();
        if !(rest.is_empty() && is_prefix) {
            for segment in rest.split('/') {
                if segment.contains('*') {
                    return wrong("has a `*` before its end");
                }
                let name = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
                segments.push(match name {
                    Some("") => return wrong("has a segment `{}` without a name"),
                    Some(name) => Segment::Any(name.into()),
                    None if segment.contains(['{', '}']) => {
                        return wrong("has a `{` or `}` that is not around a whole segment");
                    }
                    None => Segment::Text(segment.into()),
                });
            }
        }
        let fixed: Vec<&str> = segments.iter().map(|segment| segment.sample()).collect();
        let sample = format!("/{}", fixed.join("/"));
        match super::path::normalize(&sample) {
            super::path::PathForm::Normal(form) if form == sample => Ok(PathPattern { segments, is_prefix }),
            super::path::PathForm::Normal(form) => {
                wrong(&format!("matches nothing: requests come as {form:?}"))
            }
            super::path::PathForm::Ambiguous => wrong("matches nothing: such requests are refused"),
        }
    }

    /// True if it takes this path.
    pub(crate) fn takes(&self, path: &str) -> bool {
        let mut rest = path.strip_prefix('/');
        for segment in &self.segments {
            let Some(left) = rest else { return false };
            let (front, behind) = match left.split_once('/') {
                Some((front, behind)) => (front, Some(behind)),
                None => (left, None),
            };
            let is_same = match segment {
                Segment::Text(text) => **text == *front,
                Segment::Any(_) => !front.is_empty(),
            };
            if !is_same {
                return false;
            }
            rest = behind;
        }
        self.is_prefix || rest.is_none()
    }

    /// The text of the first segment, if every path that it takes begins with it.
    pub(crate) fn first(&self) -> Option<&str> {
        match self.segments.first() {
            Some(Segment::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The more specific one is less: text before a name before the rest, at the first segment in
    /// which they differ.
    pub(crate) fn order(&self, other: &PathPattern) -> Ordering {
        let rank = |pattern: &PathPattern, at: usize| match pattern.segments.get(at) {
            Some(Segment::Text(_)) => 0,
            // An end is as specific as a text, since nothing else ends there.
            None if !pattern.is_prefix => 0,
            Some(Segment::Any(_)) => 1,
            None => 2,
        };
        let len = self.segments.len().max(other.segments.len()) + 1;
        (0..len)
            .map(|at| rank(self, at).cmp(&rank(other, at)))
            .find(|order| order.is_ne())
            .unwrap_or(Ordering::Equal)
    }

    /// True if both take the same paths, whatever their names are.
    pub(crate) fn takes_the_same(&self, other: &PathPattern) -> bool {
        let same = |one: &Segment, two: &Segment| match (one, two) {
            (Segment::Any(_), Segment::Any(_)) => true,
            (Segment::Text(one), Segment::Text(two)) => one == two,
            _ => false,
        };
        self.is_prefix == other.is_prefix
            && self.segments.len() == other.segments.len()
            && self.segments.iter().zip(&other.segments).all(|(one, two)| same(one, two))
    }
}

impl Segment {
    /// A segment that it takes.
    fn sample(&self) -> &str {
        match self {
            Segment::Text(text) => text,
            Segment::Any(_) => "x",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> PathPattern {
        PathPattern::parse(text).expect("a pattern")
    }

    #[test]
    fn patterns_take_the_paths_that_they_say() {
        for (pattern, takes, others) in [
            ("/", &["/"][..], &["/a", "/a/"][..]),
            ("/*", &["/", "/a", "/a/b/"], &[]),
            ("/a", &["/a"], &["/", "/a/", "/ab", "/a/b"]),
            ("/a/", &["/a/"], &["/a", "/a/b"]),
            ("/a/*", &["/a", "/a/", "/a/b", "/a/b/c"], &["/", "/ab", "/ab/c"]),
            ("/{id}", &["/a", "/b"], &["/", "/a/", "/a/b"]),
            ("/u/{id}/p", &["/u/1/p"], &["/u//p", "/u/1", "/u/1/p/", "/u/1/2/p"]),
            ("/u/{id}/*", &["/u/1", "/u/1/p/q"], &["/u", "/u/", "/v/1"]),
        ] {
            for taken in takes {
                assert!(path(pattern).takes(taken), "{pattern} {taken}");
            }
            for other in others {
                assert!(!path(pattern).takes(other), "{pattern} {other}");
            }
        }
    }

    #[test]
    fn patterns_that_nothing_matches_are_refused() {
        for text in ["", "a", "/a*", "/*/a", "/a/../b", "//a", "/a/%2f", "/%61", "/{}", "/a{b}", "/{a"] {
            assert!(PathPattern::parse(text).is_err(), "{text}");
        }
        for text in ["", "a b", "*a", "*.", "a:80", "a/b", "**", "a.*"] {
            assert!(HostPattern::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn more_specific_pattern_comes_first() {
        let mut sorted =
            ["/*", "/{a}", "/{a}/*", "/a/*", "/a/{b}/*", "/a/{b}", "/a/b/*", "/a/b", "/a"].map(path);
        let written = sorted.clone();
        sorted.sort_by(PathPattern::order);
        let place =
            |text: &str| sorted.iter().position(|pattern| *pattern == path(text)).expect("it is there");
        for (first, second) in [
            ("/a/b", "/a/b/*"),
            ("/a/b/*", "/a/{b}"),
            ("/a/{b}", "/a/{b}/*"),
            ("/a/{b}/*", "/a/*"),
            ("/a", "/a/*"),
            ("/a/*", "/{a}"),
            ("/{a}", "/{a}/*"),
            ("/{a}/*", "/*"),
        ] {
            assert!(place(first) < place(second), "{first} {second}");
        }
        assert_eq!(written.len(), sorted.len());
    }

    #[test]
    fn hosts_are_names_ends_of_names_or_any() {
        let host = |text: &str| HostPattern::parse(text).expect("a host");
        assert!(host("API.example.org").takes("api.example.org"));
        assert!(!host("api.example.org").takes("x.api.example.org"));
        assert!(host("*.example.org").takes("a.b.example.org"));
        assert!(
            !host("*.example.org").takes("example.org") && !host("*.example.org").takes(".example.org.x")
        );
        assert!(host("*").takes("") && host("[::1]").takes("[::1]"));
        assert!(host("a.b").order(&host("*.b")).is_lt() && host("*.a.b").order(&host("*.b")).is_lt());
        assert!(host("*.b").order(&host("*")).is_lt());
    }
}
