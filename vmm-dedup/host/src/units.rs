//! Figures as people read them.

use std::cmp::Ordering;
use std::time::Duration;

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// Bytes in MiB with one digit after the point; never `-0.0`.
#[must_use]
pub fn mib(bytes: i64) -> String {
    format!("{} MiB", tenths(bytes as f64 / f64::from(1 << 20)))
}

/// Pages of 4 KiB in MiB.
#[must_use]
pub fn pages_mib(pages: u64) -> String {
    mib(i64::try_from(pages.saturating_mul(PAGE_BYTES)).unwrap_or(i64::MAX))
}

/// A number with one digit after the point; never `-0.0`.
#[must_use]
pub fn tenths(value: f64) -> String {
    match format!("{value:.1}") {
        zero if zero == "-0.0" => "0.0".to_owned(),
        text => text,
    }
}

/// A number with two digits after the point; never `-0.00`.
#[must_use]
pub fn hundredths(value: f64) -> String {
    match format!("{value:.2}") {
        zero if zero == "-0.00" => "0.00".to_owned(),
        text => text,
    }
}

/// A text that others chose, as the name of a file, without what a terminal takes for more than letters.
#[must_use]
pub fn printable(text: &str) -> String {
    let shown = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Bytes in at most nine characters.
#[must_use]
pub fn short(bytes: i64) -> String {
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value.abs() >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match value.abs() < 9.95 {
        true => format!("{} {}", tenths(value), UNITS[unit]),
        false => format!("{value:.0} {}", UNITS[unit]),
    }
}

/// So many of something, in the right number: `1 VM`, `2 VMs`.
#[must_use]
pub fn count(number: usize, one: &str, many: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        number => format!("{number} {many}"),
    }
}

/// So many pages: `1 page`, `2 pages`.
#[must_use]
pub fn pages(number: u64) -> String {
    match number {
        1 => "1 page".to_owned(),
        number => format!("{number} pages"),
    }
}

/// How long ago, or for how long, in at most five characters: `0.3 s`, `12 s`, `5 min`, `3 h`, `40 d`.
#[must_use]
pub fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..=1 => format!("{:.1} s", time.as_secs_f64()),
        2..=99 => format!("{seconds} s"),
        100..=5_999 => format!("{} min", seconds / 60),
        6_000..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Names in the order that people expect: numbers in them by their value, `web-2` before `web-10`.
#[must_use]
pub fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut rest_a, mut rest_b) = (a, b);
    while !rest_a.is_empty() && !rest_b.is_empty() {
        let ((part_a, tail_a), (part_b, tail_b)) = (first_part(rest_a), first_part(rest_b));
        let order = match (number_of(part_a), number_of(part_b)) {
            (Some(a), Some(b)) => a.len().cmp(&b.len()).then_with(|| a.cmp(b)),
            _ => part_a.cmp(part_b),
        };
        if order != Ordering::Equal {
            return order;
        }
        (rest_a, rest_b) = (tail_a, tail_b);
    }
    // Equal but for leading zeros, or one is the other's beginning.
    rest_a.len().cmp(&rest_b.len()).then_with(|| a.cmp(b))
}

/// The digits at the beginning, or what is before the first digit; and the rest.
fn first_part(text: &str) -> (&str, &str) {
    let digit = |c: char| c.is_ascii_digit();
    let is_number = text.starts_with(digit);
    text.split_at(text.find(|c| digit(c) != is_number).unwrap_or(text.len()))
}

/// A number without leading zeros.
fn number_of(part: &str) -> Option<&str> {
    part.starts_with(|c: char| c.is_ascii_digit())
        .then(|| part.trim_start_matches('0'))
}

/// A word as a shell takes it.
#[must_use]
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,=".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_less_than_nothing_is_nothing() {
        assert_eq!(
            [-0.004, 0.0, -0.5, 2.345].map(hundredths),
            ["0.00", "0.00", "-0.50", "2.35"]
        );
    }

    #[test]
    fn names_move_no_cursor() {
        assert_eq!(printable("a\x1b[2Jb\u{9b}c\r"), "a\\u{1b}[2Jb\\u{9b}c\\r");
        assert_eq!(printable("web-ä 1"), "web-ä 1");
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(short(0), "0.0 KiB");
        assert_eq!(short(-40), "0.0 KiB");
        assert_eq!(short(1023 << 10), "1.0 MiB");
        assert_eq!(short(-20 << 30), "-20 GiB");
        let texts = [i64::MAX, i64::MIN, 1 << 39, 999 << 20].map(short);
        assert!(texts.iter().all(|t| t.len() <= 9), "{texts:?}");
    }

    #[test]
    fn nothing_is_negative_zero() {
        assert_eq!(mib(-40), "0.0 MiB");
        assert_eq!(mib(-(1 << 20)), "-1.0 MiB");
        assert_eq!(pages_mib(512), "2.0 MiB");
    }

    #[test]
    fn numbers_agree_with_their_nouns() {
        let vms = |n| count(n, "VM", "VMs");
        assert_eq!([vms(0), vms(1), vms(2)], ["0 VMs", "1 VM", "2 VMs"]);
        assert_eq!([pages(0), pages(1), pages(2)], ["0 pages", "1 page", "2 pages"]);
    }

    #[test]
    fn spans_are_short_at_every_length() {
        let texts = [0, 1, 2, 99, 100, 5_999, 6_000, 172_799, 172_800, 86_400_000]
            .map(|seconds| span(Duration::from_secs(seconds)));
        assert_eq!(
            texts,
            [
                "0.0 s", "1.0 s", "2 s", "99 s", "1 min", "99 min", "1 h", "47 h", "2 d", "1000 d"
            ]
        );
    }

    #[test]
    fn numbers_in_names_count_by_their_value() {
        let mut names = ["web-10", "web-2", "db", "web", "web-02", "web-2b", "web-2.17"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(
            names,
            ["db", "web", "web-02", "web-2", "web-2.17", "web-2b", "web-10"]
        );
    }

    #[test]
    fn words_can_be_pasted() {
        assert_eq!(quoted("/run/vmm-dedup/store.sock"), "/run/vmm-dedup/store.sock");
        assert_eq!(quoted("/a b"), "'/a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
