//! An explanation for people.

use std::collections::BTreeMap;
use std::path::Path;
use vmm_dedup_host::account;
use vmm_dedup_host::table::{percent, wrapped};
use vmm_dedup_host::units::{self, count};
use vmm_dedup_host::view::{HostView, StoreView};
use vmm_dedup_protocol::control::{Explained, Explanation};
use vmm_dedup_protocol::observer::{Account, Vm};
use vmm_dedup_protocol::refusal::Refused;
use vmm_dedup_protocol::stats::ServiceStats;

/// A line: what stands alone to the left, and a text that is broken where it has no room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    head: String,
    text: String,
}

/// No text is broken into columns narrower than this: it begins a line of its own then.
const NARROWEST: usize = 24;

impl Line {
    fn new(text: impl Into<String>) -> Self {
        Self {
            head: String::new(),
            text: text.into(),
        }
    }

    /// The line as lines of at most `width`.
    pub(super) fn broken(&self, width: usize) -> Vec<String> {
        let head = self.head.chars().count();
        let room = width.saturating_sub(head);
        if head > 0 && room < NARROWEST.min(self.text.chars().count()) {
            let texts = wrapped(&self.text, width.saturating_sub(4));
            let texts = texts.into_iter().map(|text| format!("    {text}"));
            return [self.head.trim_end().to_owned()]
                .into_iter()
                .chain(texts)
                .collect();
        }
        let mut head = self.head.clone();
        let mut lines = Vec::new();
        for text in wrapped(&self.text, room) {
            lines.push(format!("{head}{text}").trim_end().to_owned());
            head = " ".repeat(head.chars().count());
        }
        lines
    }
}

/// What a class means, and what to do if it is large.
fn meaning(class: &str) -> &'static str {
    match class {
        "shared" => "map a page of the store",
        "zero" => "replaced by the zero page",
        "unique" => "nobody else has the same page",
        "waiting" => "have a twin, to be merged in one of the next passes",
        "over_vmas" => "have a twin, but no mapping is left: raise vm.max_map_count",
        "suspended" => "have a twin, but merging is suspended while direct I/O could be harmed",
        "swapped" => "have a twin, but are swapped out; tried again when they are back",
        "deferred" => "have a twin, and wait some passes for more around them",
        "volatile" => "written all the time",
        "too_new" => "written lately, or not looked at yet",
        "unpopulated" => "nothing there: no memory to save",
        "pinned" => "in use by a device (DMA, direct I/O); tried again later",
        "broken" => "written since they were shared: own copies again; no twin is known",
        "may_be_pinned" => "copied so, and nothing tells now that they are not pinned",
        "restless" => "written soon after they were shared, more than once maybe: left alone for a while",
        "huge" => "in huge pages with too few twins to be split",
        "probe" => "kept private to see whether what was a huge page is used",
        "foreign" => "map a page of a store that is gone; move to the new one as twins are found",
        "withheld" => "marked by the guest: never to be shared",
        "idle" => "left alone: the guest says that they are free, or soon overwritten",
        "packed" => "kept in fewer bytes: nobody has touched them for long",
        _ => "",
    }
}

/// What is to know of the stores of VMs, to tell what classes of their pages mean.
#[derive(Clone, Copy, Debug, Default)]
struct About {
    /// One has no room: it does not know what it has refused.
    full: bool,
    /// One shares securely.
    secure: bool,
    /// One does not.
    ordinary: bool,
}

impl About {
    fn of<'a>(stores: impl IntoIterator<Item = &'a StoreView>) -> Self {
        let mut about = Self::default();
        for (stats, _) in stores.into_iter().filter_map(|store| store.account.as_ref().ok()) {
            about.full |= account::is_full(stats);
            let secure = account::is_secure(stats);
            about.secure |= secure;
            about.ordinary |= !secure;
        }
        about
    }
}

fn meaning_of(class: &str, about: About) -> &'static str {
    match class {
        "unique" if about.full => {
            "no twin is known: the full store refused them, or nobody else has the same page"
        }
        "packed" if about.secure && about.ordinary => {
            "nobody has touched them for long: kept in a store that shares securely, or in fewer bytes"
        }
        "packed" if about.secure => {
            "kept in the store, which shares securely: nobody has touched them for long"
        }
        _ => meaning(class),
    }
}

/// Classes that hold pages, each with its share; the others are named together.
fn class_lines(classes: &[(&'static str, u64)], pages: u64, about: About) -> Vec<Line> {
    let filled = classes.iter().filter(|(_, n)| *n > 0);
    let mut lines: Vec<Line> = filled
        .map(|(class, n)| Line {
            head: format!("{n:>10} {:>5} %  {class:<13} ", percent(*n, pages)),
            text: meaning_of(class, about).into(),
        })
        .collect();
    let empty: Vec<&str> = classes
        .iter()
        .filter(|(_, n)| *n == 0)
        .map(|(class, _)| *class)
        .collect();
    if !empty.is_empty() {
        lines.push(Line {
            head: format!("{:>10}          ", 0),
            text: empty.join(", "),
        });
    }
    lines
}

/// One VM. `whole`: all of its pages were asked for.
pub(super) fn of_vm(store: &StoreView, vm: &Vm, told: &Account, whole: bool) -> Vec<Line> {
    let explained = match told {
        Account::Refused(refused) => return refusal(refused),
        Account::Explained(explained) => explained,
    };
    let passed = account::last_pass(vm).map_or("no pass yet".to_owned(), |age| {
        format!("last pass {} ago", units::span(age))
    });
    let about = About::of([store]);
    let mut lines = vec![Line::new(format!(
        "{}: {}, {}, {passed}",
        vm.name,
        account::condition(vm),
        units::pages(explained.explanation.pages)
    ))];
    lines.extend(classes_of(explained, about));
    lines.extend(full(store, &vm.name, explained.explanation.unique));
    if whole && vm.stats == ServiceStats::default() {
        lines.push(Line::new(
            "settings, and what was tried, its service tells after its first pass",
        ));
    } else if whole {
        lines.push(Line::new(account::vm_saved_in_parts(vm, about.secure)));
        lines.push(tried_in_vain(&vm.stats));
        lines.extend(huge_pages(&vm.stats));
        lines.push(settings(&vm.stats));
    }
    lines
}

/// What to do about a VM that does not merge; `named`: how a command names it.
pub(super) fn hint(vm: &Vm, named: &str) -> Option<Line> {
    if vm.reason.is_some() {
        let text = format!("`vmm-dedup doctor {named}` looks at its VMM and at this host");
        return Some(Line::new(text));
    }
    account::is_off(vm.stats.state)
        .then(|| Line::new(format!("`vmm-dedup set {named} on` switches merging on")))
}

fn classes_of(explained: &Explained, about: About) -> Vec<Line> {
    let all = &explained.explanation;
    let mut lines = class_lines(&all.classes(), all.pages, about);
    if all.broken + all.may_be_pinned > 0 {
        let can = if all.heals == 1 { "can" } else { "cannot" };
        lines.push(Line::new(format!(
            "pages that the kernel copied {can} be merged again now"
        )));
    }
    if !explained.note.is_empty() {
        lines.push(Line::new(explained.note.clone()));
    }
    lines
}

/// VMs together; `told`: by those that have answered. `pattern`: what means them, unless all are meant. `store_words`: how a command
/// asks the same stores.
pub(super) fn of_several(
    host: &HostView,
    told: &[(&StoreView, &Vm, Account)],
    pattern: Option<&str>,
    store_words: &str,
) -> Vec<Line> {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    // Of each store, by its place.
    let mut unique: BTreeMap<&Path, u64> = BTreeMap::new();
    let (mut services, mut pages) = (0, 0);
    let mut refused = Vec::new();
    for (store, vm, account) in told {
        match account {
            Account::Explained(explained) => {
                services += 1;
                *unique.entry(&store.socket).or_default() += explained.explanation.unique;
                pages += explained.explanation.pages;
                for (class, n) in explained.explanation.classes() {
                    *sums.entry(class).or_default() += n;
                }
            }
            Account::Refused(_) => refused.push(vm),
        }
    }
    let names = Explanation::default().classes();
    let classes: Vec<_> = names
        .map(|(class, _)| (class, sums.get(class).copied().unwrap_or(0)))
        .into();
    let called = pattern.map_or(String::new(), |pattern| format!(" called {pattern}"));
    let mut lines = vec![Line::new(format!(
        "{}{called} of {}: {}",
        count(services, "VM", "VMs"),
        host.answering(),
        units::pages(pages)
    ))];
    if services > 0 {
        lines.extend(class_lines(&classes, pages, About::of(&host.stores)));
    }
    for store in &host.stores {
        let whose = pattern.unwrap_or("its VMs");
        lines.extend(full(
            store,
            whose,
            unique.get(&*store.socket).copied().unwrap_or(0),
        ));
    }
    // The one with the shortest name, which needs least room.
    let example = refused.iter().map(|vm| host.name_of(vm));
    if let Some(example) = example.min_by_key(String::len) {
        let refused = refused.iter();
        let all: Vec<String> = refused
            .map(|vm| format!("{} ({})", vm.name, account::condition(vm)))
            .collect();
        let others = if all.len() > 1 { ", and so for each" } else { "" };
        lines.push(Line::new(format!(
            "not deduplicated: {}; `vmm-dedup explain {example}{store_words}` tells what would lift that{others}",
            all.join(", ")
        )));
    }
    lines
}

/// A store without room does not know all pages: what it has refused looks unique. `unique`: how many do.
fn full(store: &StoreView, whose: &str, unique: u64) -> Option<Line> {
    let (stats, _) = store.account.as_ref().ok()?;
    let what_to_do = store.if_full()?;
    let text = format!(
        "store full: {} is FULL and refused {}: {} of {whose} called unique may have twins; {what_to_do}",
        store.socket.display(),
        account::refused_full(stats),
        units::pages(unique)
    );
    Some(Line::new(text))
}

/// How often pages could not be shared, since the VM started.
fn tried_in_vain(stats: &ServiceStats) -> Line {
    Line::new(format!(
        "tried in vain so far: {} pinned, {} for want of mappings, {} swapped out, {} changed meanwhile, {} other",
        stats.refused_pinned_total,
        stats.refused_vmas_total,
        stats.refused_swapped_total,
        stats.mismatches_total,
        stats.refused_other_total
    ))
}

/// The settings that the service tells of.
fn settings(stats: &ServiceStats) -> Line {
    let breaks = match stats.reserve_target {
        0 => "kernel".to_owned(),
        target => format!("managed, {} of {target} pages ready", stats.reserve_pages),
    };
    Line::new(format!(
        "settings: cpu_percent {}, pass_period_ms {}, stop_target_us {}, breaks {breaks}, mappings {} of {}, search {}, verify {}",
        stats.cpu_percent,
        stats.pass_period_ms,
        stats.stop_target_us,
        stats.vmas,
        stats.vmas_max,
        stats.search.text(),
        stats.verify.text()
    ))
}

/// What became of huge pages, if there are or were any.
fn huge_pages(stats: &ServiceStats) -> Vec<Line> {
    if [stats.huge_ranges, stats.huge_splits_total, stats.huge_zero_total] == [0; 3] {
        return Vec::new();
    }
    let unused = stats
        .huge_splits_total
        .saturating_sub(stats.huge_splits_rare_total);
    [
        format!(
            "huge pages: {} there, {} of them kept since they are in use although {} of their pages repeat; {} are split",
            stats.huge_ranges, stats.huge_kept_hot, stats.pages_given_up, stats.huge_split
        ),
        format!(
            "so far: {unused} split unused, {} rarely used, {} given up as zeros, {} built again (p99 {} us away); \
             not built: {} pinned or copied by the kernel, {} for want of memory, {} other",
            stats.huge_splits_rare_total,
            stats.huge_zero_total,
            stats.huge_rebuilt_total,
            stats.rebuild.quantile_us(0.99),
            stats.rebuild_pinned_total,
            stats.rebuild_memory_total,
            stats.rebuild_other_total
        ),
        format!("use is told by: {}", stats.use_source_name()),
    ]
    .map(Line::new)
    .into()
}

fn refusal(refused: &Refused) -> Vec<Line> {
    let (name, refusal) = (refused.name.text(), &refused.refusal);
    let mut lines = vec![
        Line::new(format!(
            "{name}: refused ({}), {}",
            refusal.reason.label(),
            units::pages(refused.pages)
        )),
        Line::new(format!("why: {}", refusal.detail())),
    ];
    if !refusal.lift().is_empty() {
        lines.push(Line::new(format!("to lift it: {}", refusal.lift())));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::json::explained_json;
    use super::*;
    use vmm_dedup_protocol::message::StoreStats;

    #[test]
    fn it_is_told_whether_copies_can_be_merged_again() {
        let explained = |may_be_pinned, heals| Explained {
            serial: 0,
            explanation: Explanation {
                pages: 9,
                may_be_pinned,
                heals,
                ..Explanation::default()
            },
            note: String::new(),
        };
        let says = |may_be_pinned, heals, what: &str| {
            let lines = classes_of(&explained(may_be_pinned, heals), About::default());
            lines.iter().any(|line| line.text.contains(what))
        };
        assert!(says(9, 0, "cannot be merged again now") && says(9, 1, "can be merged again now"));
        assert!(!says(0, 0, "merged again"));
        assert_eq!(explained_json("vm", &explained(9, 0), None)["heals"], false);
        assert_eq!(
            explained_json("vm", &explained(9, 1), None)["classes"]["may_be_pinned"],
            9
        );
    }

    #[test]
    fn what_a_service_has_not_told_is_not_called_zero() {
        let mut vm = Vm {
            name: "web".into(),
            pid: 1,
            reason: None,
            saved_net_bytes: 0,
            stats: ServiceStats::default(),
        };
        let told = Account::Explained(Explained {
            serial: 0,
            explanation: Explanation::default(),
            note: String::new(),
        });
        let text = |vm: &Vm| {
            let lines = of_vm(&store("/s", 0, 0), vm, &told, true);
            let lines: Vec<String> = lines.into_iter().map(|line| line.text).collect();
            lines.join("\n")
        };
        let early = text(&vm);
        assert!(
            early.contains("no pass yet") && early.contains("after its first pass"),
            "{early}"
        );
        assert!(!early.contains("cpu_percent"), "{early}");
        vm.stats.cpu_percent = 20;
        assert!(text(&vm).contains("cpu_percent 20"));
    }

    #[test]
    fn every_class_is_explained() {
        assert!(
            Explanation::default()
                .classes()
                .iter()
                .all(|(class, _)| !meaning(class).is_empty())
        );
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let classes: Vec<_> = Explanation::default()
            .classes()
            .map(|(class, _)| (class, 1 << 40))
            .into();
        let about = About {
            full: true,
            secure: true,
            ordinary: true,
        };
        let lines = class_lines(&classes, 1 << 45, about);
        for width in 40..=200 {
            let broken: Vec<String> = lines.iter().flat_map(|line| line.broken(width)).collect();
            assert!(
                broken.iter().all(|line| line.chars().count() <= width),
                "{width}: {broken:#?}"
            );
        }
    }

    #[test]
    fn a_full_store_is_named_where_pages_look_unique() {
        let line = full(&store("/s", 7, 4_096_000), "web", 5).expect("a line");
        assert!(line.text.contains("FULL and refused 7 times") && line.text.contains("--max-mib"));
        assert_eq!(full(&store("/s", 0, 4_096_000), "web", 5), None);
        assert_eq!(full(&store("/s", 7, 2_000_000), "web", 5), None);
    }

    #[test]
    fn pages_kept_in_a_store_that_shares_securely_are_not_called_packed_in_fewer_bytes() {
        let mut stores = vec![store("/a", 0, 0), store("/b", 0, 0)];
        let says = |stores: &[StoreView], what: &str| {
            let lines = class_lines(&[("packed", 1)], 1, About::of(stores));
            lines[0].text.contains(what)
        };
        assert!(says(&stores, "in fewer bytes") && !says(&stores, "securely"));
        let (stats, _) = stores[1].account.as_mut().expect("it answers");
        stats.secure = 1;
        assert!(says(&stores, "in fewer bytes") && says(&stores, "securely"));
        assert!(!says(&stores[1..], "in fewer bytes") && says(&stores[1..], "securely"));
    }

    #[test]
    fn pages_that_look_unique_are_counted_for_each_store() {
        let stores = vec![store("/a", 1, 4_096_000), store("/b", 2, 4_096_000)];
        let host = HostView { stores };
        let vm = Vm {
            name: "web".into(),
            pid: 1,
            reason: None,
            saved_net_bytes: 0,
            stats: ServiceStats::default(),
        };
        let of = |unique| {
            Account::Explained(Explained {
                serial: 0,
                explanation: Explanation {
                    unique,
                    ..Explanation::default()
                },
                note: String::new(),
            })
        };
        let told = [
            (&host.stores[0], &vm, of(3)),
            (&host.stores[1], &vm, of(4)),
            (&host.stores[1], &vm, of(5)),
        ];
        let lines = of_several(&host, &told, None, "");
        for part in [
            "/a is FULL and refused once: 3 pages of its VMs",
            "/b is FULL and refused 2 times: 9 pages of its VMs",
        ] {
            assert!(lines.iter().any(|line| line.text.contains(part)), "{lines:#?}");
        }
    }

    fn store(socket: &str, refused_full_total: u64, resident_bytes: u64) -> StoreView {
        StoreView {
            socket: socket.into(),
            record: None,
            account: Ok((
                StoreStats {
                    slots_max: 1000,
                    refused_full_total,
                    resident_bytes,
                    ..StoreStats::default()
                },
                Vec::new(),
            )),
        }
    }
}
