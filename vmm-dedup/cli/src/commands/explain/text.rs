//! An explanation for people.

use std::collections::BTreeMap;
use vmm_dedup_host::account;
use vmm_dedup_host::table::{percent, wrapped};
use vmm_dedup_host::units::count;
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

/// Classes that hold pages, each with its share; the others are named together.
fn class_lines(classes: &[(&'static str, u64)], pages: u64) -> Vec<Line> {
    let filled = classes.iter().filter(|(_, n)| *n > 0);
    let mut lines: Vec<Line> = filled
        .map(|(class, n)| Line {
            head: format!("{n:>10} {:>5} %  {class:<13} ", percent(*n, pages)),
            text: meaning(class).into(),
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
    let mut lines = vec![Line::new(format!(
        "{}: {}, {} pages, last pass {} ago",
        vm.name,
        account::condition(vm),
        explained.explanation.pages,
        account::last_pass_text(vm)
    ))];
    lines.extend(classes_of(explained));
    lines.extend(full(store, explained.explanation.unique));
    if whole {
        lines.push(tried_in_vain(&vm.stats));
        lines.extend(huge_pages(&vm.stats));
        lines.push(settings(&vm.stats));
    }
    lines
}

fn classes_of(explained: &Explained) -> Vec<Line> {
    let all = &explained.explanation;
    let mut lines = class_lines(&all.classes(), all.pages);
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

/// All VMs together; `told`: by those that have answered.
pub(super) fn of_all(host: &HostView, told: &[(&StoreView, &Vm, Account)]) -> Vec<Line> {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut services, mut pages) = (0, 0);
    let mut refused = Vec::new();
    for (_, vm, account) in told {
        match account {
            Account::Explained(explained) => {
                services += 1;
                pages += explained.explanation.pages;
                for (class, n) in explained.explanation.classes() {
                    *sums.entry(class).or_default() += n;
                }
            }
            Account::Refused(_) => refused.push(format!("{} ({})", vm.name, account::condition(vm))),
        }
    }
    let names = Explanation::default().classes();
    let classes: Vec<_> = names
        .map(|(class, _)| (class, sums.get(class).copied().unwrap_or(0)))
        .into();
    let mut lines = vec![Line::new(format!(
        "{} of {}: {pages} pages",
        count(services, "VM", "VMs"),
        count(host.stores.len(), "store", "stores")
    ))];
    if services > 0 {
        lines.extend(class_lines(&classes, pages));
    }
    for store in &host.stores {
        lines.extend(full(store, sums.get("unique").copied().unwrap_or(0)));
    }
    if !refused.is_empty() {
        lines.push(Line::new(format!(
            "not deduplicated: {}; `vmm-dedup explain VM` tells what would lift that",
            refused.join(", ")
        )));
    }
    lines
}

/// A store without room does not know all pages: what it has refused looks unique.
fn full(store: &StoreView, unique: u64) -> Option<Line> {
    let (stats, _) = store.account.as_ref().ok()?;
    let text = format!(
        "the store {} is FULL and refused {} pages: of the {unique} that are called unique many may have twins; raise --max-mib",
        store.socket.display(),
        stats.refused_full_total
    );
    account::is_full(stats).then(|| Line::new(text))
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
            "{name}: refused ({}), {} pages",
            refusal.reason.label(),
            refused.pages
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
            let lines = classes_of(&explained(may_be_pinned, heals));
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
        let lines = class_lines(&classes, 1 << 45);
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
        let store = |refused_full_total, resident_bytes| StoreView {
            socket: "/s".into(),
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
        };
        let line = full(&store(7, 4_096_000), 5).expect("a line");
        assert!(line.text.contains("FULL and refused 7 pages") && line.text.contains("--max-mib"));
        assert_eq!(full(&store(0, 4_096_000), 5), None);
        assert_eq!(full(&store(7, 2_000_000), 5), None);
    }
}
