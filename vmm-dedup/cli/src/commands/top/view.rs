//! Drawing. All of it fits the terminal, from some 40 columns on; what does not fit its lines is scrolled.

use super::columns::{self, Shown};
use super::help;
use super::pressure::Pressure;
use super::sample::{Column, Host, Row, Sample, Silent, Stores};
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table};
use std::time::{Duration, Instant};
use vmm_dedup_host::account;
use vmm_dedup_host::silence::Silence;
use vmm_dedup_host::table::{continued, shortened, wrapped};
use vmm_dedup_host::units::{PAGE_BYTES, count, short, span};

/// What the last line says of keys, each with its rank: the higher, the sooner it is left out.
const KEYS: [(&str, u8); 6] = [
    ("q quit", 0),
    ("left/right sort", 3),
    ("r reverse", 4),
    ("up/down scroll", 5),
    ("/ filter", 2),
    ("h help", 1),
];

/// So many rows of VMs are shown before the head tells all that it could.
const ROWS: usize = 3;

/// Figures that are older have their age beside them.
const OLD: Duration = Duration::from_secs(10);

/// What is on the screen.
#[derive(Debug)]
pub(crate) struct View {
    stores: Stores,
    /// When the stores were looked at.
    at: Instant,
    pressure: Option<Pressure>,
    rows: Vec<Row>,
    sort: Column,
    reversed: bool,
    /// Of a name, in lower case; empty: all are shown.
    filter: String,
    /// Letters go to the filter.
    typing: bool,
    help: bool,
    /// First row shown.
    top: usize,
    /// As they were drawn last.
    columns: Vec<Column>,
}

impl View {
    pub(crate) fn new(first: Sample) -> Self {
        let mut view = Self {
            stores: Stores::default(),
            at: first.at,
            pressure: None,
            rows: Vec::new(),
            sort: Column::Saved,
            reversed: false,
            filter: String::new(),
            typing: false,
            help: false,
            top: 0,
            columns: Column::ALL.into(),
        };
        view.update(first);
        view
    }

    /// Takes another look.
    pub(crate) fn update(&mut self, sample: Sample) {
        (self.at, self.pressure) = (sample.at, sample.pressure);
        self.stores.update(sample);
        self.arrange();
    }

    /// When the stores were looked at.
    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// The host's figures then.
    pub(crate) fn host(&self) -> Host {
        self.stores.host()
    }

    /// Whether letters are text.
    pub(crate) fn takes_text(&self) -> bool {
        self.typing
    }

    /// A key that does not quit.
    pub(crate) fn press(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace if self.typing => drop(self.filter.pop()),
            KeyCode::Char(c) if self.typing => self.filter.extend(c.to_lowercase()),
            KeyCode::Char('/') => {
                self.typing = true;
                self.filter.clear();
            }
            KeyCode::Char('h' | '?') => {
                self.help = !self.help;
                self.top = 0;
            }
            KeyCode::Left => self.sort = self.sort.moved(-1, &self.columns),
            KeyCode::Right => self.sort = self.sort.moved(1, &self.columns),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Up => self.top = self.top.saturating_sub(1),
            KeyCode::Down => self.top += 1,
            KeyCode::PageUp => self.top = self.top.saturating_sub(10),
            KeyCode::PageDown => self.top += 10,
            KeyCode::Home => self.top = 0,
            _ => {}
        }
        self.arrange();
    }

    fn arrange(&mut self) {
        self.rows = self.stores.rows();
        self.rows
            .retain(|row| row.name.to_lowercase().contains(&self.filter));
        self.sort.sort(&mut self.rows, self.reversed);
    }

    pub(crate) fn draw(&mut self, frame: &mut Frame<'_>) {
        let width = frame.area().width;
        let head = match self.help {
            true => Vec::new(),
            false => {
                // Beside the titles of the columns, and the keys.
                let room = usize::from(frame.area().height).saturating_sub(2 + self.rows.len().min(ROWS));
                self.head(width.into(), room)
            }
        };
        let lines = u16::try_from(head.len()).unwrap_or(u16::MAX);
        let areas = Layout::vertical([
            Constraint::Length(lines),
            Constraint::Min(1),
            Constraint::Length(1),
        ])
        .split(frame.area());
        let help = help::lines(width.into());
        let (shown, all) = match self.help {
            true => (areas[1].height.into(), help.len()),
            false => (areas[1].height.saturating_sub(1).into(), self.rows.len()),
        };
        self.top = self.top.min(all.saturating_sub(shown));
        frame.render_widget(Paragraph::new(head), areas[0]);
        if self.help {
            let lines: Vec<Line<'_>> = help.into_iter().skip(self.top).collect();
            frame.render_widget(Paragraph::new(lines), areas[1]);
        } else {
            let longest = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
            let longest = u16::try_from(longest).unwrap_or(u16::MAX);
            let columns = columns::shown(width, self.stores.many(), longest);
            self.columns = columns.iter().map(|shown| shown.column).collect();
            frame.render_widget(self.table(&columns, shown), areas[1]);
        }
        let hidden = all.saturating_sub(self.top + shown);
        frame.render_widget(Line::from(self.foot(hidden, width.into())).dim(), areas[2]);
    }

    /// The last line; `hidden`: lines that are further down.
    fn foot(&self, hidden: usize, width: usize) -> String {
        // Half of the line is enough to tell filters by.
        let filter = shortened(&self.filter, (width / 2).max(1));
        if self.typing {
            return fitting(
                vec![(format!("/{filter}_"), 0), ("(enter: keep, esc: all)".into(), 1)],
                width,
            );
        }
        let mut parts = Vec::new();
        if !filter.is_empty() {
            parts.push((format!("/{filter}"), 0));
        }
        if hidden > 0 {
            parts.push((format!("{hidden} more below"), 0));
        }
        parts.extend(KEYS.map(|(text, rank)| (text.to_owned(), rank)));
        fitting(parts, width)
    }

    /// What is told of the host, in at most `room` lines as far as that can be: rates and pressure go before rows of VMs do.
    fn head(&self, width: usize, room: usize) -> Vec<Line<'static>> {
        let host = &self.stores.host();
        let bytes = |bytes: u64| short(i64::try_from(bytes).unwrap_or(i64::MAX));
        let pages = |pages: u64| bytes(pages.saturating_mul(PAGE_BYTES));
        let saved = Span::raw(format!("saved net {}", short(host.saved_net))).bold();
        let waits = Span::raw(format!("waits {:.0}/s", host.waits));
        let mut memory = vec![
            if host.saved_net < 0 { saved.red() } else { saved },
            Span::raw(format!("kept once {}", pages(host.pages_shared))),
            Span::raw(format!("not again {}", pages(host.pages_sharing))),
            Span::raw(format!(
                "store {} of {}",
                bytes(host.resident_bytes),
                bytes(host.limit_bytes)
            )),
        ];
        if host.answering == 0 {
            memory = vec![Span::raw("saved net: not known, no store answers").bold()];
        }
        let full = self.stores.full();
        memory.extend(full.map(|socket| Span::raw(format!("FULL, see `vmm-dedup doctor`: {socket}")).red()));
        let mut rates = vec![
            Span::raw(format!("merges {:.0}/s", host.merges)),
            Span::raw(format!("breaks {:.0}/s", host.breaks)),
            Span::raw(format!("cpu {:.2} cores, store {:.2}", host.cpu, host.store_cpu)),
            if host.waits > 0.0 { waits.red() } else { waits },
        ];
        if host.answering == 0 {
            rates.clear();
        }
        let pressure = match self.pressure {
            Some(p) => vec![
                Span::raw("pressure, 10 s"),
                Span::raw(format!(
                    "memory {:.1} % some {:.1} % full",
                    p.memory_some, p.memory_full
                )),
                Span::raw(format!("cpu {:.1} % some", p.cpu_some)),
            ],
            None => vec![Span::raw("pressure: not told by this kernel")],
        };
        let title = self.title(host).into_iter().map(|part| Span::raw(part).bold());
        let mut groups = [title.collect(), memory, rates, pressure].map(|group| flow(group, width));
        let silent = self.stores.silent(Instant::now());
        let silent = silent
            .iter()
            .flat_map(|store| wrapped(&trouble(store), width.max(1)))
            .flat_map(|line| continued(&line, width));
        let silent: Vec<Line<'static>> = silent.map(|line| Line::from(line).red()).collect();
        for (least, left) in [(3, 0), (2, 0), (1, 1)] {
            if groups.iter().map(Vec::len).sum::<usize>() + silent.len() > room {
                groups[least].truncate(left);
            }
        }
        groups.into_iter().flatten().chain(silent).collect()
    }

    fn title(&self, host: &Host) -> Vec<String> {
        let refused = match host.refused {
            0 => String::new(),
            n => format!(", {n} refused"),
        };
        let vms = match host.answering {
            0 => "no store answers".to_owned(),
            _ => count(host.services, "VM", "VMs"),
        };
        let mut parts = vec![format!("vmm-dedup   {vms}{refused}"), self.stores.place()];
        match (self.stores.secure(), self.stores.many()) {
            (0, _) => {}
            (_, false) => parts.push("secure".to_owned()),
            (secure, true) => parts.push(format!("{secure} secure")),
        }
        let age = self.at.elapsed();
        if age > OLD {
            parts.push(format!("as of {} ago", span(age)));
        }
        parts
    }

    fn table(&self, columns: &[Shown], shown: usize) -> Table<'static> {
        let title = |shown: &Shown| {
            let (title, ..) = columns::about(shown.column);
            let title = match (shown.column == self.sort, self.reversed) {
                (false, _) => title.to_owned(),
                (true, false) => format!("{title}*"),
                (true, true) => format!("{title}^"),
            };
            let bold = match shown.column == self.sort {
                true => Style::new().add_modifier(Modifier::BOLD),
                false => Style::new(),
            };
            cell(*shown, title).style(bold)
        };
        let head =
            TableRow::new(columns.iter().map(title)).style(Style::new().add_modifier(Modifier::REVERSED));
        let rows = self.rows.iter().skip(self.top).take(shown).map(|row| {
            let cells = columns.iter().map(|shown| cell(*shown, text(row, shown.column)));
            TableRow::new(cells).style(style_of(row))
        });
        let widths = columns.iter().map(|shown| Constraint::Length(shown.width));
        Table::new(rows, widths).header(head).column_spacing(1)
    }
}

/// Parts beside each other, without those of the highest ranks if a line has no room for all.
fn fitting(mut parts: Vec<(String, u8)>, width: usize) -> String {
    loop {
        let texts: Vec<&str> = parts.iter().map(|(text, _)| text.as_str()).collect();
        let line = texts.join("  ");
        let least = parts.iter().map(|(_, rank)| *rank).max().unwrap_or(0);
        if least == 0 || line.chars().count() <= width {
            return line;
        }
        parts.retain(|(_, rank)| *rank != least);
    }
}

/// Phrases beside each other, as many as a line has room for; none is broken, one that is too wide is cut in its middle.
fn flow(phrases: Vec<Span<'static>>, width: usize) -> Vec<Line<'static>> {
    let mut lines: Vec<Line<'static>> = Vec::new();
    for phrase in phrases {
        let phrase = Span::styled(shortened(&phrase.content, width), phrase.style);
        match lines.last_mut() {
            Some(line) if line.width() + 3 + phrase.width() <= width => {
                line.push_span("   ");
                line.push_span(phrase);
            }
            _ => lines.push(Line::from(phrase)),
        }
    }
    lines
}

/// A store that says nothing, and what to do.
fn trouble(store: &Silent<'_>) -> String {
    let what = match store.silence {
        Silence::Gone => format!("is gone; guests go on, nothing merges: `{}`", store.start),
        Silence::Hangs => "does not answer: it hangs or is stopped; guests go on".into(),
        Silence::NoAccess => "may not be asked by this user".into(),
        Silence::Strange => "is no store of this release".into(),
    };
    let at_least = if store.at_least { "at least " } else { "" };
    format!("for {at_least}{} {} {what}", span(store.time), store.socket)
}

fn text(row: &Row, column: Column) -> String {
    match column {
        Column::Name => row.name.clone(),
        Column::Domain => row.domain.clone(),
        Column::State => row.state.clone(),
        Column::Passed => row.passed.map_or("-".into(), span),
        Column::Saved => short(row.saved_net),
        Column::Shared => short(i64::try_from(row.shared).unwrap_or(i64::MAX)),
        Column::Merges => number(row.merges),
        Column::Breaks => number(row.breaks),
        Column::Cpu => format!("{:.1}", row.cpu * 100.0),
        Column::Waits => number(row.waits),
        Column::Budget => account::setting(row.served, row.cpu_percent, " %"),
        Column::Period => account::setting(row.served, row.pass_period_ms, " ms"),
        Column::StopTarget => account::setting(row.served, row.stop_target_us, " us"),
        Column::Reserve => account::setting(row.served, row.reserve_pages, ""),
    }
}

/// A rate in at most five characters.
fn number(rate: f64) -> String {
    match rate {
        0.0..99_999.5 => format!("{rate:.0}"),
        0.0..9_999_500.0 => format!("{:.0}k", rate / 1e3),
        _ => format!("{:.0}M", rate / 1e6),
    }
}

/// Texts to the left, cut; figures to the right, never cut.
fn cell(shown: Shown, text: String) -> Cell<'static> {
    let width = usize::from(shown.width);
    match shown.column {
        Column::Name | Column::Domain | Column::State => Cell::new(shortened(&text, width)),
        _ => Cell::new(format!("{text:>width$}")),
    }
}

fn style_of(row: &Row) -> Style {
    match row.state.as_str() {
        "running" if row.waits > 0.0 => Style::new().fg(Color::Red),
        "running" if row.saved_net < 0 => Style::new().fg(Color::Yellow),
        "running" => Style::new(),
        "frozen" => Style::new().fg(Color::Yellow),
        _ => Style::new().fg(Color::DarkGray),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::tests::{refused, sample, store, vm};
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(view: &mut View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        terminal.draw(|frame| view.draw(frame)).expect("it draws");
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    const SOCKET: &str = "/run/vmm-dedup/store.sock";

    fn view() -> View {
        let start = Instant::now();
        let vms = vec![vm("web", 1000, 0), vm("db", 5000, 10), refused("gpu")];
        let mut view = View::new(sample(start, vec![store(SOCKET, Ok(vms))]));
        let vms = vec![vm("web", 1000, 0), vm("db", 5000, 70), refused("gpu")];
        let mut stores = vec![store(SOCKET, Ok(vms))];
        let (stats, _) = stores[0].account.as_mut().expect("it answers");
        stats.saved_net_bytes = (-5i64 << 20).cast_unsigned();
        (stats.pages_shared, stats.resident_bytes) = (256, 3 << 20);
        stats.slots_max = 1 << 18;
        let mut now = sample(start + Duration::from_secs(2), stores);
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
        assert_eq!(
            lines[0],
            "vmm-dedup   2 VMs, 1 refused   /run/vmm-dedup/store.sock"
        );
        assert_eq!(
            lines[1],
            "saved net -5.0 MiB   kept once 1.0 MiB   not again 0.0 KiB"
        );
        assert_eq!(lines[2], "store 3.0 MiB of 1.0 GiB");
        assert_eq!(
            lines[3],
            "merges 0/s   breaks 30/s   cpu 0.03 cores, store 0.00   waits 0/s"
        );
        assert_eq!(
            lines[4],
            "pressure, 10 s   memory 1.5 % some 0.0 % full   cpu 99.9 % some"
        );
        assert_eq!(
            lines[5],
            "VM           STATE        PASS    SAVED*    SHARED  MERGE/S  BREAK/S  CPU%  WAIT"
        );
        assert_eq!(
            lines[6],
            "db           running         -    20 MiB    20 MiB        0       30   3.0     0"
        );
        assert_eq!(
            lines[8],
            "gpu          vfio            -   0.0 KiB   0.0 KiB        0        0   0.0     0"
        );
        let keys = "q quit  left/right sort  r reverse  up/down scroll  / filter  h help";
        assert_eq!(lines[23], keys);
    }

    #[test]
    fn vms_are_shown_on_small_terminals_too() {
        for (width, height) in [(40, 10), (40, 8), (80, 8), (30, 8)] {
            let lines = screen(&mut view(), width, height);
            let shown = ["db", "web", "gpu"].iter();
            let shown = shown.filter(|name| lines.iter().any(|line| line.starts_with(**name)));
            assert_eq!(shown.count(), 3, "{width}x{height}: {lines:#?}");
            assert!(
                lines.iter().any(|line| line.contains("saved net -5.0 MiB")),
                "{lines:#?}"
            );
        }
    }

    #[test]
    fn no_figure_is_cut_at_any_width() {
        let figures = |width: u16| {
            let lines = screen(&mut view(), width, 40);
            let text = lines.join("\n");
            let sizes: Vec<String> = text
                .split_whitespace()
                .zip(text.split_whitespace().skip(1))
                .filter(|(_, unit)| ["KiB", "MiB"].contains(unit))
                .map(|(number, unit)| format!("{number} {unit}"))
                .collect();
            (text, sizes)
        };
        let (_, all) = figures(200);
        for width in 30..200 {
            let (text, sizes) = figures(width);
            assert!(
                text.contains("saved net -5.0 MiB") && text.contains("20 MiB"),
                "{width}: {text}"
            );
            assert!(sizes.iter().all(|size| all.contains(size)), "{width}: {text}");
        }
    }

    #[test]
    fn a_store_that_is_gone_is_named_with_what_starts_it() {
        let mut view = view();
        view.update(sample(Instant::now(), vec![store(SOCKET, Err(Silence::Gone))]));
        let lines = screen(&mut view, 100, 24);
        let hint = "for 0.0 s /run/vmm-dedup/store.sock is gone; guests go on, nothing merges:";
        assert_eq!(lines[1], "saved net: not known, no store answers");
        assert_eq!(lines[3], hint);
        assert_eq!(
            lines[4],
            "`vmm-dedup store --socket /run/vmm-dedup/store.sock --domain default --max-mib 8 --metrics none`"
        );
        assert!(
            lines[6].starts_with("db") && lines[6].contains("store gone"),
            "{lines:#?}"
        );
    }

    #[test]
    fn settings_are_shown_of_those_that_have_them() {
        let mut managed = vm("web", 1, 0);
        (managed.stats.cpu_percent, managed.stats.reserve_target) = (20, 4711);
        let vms = vec![managed, refused("gpu")];
        let mut view = View::new(sample(Instant::now(), vec![store(SOCKET, Ok(vms))]));
        let lines = screen(&mut view, 200, 24);
        let row = |name: &str| lines.iter().find(|line| line.starts_with(name)).expect(name);
        assert!(lines.iter().any(|line| line.ends_with("RESERVE")), "{lines:#?}");
        assert!(
            row("web").contains("20 %") && row("web").ends_with("4711"),
            "{lines:#?}"
        );
        assert!(
            !row("gpu").contains('%') && row("gpu").ends_with('-'),
            "{lines:#?}"
        );
    }

    #[test]
    fn keys_sort_and_reverse() {
        let mut view = view();
        let first = |view: &mut View| screen(view, 80, 24)[6].split(' ').next().map(str::to_owned);
        view.press(KeyCode::Char('r'));
        assert_eq!(first(&mut view).as_deref(), Some("gpu"));
        (0..3).for_each(|_| view.press(KeyCode::Left));
        assert_eq!(first(&mut view).as_deref(), Some("web"));
        view.press(KeyCode::Char('r'));
        assert_eq!(first(&mut view).as_deref(), Some("db"));
    }

    #[test]
    fn the_stores_that_are_full_are_named_and_the_others_not() {
        let stores = ["/a", "/b", "/c"].map(|socket| {
            let mut store = store(socket, Ok(Vec::new()));
            let (stats, _) = store.account.as_mut().expect("it answers");
            (stats.slots_max, stats.resident_bytes) = (1 << 10, 1 << 20);
            if socket != "/b" {
                (stats.resident_bytes, stats.refused_full_total) = (4 << 20, 1);
            }
            store
        });
        let mut view = View::new(sample(Instant::now(), stores.into()));
        let text = screen(&mut view, 200, 24).join("\n");
        assert!(
            text.contains(
                "store 9.0 MiB of 12 MiB   FULL, see `vmm-dedup doctor`: /a   FULL, see `vmm-dedup doctor`: /c"
            ),
            "{text}"
        );
        assert!(!text.contains("/b"), "{text}");
    }

    #[test]
    fn stores_that_share_securely_are_told_of() {
        let title = |stores: &[(&str, u64)]| {
            let stores = stores.iter().map(|(socket, secure)| {
                let mut store = store(socket, Ok(Vec::new()));
                store.account.as_mut().expect("it answers").0.secure = *secure;
                store
            });
            let mut view = View::new(sample(Instant::now(), stores.collect()));
            screen(&mut view, 200, 24).swap_remove(0)
        };
        assert!(
            title(&[("/a", 1)]).ends_with("/a   secure"),
            "{}",
            title(&[("/a", 1)])
        );
        assert!(title(&[("/a", 1), ("/b", 0)]).ends_with("   1 secure"));
        assert!(!title(&[("/a", 0), ("/b", 0)]).contains("secure"));
    }

    #[test]
    fn a_filter_shows_some_and_help_shows_the_keys() {
        let mut view = view();
        "/WE".chars().for_each(|c| view.press(KeyCode::Char(c)));
        assert!(view.takes_text());
        let lines = screen(&mut view, 80, 24);
        assert!(
            lines[6].starts_with("web") && lines[7].is_empty() && lines[23].starts_with("/we_"),
            "{lines:#?}"
        );
        view.press(KeyCode::Enter);
        assert!(!view.takes_text() && screen(&mut view, 80, 24)[23].starts_with("/we  q quit"));
        "/".chars().for_each(|c| view.press(KeyCode::Char(c)));
        view.press(KeyCode::Esc);
        assert!(screen(&mut view, 80, 24)[8].starts_with("gpu"));
        view.press(KeyCode::Char('h'));
        let lines = screen(&mut view, 80, 24);
        assert!(
            lines.iter().any(|line| line.starts_with("r            reverse")),
            "{lines:#?}"
        );
    }

    #[test]
    fn help_and_keys_are_whole_on_narrow_terminals() {
        for (width, height) in [(40, 24), (60, 24), (80, 24), (40, 8)] {
            let mut view = view();
            let lines = screen(&mut view, width, height);
            let keys = &lines[usize::from(height) - 1];
            assert!(keys.contains("q quit") && keys.ends_with("h help"), "{keys}");
            view.press(KeyCode::Char('h'));
            let mut seen = String::new();
            for _ in 0..40 {
                let lines = screen(&mut view, width, height);
                seen += &lines[..usize::from(height) - 1].join(" ");
                seen += " ";
                view.press(KeyCode::Down);
            }
            let words: Vec<&str> = seen.split_whitespace().collect();
            let text = words.join(" ");
            for (word, meaning) in help::HELP {
                let last = meaning.rsplit(' ').next().unwrap_or_default();
                assert!(
                    text.contains(word) && text.contains(last),
                    "{width}: {word}: {text}"
                );
            }
        }
    }

    #[test]
    fn a_command_that_has_no_room_can_still_be_pasted() {
        for width in [40, 80] {
            let mut view = view();
            view.update(sample(Instant::now(), vec![store(SOCKET, Err(Silence::Gone))]));
            let text = screen(&mut view, width, 24).join("\n");
            let command = text.split('`').nth(1).expect("a command");
            assert!(command.contains(" \\\n"), "{text}");
            // What a shell makes of it.
            assert_eq!(
                command.replace("\\\n", ""),
                format!("vmm-dedup store --socket {SOCKET} --domain default --max-mib 8 --metrics none")
            );
        }
    }

    #[test]
    fn a_store_that_never_answered_is_silent_for_at_least_as_long_as_it_was_looked_at() {
        let mut view = View::new(sample(Instant::now(), vec![store(SOCKET, Err(Silence::Hangs))]));
        let text = screen(&mut view, 100, 24).join("\n");
        assert!(text.contains("for at least 0.0 s /run"), "{text}");
    }

    #[test]
    fn many_vms_are_scrolled_and_small_terminals_bear_it() {
        let vms = (0..100).map(|n| vm(&format!("vm{n:03}"), n, 0)).collect();
        let mut view = View::new(sample(Instant::now(), vec![store(SOCKET, Ok(vms))]));
        let lines = screen(&mut view, 80, 24);
        assert!(
            lines[6].starts_with("vm099") && lines[22].starts_with("vm083"),
            "{lines:?}"
        );
        assert!(lines[23].starts_with("83 more below"));
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
}
