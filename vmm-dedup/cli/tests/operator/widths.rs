//! Tables on terminals from 40 to 200 columns.

use crate::host::{Host, kvm_is_there};
use crate::terminal::{Terminal, lines_of};
use std::time::Duration;

const WIDTHS: [u16; 6] = [40, 60, 80, 100, 132, 200];
/// A name that has no room in 40 columns beside anything else.
const LONG: &str = "a-database-with-a-rather-long-name-17";

/// Runs a command on terminals of all widths: no line is wider, and each of these texts is whole in some line.
fn fits(host: &Host, args: &[&str], whole: &[&str]) {
    for width in WIDTHS {
        let (lines, code) = lines_of(host.command(args), width);

        assert_eq!(code, Some(0), "{args:?}: {lines:#?}");
        let too_wide: Vec<&String> = lines
            .iter()
            .filter(|line| line.chars().count() > width.into())
            .collect();
        assert!(too_wide.is_empty(), "{args:?} at {width}: {too_wide:#?}");
        for part in whole {
            assert!(
                lines.iter().any(|line| line.contains(part)),
                "{args:?} at {width} has no {part:?}: {lines:#?}"
            );
        }
    }
}

#[test]
fn stat_and_explain_fit_and_cut_no_figure() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = [host.refused("default", LONG), host.refused("default", "gpu")];

    fits(
        &host,
        &["stat"],
        &["VM", "SAVED", "gpu", "vfio", "0.0 KiB", "e-17"],
    );
    fits(&host, &["explain"], &["0 VMs of 1 store"]);
    let output = host.must(&["stat"]);
    assert!(output.contains(LONG) && !output.contains("-0.0"), "{output}");
}

#[test]
fn estimates_fit_and_cut_no_figure() {
    let host = Host::new();
    let images = host.images();
    let args: Vec<&str> = ["estimate"]
        .into_iter()
        .chain(images.iter().map(String::as_str))
        .collect();

    // Half of each image of 1 MiB is in all four.
    fits(&host, &args, &["MEMORY", "SHARED", "to be saved: 1.5 MiB"]);
    let args: Vec<&str> = ["estimate", "--pack"]
        .into_iter()
        .chain(images.iter().map(String::as_str))
        .collect();
    fits(&host, &args, &["SAVED NET"]);
}

#[test]
fn explanations_of_a_vm_fit() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _guests = [host.guest("web"), host.guest(LONG)];
    host.wait_for_sharing("web");

    fits(
        &host,
        &["explain", "web"],
        &["shared", "settings: cpu_percent 20"],
    );
    fits(&host, &["stat"], &["running", "e-17"]);
    let explained = host.must(&["explain"]);
    assert!(
        explained.starts_with("2 VMs of 1 store: 32768 pages"),
        "{explained}"
    );
}

#[test]
fn the_demo_draws_one_table_on_80_by_24_and_on_less() {
    if !kvm_is_there() {
        return;
    }
    for (columns, lines) in [(80, 24), (50, 8)] {
        let host = Host::new();
        let demo = host.command(&["demo", "--guests", "4", "--memory-mib", "64", "--seconds", "3"]);
        let mut terminal = Terminal::open(demo, columns, lines);

        terminal.shows("saved net");
        std::thread::sleep(Duration::from_millis(1500));
        let screen = terminal.screen();

        let heads = screen.iter().filter(|line| line.starts_with("GUEST")).count();
        let totals = screen.iter().filter(|line| line.contains("saved net")).count();
        assert_eq!((heads, totals), (1, 1), "{screen:#?}");
        assert!(terminal.end().success(), "{:#?}", terminal.screen());
    }
}
