//! Bars side by side.

use crate::scale::{range, short};
use crate::{FONT, colour, document};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Groups of bars, a bar for each series in each group, with its figure above.
#[derive(Clone, Debug, PartialEq)]
pub struct Bars {
    /// What is shown.
    pub title: String,
    /// The unit of the figures.
    pub unit: String,
    /// Names of the groups.
    pub groups: Vec<String>,
    /// Name and figures, one for each group; one that is not finite has no bar.
    pub series: Vec<(String, Vec<f64>)>,
}

impl Bars {
    /// The plot.
    #[must_use]
    pub fn svg(&self) -> String {
        document(|backend| self.draw(backend))
    }

    fn draw(&self, backend: SVGBackend<'_>) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let area = backend.into_drawing_area();
        area.fill(&WHITE)?;
        let figures = self
            .series
            .iter()
            .flat_map(|(_, figures)| figures.iter().take(self.groups.len()).copied());
        let Some(range) = range(figures, self.series.len()) else {
            let title = format!("{}: no figures", self.title);
            area.titled(&title, (FONT, 18))?;
            return area.present();
        };
        let groups = self.groups.len();
        let title = format!("{} ({})", self.title, self.unit);
        let mut chart = ChartBuilder::on(&area)
            .caption(title, (FONT, 18))
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..groups as f64, range)?;
        let name = |x: &f64| {
            let at = self.groups.iter().enumerate();
            // A label stands in the middle of its group.
            let mut at = at.filter(|(i, _)| (*x - *i as f64 - 0.5).abs() < 0.01);
            at.next().map_or_else(String::new, |(_, name)| name.clone())
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(WHITE)
            .x_labels(groups * 2 + 1)
            .x_label_formatter(&name)
            .y_label_formatter(&|y| short(*y))
            .label_style((FONT, 13))
            .draw()?;
        let width = 0.8 / self.series.len() as f64;
        for (at, (name, figures)) in self.series.iter().enumerate() {
            let bars = figures.iter().take(groups).enumerate();
            let bars: Vec<(f64, f64)> = bars
                .filter(|(_, figure)| figure.is_finite())
                .map(|(group, figure)| (group as f64 + 0.1 + width * at as f64, *figure))
                .collect();
            let rectangles = bars.iter().map(|(left, figure)| {
                Rectangle::new(
                    [(*left, 0.0), (left + width * 0.92, *figure)],
                    colour(at).filled(),
                )
            });
            chart
                .draw_series(rectangles)?
                .label(name.clone())
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour(at).filled()));
            let above = (FONT, 12).into_font().into_text_style(&area);
            let above = above.pos(Pos::new(HPos::Center, VPos::Bottom));
            chart.draw_series(bars.iter().map(|(left, figure)| {
                Text::new(
                    short(*figure),
                    (left + width * 0.46, figure.max(0.0)),
                    above.clone(),
                )
            }))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .label_font((FONT, 13))
            .draw()?;
        area.present()
    }
}
