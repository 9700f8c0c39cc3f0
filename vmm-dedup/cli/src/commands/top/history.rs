//! What the host's figures were since `top` began, and plots of that.

use super::sample::Host;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;
use vmm_dedup_plot::Lines;

/// Looks that are kept. With more, every second of the older and the newer ones goes, so that a line of days stays a line.
const MOST: usize = 4096;

/// How often plots are written while `top` runs: whoever is killed leaves those.
const EVERY: Duration = Duration::from_secs(60);

/// What is drawn of a look.
type Figure = fn(&Host) -> f64;

/// What is plotted of the host's figures.
struct Plot {
    file: &'static str,
    title: &'static str,
    unit: &'static str,
    series: [(&'static str, Figure); 2],
}

const MIB: f64 = (1 << 20) as f64;

static PLOTS: [Plot; 3] = [
    Plot {
        file: "top-memory.svg",
        title: "What is saved, and what the store holds",
        unit: "MiB",
        series: [
            ("saved net", |host| host.saved_net as f64 / MIB),
            ("store", |host| host.resident_bytes as f64 / MIB),
        ],
    },
    Plot {
        file: "top-pages.svg",
        title: "Pages merged, and shared pages written",
        unit: "pages a second",
        series: [("merges", |host| host.merges), ("breaks", |host| host.breaks)],
    },
    Plot {
        file: "top-cpu.svg",
        title: "CPU time of dedup",
        unit: "cores",
        series: [("services", |host| host.cpu), ("stores", |host| host.store_cpu)],
    },
];

/// The host's figures over time.
#[derive(Debug)]
pub(crate) struct History {
    folder: PathBuf,
    start: Instant,
    written: Instant,
    looks: Vec<(f64, Host)>,
}

impl History {
    /// Nothing so far. Finds out that plots can be written.
    pub(crate) fn into(folder: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(folder).map_err(|e| unwritten(folder, &e))?;
        let now = Instant::now();
        let history = Self {
            folder: folder.to_owned(),
            start: now,
            written: now,
            looks: Vec::new(),
        };
        history.write()?;
        Ok(history)
    }

    /// Takes what was seen.
    pub(crate) fn add(&mut self, at: Instant, host: Host) {
        if self.looks.len() >= MOST {
            let mut nth = 0usize;
            self.looks.retain(|_| {
                nth += 1;
                nth % 2 == 1
            });
        }
        let seconds = at.saturating_duration_since(self.start).as_secs_f64();
        self.looks.push((seconds, host));
    }

    /// Writes the plots if it is time. What cannot be written now is told at the end.
    pub(crate) fn write_now_and_then(&mut self) {
        if self.written.elapsed() >= EVERY {
            self.written = Instant::now();
            let _ = self.write();
        }
    }

    /// Writes the plots.
    pub(crate) fn write(&self) -> Result<(), Failure> {
        for (name, lines) in self.plots() {
            let path = self.folder.join(name);
            // Whoever looks meanwhile sees the old plot or the new one.
            let fresh = path.with_extension("svg.new");
            fs::write(&fresh, lines.svg())
                .and_then(|()| fs::rename(&fresh, &path))
                .map_err(|e| unwritten(&path, &e))?;
        }
        Ok(())
    }

    fn plots(&self) -> impl Iterator<Item = (&'static str, Lines)> {
        // Minutes, where seconds are too many to be read.
        let last = self.looks.last().map_or(0.0, |(seconds, _)| *seconds);
        let (along, unit) = match last {
            s if s < 600.0 => ("seconds", 1.0),
            s if s < 36_000.0 => ("minutes", 60.0),
            _ => ("hours", 3600.0),
        };
        PLOTS.iter().map(move |plot| {
            let points = |figure: Figure| {
                let looks = self.looks.iter();
                looks
                    .map(|(seconds, host)| (seconds / unit, figure(host)))
                    .collect()
            };
            let lines = Lines {
                title: plot.title.into(),
                along: along.into(),
                unit: plot.unit.into(),
                series: plot
                    .series
                    .map(|(name, figure)| (name.into(), points(figure)))
                    .into(),
            };
            (plot.file, lines)
        })
    }
}

fn unwritten(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(saved_mib: i64) -> Host {
        Host {
            saved_net: saved_mib << 20,
            ..Host::default()
        }
    }

    #[test]
    fn plots_have_what_was_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut history = History::into(folder.path()).expect("a folder");
        let at = |seconds| history.start + Duration::from_secs(seconds);
        let looks = [(at(0), 0), (at(60), 10), (at(1200), 20)];
        for (at, saved) in looks {
            history.add(at, host(saved));
        }

        let (_, memory) = history.plots().next().expect("a plot");

        assert_eq!((memory.along.as_str(), memory.unit.as_str()), ("minutes", "MiB"));
        assert_eq!(memory.series[0].1, [(0.0, 0.0), (1.0, 10.0), (20.0, 20.0)]);
        history.write().expect("plots");
        let names = ["top-memory.svg", "top-pages.svg", "top-cpu.svg"];
        assert!(names.iter().all(|name| folder.path().join(name).is_file()));
        assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 3);
    }

    #[test]
    fn a_long_history_gets_coarser_and_not_longer() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut history = History::into(folder.path()).expect("a folder");
        let start = history.start;
        for second in 0..3 * MOST as u64 {
            history.add(start + Duration::from_secs(second), host(1));
        }
        assert!(history.looks.len() <= MOST, "{}", history.looks.len());
        let times: Vec<f64> = history.looks.iter().map(|(seconds, _)| *seconds).collect();
        assert!(times.is_sorted() && times[0] == 0.0 && times[times.len() - 1] == (3 * MOST - 1) as f64);
    }

    #[test]
    fn a_folder_that_cannot_be_is_refused_at_once() {
        let refused = History::into(Path::new("/proc/no/folder"));
        assert!(
            refused.is_err_and(|failure| failure.to_string().contains("cannot write /proc/no/folder")),
            "it is refused"
        );
    }
}
