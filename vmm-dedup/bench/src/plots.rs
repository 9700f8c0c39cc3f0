//! Plots of a bench's figures, where `--plot` asks for them.

use std::fs;
use std::path::{Path, PathBuf};
use vmm_dedup_host::{Failure, note};
use vmm_dedup_plot::{Bars, Lines};

/// A plot, and the name of its file without `.svg`.
pub(crate) struct Plot {
    name: String,
    svg: String,
}

impl Plot {
    /// Bars of figures that have a group and a series each; both stand in the order in which they come first.
    pub(crate) fn bars(
        name: &str,
        title: &str,
        unit: &str,
        figures: impl IntoIterator<Item = (String, String, f64)>,
    ) -> Self {
        let mut bars = Bars {
            title: title.into(),
            unit: unit.into(),
            groups: Vec::new(),
            series: Vec::new(),
        };
        for (group, series, figure) in figures {
            let group = place(&mut bars.groups, |known| *known == group, || group.clone());
            let at = place(
                &mut bars.series,
                |(known, _)| *known == series,
                || (series.clone(), Vec::new()),
            );
            let figures = &mut bars.series[at].1;
            // What there is no figure for has no bar.
            figures.resize(figures.len().max(group + 1), f64::NAN);
            figures[group] = figure;
        }
        Self {
            name: name.into(),
            svg: bars.svg(),
        }
    }

    /// Lines, each of a series.
    pub(crate) fn lines(
        name: &str,
        title: &str,
        (along, unit): (&str, &str),
        series: Vec<(String, Vec<(f64, f64)>)>,
    ) -> Self {
        let lines = Lines {
            title: title.into(),
            along: along.into(),
            unit: unit.into(),
            series,
        };
        Self {
            name: name.into(),
            svg: lines.svg(),
        }
    }
}

/// Where an item is, after it was put at the end if it was not there.
fn place<T>(items: &mut Vec<T>, is: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> usize {
    items.iter().position(is).unwrap_or_else(|| {
        items.push(new());
        items.len() - 1
    })
}

/// The folder for plots, if they are wanted.
#[derive(Clone)]
pub(crate) struct Plots(Option<PathBuf>);

impl Plots {
    /// Makes the folder, and finds out that it can be written to: a bench takes minutes.
    pub(crate) fn into(folder: Option<&Path>) -> Result<Self, Failure> {
        if let Some(folder) = folder {
            let trial = folder.join(".vmm-dedup-plot");
            fs::create_dir_all(folder)
                .and_then(|()| fs::write(&trial, ""))
                .and_then(|()| fs::remove_file(&trial))
                .map_err(|e| Failure::new(format!("cannot write plots to {}: {e}", folder.display())))?;
        }
        Ok(Self(folder.map(Path::to_owned)))
    }

    /// Writes plots. Figures have been printed by then, so that none is lost.
    pub(crate) fn write(&self, plots: impl FnOnce() -> Vec<Plot>) -> Result<(), Failure> {
        let Some(folder) = &self.0 else { return Ok(()) };
        for plot in plots() {
            let path = folder.join(format!("{}.svg", plot.name));
            fs::write(&path, plot.svg)
                .map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))?;
            note!("plot: {}", path.display());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_stand_in_their_groups_whatever_is_missing() {
        let figures = [("a", "x", 1.0), ("b", "y", 2.0), ("b", "x", 4.0)];
        let plot = Plot::bars(
            "n",
            "t",
            "u",
            figures.map(|(g, s, f)| (g.to_owned(), s.to_owned(), f)),
        );
        let expected = Bars {
            title: "t".into(),
            unit: "u".into(),
            groups: vec!["a".into(), "b".into()],
            series: vec![("x".into(), vec![1.0, 4.0]), ("y".into(), vec![f64::NAN, 2.0])],
        };
        assert_eq!(plot.svg, expected.svg());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_found_out_before_the_bench() {
        let refused = Plots::into(Some(Path::new("/proc/no/folder")));
        let said = refused
            .err()
            .map(|failure| failure.to_string())
            .unwrap_or_default();
        assert!(said.contains("cannot write plots to /proc/no/folder"), "{said}");
    }
}
