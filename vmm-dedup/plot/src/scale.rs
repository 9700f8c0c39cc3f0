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
    let room = match high - low {
        0.0 => 1.0,
        span => span * 0.08,
    };
    let below = if low < 0.0 { low - room } else { 0.0 };
    Some(below..high + room * (1.0 + 0.75 * legend as f64))
}
