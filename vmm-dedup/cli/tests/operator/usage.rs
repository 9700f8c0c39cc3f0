//! Wrong usage ends with 2, whoever finds it out, and hints name what is wrong.

use crate::host::{Host, kvm_is_there, text};

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
