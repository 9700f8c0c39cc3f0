//! The Debian packages: what they hold works from where they put it, and in a clean Debian.

use crate::host::{Host, eventually, kvm_is_there, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use vmm_dedup_integration_tests::unmodified::library;

const PACKAGES: [&str; 3] = ["vmm-dedup-agent", "vmm-dedup-preload", "vmm-dedup"];

fn has(program: &str) -> bool {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .output()
        .is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("SKIPPED: {program} is missing");
    }
    found
}

/// A command that must succeed.
fn must(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("it runs");
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    text(&output.stdout)
}

/// The packages, made of the programs that the tests have, and all of them unpacked into `root`.
fn unpacked() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let built = folder.path().join("built");
    fs::create_dir(&built).expect("a folder");
    let program = PathBuf::from(env!("CARGO_BIN_EXE_vmm-dedup"));
    for file in [&program, &library::path(), &library::agent()] {
        fs::copy(file, built.join(file.file_name().expect("a name"))).expect("a program");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/build-debs");
    let debs = folder.path().join("debs");
    let mut build = Command::new(script);
    build
        .arg(&debs)
        .env("BUILT", &built)
        .env("DPKG_DEB_OPTIONS", "-Znone");
    must(&mut build);
    for deb in debs_in(&debs) {
        must(
            Command::new("dpkg-deb")
                .arg("-x")
                .arg(deb)
                .arg(folder.path().join("root")),
        );
    }
    folder
}

#[test]
fn the_packages_hold_what_works_from_where_they_put_it() {
    if !has("dh") || !has("dpkg-deb") {
        return;
    }
    let folder = unpacked();
    let folder = folder.path();
    they_say_what_they_are_and_need(folder);
    each_command_has_a_man_page_that_man_reads(folder);
    the_agents_man_page_names_its_options_and_settings(folder);
    bash_completes_commands_and_options(folder);
    if kvm_is_there() {
        if !they_come_and_go_in_a_clean_debian(folder) {
            a_fleet_of_four_runs_from_them_and_leaves_nothing(folder);
        }
        a_systemd_starts_their_units(folder);
    }
}

fn debs_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("packages").flatten();
    let mut debs: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    debs.sort();
    debs
}

fn they_say_what_they_are_and_need(folder: &Path) {
    let debs = debs_in(&folder.join("debs"));
    let version = must(Command::new(env!("CARGO_BIN_EXE_vmm-dedup")).arg("--version"));
    let version = version.trim().trim_start_matches("vmm-dedup ");
    for (deb, package) in debs.iter().zip(PACKAGES) {
        let field = |name: &str| must(Command::new("dpkg-deb").arg("-f").arg(deb).arg(name));
        assert_eq!(field("Package").trim(), package);
        assert_eq!(field("Version").trim(), version);
        assert!(field("Depends").contains("libc6 (>= "), "{}", field("Depends"));
    }
    assert_eq!(debs.len(), PACKAGES.len());
    if has("lintian") {
        // Root may have built them, which lintian has to be told.
        let mut lintian = Command::new("lintian");
        lintian.args([
            "--fail-on",
            "error",
            "--allow-root",
            "--suppress-tags",
            // Those are not compressed, to be made sooner.
            "initial-upload-closes-no-bugs,uses-no-compression-for-control-tarball,uses-no-compression-for-data-tarball",
        ]);
        must(lintian.args(&debs));
    }
}

fn each_command_has_a_man_page_that_man_reads(folder: &Path) {
    let pages = folder.join("root/usr/share/man/man1");
    // From `--help` of the program and of its commands with commands.
    let commands = |of: &[&str]| -> Vec<String> {
        let help = must(Command::new(env!("CARGO_BIN_EXE_vmm-dedup")).args(of).arg("-h"));
        let list = help.split("Commands:\n").nth(1).unwrap_or_default();
        let list = list.split("\n\n").next().unwrap_or_default();
        let names = list.lines().filter_map(|line| line.split_whitespace().next());
        names.filter(|name| *name != "help").map(str::to_owned).collect()
    };
    let mut expected = vec!["vmm-dedup".to_owned()];
    for command in commands(&[]) {
        expected.extend(
            commands(&[&command])
                .iter()
                .map(|inner| format!("vmm-dedup-{command}-{inner}")),
        );
        expected.push(format!("vmm-dedup-{command}"));
    }
    assert!(
        expected.contains(&"vmm-dedup-fleet-up".to_owned()),
        "{expected:?}"
    );
    for name in &expected {
        let page = pages.join(format!("{name}.1.gz"));
        assert!(page.is_file(), "no {}", page.display());
    }
    let pages_of_help = fs::read_dir(&pages).expect("pages").flatten();
    let mut pages_of_help = pages_of_help.filter(|page| page.file_name().to_string_lossy().contains("-help"));
    assert!(pages_of_help.next().is_none(), "`help` has pages");
    if has("man") {
        let page = pages.join("vmm-dedup-fleet-up.1.gz");
        let shown = must(Command::new("man").arg("-l").arg(page).env("MANWIDTH", "80"));
        assert!(shown.contains("--plan") && shown.contains("vmm-dedup"), "{shown}");
    }
}

fn the_agents_man_page_names_its_options_and_settings(folder: &Path) {
    let page = folder.join("root/usr/share/man/man8/vmm-dedup-agent.8.gz");
    assert!(page.is_file(), "no {}", page.display());
    if !has("man") {
        return;
    }
    let shown = must(Command::new("man").arg("-l").arg(page).env("MANWIDTH", "80"));
    let help = must(Command::new(folder.join("root/usr/sbin/vmm-dedup-agent")).arg("--help"));
    let options: Vec<&str> = help
        .split_whitespace()
        .filter(|word| word.starts_with("--"))
        .collect();
    let file = fs::read_to_string(folder.join("root/etc/vmm-dedup-agent.toml")).expect("settings");
    let settings: Vec<&str> = file
        .lines()
        .filter(|line| !line.starts_with('#') && line.contains(" = "))
        .collect();
    assert!(
        options.len() >= 8 && settings.len() >= 8,
        "{options:?} {settings:?}"
    );
    for part in options.iter().chain(&settings) {
        assert!(shown.contains(part), "the page has no {part}: {shown}");
    }
}

fn bash_completes_commands_and_options(folder: &Path) {
    if !has("bash") {
        return;
    }
    let file = folder.join("root/usr/share/bash-completion/completions/vmm-dedup");
    let complete = |words: &str, count: u32| {
        let script = format!(
            "source '{}'; COMP_WORDS=({words}); COMP_CWORD={count}; \
             complete=$(complete -p vmm-dedup | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); \
             $complete vmm-dedup \"${{COMP_WORDS[{count}]}}\" \"${{COMP_WORDS[{}]}}\"; echo \"${{COMPREPLY[*]}}\"",
            file.display(),
            count - 1
        );
        must(Command::new("bash").args(["-c", &script])).trim().to_owned()
    };
    assert_eq!(complete("vmm-dedup fl", 1), "fleet");
    assert_eq!(complete("vmm-dedup fleet rest", 2), "restart");
    assert_eq!(complete("vmm-dedup estimate --ht", 2), "--html");
}

/// Installed, used, upgraded and removed there. `false` where none can be made, which is said.
fn they_come_and_go_in_a_clean_debian(folder: &Path) -> bool {
    let arguments = [folder.join("built"), folder.join("debs")];
    checked("check-deb", &arguments)
}

/// The units for a store and for VMs of a user of their own, started by a systemd that is the first process of namespaces of its own.
fn a_systemd_starts_their_units(folder: &Path) {
    checked("check-systemd", &[folder.join("built"), folder.join("debs")]);
}

/// Runs one of the scripts beside the packages. `false` where it can do nothing, which is said.
fn checked(script: &str, arguments: &[PathBuf]) -> bool {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let mut check = Command::new(packaging.join(script));
    check.args(arguments);
    check.env("DPKG_DEB_OPTIONS", "-Znone").stdin(Stdio::null());
    check
        .env_remove("VMM_DEDUP_RUNTIME_DIR")
        .env_remove("VMM_DEDUP_STORE");
    let output = check.output().expect("it runs");
    let said = text(&output.stderr);
    assert!(output.status.success(), "{}{said}", text(&output.stdout));
    let mark = format!("{script}: SKIPPED: ");
    let skipped: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix(&mark)).collect();
    skipped
        .iter()
        .for_each(|why| eprintln!("SKIPPED: {script}: {why}"));
    skipped.is_empty()
}

fn a_fleet_of_four_runs_from_them_and_leaves_nothing(folder: &Path) {
    let (root, host) = (folder.join("root"), Host::new());
    let four = fs::read_to_string(root.join("usr/share/vmm-dedup/four.toml")).expect("the example");
    let four = four
        .replace(
            "/usr/lib/vmm-dedup",
            root.join("usr/lib/vmm-dedup").to_str().expect("UTF-8"),
        )
        .replace("127.0.0.1:9753", "127.0.0.1:0")
        .replace(
            "[store]",
            &format!("[store]\nsocket = {:?}", host.path("store.sock")),
        );
    let file = host.path("four.toml");
    fs::write(&file, four).expect("a file");
    let program = root.join("usr/bin/vmm-dedup");
    let run = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.args(args).env("VMM_DEDUP_RUNTIME_DIR", host.runtime());
        command.env_remove("VMM_DEDUP_STORE");
        must(&mut command)
    };
    let file = file.to_str().expect("UTF-8");

    let up = run(&["fleet", "up", file]);
    let stat = eventually("it saves", || {
        let stat: Value = serde_json::from_str(&run(&["stat", "--json"])).ok()?;
        // Of four guests three times 32 MiB, less what tables take.
        (stat["store"]["saved_net_bytes"].as_i64()? > 64 << 20).then_some(stat)
    });
    let explained = run(&["explain", "guest-0"]);
    let down = run(&["fleet", "down", file]);

    assert!(up.contains("4 VMs run"), "{up}");
    assert_eq!(stat["vms"].as_array().map(Vec::len), Some(4), "{stat}");
    assert!(explained.contains("shared"), "{explained}");
    assert!(!down.is_empty());
    let left = run(&["fleet", "ls"]);
    assert!(!left.contains("four"), "{left}");
    assert!(!host.path("store.sock").exists(), "the socket is left");
}
