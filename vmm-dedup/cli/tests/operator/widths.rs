//! Tables on terminals from 40 to 200 columns.

use crate::host::{Host, hints, kvm_is_there, pasted, text};
use crate::terminal::{Terminal, lines_of};
use std::time::Duration;

const WIDTHS: [u16; 6] = [40, 60, 80, 100, 132, 200];
/// A name that has no room in 40 columns beside anything else.
const LONG: &str = "a-database-with-a-rather-long-name-17";

/// Runs a command on terminals of all widths: no line is wider, and each of these texts is whole in some line.
fn fits(host: &Host, args: &[&str], whole: &[&str]) {
    fits_and_ends(host, args, whole, |code| code == 0);
}

/// The same of a command that ends with such a code.
fn fits_and_ends(host: &Host, args: &[&str], whole: &[&str], is_right: fn(i32) -> bool) {
    for width in WIDTHS {
        let (lines, code) = lines_of(host.command(args), width);

        assert!(code.is_some_and(is_right), "{args:?}: {lines:#?}");
        let too_wide: Vec<&String> = lines
            .iter()
            .filter(|line| line.chars().count() > width.into())
            // A command is not broken: it has a line of its own.
            .filter(|line| !line.trim_start().starts_with('`'))
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
fn what_is_to_be_pasted_is_in_one_line_and_works() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let socket = host.path("default.sock");
    for (args, expected) in [
        (&["stat"][..], "vmm-dedup doctor --store "),
        (&["explain"], "vmm-dedup explain gpu --store "),
        (&["explain", "gpu"], "vmm-dedup doctor gpu --store "),
        (&["doctor"], "vmm-dedup explain gpu."),
        (&["top"], "vmm-dedup stat --json --store "),
    ] {
        for by_option in [true, false] {
            let mut command = host.command(args);
            match by_option {
                true => command.arg("--store").arg(&socket),
                false => command.env("VMM_DEDUP_STORE", &socket),
            };
            let lines = match args {
                // On a terminal it would not end.
                ["top"] => vec![text(&command.output().expect("a run").stderr)],
                _ => lines_of(command, 40).0,
            };
            let found: Vec<String> = lines.iter().flat_map(|line| hints(line)).collect();

            assert_eq!(found.len(), 1, "{args:?}: {lines:#?}");
            assert!(found[0].starts_with(expected), "{args:?}: {found:?}");
            let told = text(&pasted(&host, &found[0]).output().expect("a shell").stdout);
            assert!(told.contains("gpu"), "{found:?}: {told}");
        }
    }
}

#[test]
fn help_fits() {
    let host = Host::new();
    for command in [
        &[][..],
        &["set"],
        &["fleet"],
        &["fleet", "up"],
        &["run"],
        &["top"],
        &["estimate"],
    ] {
        for option in ["-h", "--help"] {
            for width in [80, 100, 200] {
                let (lines, code) = lines_of(host.command(&[command, &[option]].concat()), width);
                let letters = |line: &String| plain(line).chars().count();
                let wide: Vec<&String> = lines.iter().filter(|line| letters(line) > width.into()).collect();
                assert!(
                    code == Some(0) && wide.is_empty(),
                    "{command:?} at {width}: {wide:#?}"
                );
            }
        }
    }
}

/// A line without what makes it bold.
fn plain(line: &str) -> String {
    let mut parts = line.split('\x1b');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| {
        all + part.split_once('m').map_or("", |(_, text)| text)
    })
}

#[test]
fn what_doctor_says_fits() {
    let host = Host::new();
    let _store = host.store("default", &[]);

    // Whatever this host is like.
    fits_and_ends(&host, &["doctor"], &["store default:", "large folios:"], |code| {
        (0..=2).contains(&code)
    });
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
    for name in ["web", LONG] {
        host.wait_for_sharing(name);
    }

    fits(
        &host,
        &["explain", "web"],
        &["shared", "settings: cpu_percent 20"],
    );
    fits(&host, &["stat"], &["running", "e-17"]);
    fits(
        &host,
        &["set", "--all", "cpu_percent=30"],
        &["web: done", "e-17: done"],
    );
    let explained = host.must(&["explain"]);
    assert!(
        explained.starts_with("2 VMs of 1 store: 32768 pages"),
        "{explained}"
    );
}

#[test]
fn the_status_of_a_fleet_fits() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let file = &*host.fleet_file(LONG);
    host.must(&["fleet", "up", file]);

    let fit = std::panic::catch_unwind(|| {
        fits(
            &host,
            &["fleet", "status", file],
            &["saved", "again", "e-17", "running"],
        );
    });

    host.must(&["fleet", "down", file]);
    assert!(fit.is_ok());
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
