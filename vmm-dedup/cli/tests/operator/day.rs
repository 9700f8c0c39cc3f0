//! An operator's day: 60 steps and more on one host, typed into a shell. Each must end with the code that it should, say what it
//! should, never panic; figures must be right, and a hint that is pasted must work.

use crate::host::{COMMON_PAGES, Host, eventually, has_stopped, kvm_is_there, text};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use vmm_dedup_host::process::Stat;

/// VMs that have 8 MiB in common, 4 MiB of their own and 1 MiB of zeros.
const FLEET: &str = r#"
name = "day"
[store]
socket = "store.sock"
metrics = "none"
max_mib = 256
[[vm]]
name = "web"
count = 3
vmm = "reference"
memory_mib = 64
kernel = "payload.elf"
cmdline = "seed={index} private_mib=4 zero_mib=1 common_mib=8 ws_area=private ws_pages=8 rate=10 report_ms=1000 seconds=1000000"
dedup = { pass_period_ms = 100 }
"#;

/// What is typed, and what is to come of it.
struct Step {
    line: String,
    codes: Vec<i32>,
    shown: Vec<&'static str>,
    said: Vec<&'static str>,
}

/// A line that succeeds.
fn type_in(line: &str) -> Step {
    Step {
        line: line.into(),
        codes: vec![0],
        shown: Vec::new(),
        said: Vec::new(),
    }
}

impl Step {
    /// It ends with this instead.
    fn ends(mut self, code: i32) -> Self {
        self.codes = vec![code];
        self
    }

    /// Whatever the host is like: with one of these.
    fn ends_one_of(mut self, codes: &[i32]) -> Self {
        self.codes = codes.to_vec();
        self
    }

    /// On standard output.
    fn shows(mut self, text: &'static str) -> Self {
        self.shown.push(text);
        self
    }

    /// On standard error.
    fn says(mut self, text: &'static str) -> Self {
        self.said.push(text);
        self
    }
}

/// The host, and the operator's shell.
struct Day {
    host: Host,
    steps: usize,
    /// What the last step wrote.
    last: String,
}

impl Drop for Day {
    /// A day that fails midway leaves no VM either.
    fn drop(&mut self) {
        let down = "vmm-dedup fleet down fleet.toml";
        if std::thread::panicking() && !self.shell(down).status().is_ok_and(|status| status.success()) {
            eprintln!(
                "VMs may be left: {down:?} fails in {}",
                self.host.path("").display()
            );
        }
    }
}

impl Day {
    fn begin() -> Self {
        let host = Host::new();
        fs::write(host.path("payload.elf"), vmm_dedup_payload::ELF).expect("a kernel");
        fs::write(host.path("fleet.toml"), FLEET).expect("a file");
        fs::write(host.path("wrong.toml"), FLEET.replace("= 3", "= \"three\"")).expect("a file");
        for (at, image) in host.images().into_iter().take(2).enumerate() {
            fs::rename(image, host.path(&format!("image-{at}"))).expect("an image");
        }
        Self {
            host,
            steps: 0,
            last: String::new(),
        }
    }

    fn shell(&self, line: &str) -> Command {
        let program = Path::new(env!("CARGO_BIN_EXE_vmm-dedup"));
        let path = std::env::var("PATH").unwrap_or_default();
        let folder = program.parent().expect("a folder").display();
        let mut shell = Command::new("bash");
        shell
            .args(["-c", line])
            .current_dir(self.host.path(""))
            .env("PATH", format!("{folder}:{path}"))
            .env("VMM_DEDUP_RUNTIME_DIR", self.host.runtime())
            .env("COLUMNS", "120")
            .env_remove("VMM_DEDUP_STORE")
            .stdin(Stdio::null());
        shell
    }

    fn take(&mut self, step: Step) {
        let output = self.shell(&step.line).output().expect("a shell");
        let (shown, said) = (text(&output.stdout), text(&output.stderr));
        let code = output.status.code().unwrap_or(-1);
        self.steps += 1;
        let all = format!(
            "step {}: {}\nended with {code}\n{shown}\n{said}",
            self.steps, step.line
        );
        assert!(step.codes.contains(&code), "expected {:?}: {all}", step.codes);
        for part in &step.shown {
            assert!(shown.contains(part), "not shown: {part:?}: {all}");
        }
        for part in &step.said {
            assert!(said.contains(part), "not said: {part:?}: {all}");
        }
        assert!(
            !said.contains("panicked") && !said.contains("RUST_BACKTRACE"),
            "{all}"
        );
        assert!(!shown.contains("NaN") && !shown.contains("-0.0 "), "{all}");
        // What failed says why, in the program's name.
        assert!(
            code == 0 || !said.trim().is_empty(),
            "fails without a word: {all}"
        );
        self.last = shown + &said;
    }

    /// A step that succeeds and shows this.
    fn shows(&mut self, line: &str, text: &'static str) {
        self.take(type_in(line).shows(text));
    }

    /// A step that ends with this code and says why.
    fn fails(&mut self, line: &str, code: i32, why: &'static str) {
        self.take(type_in(line).ends(code).says(why));
    }

    /// Pastes what the last step had in backquotes and begins like this.
    fn paste(&mut self, beginning: &str) {
        let hint = self.last.split('`').skip(1).step_by(2);
        let hint = hint.filter(|hint| hint.starts_with(beginning)).last();
        let hint = hint
            .unwrap_or_else(|| panic!("no hint {beginning:?}: {}", self.last))
            .to_owned();
        self.take(type_in(&hint));
    }

    fn json(&self, line: &str) -> Value {
        let output = self.shell(line).output().expect("a shell");
        let json = serde_json::from_slice(&output.stdout);
        json.unwrap_or_else(|e| panic!("{line}: {e}: {}", text(&output.stderr)))
    }

    /// What `stat --json` says, once all VMs share what they have in common.
    fn settled(&self, vms: u64) -> Value {
        eventually("they share", || {
            let stat = self.json("vmm-dedup stat --json");
            let sharing = stat["store"]["pages_sharing"].as_u64()?;
            (sharing >= COMMON_PAGES * (vms - 1)).then_some(stat)
        })
    }

    /// Waits until the store knows so many VMs: one that has just started, or whose store has, connects within a second or two.
    fn connected(&self, vms: usize) {
        eventually("they are connected", || {
            let stat = self.json("vmm-dedup stat --json");
            (stat["vms"].as_array()?.len() == vms).then_some(())
        });
    }

    /// Of a VM, once the store knows it: one that has just started, or that could not answer, joins a little later.
    fn pid(&self, name: &str) -> u64 {
        eventually("the store knows it", || {
            let stat = self.json("vmm-dedup stat --json");
            let vms = stat["vms"].as_array()?;
            let vm = vms.iter().find(|vm| vm["name"] == name);
            vm?["pid"].as_u64()
        })
    }
}

fn number(value: &Value, key: &str) -> i64 {
    value[key]
        .as_i64()
        .unwrap_or_else(|| panic!("no {key} in {value:#}"))
}

/// Waits until a process that was killed has ended with all its threads. (Its memory goes first, for a moment in which it still runs.)
fn has_gone(pid: u64) {
    eventually("it has gone", || {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        let ended = Stat::of(pid).is_none_or(|stat| stat.has_ended());
        (ended && threads <= 1).then_some(())
    });
}

/// What the store's files of pages take, by the kernel's word.
fn segment_bytes(store: i64) -> i64 {
    let files = fs::read_dir(format!("/proc/{store}/fd"))
        .expect("a process")
        .flatten();
    let segments = files.map(|file| file.path()).filter(|path| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:vmm-dedup-segment"))
    });
    let blocks = segments
        .filter_map(|path| fs::metadata(path).ok())
        .map(|file| file.blocks());
    i64::try_from(blocks.sum::<u64>() * 512).expect("a size")
}

/// What VMs share already is not to be saved once more.
fn estimate_leaves_out_what_is_shared(day: &Day) {
    // Of the VMMs' own memory some maps the zero page.
    let of_vmm = 256;
    // Between the two commands a pass may merge what was written before.
    eventually("the estimate leaves out what is shared", || {
        let stat = day.json("vmm-dedup stat --json");
        let vms = stat["vms"].as_array().expect("VMs");
        let pids: Vec<String> = vms.iter().map(|vm| number(vm, "pid").to_string()).collect();
        let estimate = day.json(&format!("vmm-dedup estimate --json --pid {}", pids.join(",")));
        let memories = estimate["inputs"].as_array().expect("memories");
        let is_left_out = vms.iter().zip(memories).all(|(vm, memory)| {
            let shares = number(vm, "pages_mapped") + number(vm, "pages_zero");
            (shares - 64..shares + of_vmm).contains(&number(memory, "merged_already"))
        });
        let saved = number(&estimate["total"]["saved"], "pages");
        (is_left_out && saved < 3 * of_vmm).then_some(())
    });
}

/// What is saved net is the sum of the parts that are shown, in the text as in JSON.
fn parts_add_up(day: &Day, line: &str) {
    let output = day.shell(line).output().expect("a shell");
    let shown = text(&output.stdout);
    let told = shown
        .lines()
        .find(|line| line.trim_start().starts_with("saved net ") && line.contains("; less "));
    let told = told.unwrap_or_else(|| panic!("{line}: {shown}"));
    let (spared, taken) = told.split_once("; less ").expect("two halves");
    let numbers = |text: &str| -> Vec<i64> {
        let words = text.split([' ', ',']).filter(|word| word.contains('.'));
        words
            .map(|word| word.replace('.', "").parse().expect("a number"))
            .collect()
    };
    let (spared, taken) = (numbers(spared), numbers(taken));
    let sum = spared[1..].iter().sum::<i64>() - taken.iter().sum::<i64>();
    assert!(spared.len() >= 3 && taken.len() >= 2, "{told}");
    assert_eq!(spared[0], sum, "{told}");
    assert!(told.contains(" zero"), "{told}");
}

/// The figures of three VMs that share, held against what the guests hold and what the kernel says.
fn figures_are_right(day: &Day) {
    let stat = day.settled(3);
    let store = &stat["store"];
    let common = i64::try_from(COMMON_PAGES).expect("a number");
    // Beside their common memory guests have pages of their program in common: less than half a MiB.
    let of_program = 128;
    let (once, again) = (number(store, "pages_shared"), number(store, "pages_sharing"));
    assert!((common..common + of_program).contains(&once), "kept once: {once}");
    assert!(
        (2 * common..2 * common + 3 * of_program).contains(&again),
        "not again: {again}"
    );
    let vms = stat["vms"].as_array().expect("VMs");
    assert_eq!(vms.len(), 3, "{stat:#}");
    // Services tell what they map in their own time, the store what it keeps at once.
    eventually("what is saved net is what is saved, less what that takes", || {
        let stat = day.json("vmm-dedup stat --json");
        let zero = stat["vms"].as_array().expect("VMs").iter();
        let zero: i64 = zero.map(|vm| number(vm, "pages_zero")).sum();
        let net = number(&stat, "saved_net_bytes");
        let gross = 4096 * (number(&stat["store"], "pages_sharing") + zero);
        // Each service and the store take some; more than 2 MiB each would be wrong.
        (net < gross && net > gross - (4 << 21)).then_some(())
    });
    // The store tells of itself and of the VMs in one answer each, and a service may report between the two.
    eventually("the VMs' parts make the whole", || {
        let stat = day.json("vmm-dedup stat --json");
        let parts = stat["vms"].as_array().expect("VMs").iter();
        let of_vms: i64 = parts.map(|vm| number(vm, "saved_net_bytes")).sum();
        ((of_vms - number(&stat, "saved_net_bytes")).abs() < 4096).then_some(())
    });
    parts_add_up(day, "COLUMNS=500 vmm-dedup stat");
    parts_add_up(day, "COLUMNS=500 vmm-dedup explain web-1");
    eventually("it holds what the kernel says that its files take", || {
        let store = &day.json("vmm-dedup stat --json")["store"];
        let files = segment_bytes(number(store, "pid"));
        (files >= 4096 * common && number(store, "resident_bytes") == files).then_some(())
    });
    let explained = day.json("vmm-dedup explain web-0 --json");
    let classes = explained["classes"].as_object().expect("classes");
    let pages: i64 = classes.values().filter_map(Value::as_i64).sum();
    assert_eq!(pages, number(&explained, "pages"), "{explained:#}");
    assert_eq!(pages, 64 << 8, "the guest has 64 MiB");
    estimate_leaves_out_what_is_shared(day);
}

#[test]
#[allow(clippy::too_many_lines)] // a day is long
fn a_day_of_sixty_steps() {
    if !kvm_is_there() {
        return;
    }
    let mut day = Day::begin();

    // Morning: what is this?
    day.shows("vmm-dedup --version", "vmm-dedup 0.");
    day.fails("vmm-dedup", 2, "Usage: vmm-dedup <COMMAND>");
    day.fails("vmm-dedup sta", 2, "'stat'");
    day.shows("vmm-dedup help fleet", "restart");
    day.take(type_in("vmm-dedup completions bash | bash -n"));
    day.take(type_in("vmm-dedup doctor").ends_one_of(&[0, 1]).shows("kvm"));
    day.take(
        type_in("vmm-dedup doctor --json")
            .ends_one_of(&[0, 1])
            .shows("\"findings\""),
    );
    day.fails("vmm-dedup stat", 1, "no store is listed in");
    day.fails("vmm-dedup stat --store nowhere.sock", 1, "nowhere.sock");
    day.fails("vmm-dedup explain", 1, "no store is listed in");
    day.fails("vmm-dedup set --all off", 1, "no store is listed in");
    day.fails("vmm-dedup run --payload foo=1", 1, "foo=1");
    day.shows(
        "vmm-dedup estimate image-0 image-1",
        "0.5 MiB of 2.0 MiB (25.0 %)",
    );
    day.shows(
        "vmm-dedup estimate image-0 image-1 --html page.html > /dev/null && grep -c '<h1>' page.html",
        "1",
    );
    day.fails("vmm-dedup estimate nothing", 1, "cannot read nothing");
    day.shows(
        "vmm-dedup bench estimate image-0 --repetitions 1 --plot plots && ls plots",
        "estimate.svg",
    );

    // A fleet comes up.
    day.fails(
        "vmm-dedup fleet up missing.toml",
        1,
        "cannot read the fleet file missing.toml",
    );
    day.fails("vmm-dedup fleet up wrong.toml", 1, "wrong.toml:");
    day.shows("vmm-dedup fleet ls", "no fleet is up");
    day.shows("vmm-dedup fleet up fleet.toml --plan", "+ web-2");
    day.fails("vmm-dedup fleet status fleet.toml", 1, "is not up");
    day.paste("vmm-dedup fleet up");
    day.shows("vmm-dedup fleet up fleet.toml", "nothing to do");
    day.connected(3);
    day.shows("vmm-dedup fleet ls", "day     3   3 1 of 1");
    day.shows("vmm-dedup fleet ls --json", "\"running\": 3");
    day.shows("vmm-dedup fleet status fleet.toml", "web-2");
    day.fails("vmm-dedup top", 2, "top needs a terminal");
    day.paste("vmm-dedup stat --json");
    figures_are_right(&day);
    day.take(type_in("vmm-dedup stat").shows("by 3 VMs").shows("running"));
    day.shows("vmm-dedup stat | head -n 1", "saved net");
    day.fails("vmm-dedup stat > /dev/full", 1, "cannot write to standard output");
    day.shows("vmm-dedup explain", "3 VMs of 1 store");
    day.take(
        type_in("vmm-dedup explain web-0")
            .shows("web-0: running")
            .shows("shared"),
    );
    day.shows("vmm-dedup explain web-0 --gpa 0x400000-0x500000", "256 pages");
    day.fails("vmm-dedup explain nobody", 1, "there are web-0, web-1, web-2");
    day.take(
        type_in("vmm-dedup doctor web-0")
            .ends_one_of(&[0, 1])
            .shows("service: built in"),
    );

    // Settings.
    day.take(type_in("vmm-dedup set web-0 cpu_percent=5"));
    eventually("it has its new budget", || {
        (day.host.vm("web-0")?["cpu_percent"] == 5).then_some(())
    });
    day.fails("vmm-dedup set web-0 cpu_percent=500", 2, "must be 1 to 100");
    day.fails("vmm-dedup set web-0", 2, "say what to change");
    day.fails("vmm-dedup set nobody on", 1, "no VM is called nobody");
    day.shows("vmm-dedup set 'web-*' budget=9", "web-2: done");
    day.take(type_in(
        "vmm-dedup set web-1 pass_period_ms=150 stop_target_us=100",
    ));
    day.shows(
        "vmm-dedup explain web-1",
        "pass_period_ms 150, stop_target_us 100",
    );
    day.fails("vmm-dedup set web-1 max_vmas=9", 2, "while the VM runs");
    day.shows("vmm-dedup set --all off", "web-0: done");
    day.shows("vmm-dedup stat", " off ");
    day.shows("vmm-dedup set --all on", "web-0: done");

    // The fleet changes.
    day.shows("vmm-dedup fleet scale fleet.toml web=4", "4 VMs now");
    day.shows(
        "vmm-dedup fleet up fleet.toml --plan",
        "~ web-0: dedup.cpu_percent (9 by `set`, 20 in the file)",
    );
    day.shows("vmm-dedup fleet up fleet.toml", "(150 by `set`, 100 in the file)");
    day.shows("vmm-dedup fleet up fleet.toml --plan", "nothing to do");
    day.take(type_in("vmm-dedup set web-0 off"));
    day.take(
        type_in("vmm-dedup fleet up fleet.toml")
            .ends(3)
            .shows("! web-0 was switched off by `set`"),
    );
    day.paste("vmm-dedup set web-0");
    day.shows("vmm-dedup fleet restart fleet.toml web-1", "1 VM started anew");
    day.shows("vmm-dedup fleet down fleet.toml web-3", "3 VMs are left");
    day.connected(3);
    day.shows("vmm-dedup fleet status fleet.toml", "web-3 down: ");
    day.fails(
        "vmm-dedup fleet restart fleet.toml 'zz*'",
        1,
        "there are web-0, web-1, web-2; down: web-3",
    );
    day.shows("vmm-dedup fleet scale fleet.toml web=3", "3 VMs now");
    day.shows(
        "vmm-dedup fleet logs fleet.toml web-0 --serial | head -n 1",
        "@payload",
    );
    day.shows("vmm-dedup fleet logs fleet.toml --stores", "listening on");
    day.fails(
        "vmm-dedup fleet logs fleet.toml nobody",
        1,
        "there are web-0, web-1, web-2",
    );
    day.fails(
        "vmm-dedup fleet api fleet.toml web-0 GET vm.info",
        1,
        "has no API",
    );
    fs::write(
        day.host.path("fleet.toml"),
        FLEET.replace(
            "pass_period_ms = 100",
            "pass_period_ms = 200, cpu_percent = 7, max_vmas = 9000",
        ),
    )
    .expect("a file");
    let left = |line: &str| type_in(line).ends(3).says("fleet day is not as its file says");
    day.take(left("vmm-dedup fleet up fleet.toml --plan").shows("~ web-0: dedup.cpu_percent"));
    day.take(left("vmm-dedup fleet up fleet.toml").shows("! web-2: dedup.max_vmas changed"));
    day.paste("vmm-dedup fleet restart");
    // On a busy machine the one that comes second may give up.
    let two = "vmm-dedup fleet up fleet.toml & vmm-dedup fleet up fleet.toml; wait $!";
    day.take(left(two).ends_one_of(&[3, 1]).shows("! web-0"));
    day.shows(
        "vmm-dedup fleet restart fleet.toml web-0 web-1",
        "2 VMs started anew",
    );
    day.shows("vmm-dedup fleet up fleet.toml --plan", "nothing to do");

    // Night: a VM is stopped, one is killed, the store is killed.
    let frozen = day.pid("web-0");
    day.take(type_in(&format!("kill -STOP {frozen}")));
    has_stopped(frozen);
    day.take(
        type_in("vmm-dedup stat")
            .ends(1)
            .shows("frozen")
            .says("1 VM is frozen (web-0): `vmm-dedup doctor`"),
    );
    day.fails("vmm-dedup stat --json", 1, "1 VM is frozen (web-0)");
    day.fails("vmm-dedup fleet ls", 1, "VMs that are frozen: 1");
    day.take(
        type_in("vmm-dedup fleet status fleet.toml")
            .ends(1)
            .shows("web-0 frozen"),
    );
    day.fails("vmm-dedup set web-0 off", 1, "nothing was changed");
    day.paste("kill -CONT");
    day.connected(3);
    day.shows("vmm-dedup fleet status fleet.toml", "running");
    let killed = day.pid("web-2");
    day.take(type_in(&format!("kill -KILL {killed}")));
    has_gone(killed);
    day.fails("vmm-dedup fleet ls --json", 1, "VMs that do not run: 1");
    day.take(
        type_in("vmm-dedup fleet status fleet.toml")
            .ends(1)
            .shows("web-2 crashed"),
    );
    day.paste("vmm-dedup fleet logs");
    day.shows("vmm-dedup fleet up fleet.toml", "+ web-2 (reference, crashed)");
    let store = number(&day.settled(3)["store"], "pid");
    day.take(type_in(&format!("kill -KILL {store}")));
    has_gone(u64::try_from(store).expect("a process"));
    day.fails("vmm-dedup stat", 1, "guests go on, nothing merges");
    day.fails("vmm-dedup explain web-0", 1, "has ended");
    day.take(type_in("vmm-dedup doctor").ends(1).shows("warn store"));
    day.take(type_in("vmm-dedup fleet status fleet.toml").ends(1).shows("GONE"));
    day.paste("vmm-dedup fleet up");
    figures_are_right(&day);

    // Home.
    day.take(type_in("vmm-dedup set web-0 off --unmerge"));
    day.shows("vmm-dedup stat", " off ");
    day.shows("vmm-dedup fleet down fleet.toml", "3 VMs ended");
    day.shows("vmm-dedup fleet down fleet.toml", "nothing to do");
    day.fails("vmm-dedup stat", 1, "no store is listed in");
    day.shows("find run -type f -o -type s | wc -l", "0");
    assert!(day.steps >= 60, "{} steps", day.steps);
}

#[test]
fn a_runtime_folder_that_is_full_stops_a_fleet_that_starts_and_leaves_nothing() {
    if !kvm_is_there() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can mount a small file system");
        return;
    }
    let mut day = Day::begin();
    fs::create_dir_all(day.host.runtime()).expect("a folder");
    // What is mounted there nobody else sees, and it goes with the shell.
    let line = "unshare --mount bash -c 'mount -t tmpfs -o size=16k tmpfs run || exit 99; vmm-dedup fleet up fleet.toml; \
                code=$?; echo left: $(find run -type f -o -type s); vmm-dedup stat; exit $code'";
    let full = type_in(line).ends(1).shows("left:\n");

    day.take(full.says("No space left on device").says("no store is listed in"));

    let folder = day.host.path("");
    let folder = folder.to_str().expect("UTF-8");
    eventually("no process is left", || {
        let processes = fs::read_dir("/proc").expect("/proc").flatten();
        let lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
        let mut texts = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
        texts.all(|text| !text.contains(folder)).then_some(())
    });
}
