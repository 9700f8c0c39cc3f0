//! What `--plot` has written.

use std::path::Path;

/// The folder has these plots, and each has figures.
pub(crate) fn are_whole(folder: &Path, names: &[&str]) {
    for name in names {
        let path = folder.join(format!("{name}.svg"));
        let svg = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(
            svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"),
            "{name}: {svg}"
        );
        assert!(
            !svg.contains("no figures") && !svg.contains("cannot be drawn"),
            "{name}: {svg}"
        );
    }
}
