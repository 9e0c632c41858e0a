//! Numbers for people: median, spread, and columns that line up.

use std::fmt::Write;

/// The middle of `values`, or the mean of the two middle ones. `None` without values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        count if count % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// The smallest and the largest of `values`. `None` without values.
pub(crate) fn spread(values: &[f64]) -> Option<(f64, f64)> {
    let smallest = values.iter().copied().min_by(f64::total_cmp)?;
    let largest = values.iter().copied().max_by(f64::total_cmp)?;
    Some((smallest, largest))
}

/// The first quartile of `values`: the result in a machine's quiet moments. `None` without values.
pub(crate) fn first_quartile(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 4).copied()
}

/// A table of text with right-aligned numbers and left-aligned words.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub(crate) fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row, one cell for each heading.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.rows[0].len());
        self.rows.push(cells);
    }

    /// Renders the text, one line for each row. A column is right-aligned if its first cell is a
    /// number.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max();
        let widths: Vec<usize> = (0..columns).filter_map(width).collect();
        let right = |column: usize| {
            let cell = self.rows.get(1).and_then(|row| row[column].chars().next());
            cell.is_some_and(|first| first.is_ascii_digit())
        };
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let gap = if column == 0 { "" } else { "  " };
                let width = widths[column];
                // Writing to a string cannot fail.
                let _ = if right(column) {
                    write!(line, "{gap}{cell:>width$}")
                } else {
                    write!(line, "{gap}{cell:<width$}")
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::{Table, median, spread};

    #[test]
    fn median_is_the_middle_whatever_the_order() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[4.0]), Some(4.0));
        assert_eq!(median(&[9.0, 1.0, 5.0]), Some(5.0));
        assert_eq!(median(&[8.0, 1.0, 3.0, 5.0]), Some(4.0));
    }

    #[test]
    fn spread_is_smallest_and_largest() {
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[2.0, 1.0, 3.0]), Some((1.0, 3.0)));
    }

    #[test]
    fn columns_line_up_numbers_right_and_words_left() {
        let mut table = Table::new(&["connections", "server", "µs"]);
        table.row(vec!["1".into(), "limit-uring".into(), "3.47".into()]);
        table.row(vec!["1000".into(), "tokio".into(), "12.73".into()]);
        let expected = "\
connections  server          µs
          1  limit-uring   3.47
       1000  tokio        12.73
";
        assert_eq!(table.render(), expected);
    }

    #[test]
    fn a_table_without_rows_is_its_headings() {
        assert_eq!(Table::new(&["a", "b"]).render(), "a  b\n");
    }
}
