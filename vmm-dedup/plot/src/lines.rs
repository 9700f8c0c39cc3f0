//! Lines, over time for the most part.

use crate::scale::{range, short};
use crate::{FONT, colour, document};
use plotters::prelude::*;

/// A line for each series. A figure that is not finite makes a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Lines {
    /// What is shown.
    pub title: String,
    /// What is along the axis below, with its unit.
    pub along: String,
    /// The unit of the figures.
    pub unit: String,
    /// Name and points, from left to right.
    pub series: Vec<(String, Vec<(f64, f64)>)>,
}

impl Lines {
    /// The plot.
    #[must_use]
    pub fn svg(&self) -> String {
        document(|backend| self.draw(backend))
    }

    fn draw(&self, backend: SVGBackend<'_>) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let area = backend.into_drawing_area();
        area.fill(&WHITE)?;
        let points = || self.series.iter().flat_map(|(_, points)| points);
        let drawn = || points().filter(|(x, y)| x.is_finite() && y.is_finite());
        let Some(range) = range(drawn().map(|(_, y)| *y), self.series.len()) else {
            let title = format!("{}: no figures", self.title);
            area.titled(&title, (FONT, 18))?;
            return area.present();
        };
        let first = drawn().map(|(x, _)| *x).fold(f64::INFINITY, f64::min);
        let last = drawn().map(|(x, _)| *x).fold(f64::NEG_INFINITY, f64::max);
        // A single point has an axis, too.
        let last = if last > first { last } else { first + 1.0 };
        let title = format!("{} ({})", self.title, self.unit);
        let mut chart = ChartBuilder::on(&area)
            .caption(title, (FONT, 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(first..last, range)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(self.along.clone())
            .x_label_formatter(&|x| short(*x))
            .y_label_formatter(&|y| short(*y))
            .label_style((FONT, 13))
            .draw()?;
        for (at, (name, points)) in self.series.iter().enumerate() {
            let style = colour(at).stroke_width(2);
            let pieces = points.split(|(x, y)| !(x.is_finite() && y.is_finite()));
            for (nth, piece) in pieces.filter(|piece| !piece.is_empty()).enumerate() {
                let drawn = chart.draw_series(LineSeries::new(piece.iter().copied(), style))?;
                if nth == 0 {
                    drawn
                        .label(name.clone())
                        .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], style));
                }
                // A point between two gaps is no line.
                if let [only] = piece {
                    chart.draw_series([Circle::new(*only, 3, colour(at).filled())])?;
                }
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .label_font((FONT, 13))
            .draw()?;
        area.present()
    }
}
