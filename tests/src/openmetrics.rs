//! The text of OpenMetrics 1.0, read strictly: anything that a scraper may refuse is an error here.

use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// The metrics of one name.
#[derive(Debug)]
pub struct Family {
    pub kind: Kind,
    /// By name and labels, which are in the order of their names: `a_total{b="c",d="e"}`.
    pub samples: BTreeMap<String, f64>,
}

/// All metrics of a text, by name.
///
/// # Errors
/// The line that breaks a rule, and the rule.
pub fn parse(text: &str) -> Result<BTreeMap<String, Family>, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("it does not end in # EOF and a line feed")?;
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut reader = Reader::default();
    for line in body.split_terminator('\n') {
        reader.line(line, &mut families).map_err(|rule| format!("{line:?}: {rule}"))?;
    }
    for (name, family) in &families {
        if family.kind == Kind::Histogram {
            histogram(name, family).map_err(|rule| format!("{name}: {rule}"))?;
        }
    }
    Ok(families)
}

/// The family of the current lines.
#[derive(Default)]
struct Reader {
    name: String,
    /// The lines of its head so far: HELP, TYPE, UNIT.
    told: Vec<String>,
    has_samples: bool,
}

impl Reader {
    fn line(&mut self, line: &str, families: &mut BTreeMap<String, Family>) -> Result<(), String> {
        match line.strip_prefix("# ") {
            Some(head) => self.head(head, families),
            None => self.sample(line, families),
        }
    }

    fn head(&mut self, head: &str, families: &mut BTreeMap<String, Family>) -> Result<(), String> {
        let mut words = head.splitn(3, ' ');
        let (keyword, name, rest) = (
            words.next().unwrap_or_default(),
            words.next().ok_or("no name")?,
            words.next().ok_or("no value")?,
        );
        if name != self.name {
            if families.contains_key(name) {
                return Err("its family comes twice".into());
            }
            *self = Reader { name: name.to_owned(), ..Reader::default() };
        }
        if self.has_samples || self.told.iter().any(|told| told == keyword) {
            return Err(format!("{keyword} comes twice, or behind a sample"));
        }
        self.told.push(keyword.to_owned());
        if !is_name(name) {
            return Err(format!("{name} is no name"));
        }
        match keyword {
            "HELP" => Ok(()),
            "UNIT" if name.ends_with(&format!("_{rest}")) => Ok(()),
            "UNIT" => Err("the name does not end in the unit".into()),
            "TYPE" => {
                let kind = match rest {
                    "counter" if name.ends_with("_total") => return Err("_total is the sample's".into()),
                    "counter" => Kind::Counter,
                    "gauge" => Kind::Gauge,
                    "histogram" => Kind::Histogram,
                    _ => return Err(format!("{rest} is no type of ours")),
                };
                families.insert(name.to_owned(), Family { kind, samples: BTreeMap::new() });
                Ok(())
            }
            _ => Err(format!("{keyword} is no keyword")),
        }
    }

    fn sample(&mut self, line: &str, families: &mut BTreeMap<String, Family>) -> Result<(), String> {
        let (series, value) = line.rsplit_once(' ').ok_or("no value")?;
        let value = match value {
            "+Inf" => return Err("no metric of ours is without end".into()),
            value => value.parse::<f64>().map_err(|error| error.to_string())?,
        };
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels_of(labels.strip_suffix('}').ok_or("no }")?)?),
            None => (series, Vec::new()),
        };
        self.has_samples = true;
        let family = families.get_mut(&self.name).ok_or("no TYPE before it")?;
        let suffix = name.strip_prefix(&self.name).ok_or("it is of another family")?;
        let fits = match family.kind {
            Kind::Counter => suffix == "_total",
            Kind::Gauge => suffix.is_empty(),
            Kind::Histogram => ["_bucket", "_count", "_sum"].contains(&suffix),
        };
        if !fits {
            return Err(format!("{suffix} is no end for this type"));
        }
        if family.kind != Kind::Gauge && !(value >= 0.0 && value.is_finite()) {
            return Err("it is below 0".into());
        }
        let mut key = name.to_owned();
        if !labels.is_empty() {
            let labels: Vec<String> =
                labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
            key = format!("{name}{{{}}}", labels.join(","));
        }
        match family.samples.insert(key, value) {
            Some(_) => Err("it comes twice".into()),
            None => Ok(()),
        }
    }
}

fn is_name(name: &str) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(is_first) && name.chars().all(|c| is_first(c) || c.is_ascii_digit())
}

/// The labels, in the order of their names, of which none may occur twice.
fn labels_of(text: &str) -> Result<Vec<(String, String)>, String> {
    let (mut labels, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let (name, behind) = rest.split_once("=\"").ok_or("a label without a value")?;
        if !is_name(name) {
            return Err(format!("{name} is no name of a label"));
        }
        let mut escaped = false;
        let is_end = |c: char| {
            let is_end = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            is_end
        };
        let end = behind.find(is_end).ok_or("a value without an end")?;
        labels.push((name.to_owned(), behind[..end].to_owned()));
        rest = match &behind[end + 1..] {
            "" => "",
            more => {
                more.strip_prefix(',').filter(|more| !more.is_empty()).ok_or("no label behind a comma")?
            }
        };
    }
    labels.sort();
    match labels.windows(2).any(|two| two[0].0 == two[1].0) {
        true => Err("a label comes twice".into()),
        false => Ok(labels),
    }
}

/// Checks each of its series: those with the same labels except that of the bucket.
fn histogram(name: &str, family: &Family) -> Result<(), String> {
    let counts = family.samples.keys().filter_map(|series| series.strip_prefix(&format!("{name}_count")));
    let labels: Vec<&str> = counts.collect();
    if labels.is_empty() {
        return Err("no count".into());
    }
    let mut read = 0;
    for labels in labels {
        read += 2 + of_labels(name, labels, family)?;
    }
    match family.samples.len() - read {
        0 => Ok(()),
        more => Err(format!("{more} lines are of no series with a count")),
    }
}

/// Checks that its buckets rise, and the last one has no end, and equals the count. Returns how
/// many there are.
fn of_labels(name: &str, labels: &str, family: &Family) -> Result<usize, String> {
    let of = |what: &str| family.samples.get(&format!("{name}_{what}{labels}"));
    let (count, sum) = (of("count").ok_or("no count")?, of("sum").ok_or("no sum")?);
    let mut buckets = Vec::new();
    for (series, value) in &family.samples {
        let Some(its) = series.strip_prefix(&format!("{name}_bucket{{")) else { continue };
        let mut its = labels_of(its.strip_suffix('}').ok_or("no }")?)?;
        let end = its.iter().position(|(label, _)| label == "le").ok_or("a bucket without an end")?;
        let (_, end) = its.remove(end);
        let others: Vec<String> = its.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        let others = if others.is_empty() { String::new() } else { format!("{{{}}}", others.join(",")) };
        if others != labels {
            continue;
        }
        let end = match &*end {
            "+Inf" => f64::INFINITY,
            end => end.parse::<f64>().map_err(|error| error.to_string())?,
        };
        buckets.push((end, *value));
    }
    buckets.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    if buckets.last() != Some(&(f64::INFINITY, *count)) {
        return Err(format!("the last bucket is {:?}, and the count {count}", buckets.last()));
    }
    if !buckets.is_sorted_by(|(_, one), (_, other)| one <= other) {
        return Err("a bucket has fewer than the one before".into());
    }
    match *count == 0.0 && *sum != 0.0 {
        true => Err("there is a sum of nothing".into()),
        false => Ok(buckets.len()),
    }
}
