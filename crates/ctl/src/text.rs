//! Figures as text.

/// Bytes: `512`, `16K`, `3.2M`.
pub fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["", "K", "M", "G", "T", "P"])
}

/// A count or a rate: `512`, `16k`, `3.2M`.
pub fn count(count: f64) -> String {
    scaled(count, 1000.0, &["", "k", "M", "G", "T", "P"])
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (value.max(0.0), 0);
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    match unit {
        0 => format!("{value:.0}"),
        // Rounded down, so that it is never the next unit.
        _ if value < 10.0 => format!("{:.1}{}", (value * 10.0).floor() / 10.0, units[unit]),
        _ => format!("{:.0}{}", value.floor(), units[unit]),
    }
}

/// A time: `340 µs`, `1.2 ms`, `12 s`, `3 m 20 s`, `2 d 4 h`.
pub fn seconds(seconds: f64) -> String {
    let seconds = if seconds.is_finite() { seconds.max(0.0) } else { 0.0 };
    let small = |value: f64, unit: &str| match value < 10.0 {
        true => format!("{value:.1} {unit}"),
        false => format!("{value:.0} {unit}"),
    };
    let whole = seconds as u64;
    match whole {
        0 if seconds == 0.0 => "0".to_owned(),
        0 if seconds < 0.001 => format!("{:.0} µs", seconds * 1e6),
        0 => small(seconds * 1e3, "ms"),
        1..60 => small(seconds, "s"),
        60..3600 => format!("{} m {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} m", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// A share of one: `61 %`.
pub fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Formats rows below a header, each column as wide as its widest cell. Columns whose header ends
/// with a space are right-aligned, for numbers.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width_of = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.max().unwrap_or(0).max(header[column].trim_end().chars().count())
    };
    let widths: Vec<usize> = (0..header.len()).map(width_of).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((cell, width), name) in cells.zip(&widths).zip(header) {
            let space = " ".repeat(width - cell.chars().count());
            line +=
                &if name.ends_with(' ') { format!("{space}{cell}  ") } else { format!("{cell}{space}  ") };
        }
        line.trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut header.iter().map(|name| name.trim_end()));
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Text of a peer or a program, without characters that move the cursor.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Seconds of an option, 0.1 to 3600.
///
/// # Errors
/// The allowed values, if it is something else.
pub fn read_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds, 0.1 to 3600".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let all = [0, 1023, 1024, 1536, 10 << 10, (1 << 20) - 1, 5 << 40].map(bytes);
        assert_eq!(all, ["0", "1023", "1.0K", "1.5K", "10K", "1023K", "5.0T"]);
        let all = [0.0, 999.0, 1000.0, 9999.0, 12_345.0, 1e6].map(count);
        assert_eq!(all, ["0", "999", "1.0k", "9.9k", "12k", "1.0M"]);
        let all = [0.0, 0.000_34, 0.0012, 0.25, 1.5, 59.9, 200.0, 7300.0, 1e6, f64::NAN, -1.0].map(seconds);
        assert_eq!(
            all,
            [
                "0",
                "340 µs",
                "1.2 ms",
                "250 ms",
                "1.5 s",
                "60 s",
                "3 m 20 s",
                "2 h 1 m",
                "11 d 13 h",
                "0",
                "0"
            ]
        );
    }

    #[test]
    fn columns_are_as_wide_as_they_need() {
        let rows = [vec!["0.1.2".into(), "7".into()], vec!["a".into(), "1000".into()]];
        assert_eq!(table(&["id", "bytes "], &rows), "id     bytes\n0.1.2      7\na       1000\n");
    }

    #[test]
    fn text_of_others_moves_no_cursor() {
        assert_eq!(plain("a\u{1b}[2Jb\n"), "a?[2Jb?");
    }
}
