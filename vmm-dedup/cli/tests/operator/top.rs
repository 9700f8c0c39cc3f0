//! `top` through all that happens while somebody looks.

use crate::host::{Host, eventually};
use crate::terminal::Terminal;
use rustix::process::Signal;
use std::os::unix::process::CommandExt;
use vmm_dedup_host::units::quoted;

fn top(host: &Host, columns: u16) -> Terminal {
    let mut top = host.command(&["top", "--interval", "0.2"]);
    // A group of its own, of which we are the parent: the kernel stops no process of a group that nobody could let go on, and ours
    // may be such, if whoever started the tests has ended.
    top.process_group(0);
    Terminal::open(top, columns, 24)
}

fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

#[test]
fn it_survives_the_death_of_a_store_and_finds_the_next() {
    let host = Host::new();
    let mut store = host.store("default", &[]);
    let refused = host.refused("default", "gpu");
    let mut top = top(&host, 80);
    top.shows("vfio");

    store.kill();
    let screen = top.shows("store gone");
    assert!(
        screen
            .iter()
            .any(|line| line.contains("not known, no store answers")),
        "{screen:#?}"
    );
    let zeros = ["0 VMs", "saved net 0", "kept once", "merges 0", "of 0.0 KiB"];
    let wrong = |line: &&String| zeros.iter().any(|zero| line.contains(zero));
    assert_eq!(screen.iter().find(wrong), None, "{screen:#?}");
    drop(refused);
    let socket = host.path("default.sock");
    let hint = screen
        .iter()
        .skip_while(|line| !line.contains("is gone; guests go on"));
    // Where a line ends there may be a blank, or none.
    let joined = |text: &str| text.replace(' ', "");
    let hint = joined(&hint.take(3).map(String::as_str).collect::<String>());
    let command = joined(&format!(
        "vmm-dedup store --socket {}",
        quoted(socket.to_str().expect("UTF-8"))
    ));
    assert!(hint.contains(&command), "{screen:#?}");

    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    eventually("all is well again", || {
        let screen = top.screen();
        let well = screen.iter().any(|line| line.contains("vfio"))
            && !screen.iter().any(|line| line.contains("gone"));
        well.then_some(())
    });
    top.types("q");
    assert!(top.end().success());
}

#[test]
fn it_says_in_whole_words_that_a_store_hangs() {
    let host = Host::new();
    let store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let mut top = top(&host, 80);
    top.shows("vfio");

    store.send(Signal::STOP);
    let screen = top.shows("does not answer: it hangs");
    store.send(Signal::CONT);

    let row = screen.iter().find(|line| line.starts_with("gpu")).expect("a row");
    assert!(row.contains(" store hung "), "{screen:#?}");
    top.types("q");
    assert!(top.end().success());
}

#[test]
fn it_shows_no_wrong_figure_on_narrow_terminals() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "a-vm-with-a-long-name-17");
    for columns in [40, 60, 75, 80, 132, 200] {
        let mut top = top(&host, columns);
        let screen = top.shows("vfio");
        let row = screen.iter().find(|line| line.contains("vfio")).expect("a row");
        assert!(
            row.starts_with("a-v") && row.contains("0.0 KiB"),
            "{columns}: {row}"
        );
        top.types("q");
        assert!(top.end().success());
    }
}

#[test]
fn it_can_be_put_aside_and_taken_up_again() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let mut top = top(&host, 80);
    top.shows("vfio");

    top.types("\x1a");
    eventually("it is stopped", || {
        (state(top.process.pid())? == 'T').then_some(())
    });
    let left = top.bytes().len();
    top.process.send(Signal::CONT);
    eventually("it draws again", || {
        let bytes = top.bytes();
        String::from_utf8_lossy(&bytes[left..])
            .contains("vfio")
            .then_some(())
    });
    top.types("q");
    assert!(top.end().success());
}

#[test]
fn it_filters_by_name_and_explains_its_keys() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = [host.refused("default", "gpu"), host.refused("default", "web")];
    let mut top = top(&host, 80);
    top.shows("web");

    top.types("/gp\r");
    eventually("one is left", || {
        let screen = top.screen();
        let rows = screen.iter().filter(|line| line.contains("vfio")).count();
        (rows == 1 && screen.iter().any(|line| line.starts_with("gpu"))).then_some(())
    });
    top.types("h");
    top.shows("column to sort by");
    top.types("hq");
    assert!(top.end().success());
}

#[test]
fn it_hears_keys_after_the_terminal_has_another_size() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = [host.refused("default", "gpu"), host.refused("default", "web")];
    let mut top = top(&host, 80);
    top.shows("web");
    top.types("/gp\r");
    eventually("one is left", || {
        let rows = top.screen().iter().filter(|line| line.contains("vfio")).count();
        (rows == 1).then_some(())
    });

    let drawn = top.bytes().len();
    top.process.send(Signal::WINCH);
    eventually("it draws again", || (top.bytes().len() > drawn).then_some(()));

    top.types("q");
    assert!(top.end().success());
}

#[test]
fn it_ends_with_its_terminal() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let mut top = top(&host, 80);
    top.shows("vfio");

    top.hang_up();

    // Neither a panic nor a signal.
    assert_eq!(top.end().code(), Some(1));
}
