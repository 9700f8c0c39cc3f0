//! Readers that go, disks that are full: no command panics, and exit codes say what happened.

use crate::host::{Host, text};
use std::fs::{File, OpenOptions};
use std::io::pipe;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

/// 128 and the number of SIGPIPE: what a process has that the signal ended.
const READER_GONE: i32 = 141;

/// Commands that print, each with much and with little.
fn printing(images: &[String]) -> Vec<Vec<&str>> {
    let of_images =
        |args: &[&'static str]| [args, &images.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat();
    vec![
        vec!["stat"],
        vec!["stat", "--json"],
        vec!["explain"],
        vec!["explain", "gpu"],
        vec!["explain", "gpu", "--json"],
        of_images(&["estimate"]),
        of_images(&["estimate", "--json"]),
        of_images(&["estimate", "--pack"]),
        of_images(&["bench", "estimate"]),
        vec!["fleet", "down", "fleet.toml"],
        vec!["--help"],
        vec!["store", "--help"],
        vec!["--version"],
    ]
}

fn host() -> Host {
    let host = Host::new();
    std::fs::write(host.path("fleet.toml"), "").expect("a file");
    host
}

fn full() -> File {
    OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full")
}

#[test]
fn a_reader_that_has_gone_ends_a_command_without_a_word() {
    let host = host();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let images = host.images();

    for args in printing(&images) {
        let (reader, writer) = pipe().expect("a pipe");
        drop(reader);
        let mut command = host.command(&args);
        let output = command
            .current_dir(host.path(""))
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn();
        let output = output.expect("a run").wait_with_output().expect("an end");

        assert_eq!(text(&output.stderr), "", "{args:?}");
        assert_eq!(
            output.status.code(),
            Some(READER_GONE),
            "{args:?}: {:?}",
            output.status.signal()
        );
    }
}

#[test]
fn output_that_has_no_room_is_a_failure_of_one_line() {
    let host = host();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let images = host.images();

    for args in printing(&images) {
        let mut command = host.command(&args);
        let output = command
            .current_dir(host.path(""))
            .stdout(full())
            .stderr(Stdio::piped())
            .spawn();
        let output = output.expect("a run").wait_with_output().expect("an end");

        let errors = text(&output.stderr);
        assert!(
            errors.starts_with("vmm-dedup: cannot write to standard output: No space left"),
            "{args:?}: {errors}"
        );
        assert_eq!(
            (errors.lines().count(), output.status.code()),
            (1, Some(1)),
            "{args:?}: {errors}"
        );
    }
}

#[test]
fn errors_that_nobody_can_read_change_no_exit_code() {
    let host = host();
    for (args, code) in [
        (&["stat"][..], 1),
        (&["stat", "--nonsense"], 2),
        (&["explain", "web"], 1),
        (&["fleet", "status", "fleet.toml"], 1),
        (&["set", "web", "onn"], 2),
    ] {
        let mut command = host.command(args);
        let status = command
            .current_dir(host.path(""))
            .stdout(full())
            .stderr(full())
            .status();

        assert_eq!(status.expect("a run").code(), Some(code), "{args:?}");
    }
}
