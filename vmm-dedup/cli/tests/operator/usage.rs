//! Wrong usage ends with 2, whoever finds it out, and hints name what is wrong.

use crate::host::{Host, Process, eventually, kvm_is_there, text};
use std::process::Stdio;

#[test]
fn options_that_cannot_be_end_with_2() {
    let host = Host::new();
    let long = host.path(&"x".repeat(120));
    let long = long.to_str().expect("UTF-8");
    for (args, part) in [
        (
            &["store", "--metrics", "none", "--socket", long][..],
            "1 to 107 bytes",
        ),
        (&["store", "--metrics", "none", "--domain", ""], "domain"),
        (&["store", "--metrics", "none", "--domain", "two words"], "domain"),
    ] {
        let error = host.error(args, 2);
        assert!(error.contains(part), "{error}");
    }
    if kvm_is_there() {
        for args in [["--memory-mib", "0"], ["--vcpus", "0"], ["--vcpus", "255"]] {
            let error = host.error(&[&["run", "--payload"][..], &args].concat(), 2);
            assert!(error.contains("is out of range: give between"), "{error}");
        }
    }
    // Either kind of input is one.
    let nothing = host.run(&["estimate"]);
    let errors = text(&nothing.stderr);
    assert_eq!(nothing.status.code(), Some(2), "{errors}");
    assert!(errors.contains("--pid") && errors.contains("FILE"), "{errors}");
}

#[test]
fn names_of_files_reach_no_terminal_as_commands() {
    let host = Host::new();
    let images = host.images();
    let odd = host.path("image\x1b[31m");
    std::fs::rename(&images[0], &odd).expect("a name");
    let odd = odd.to_str().expect("UTF-8");

    let table = host.must(&["estimate", odd, &images[1]]);
    let error = host.error(&["estimate", &format!("{odd}-not")], 1);

    assert!(
        table.contains(r"image\u{1b}[31m") && !table.contains('\x1b'),
        "{table:?}"
    );
    assert!(
        error.contains(r"image\u{1b}[31m-not") && !error.contains('\x1b'),
        "{error:?}"
    );
}

#[test]
fn numbers_that_cannot_be_negative_are_told_of_by_their_options() {
    let host = Host::new();
    for (args, option) in [
        (&["fleet", "down", "f.toml", "--grace", "-1"][..], "--grace"),
        (&["fleet", "logs", "f.toml", "-n", "-1"], "--lines"),
        (&["store", "--max-mib", "-5"], "--max-mib"),
        (&["top", "--interval", "-1"], "--interval"),
    ] {
        let output = host.run(args);
        let said = text(&output.stderr);
        // A tip to write `-- -1` would not help.
        assert!(
            said.contains(" for '") && said.contains(option) && !said.contains("tip:"),
            "{said}"
        );
        assert_eq!(output.status.code(), Some(2), "{said}");
    }
}

#[test]
fn the_budget_has_each_of_its_names_where_a_vm_starts() {
    let host = Host::new();
    for option in ["--budget", "--cpu-percent"] {
        let error = host.error(&["run", "--payload", "--store", "/nonexistent", option, "0"], 2);
        assert!(
            error.contains("cpu_percent is 0, but it must be 1 to 100"),
            "{error}"
        );
    }
}

#[test]
fn a_store_listens_in_the_runtime_folder_unless_told_otherwise() {
    let host = Host::new();
    let mut store = host.command(&["store", "--metrics", "none"]);
    let _store = Process(store.stderr(Stdio::null()).spawn().expect("a store"));
    let stat = eventually("it is listed", || {
        serde_json::from_slice::<serde_json::Value>(&host.run(&["stat", "--json"]).stdout).ok()
    });

    let socket = host.runtime().join("store.sock");
    assert_eq!(stat["store"]["socket"].as_str(), socket.to_str());
}

#[test]
fn why_a_store_cannot_serve_metrics_comes_before_what_to_do() {
    let host = Host::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let socket = host.path("s.sock");
    let socket = socket.to_str().expect("UTF-8");
    let error = host.error(&["store", "--socket", socket, "--metrics", &address], 1);
    assert!(error.contains("(Address already in use"), "{error}");
    assert!(
        error.ends_with("): choose another address, or \"none\"\n"),
        "{error}"
    );
}
