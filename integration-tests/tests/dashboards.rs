//! Every expression of every dashboard panel, variable and rule, evaluated by a real Prometheus that scrapes a real store
//! with a real fleet.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, Reason, Refusal, Refused};
use vmm_dedup_integration_tests::dashboards::{DASHBOARDS, array, drawing, folder, read, substitute, text};
use vmm_dedup_integration_tests::need_kvm;
use vmm_dedup_integration_tests::prometheus::Prometheus;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_payload::{PayloadConfig, Rewrite, WorkingSet};
use vmm_dedup_refvmm::ThpMode;

const PATIENCE: Duration = Duration::from_secs(120);
/// The VM that the dashboard of one VM is tried with: it has a reserve.
const VM: &str = "managed-1";

fn skip_without(what: &str, package: &str) {
    assert!(
        std::env::var_os("CI").is_none(),
        "{what} is needed in CI: install {package}"
    );
    eprintln!("SKIPPED: {what} is not installed (Debian package {package})");
}

fn guest(store: &StoreThread, name: &str, seed: u64, breaks: Breaks) -> Guest {
    let payload = PayloadConfig::default()
        .seed(seed)
        .private_mib(2)
        .zero_mib(2)
        .common_mib(8)
        .ws_area(WorkingSet::Common)
        .ws_pages(1 << 20)
        .rate(0)
        .rewrite(Rewrite::Restore)
        .rest_ms(400)
        .seconds(1_000_000);
    let config = Config {
        name: name.into(),
        pass_period_ms: 100,
        cpu_percent: 30,
        breaks,
        ..Config::default()
    };
    Guest::boot(payload, 32, ThpMode::Never, Some((&store.socket(), config)))
}

/// An alert's expression without its comparisons with numbers.
fn without_thresholds(expression: &str) -> String {
    let words: Vec<&str> = expression.split_whitespace().collect();
    let is_comparison = |word: &str| ["==", "!=", ">", "<", ">=", "<="].contains(&word);
    let is_threshold =
        |at: usize| is_comparison(words[at]) && words.get(at + 1).is_some_and(|n| n.parse::<f64>().is_ok());
    let keep = |at: &usize| !is_threshold(*at) && (*at == 0 || !is_threshold(at - 1));
    let kept: Vec<&str> = (0..words.len()).filter(keep).map(|at| words[at]).collect();
    kept.join(" ")
}

/// Expressions with where they come from.
fn expressions_of(name: &str) -> Vec<(String, String)> {
    let dashboard = read(name);
    let mut found = Vec::new();
    for panel in array(&dashboard, "panels") {
        for target in array(panel, "targets") {
            let place = format!("{name}.json, panel {}, {}", panel["title"], target["refId"]);
            found.push((place, substitute(text(target, "expr"), VM)));
        }
    }
    for variable in array(&dashboard["templating"], "list")
        .iter()
        .filter(|v| v["type"] == "query")
    {
        // label_values(SERIES, LABEL)
        let query = text(&variable["query"], "query");
        let inner = query
            .strip_prefix("label_values(")
            .and_then(|q| q.strip_suffix(')'));
        let (series, label) = inner.and_then(|q| q.rsplit_once(", ")).expect("label_values");
        let place = format!("{name}.json, variable {}", variable["name"]);
        let (metric, matchers) = series.split_once('{').unwrap_or((series, "}"));
        found.push((
            place,
            substitute(&format!("{metric}{{{label}!=\"\", {matchers}"), VM),
        ));
    }
    found
}

#[test]
fn every_expression_of_dashboards_and_rules_returns_data() {
    need_kvm!();
    // These guests write all the time: after a while their pages would be left alone.
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::with_metrics();
    let managed = Breaks::managed(256, 0);
    let guests = [
        guest(&store, VM, 1, managed),
        guest(&store, "managed-2", 2, managed),
        guest(&store, "kernel", 3, Breaks::KERNEL),
    ];
    let refusal = Refusal::new(Reason::Vfio, "device 0000:01:00.0", "detach it");
    let _refused = Refused::announce(&store.socket(), "gpu", 512, &refusal).expect("a thread");
    let metrics = store.metrics().expect("metrics");
    let rules = folder().join("vmm-dedup.rules.yml");
    let Some(prometheus) = Prometheus::start(metrics, &rules) else {
        return skip_without("prometheus", "prometheus");
    };
    let mut wanted: Vec<(String, String)> = DASHBOARDS.into_iter().flat_map(expressions_of).collect();
    let rules = prometheus.rules();
    assert!(rules.len() > 20, "{} rules", rules.len());
    for rule in &rules {
        let place = format!("rule {}", rule["name"]);
        // As it is, it must parse; whether it returns data is a matter of the host's state.
        prometheus
            .query(text(rule, "query"))
            .unwrap_or_else(|e| panic!("{place}: {e}"));
        wanted.push((place, without_thresholds(text(rule, "query"))));
    }
    let start = Instant::now();
    // Rates need several scrapes, and guests that merge and break meanwhile.
    loop {
        wanted.retain(|(place, expression)| {
            let values = prometheus
                .query(expression)
                .unwrap_or_else(|e| panic!("{place}: {expression}: {e}"));
            !values.iter().any(|value| value.is_finite())
        });
        if wanted.is_empty() {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "no data: {wanted:#?}");
        std::thread::sleep(Duration::from_secs(1));
    }
    for rule in prometheus.rules() {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
    let moving = [
        "sum(instance_domain:vmmdedup_merges:rate5m)",
        "sum(instance_domain:vmmdedup_breaks:rate5m)",
        "sum(instance_domain:vmmdedup_cpu_cores:rate5m)",
    ];
    for expression in moving {
        let values = prometheus.query(expression).expect("it parses");
        assert!(values[0] > 0.0, "{expression} is {values:?}");
    }
    for guest in guests {
        let (verdict, _) = guest.finish();
        assert!(verdict.ok, "{verdict:?}");
    }
}

#[test]
fn thresholds_are_taken_out_and_nothing_else() {
    assert_eq!(
        without_thresholds("a{x=\"1\"} < 0 and on (b) c > 0.5"),
        "a{x=\"1\"} and on (b) c"
    );
    assert_eq!(without_thresholds("a / (b > 0)"), "a / (b > 0)");
    assert_eq!(without_thresholds("time() - a > 900"), "time() - a");
}

#[test]
fn rules_do_what_their_tests_say() {
    let run = |arguments: &[&str]| {
        Command::new("promtool")
            .args(arguments)
            .current_dir(folder())
            .output()
    };
    let Ok(output) = run(&["check", "rules", "vmm-dedup.rules.yml"]) else {
        return skip_without("promtool", "prometheus");
    };
    assert!(output.status.success(), "{output:?}");
    let output = run(&["check", "config", "local/prometheus.yml"]).expect("promtool runs");
    assert!(output.status.success(), "{output:?}");
    let output = run(&["test", "rules", "vmm-dedup.rules.test.yml"]).expect("promtool runs");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn every_alert_has_a_test() {
    let read = |name: &str| std::fs::read_to_string(folder().join(name)).expect("a file");
    let tests = read("vmm-dedup.rules.test.yml");
    let rules = read("vmm-dedup.rules.yml");
    let alerts: Vec<&str> = rules
        .lines()
        .filter_map(|l| l.trim().strip_prefix("- alert: "))
        .collect();
    assert!(alerts.len() > 10);
    for alert in alerts {
        assert!(
            tests.contains(&format!("alertname: {alert}\n        exp_alerts:\n")),
            "{alert} is never fired"
        );
    }
}

/// The runbook, wherever the operator's Prometheus says that it is served.
const RUNBOOK: &str = r#"runbook_url: '{{ or $externalLabels.vmm_dedup_docs "docs/" }}runbook.md"#;

/// An alert and the place of its paragraph, as in the rules.
fn runbook_links(rules: &str) -> Vec<(&str, &str)> {
    let alerts = rules.split("- alert: ").skip(1);
    let read = |alert| {
        let mut lines = str::lines(alert);
        let name = lines.next().unwrap_or_default();
        let link = lines.find_map(|line| line.trim().strip_prefix(RUNBOOK));
        (name, link.unwrap_or_else(|| panic!("{name} has no runbook_url")))
    };
    alerts.map(read).collect()
}

#[test]
fn every_alert_links_to_its_paragraph_of_the_runbook() {
    let read = |name: &str| std::fs::read_to_string(folder().join(name)).expect("a file");
    let (rules, runbook) = (read("vmm-dedup.rules.yml"), read("../docs/runbook.md"));
    let links = runbook_links(&rules);
    let headings: Vec<&str> = runbook
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .collect();
    assert!(links.len() > 10, "{links:?}");
    for (alert, link) in &links {
        assert_eq!(*link, format!("#{}'", alert.to_lowercase()));
        let paragraph = runbook.split(&format!("## {alert}\n")).nth(1);
        let paragraph = paragraph.unwrap_or_else(|| panic!("the runbook has no {alert}"));
        let paragraph = paragraph.split("\n## ").next().unwrap_or_default();
        for part in ["**Means:**", "**See:**", "**Do:**"] {
            assert!(paragraph.contains(part), "{alert} has no {part}");
        }
    }
    let alerts: Vec<&str> = links.iter().map(|(alert, _)| *alert).collect();
    assert!(
        headings.iter().all(|heading| alerts.contains(heading)),
        "{headings:?}"
    );
}

/// The pieces of a text that are between backquotes.
fn code(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn commands_for_alerts_are_as_they_are_typed() {
    let read = |name: &str| std::fs::read_to_string(folder().join(name)).expect("a file");
    let (rules, runbook) = (read("vmm-dedup.rules.yml"), read("../docs/runbook.md"));
    let mut commands = 0;
    for alert in rules.split("- alert: ").skip(1) {
        let name = alert.lines().next().unwrap_or_default();
        let of_a_vm = alert.contains("{{ $labels.vm }}");
        let paragraph = runbook.split(&format!("## {name}\n")).nth(1).unwrap_or_default();
        let paragraph = paragraph.split("\n## ").next().unwrap_or_default();
        for command in code(alert).into_iter().chain(code(paragraph)) {
            let mut words = command.split_whitespace();
            commands += usize::from(words.clone().next() == Some("vmm-dedup"));
            assert!(
                words.all(|word| !word.ends_with("=N") && word != "..." && (of_a_vm || word != "VM")),
                "{name}: `{command}`"
            );
        }
    }
    assert!(commands > 15, "{commands}");
}

/// Against the types that Grafana generates from its schema (npm package @grafana/schema), by the TypeScript compiler.
#[test]
fn dashboards_have_grafanas_schema() {
    let npm =
        |folder: &Path, arguments: &[&str]| Command::new("npm").args(arguments).current_dir(folder).output();
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dashboards-schema");
    std::fs::create_dir_all(&work).expect("a folder");
    for file in ["package.json", "package-lock.json", "check.mjs"] {
        std::fs::copy(folder().join("schema").join(file), work.join(file)).expect("a copy");
    }
    let Ok(installed) = npm(&work, &["ci", "--ignore-scripts", "--no-audit", "--no-fund"]) else {
        return skip_without("npm", "npm");
    };
    if !installed.status.success() {
        let why = String::from_utf8_lossy(&installed.stderr);
        eprintln!("SKIPPED: npm cannot install @grafana/schema: {why}");
        return;
    }
    let folder = folder().canonicalize().expect("the dashboards");
    let folder = folder.to_str().expect("UTF-8");
    let checked = npm(&work, &["run", "check", "--", folder]).expect("npm runs");
    assert!(
        checked.status.success(),
        "{}",
        String::from_utf8_lossy(&checked.stdout)
    );
}

/// What operators ask, and the panels of the first screen that answer.
const FIRST_SCREEN: [(&str, &[&str]); 5] = [
    (
        "what do I save",
        &["Saved, net", "Saved of memory", "Saved and spent, by host"],
    ),
    ("what does it cost", &["CPU", "Saved and spent, by host"]),
    ("who is to blame", &["Who is to blame"]),
    ("is it safe", &["Stores down", "Alerts", "Writers waiting"]),
    ("is it getting worse", &["Is it getting worse"]),
];
/// Lines of Grafana's grid that a screen has beside its head.
const SCREEN: u64 = 14;

#[test]
fn the_first_screen_answers_each_question() {
    let fleet = read("fleet");
    for (question, titles) in FIRST_SCREEN {
        for title in titles {
            let panel = array(&fleet, "panels")
                .iter()
                .find(|panel| panel["title"] == *title);
            let panel = panel.unwrap_or_else(|| panic!("{question}: no panel {title}"));
            let at = |key: &str| panel["gridPos"][key].as_u64().expect("a position");
            assert!(at("y") + at("h") <= SCREEN, "{question}: {title} is further down");
        }
    }
}

#[test]
fn each_row_of_panels_answers_a_question() {
    let shown = std::fs::read_to_string(folder().join("README.md")).expect("a file");
    for (at, name) in DASHBOARDS.into_iter().enumerate() {
        let answers = FIRST_SCREEN.iter().flat_map(|(question, _)| {
            let row = format!("| {question}? |").to_lowercase();
            let is_asked = |line: &&str| line.to_lowercase().starts_with(&row);
            let line = shown.lines().find(is_asked);
            let line = line.unwrap_or_else(|| panic!("dashboards/README.md does not ask {question}"));
            let rows = line.split('|').nth(at + 2).unwrap_or_default().split(';');
            rows.map(str::trim).filter(|row| !row.is_empty())
        });
        let dashboard = read(name);
        let rows = array(&dashboard, "panels")
            .iter()
            .filter(|panel| panel["type"] == "row");
        let rows: HashSet<&str> = rows.map(|row| text(row, "title")).collect();
        assert_eq!(answers.collect::<HashSet<&str>>(), rows, "{name}.json");
    }
}

/// What Grafana takes silently and shows wrongly.
#[test]
fn panels_are_whole() {
    let mut uids = HashSet::new();
    for name in DASHBOARDS {
        let dashboard = read(name);
        assert!(uids.insert(text(&dashboard, "uid").to_owned()) && !text(&dashboard, "title").is_empty());
        let (mut ids, mut cells) = (HashSet::new(), HashSet::new());
        for panel in array(&dashboard, "panels") {
            let place = format!("{name}.json, panel {}", panel["title"]);
            assert!(
                ids.insert(panel["id"].as_u64().expect("an id")),
                "{place}: id twice"
            );
            let at = |key: &str| panel["gridPos"][key].as_u64().expect("a position");
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    assert!(x < 24 && cells.insert((x, y)), "{place} lies over another one");
                }
            }
            if panel["type"] == "row" {
                continue;
            }
            let unit = &panel["fieldConfig"]["defaults"]["unit"];
            assert!(
                unit.is_string() && !text(panel, "description").is_empty(),
                "{place}: no unit or description"
            );
            let targets = array(panel, "targets");
            assert!(!targets.is_empty(), "{place} asks for nothing");
            // Of a time, Grafana shows the last figure that there was, also of a store that has gone meanwhile.
            let is_now = panel["type"] == "stat" || panel["type"] == "table";
            for target in targets {
                assert_eq!(target["instant"], is_now, "{place}: of a time, or of now");
                assert_eq!(text(&target["datasource"], "uid"), "${datasource}", "{place}");
                assert!(
                    text(target, "expr").contains("instance=~\"$instance\""),
                    "{place}: not of the chosen hosts"
                );
                // On one axis with its limit, what is used of it is hardly to be seen: the rules have ratios.
                assert!(
                    !["_max{", "_target_pages{"]
                        .iter()
                        .any(|limit| text(target, "expr").contains(limit)),
                    "{place} draws a limit"
                );
            }
        }
    }
}

/// `make screens` draws them.
#[test]
fn each_drawing_is_of_a_panel_and_is_shown() {
    let of_panels: HashSet<String> = DASHBOARDS
        .into_iter()
        .flat_map(|name| {
            let dashboard = read(name);
            let panels = array(&dashboard, "panels").iter();
            panels.map(|panel| drawing(name, panel)).collect::<Vec<_>>()
        })
        .collect();
    let shown = std::fs::read_to_string(folder().join("README.md")).expect("a file");
    let drawings = std::fs::read_dir(folder().join("../docs/dashboards")).expect("drawings");
    let drawings = drawings.map(|entry| entry.expect("a file").file_name());
    let drawings: Vec<String> = drawings.map(|name| name.to_string_lossy().into_owned()).collect();
    assert!(drawings.len() >= 20, "{drawings:?}");
    for drawing in &drawings {
        assert!(
            of_panels.contains(drawing),
            "no panel is drawn as {drawing}: make screens"
        );
        let link = format!("(../docs/dashboards/{drawing})");
        assert!(
            shown.contains(&link),
            "dashboards/README.md does not show {drawing}"
        );
    }
    assert_eq!(shown.matches("(../docs/dashboards/").count(), drawings.len());
}
