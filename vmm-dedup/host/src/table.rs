//! Tables that fit the terminal, from 40 columns on: columns that matter less go first, then names are cut.

use crate::units;
use rustix::termios::{isatty, tcgetwinsize};

/// A terminal that does not know its size is as large as terminals were.
const USUAL: (usize, usize) = (80, 24);
/// No name is cut shorter than this.
const SHORTEST_NAME: usize = 12;
/// Characters at the end of a cut name: numbered names differ there.
const NAME_END: usize = 4;

/// How wide a table may be: as the terminal, or as wide as it likes where there is none.
#[must_use]
pub fn width() -> Option<usize> {
    size().map(|(width, _)| width)
}

/// Columns and lines of the terminal, if standard output is one.
#[must_use]
pub fn size() -> Option<(usize, usize)> {
    let out = rustix::stdio::stdout();
    let known = |number: u16, usual: usize| match number {
        0 => usual,
        number => number.into(),
    };
    isatty(out).then(|| match tcgetwinsize(out) {
        Ok(size) => (known(size.ws_col, USUAL.0), known(size.ws_row, USUAL.1)),
        Err(_) => USUAL,
    })
}

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    kind: Kind,
    /// Columns with a higher rank go first.
    rank: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// To the left; may be cut.
    Name,
    /// To the left.
    Text,
    /// To the right.
    Number,
}

impl Column {
    /// Names of things: to the left, cut in the middle where there is no room. A table's first column.
    #[must_use]
    pub const fn name(title: &'static str) -> Self {
        Self {
            title,
            kind: Kind::Name,
            rank: 0,
        }
    }

    /// Words, to the left. The higher the rank, the sooner it is left out.
    #[must_use]
    pub const fn text(title: &'static str, rank: u8) -> Self {
        Self {
            title,
            kind: Kind::Text,
            rank,
        }
    }

    /// Figures, to the right. The higher the rank, the sooner it is left out.
    #[must_use]
    pub const fn number(title: &'static str, rank: u8) -> Self {
        Self {
            title,
            kind: Kind::Number,
            rank,
        }
    }
}

/// A table of which all rows have as many cells as there are columns.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty one.
    #[must_use]
    pub fn new(columns: &[Column]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.columns.len());
        self.rows.push(cells.into());
    }

    /// Leaves a column out of which no row has anything.
    pub fn leave_out_if_empty(&mut self, title: &str) {
        let Some(at) = self.columns.iter().position(|column| column.title == title) else {
            return;
        };
        if self.rows.iter().all(|row| row[at].is_empty()) {
            self.columns.remove(at);
            self.rows.iter_mut().for_each(|row| _ = row.remove(at));
        }
    }

    /// The lines, each at most `width` wide if that is possible at all; the last one tells which columns have no room.
    #[must_use]
    pub fn lines(&self, width: Option<usize>) -> Vec<String> {
        let natural: Vec<usize> = (0..self.columns.len()).map(|at| self.natural(at)).collect();
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let room = width.unwrap_or(usize::MAX);
        let least = |at: usize| match self.columns[at].kind {
            Kind::Name => natural[at].min(SHORTEST_NAME),
            Kind::Text | Kind::Number => natural[at],
        };
        while shown.iter().map(|at| least(*at) + 1).sum::<usize>() > room.saturating_add(1) {
            let of_rank = |at: &usize| (self.columns[*at].rank, *at);
            match shown.iter().copied().max_by_key(of_rank) {
                Some(at) if self.columns[at].rank > 0 => shown.retain(|other| *other != at),
                _ => break,
            }
        }
        let all: usize = shown.iter().map(|at| natural[*at] + 1).sum();
        let over = all.saturating_sub(1).saturating_sub(room);
        let wide = |at: usize| match self.columns[at].kind {
            Kind::Name => natural[at].saturating_sub(over).max(least(at)),
            Kind::Text | Kind::Number => natural[at],
        };
        let line = |cell: &dyn Fn(usize) -> String| {
            let cells: Vec<String> = shown
                .iter()
                .map(|at| self.fit(*at, &cell(*at), wide(*at)))
                .collect();
            cells.join(" ").trim_end().to_owned()
        };
        let mut lines = vec![line(&|at| self.columns[at].title.to_owned())];
        lines.extend(self.rows.iter().map(|row| line(&|at| row[at].clone())));
        let missing: Vec<&str> = (0..self.columns.len())
            .filter(|at| !shown.contains(at))
            .map(|at| self.columns[at].title)
            .collect();
        if !missing.is_empty() {
            lines.extend(wrapped(&format!("(no room for: {})", missing.join(", ")), room));
        }
        lines
    }

    /// How wide a column is with all that is in it.
    fn natural(&self, at: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[at].chars().count());
        cells
            .max()
            .unwrap_or(0)
            .max(self.columns[at].title.chars().count())
    }

    fn fit(&self, at: usize, text: &str, wide: usize) -> String {
        match self.columns[at].kind {
            Kind::Name => format!("{:<wide$}", shortened(text, wide)),
            Kind::Text => format!("{text:<wide$}"),
            Kind::Number => format!("{text:>wide$}"),
        }
    }
}

/// A name in so many characters: what is cut out is in the middle, since numbered names differ at the end.
#[must_use]
pub fn shortened(name: &str, wide: usize) -> String {
    let letters: Vec<char> = name.chars().collect();
    if letters.len() <= wide {
        return name.to_owned();
    }
    let end = NAME_END.min(wide.saturating_sub(1) / 2);
    let start = wide.saturating_sub(end + 1);
    let parts = [&letters[..start], &['~'], &letters[letters.len() - end..]];
    parts.concat().into_iter().take(wide).collect()
}

/// A text's words. What is in backquotes is one, so that a command is pasted whole.
fn words(text: &str) -> Vec<&str> {
    let mut in_backquotes = false;
    text.split(|c| {
        in_backquotes ^= c == '`';
        c == ' ' && !in_backquotes
    })
    .collect()
}

/// A text in lines of at most so many characters, broken between words where that is possible; all are indented as the first.
/// What is in backquotes is never broken.
#[must_use]
pub fn wrapped(text: &str, wide: usize) -> Vec<String> {
    let unindented = text.trim_start_matches(' ');
    let indent = &text[..text.len() - unindented.len()];
    let room = wide.saturating_sub(indent.len());
    let mut lines = vec![String::new()];
    for word in words(unindented) {
        let last = lines.last().map_or(0, |line| line.chars().count());
        let joined = last + usize::from(last > 0) + word.chars().count();
        match lines.last_mut() {
            Some(line) if joined <= room || last == 0 => {
                if last > 0 {
                    line.push(' ');
                }
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
        .iter()
        .map(|line| format!("{indent}{line}").trim_end().to_owned())
        .collect()
}

/// A line that holds a command and is too wide, as lines that a shell takes for one: each but the last ends with a backslash.
#[must_use]
pub fn continued(line: &str, wide: usize) -> Vec<String> {
    /// With less room for it no command can be read.
    const LEAST: usize = 8;
    let mut lines = Vec::new();
    let mut rest: Vec<char> = line.chars().collect();
    while rest.len() > wide && wide >= LEAST {
        let (at, in_quotes) = place_to_break(&rest, wide - 2);
        let mut tail = rest.split_off(at);
        let mut head: String = rest.iter().collect();
        if in_quotes {
            head.push('\'');
            tail.insert(0, '\'');
        }
        lines.push(head + "\\");
        rest = tail;
    }
    lines.push(rest.into_iter().collect());
    lines
}

/// Where to break a command, at most after so many characters: behind a blank, or else within a word. And whether that is in quotes.
fn place_to_break(command: &[char], most: usize) -> (usize, bool) {
    let (mut in_quotes, mut escaped) = (false, false);
    let (mut behind_blank, mut anywhere) = (None, (most, false));
    for (at, letter) in command.iter().enumerate().take(most) {
        (in_quotes, escaped) = match (letter, escaped) {
            (_, true) => (in_quotes, false),
            ('\'', _) => (!in_quotes, false),
            ('\\', _) => (in_quotes, !in_quotes),
            _ => (in_quotes, false),
        };
        if !escaped {
            anywhere = (at + 1, in_quotes);
        }
        if *letter == ' ' && !in_quotes && !escaped {
            behind_blank = Some((at + 1, false));
        }
    }
    behind_blank.unwrap_or(anywhere)
}

/// Phrases beside each other, separated by three spaces, as many as a line has room for; none is broken.
#[must_use]
pub fn phrases(phrases: &[String], wide: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for phrase in phrases {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 3 + phrase.chars().count() <= wide => {
                line.push_str("   ");
                line.push_str(phrase);
            }
            _ => lines.push(phrase.clone()),
        }
    }
    lines
}

/// A share in percent, with one digit.
#[must_use]
pub fn percent(part: u64, all: u64) -> String {
    units::tenths(part as f64 / all.max(1) as f64 * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] = [
        Column::name("VM"),
        Column::text("STATE", 1),
        Column::number("PID", 3),
        Column::number("SAVED", 1),
    ];

    fn table() -> Table {
        let mut table = Table::new(&COLUMNS);
        let row = |name: &str| [name, "running", "4711", "9.9 MiB"].map(str::to_owned);
        table.row(row("web"));
        table.row(row("a-very-long-name-of-a-database-12"));
        table
    }

    #[test]
    fn without_a_terminal_all_of_it_is_there() {
        let lines = table().lines(None);
        assert_eq!(lines[0], "VM                                STATE    PID   SAVED");
        assert_eq!(lines[2], "a-very-long-name-of-a-database-12 running 4711 9.9 MiB");
        assert_eq!(lines.len(), 3);
    }

    #[test]
    fn names_are_cut_before_columns_go_and_the_first_to_go_matters_least() {
        let lines = table().lines(Some(40));
        assert_eq!(lines[2], "a-very-long-na~e-12 running 4711 9.9 MiB");
        let lines = table().lines(Some(28));
        assert_eq!(lines[0], "VM           STATE     SAVED");
        assert_eq!(lines[2], "a-very-~e-12 running 9.9 MiB");
        assert_eq!(lines[3], "(no room for: PID)");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in 26..=200 {
            let lines = table().lines(Some(width));
            assert!(
                lines.iter().all(|line| line.chars().count() <= width),
                "{width}: {lines:#?}"
            );
        }
    }

    #[test]
    fn a_cut_name_keeps_its_ends() {
        assert_eq!(shortened("web-server-0012", 12), "web-ser~0012");
        assert_eq!(shortened("web", 8), "web");
        let lengths = [0, 1, 2, 3, 4].map(|wide| shortened("web-12", wide).chars().count());
        assert_eq!(lengths, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn phrases_stay_whole() {
        let texts = ["saved 1 MiB", "cpu 2 s", "breaks 3"].map(str::to_owned);
        assert_eq!(phrases(&texts, 21), ["saved 1 MiB   cpu 2 s", "breaks 3"]);
        assert_eq!(phrases(&texts, 5), texts);
    }

    #[test]
    fn what_is_continued_is_one_command_to_a_shell() {
        let words = [
            "store",
            "--socket",
            "/run/it's a long path/with blanks/s.sock",
            "--domain",
            r"back\slash",
        ];
        let command = words.map(crate::units::quoted).join(" ");
        let command = format!("printf %s\\\\n {command}");
        for wide in 8..=100 {
            let lines = continued(&command, wide);
            assert!(
                lines.iter().all(|line| line.chars().count() <= wide),
                "{lines:#?}"
            );
            let mut shell = std::process::Command::new("sh");
            let output = shell.arg("-c").arg(lines.join("\n")).output().expect("a shell");
            let told = String::from_utf8(output.stdout).expect("UTF-8");
            assert_eq!(told.lines().collect::<Vec<&str>>(), words, "{lines:#?}");
        }
    }

    #[test]
    fn texts_are_broken_between_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("incomprehensible", 5), ["incomprehensible"]);
        assert_eq!(wrapped("  one two three", 9), ["  one two", "  three"]);
        assert_eq!(wrapped("", 9), [""]);
    }

    #[test]
    fn commands_stay_whole() {
        assert_eq!(
            wrapped("type `a -b 'c d'` now, or `e`", 9),
            ["type", "`a -b 'c d'`", "now, or", "`e`"]
        );
    }
}
