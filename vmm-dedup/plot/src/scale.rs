//! How numbers stand at an axis.

/// Three digits, and a letter for thousands.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    let (value, letter) = match size {
        s if s >= 1e9 => (value / 1e9, "G"),
        s if s >= 1e6 => (value / 1e6, "M"),
        s if s >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match value.abs() {
        v if v == 0.0 || v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{letter}")
}

/// The height of what is drawn, without title and axis, at the least, pixels.
const HEIGHT: f64 = 330.0;
/// Pixels that a legend takes, with its margins and a figure below it, and for each of its lines.
const LEGEND: f64 = 32.0;
const LEGEND_LINE: f64 = 18.0;
/// Of the height no more is given to the legend.
const MOST_LEGEND: f64 = 0.6;

/// A range that has zero and all figures in it, and room above for a legend of so many lines; `None` if there is no figure.
pub(crate) fn range(figures: impl Iterator<Item = f64>, legend: usize) -> Option<std::ops::Range<f64>> {
    let (low, high) =
        figures
            .filter(|figure| figure.is_finite())
            .fold(None, |range: Option<(f64, f64)>, figure| {
                let (low, high) = range.unwrap_or((0.0, 0.0));
                Some((low.min(figure), high.max(figure)))
            })?;
    // Figures that are all zero have an axis, too.
    let span = match high - low {
        0.0 => 1.0,
        span => span,
    };
    let below = if low < 0.0 { low - span * 0.08 } else { 0.0 };
    let part = ((LEGEND + LEGEND_LINE * legend as f64) / HEIGHT).min(MOST_LEGEND);
    Some(below..high + (high.max(below + span) - below) * part / (1.0 - part))
}
