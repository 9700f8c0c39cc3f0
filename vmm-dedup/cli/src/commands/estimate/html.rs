//! An estimate as one page for a browser, which loads nothing from elsewhere.

use std::fmt::Write;
use vmm_dedup_estimate::{Amount, Report};
use vmm_dedup_host::table::percent;
use vmm_dedup_plot::{Bars, escaped};

/// Up to so many memories the cells of the matrix have their numbers in them; else where the pointer is.
const NUMBERED: usize = 24;

const STYLE: &str = "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd;font-weight:normal}
thead th{color:#555}th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
.matrix td,.matrix th{text-align:center;border:1px solid #fff;padding:.3em .4em;min-width:1em}
.scroll{overflow-x:auto}svg{max-width:100%;height:auto}.sum{font-size:1.15em}";

/// The page.
pub(crate) fn page(report: &Report) -> String {
    let mut page = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut page, report);
    page
}

fn write(page: &mut String, report: &Report) -> std::fmt::Result {
    let mib = |pages: u64| pages as f64 * report.page_bytes as f64 / f64::from(1 << 20);
    let amount = |amount: Amount| match amount.error {
        0 => format!("{:.1}", mib(amount.pages)),
        error => format!("{:.1} ±{:.1}", mib(amount.pages), mib(error)),
    };
    let total = &report.total;
    writeln!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>What sharing would save</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>What sharing would save</h1>\n\
         <p class=\"sum\"><b>{} MiB</b> of {:.1} MiB ({} %): {:.1} MiB zero pages, {} MiB duplicates.</p>",
        amount(total.saved),
        mib(total.pages),
        percent(total.saved.pages, total.pages),
        mib(total.zero),
        amount(total.duplicates)
    )?;
    writeln!(
        page,
        "<p>It is gross: tables and mappings go off it, some 1 % of the memory. Pages that change all the time count as what they \
         happened to hold.</p>"
    )?;
    if report.one_in > 1 {
        writeln!(
            page,
            "<p>Sampled: one content in {}; bounds are those of 95 % intervals.</p>",
            report.one_in
        )?;
    }
    memories(page, report, mib, amount)?;
    if report.inputs.len() > 1 {
        matrix(page, report, mib)?;
    }
    writeln!(page, "</body></html>")
}

fn memories(
    page: &mut String,
    report: &Report,
    mib: impl Fn(u64) -> f64,
    amount: impl Fn(Amount) -> String,
) -> std::fmt::Result {
    writeln!(
        page,
        "<h2>Each memory, MiB</h2>\n<div class=\"scroll\"><table><thead><tr><th>#</th><th>memory</th><th>read</th><th>zero</th>\
         <th>twins inside only</th><th>twins in others</th><th>no twin</th><th>merged already</th></tr></thead><tbody>"
    )?;
    for (i, input) in report.inputs.iter().enumerate() {
        writeln!(
            page,
            "<tr><td>{i}</td><td>{}</td><td>{:.1}</td><td>{:.1}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1}</td></tr>",
            escaped(&input.name),
            mib(input.pages),
            mib(input.zero),
            amount(input.inside),
            amount(input.shared),
            amount(input.unique),
            mib(input.merged_already)
        )?;
    }
    writeln!(page, "</tbody></table></div>")?;
    // More bars than that say nothing.
    if report.inputs.len() > NUMBERED {
        return Ok(());
    }
    let of = |figure: &dyn Fn(&vmm_dedup_estimate::Input) -> u64| {
        report
            .inputs
            .iter()
            .map(|input| mib(figure(input)))
            .collect::<Vec<f64>>()
    };
    let bars = Bars {
        title: "What each memory holds".into(),
        unit: "MiB".into(),
        groups: (0..report.inputs.len()).map(|i| i.to_string()).collect(),
        series: vec![
            ("zero".into(), of(&|input| input.zero)),
            ("twins inside only".into(), of(&|input| input.inside.pages)),
            ("twins in others".into(), of(&|input| input.shared.pages)),
            ("no twin".into(), of(&|input| input.unique.pages)),
        ],
    };
    writeln!(page, "{}", bars.svg())
}

fn matrix(page: &mut String, report: &Report, mib: impl Fn(u64) -> f64) -> std::fmt::Result {
    writeln!(
        page,
        "<h2>What any two have in common, MiB</h2>\n<p>What sharing frees within each memory (diagonal) and between two of them, zero \
         pages aside. Put those that are dark on one host.</p>\n<div class=\"scroll\"><table class=\"matrix\"><tr><th></th>"
    )?;
    for i in 0..report.inputs.len() {
        write!(page, "<th>{i}</th>")?;
    }
    writeln!(page, "</tr>")?;
    let most = report.pairs.iter().flatten().map(|a| a.pages).max();
    let most = most.unwrap_or(0).max(1);
    for (i, row) in report.pairs.iter().enumerate() {
        write!(page, "<tr><th>{i}</th>")?;
        for (j, cell) in row.iter().enumerate() {
            let part = cell.pages as f64 / most as f64;
            // From white to dark blue; text that can be read on it.
            let light = 100.0 - 65.0 * part;
            let text = if part > 0.5 { "#fff" } else { "#222" };
            let number = format!("{:.1}", mib(cell.pages));
            let shown = match report.inputs.len() <= NUMBERED {
                true => &number,
                false => "",
            };
            write!(
                page,
                "<td style=\"background:hsl(204 90% {light:.0}%);color:{text}\" title=\"{i} and {j}: {number} MiB\">{shown}</td>"
            )?;
        }
        writeln!(page, "</tr>")?;
    }
    writeln!(page, "</table></div>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_estimate::{Input, Total};

    fn report(names: &[&str]) -> Report {
        let input = |name: &&str| Input {
            name: (*name).into(),
            kind: "raw",
            pages: 1024,
            absent: 0,
            merged_already: 0,
            zero: 256,
            inside: Amount::default(),
            shared: Amount { pages: 512, error: 0 },
            unique: Amount { pages: 256, error: 0 },
            alone: Amount::default(),
        };
        let memories = names.len();
        let pair = |i: usize, j: usize| Amount {
            pages: if i == j { 0 } else { 512 },
            error: 0,
        };
        Report {
            one_in: 1,
            page_bytes: 4096,
            inputs: names.iter().map(input).collect(),
            pairs: (0..memories)
                .map(|i| (0..memories).map(|j| pair(i, j)).collect())
                .collect(),
            total: Total {
                pages: 2048,
                zero: 512,
                duplicates: Amount { pages: 512, error: 0 },
                saved: Amount {
                    pages: 1024,
                    error: 0,
                },
            },
            near: None,
            pack: None,
        }
    }

    #[test]
    fn the_page_has_the_sum_and_the_matrix() {
        let page = page(&report(&["one", "two"]));
        assert!(page.contains("<b>4.0 MiB</b> of 8.0 MiB (50.0 %)"), "{page}");
        assert_eq!(
            page.matches(">2.0</td>").count(),
            4,
            "two cells, two rows: {page}"
        );
        assert!(page.contains("title=\"0 and 1: 2.0 MiB\""), "{page}");
    }

    #[test]
    fn names_cannot_write_into_the_page() {
        let page = page(&report(&["<script>alert(1)</script>", "b\"'&"]));
        assert!(!page.contains("<script"), "{page}");
        assert!(
            page.contains("&lt;script&gt;") && page.contains("b&quot;&#39;&amp;"),
            "{page}"
        );
    }

    #[test]
    fn the_page_loads_nothing() {
        let page = page(&report(&["one", "two"]));
        let names: Vec<&str> = page
            .split("http")
            .skip(1)
            .map(|rest| rest.split('"').next().unwrap_or_default())
            .collect();
        // The name of SVG's words, which nobody asks for.
        assert!(
            names.iter().all(|name| *name == "://www.w3.org/2000/svg"),
            "{names:?}"
        );
        assert!(
            !page.contains("src=") && !page.contains("url(") && !page.contains("@import"),
            "{page}"
        );
    }

    #[test]
    fn many_memories_have_cells_without_numbers_and_one_has_no_matrix() {
        let names: Vec<String> = (0..NUMBERED + 1).map(|i| format!("vm-{i}")).collect();
        let many = page(&report(&names.iter().map(String::as_str).collect::<Vec<_>>()));
        assert!(
            many.contains("title=\"0 and 24: 2.0 MiB\"></td>") && !many.contains("<svg"),
            "{many}"
        );
        assert!(!page(&report(&["alone"])).contains("in common"));
    }
}
