//! Which columns have room, and how wide they are. A figure is shown whole or not at all.

use super::sample::Column;

/// The narrowest that names get.
const SHORTEST_NAME: u16 = 8;
/// Names get as much, if there is room, though all are shorter: so columns rarely move.
const USUAL_NAME: u16 = 16;

/// A column on the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) column: Column,
    pub(super) width: u16,
}

/// Title, width, and rank: the higher, the sooner it is left out.
pub(super) fn about(column: Column) -> (&'static str, u16, u8) {
    match column {
        Column::Name => ("VM", SHORTEST_NAME, 0),
        Column::Domain => ("DOMAIN", 10, 5),
        Column::State => ("STATE", 10, 1),
        Column::Passed => ("PASS", 6, 3),
        Column::Saved => ("SAVED", 9, 1),
        Column::Shared => ("SHARED", 9, 8),
        Column::Merges => ("MERGE/S", 8, 7),
        Column::Breaks => ("BREAK/S", 8, 4),
        Column::Cpu => ("CPU%", 5, 2),
        Column::Waits => ("WAIT", 5, 6),
        Column::Budget => ("BUDGET", 7, 9),
        Column::Period => ("PERIOD", 10, 10),
        Column::StopTarget => ("STOP", 9, 11),
        Column::Reserve => ("RESERVE", 8, 12),
    }
}

/// The columns that have room, with what is left given to the names as far as they need it. `domains`: whether there is more than
/// one. `longest`: of the names.
pub(super) fn shown(room: u16, domains: bool, longest: u16) -> Vec<Shown> {
    let wanted = Column::ALL.into_iter();
    let mut columns: Vec<Column> = wanted
        .filter(|column| domains || *column != Column::Domain)
        .collect();
    let needed = |columns: &[Column]| {
        let widths: u16 = columns.iter().map(|column| about(*column).1 + 1).sum();
        widths.saturating_sub(1)
    };
    while needed(&columns) > room {
        match columns.iter().copied().max_by_key(|column| about(*column).2) {
            Some(least) if about(least).2 > 1 => columns.retain(|column| *column != least),
            _ => break,
        }
    }
    let left = room.saturating_sub(needed(&columns));
    let left = left.min(longest.max(USUAL_NAME) - SHORTEST_NAME);
    let wide = |column| match column {
        Column::Name => SHORTEST_NAME + left,
        other => about(other).1,
    };
    let shown = columns.into_iter();
    shown
        .map(|column| Shown {
            column,
            width: wide(column),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn titles(room: u16, domains: bool) -> String {
        let titles: Vec<&str> = shown(room, domains, 64)
            .iter()
            .map(|shown| about(shown.column).0)
            .collect();
        titles.join(" ")
    }

    #[test]
    fn eighty_columns_have_room_for_nearly_all() {
        assert_eq!(
            titles(80, false),
            "VM STATE PASS SAVED SHARED MERGE/S BREAK/S CPU% WAIT"
        );
        assert_eq!(
            titles(80, true),
            "VM DOMAIN STATE PASS SAVED MERGE/S BREAK/S CPU% WAIT"
        );
    }

    #[test]
    fn forty_columns_have_room_for_what_matters() {
        assert_eq!(titles(40, false), "VM STATE SAVED CPU%");
        assert_eq!(titles(60, true), "VM STATE PASS SAVED BREAK/S CPU%");
    }

    #[test]
    fn the_mark_of_the_column_that_is_sorted_by_has_room() {
        for column in Column::ALL {
            let (title, width, _) = about(column);
            assert!(title.len() < usize::from(width), "{title}");
        }
    }

    #[test]
    fn figures_stand_beside_names_however_wide_the_terminal_is() {
        let widths = [3, 16, 40, 500].map(|longest| shown(400, true, longest)[0].width);
        assert_eq!(widths[..3], [16, 16, 40]);
        assert!(widths[3] > 200 && widths[3] < 400);
    }

    #[test]
    fn what_is_shown_takes_all_the_room_and_no_more() {
        for room in 29..=200 {
            for domains in [false, true] {
                let shown = shown(room, domains, 200);
                let widths: u16 = shown.iter().map(|shown| shown.width).sum();
                let spaces = u16::try_from(shown.len() - 1).expect("few");
                assert_eq!(widths + spaces, room);
            }
        }
    }
}
