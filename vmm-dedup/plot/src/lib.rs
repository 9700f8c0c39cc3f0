//! Plots of figures as SVG: bars side by side ([`Bars`]), and lines ([`Lines`]).
//!
//! A plot is a text, one SVG document that refers to nothing outside. What cannot be drawn (figures that are missing or not finite,
//! plots without any) is left out, and nothing is invented in its place: a plot without figures says so.

mod bars;
mod lines;
mod scale;

pub use bars::Bars;
pub use lines::Lines;

use plotters::backend::SVGBackend;
use plotters::style::RGBColor;

/// Width and height of each plot, pixels.
pub const SIZE: (u32, u32) = (900, 420);

/// Colours of series, told apart by most eyes (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(60, 60, 60),
];

const FONT: &str = "sans-serif";

fn colour(series: usize) -> RGBColor {
    COLOURS[series % COLOURS.len()]
}

/// What is drawn. In memory that does not fail: an error is the plotting library's own, and shows where the plot was to be.
fn document<E: std::fmt::Display>(draw: impl FnOnce(SVGBackend<'_>) -> Result<(), E>) -> String {
    let mut text = String::new();
    match draw(SVGBackend::with_string(&mut text, SIZE)) {
        Ok(()) => text,
        Err(error) => format!(
            "<svg width=\"{}\" height=\"{}\" xmlns=\"http://www.w3.org/2000/svg\"><text x=\"10\" y=\"30\">cannot be drawn: {}</text></svg>\n",
            SIZE.0,
            SIZE.1,
            escaped(&error.to_string())
        ),
    }
}

/// A text as it stands in XML and HTML, also in attributes.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Of control characters XML has but these.
            c if c.is_control() && !matches!(c, '\t' | '\n') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
