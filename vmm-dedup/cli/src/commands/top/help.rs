//! What `top` says of itself.

use ratatui::text::Line;
use vmm_dedup_host::table::wrapped;

/// What `h` shows: words, and what they mean.
pub(super) const HELP: [(&str, &str); 19] = [
    ("left, right", "column to sort by (marked * or, reversed, ^)"),
    ("r", "reverse the order"),
    ("up, down", "scroll, also this; page up, page down, home"),
    ("/", "show only VMs whose names have what is typed; enter ends it"),
    ("h", "this, or back"),
    ("q, esc", "quit"),
    ("", ""),
    ("PASS", "how long ago the VM's last pass ended"),
    (
        "SAVED",
        "net of all bookkeeping, its part of the store's among it",
    ),
    ("SHARED", "what maps pages of the store, or the zero page"),
    ("MERGE/S", "pages merged, a second"),
    ("BREAK/S", "shared pages written, a second"),
    ("CPU%", "of one core, by the VM's dedup service"),
    (
        "WAIT",
        "writers a second that waited for the copy-on-write reserve",
    ),
    ("BUDGET", "cpu_percent, as it is set"),
    ("PERIOD", "pass_period_ms, as it is set"),
    ("STOP", "stop_target_us, as it is set"),
    ("RESERVE", "reserve_pages, as they are set, with managed breaks"),
    ("frozen", "the VM's process is stopped"),
];

/// The help in lines of at most so many characters.
pub(super) fn lines(width: usize) -> Vec<Line<'static>> {
    const HEAD: usize = 13;
    let line = |(word, meaning): &(&str, &str)| {
        let mut head = *word;
        let texts = wrapped(meaning, width.saturating_sub(HEAD).max(1)).into_iter();
        let lines: Vec<String> = texts
            .map(|text| {
                format!("{:<HEAD$}{text}", std::mem::take(&mut head))
                    .trim_end()
                    .to_owned()
            })
            .collect();
        lines
    };
    HELP.iter().flat_map(line).map(Line::from).collect()
}
