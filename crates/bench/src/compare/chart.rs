//! Bar charts of servers, as SVG.

use std::io;
use std::path::Path;

use plotters::prelude::*;

const WIDTH: u32 = 720;
const BAR: u32 = 26;
const HEAD: u32 = 40;
/// Room for names and for figures.
const NAMES: i32 = 150;
const FIGURES: i32 = 70;

/// Draws the CPU time of a request with each server; the last of `bars` has the most. Draws nothing
/// if nothing was measured.
pub(super) fn draw(path: &Path, about: &str, bars: &[(&str, f64)]) -> io::Result<()> {
    let Some((_, most)) = bars.last() else { return Ok(()) };
    let height = HEAD + BAR * bars.len() as u32 + 8;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    let drawn = (|| -> Result<(), DrawingAreaErrorKind<_>> {
        root.fill(&WHITE)?;
        let title = format!("{about}: server CPU µs for a request (less is better)");
        root.draw(&Text::new(title, (8, 12), ("sans-serif", 14)))?;
        let room = f64::from(WIDTH as i32 - NAMES - FIGURES);
        for (at, (name, cpu_us)) in bars.iter().enumerate() {
            let top = (HEAD + BAR * at as u32) as i32;
            let ours = name.starts_with("ringserve");
            let color = if ours { RGBColor(32, 98, 166) } else { RGBColor(170, 170, 170) };
            let end = NAMES + (room * cpu_us / most) as i32;
            root.draw(&Text::new(name.to_string(), (8, top + 5), ("sans-serif", 13)))?;
            root.draw(&Rectangle::new([(NAMES, top + 2), (end, top + BAR as i32 - 4)], color.filled()))?;
            root.draw(&Text::new(format!("{cpu_us:.3}"), (end + 6, top + 5), ("sans-serif", 13)))?;
        }
        root.present()
    })();
    drawn.map_err(io::Error::other)
}
