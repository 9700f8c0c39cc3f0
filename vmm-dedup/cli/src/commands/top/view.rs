//! Drawing. All of it fits 80 columns; what does not fit 24 lines is scrolled.

use super::sample::{Column, Host, Row, Sample, rows};
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table};

/// Titles and widths, in the order of [`Column::ALL`]; 80 columns with the spaces between.
const COLUMNS: [(&str, u16); 8] = [
    ("VM", 16),
    ("STATE", 13),
    ("SAVED", 9),
    ("SHARED", 9),
    ("MERGE/S", 8),
    ("BREAK/S", 8),
    ("CPU%", 5),
    ("WAIT", 5),
];

/// What is on the screen.
#[derive(Debug)]
pub(crate) struct View {
    store: String,
    now: Sample,
    host: Host,
    rows: Vec<Row>,
    sort: Column,
    reversed: bool,
    /// First row shown.
    top: usize,
}

impl View {
    /// `store`: where it is, for the title.
    pub(crate) fn new(store: String, first: Sample) -> Self {
        let (host, rows) = rows(None, &first);
        let mut view = Self {
            store,
            now: first,
            host,
            rows,
            sort: Column::Saved,
            reversed: false,
            top: 0,
        };
        view.sort();
        view
    }

    /// Takes another look.
    pub(crate) fn update(&mut self, sample: Sample) {
        (self.host, self.rows) = rows(Some(&self.now), &sample);
        self.now = sample;
        self.sort();
    }

    /// A key that does not quit.
    pub(crate) fn press(&mut self, key: KeyCode) {
        match key {
            KeyCode::Left => self.sort = self.sort.moved(-1),
            KeyCode::Right => self.sort = self.sort.moved(1),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Up => self.top = self.top.saturating_sub(1),
            KeyCode::Down => self.top += 1,
            KeyCode::PageUp => self.top = self.top.saturating_sub(10),
            KeyCode::PageDown => self.top += 10,
            KeyCode::Home => self.top = 0,
            _ => {}
        }
        self.sort();
    }

    fn sort(&mut self) {
        self.sort.sort(&mut self.rows, self.reversed);
    }

    pub(crate) fn draw(&mut self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([Constraint::Length(4), Constraint::Min(1), Constraint::Length(1)])
            .split(frame.area());
        let shown = usize::from(areas[1].height.saturating_sub(1));
        self.top = self.top.min(self.rows.len().saturating_sub(shown));
        frame.render_widget(Paragraph::new(self.head()), areas[0]);
        frame.render_widget(self.table(shown), areas[1]);
        let hidden = self.rows.len().saturating_sub(self.top + shown);
        let more = if hidden > 0 {
            format!("{hidden} more below  ")
        } else {
            String::new()
        };
        let keys = format!("{more}q quit  left/right sort by  r reverse  up/down scroll");
        frame.render_widget(Line::from(keys).dim(), areas[2]);
    }

    fn head(&self) -> Vec<Line<'static>> {
        let host = &self.host;
        let saved = Span::raw(bytes(host.saved_net)).bold();
        let saved = if host.saved_net < 0 { saved.red() } else { saved };
        let refused = match host.refused {
            0 => String::new(),
            n => format!(", {n} refused"),
        };
        let pressure = match self.now.pressure {
            Some(p) => format!(
                "pressure, 10 s  memory {:.1} % some {:.1} % full   cpu {:.1} % some",
                p.memory_some, p.memory_full, p.cpu_some
            ),
            None => "pressure  not told by this kernel".into(),
        };
        let waits = Span::raw(format!("   waits {:.0}/s", host.waits));
        let waits = if host.waits > 0.0 { waits.red() } else { waits };
        vec![
            Line::from(format!(
                "vmm-dedup  {} VMs{refused}  {}",
                host.services, self.store
            ))
            .bold(),
            Line::from(vec![
                Span::raw("saved net "),
                saved,
                Span::raw(format!(
                    "   pages shared {}, sharing {}",
                    host.pages_shared, host.pages_sharing
                )),
            ]),
            Line::from(vec![
                Span::raw(format!(
                    "merges {:.0}/s   breaks {:.0}/s   cpu {:.2} cores, store {:.2}",
                    host.merges, host.breaks, host.cpu, host.store_cpu
                )),
                waits,
            ]),
            Line::from(pressure),
        ]
    }

    fn table(&self, shown: usize) -> Table<'static> {
        let arrow = |title: &str, column: Column| match (column == self.sort, self.reversed) {
            (false, _) => title.to_owned(),
            (true, false) => format!("{title}*"),
            (true, true) => format!("{title}^"),
        };
        let titles = Column::ALL
            .into_iter()
            .zip(COLUMNS)
            .map(|(column, (title, width))| {
                let style = if column == self.sort {
                    Style::new().add_modifier(Modifier::BOLD)
                } else {
                    Style::new()
                };
                cell(column, arrow(title, column), width).style(style)
            });
        let head = TableRow::new(titles).style(Style::new().add_modifier(Modifier::REVERSED));
        let rows = self.rows.iter().skip(self.top).take(shown).map(|row| {
            let texts = [
                row.name.clone(),
                row.state.clone(),
                bytes(row.saved_net),
                bytes(i64::try_from(row.shared).unwrap_or(i64::MAX)),
                format!("{:.0}", row.merges),
                format!("{:.0}", row.breaks),
                format!("{:.1}", row.cpu * 100.0),
                format!("{:.0}", row.waits),
            ];
            let cells = Column::ALL.into_iter().zip(COLUMNS).zip(texts);
            TableRow::new(cells.map(|((column, (_, width)), text)| cell(column, text, width)))
                .style(style_of(row))
        });
        // A wide terminal has room for long names.
        let mut widths = COLUMNS.map(|(_, width)| Constraint::Length(width));
        widths[0] = Constraint::Min(COLUMNS[0].1);
        Table::new(rows, widths).header(head).column_spacing(1)
    }
}

/// Texts to the left, cut; numbers to the right.
fn cell(column: Column, text: String, width: u16) -> Cell<'static> {
    match column {
        Column::Name | Column::State => Cell::new(text),
        _ => Cell::new(format!("{text:>width$}", width = usize::from(width))),
    }
}

fn style_of(row: &Row) -> Style {
    match row.state.as_str() {
        "running" if row.waits > 0.0 => Style::new().fg(Color::Red),
        "running" if row.saved_net < 0 => Style::new().fg(Color::Yellow),
        "running" => Style::new(),
        _ => Style::new().fg(Color::DarkGray),
    }
}

/// At most nine characters.
fn bytes(bytes: i64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value.abs() >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value.abs() < 9.95 { 1 } else { 0 };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::super::pressure::Pressure;
    use super::super::sample::tests::{refused, sample, vm};
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::{Duration, Instant};

    fn screen(view: &mut View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        terminal.draw(|frame| view.draw(frame)).expect("it draws");
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn view() -> View {
        let start = Instant::now();
        let vms = vec![vm("web", 1000, 0), vm("db", 5000, 10), refused("gpu")];
        let mut view = View::new("/run/vmm-dedup/store.sock".into(), sample(start, vms));
        let vms = vec![vm("web", 1000, 0), vm("db", 5000, 70), refused("gpu")];
        let mut now = sample(start + Duration::from_secs(2), vms);
        now.store.saved_net_bytes = (-5i64 << 20).cast_unsigned();
        now.pressure = Some(Pressure {
            memory_some: 1.5,
            memory_full: 0.0,
            cpu_some: 99.9,
        });
        view.update(now);
        view
    }

    #[test]
    fn all_of_it_fits_80_by_24() {
        let lines = screen(&mut view(), 80, 24);
        assert_eq!(lines[0], "vmm-dedup  2 VMs, 1 refused  /run/vmm-dedup/store.sock");
        assert_eq!(lines[1], "saved net -5.0 MiB   pages shared 0, sharing 0");
        assert_eq!(
            lines[2],
            "merges 0/s   breaks 30/s   cpu 0.03 cores, store 0.00   waits 0/s"
        );
        assert_eq!(
            lines[3],
            "pressure, 10 s  memory 1.5 % some 0.0 % full   cpu 99.9 % some"
        );
        assert_eq!(
            lines[4],
            "VM               STATE            SAVED*    SHARED  MERGE/S  BREAK/S  CPU%  WAIT"
        );
        assert_eq!(
            lines[5],
            "db               running          20 MiB    20 MiB        0       30   3.0     0"
        );
        assert_eq!(
            lines[7],
            "gpu              vfio            0.0 KiB   0.0 KiB        0        0   0.0     0"
        );
        assert_eq!(lines[23], "q quit  left/right sort by  r reverse  up/down scroll");
    }

    #[test]
    fn columns_take_exactly_80() {
        let widths: u16 = COLUMNS.iter().map(|(_, width)| width).sum();
        assert_eq!(usize::from(widths) + COLUMNS.len() - 1, 80);
    }

    #[test]
    fn keys_sort_and_reverse() {
        let mut view = view();
        let first = |view: &mut View| screen(view, 80, 24)[5].split(' ').next().map(str::to_owned);
        view.press(KeyCode::Char('r'));
        assert_eq!(first(&mut view).as_deref(), Some("gpu"));
        view.press(KeyCode::Left);
        view.press(KeyCode::Left);
        assert_eq!(first(&mut view).as_deref(), Some("web"));
        view.press(KeyCode::Char('r'));
        assert_eq!(first(&mut view).as_deref(), Some("db"));
    }

    #[test]
    fn many_vms_are_scrolled_and_small_terminals_bear_it() {
        let vms = (0..100).map(|n| vm(&format!("vm{n:03}"), n, 0)).collect();
        let mut view = View::new("s".into(), sample(Instant::now(), vms));
        let lines = screen(&mut view, 80, 24);
        assert!(
            lines[5].starts_with("vm099") && lines[22].starts_with("vm082"),
            "{lines:?}"
        );
        assert!(lines[23].starts_with("82 more below"));
        (0..30).for_each(|_| view.press(KeyCode::PageDown));
        let lines = screen(&mut view, 80, 24);
        assert!(
            lines[22].starts_with("vm000") && lines[23].starts_with('q'),
            "{lines:?}"
        );
        for (width, height) in [(1, 1), (20, 3), (300, 6)] {
            screen(&mut view, width, height);
        }
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(bytes(0), "0.0 KiB");
        assert_eq!(bytes(1023 << 10), "1.0 MiB");
        assert_eq!(bytes(-20 << 30), "-20 GiB");
        let texts = [i64::MAX, i64::MIN, 1 << 39, 999 << 20].map(bytes);
        assert!(texts.iter().all(|t| t.len() <= 9), "{texts:?}");
    }
}
