//! Plots and the estimate's page, as a browser takes them.

use crate::host::{Host, text};
use crate::terminal::Terminal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What a browser says of a page: the JSON that a script, which is put at the page's end, makes of it. `None`, with a word, where
/// there is no browser.
fn looked_at(page: &Path, script: &str) -> Option<Value> {
    let mut whole = fs::read_to_string(page).expect("a page");
    whole += &format!(
        "<pre id=\"seen\"></pre><script>addEventListener('load', () => {{ \
         document.getElementById('seen').textContent = '@' + JSON.stringify(({script})()) + '@'; }});</script>"
    );
    let looked = page.with_extension("looked.html");
    fs::write(&looked, whole).expect("a page");
    let profile = page.with_extension("profile");
    let mut browser = Command::new("chromium");
    browser
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1000,1000",
        ])
        // Nothing but files of this folder is there to be loaded.
        .args(["--proxy-server=127.0.0.1:9", "--allow-file-access-from-files"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg("--dump-dom")
        .arg(format!("file://{}", looked.display()));
    let Ok(output) = browser.output() else {
        eprintln!("SKIPPED: no browser looks at it (Debian package chromium)");
        return None;
    };
    let dom = text(&output.stdout);
    let seen = dom
        .split("<pre id=\"seen\">@")
        .nth(1)
        .and_then(|rest| rest.split("@</pre>").next());
    let seen = seen.unwrap_or_else(|| panic!("nothing seen: {dom}\n{}", text(&output.stderr)));
    let seen = seen
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&amp;", "&");
    Some(serde_json::from_str(&seen).expect("JSON"))
}

#[test]
fn the_estimates_page_is_whole_in_a_browser_and_loads_nothing() {
    let host = Host::new();
    let images = host.images();
    let page = host.path("page.html");
    let mut estimate = host.command(&["estimate", "--html"]);
    let output = estimate.arg(&page).args(&images).output().expect("a run");
    assert!(output.status.success(), "{}", text(&output.stderr));

    let seen = looked_at(
        &page,
        "() => { \
         const cells = [...document.querySelectorAll('.matrix td')]; \
         const light = cell => { const [r, g, b] = getComputedStyle(cell).backgroundColor.match(/\\d+/g).map(Number); return r + g + b; }; \
         const boxes = [...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect()); \
         const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom; \
         const meeting = boxes.filter((a, at) => boxes.some((b, other) => other > at && meet(a, b))); \
         return { texts: boxes.length, meeting: meeting.length, sum: document.querySelector('.sum').innerText, rows: document.querySelectorAll('tbody')[0].rows.length, \
         cells: cells.map(cell => cell.innerText), alone: light(cells[0]), pair: light(cells[1]), \
         bars: document.querySelectorAll('svg rect').length, loaded: performance.getEntriesByType('resource').length, \
         wide: document.documentElement.scrollWidth <= innerWidth }; }",
    );

    let Some(seen) = seen else { return };
    // Four images of 1 MiB, half of each the same in all.
    assert_eq!(
        seen["sum"],
        "1.5 MiB of 4.0 MiB (37.5 %): 0.0 MiB zero pages, 1.5 MiB duplicates."
    );
    assert_eq!(
        (&seen["rows"], &seen["loaded"], &seen["wide"]),
        (&4.into(), &0.into(), &true.into()),
        "{seen}"
    );
    let cells: Vec<&str> = seen["cells"]
        .as_array()
        .expect("cells")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let expected = |at: usize| if at.is_multiple_of(5) { "0.0" } else { "0.5" };
    assert_eq!(cells, (0..16).map(expected).collect::<Vec<_>>());
    assert!(
        seen["alone"].as_u64() > seen["pair"].as_u64(),
        "what is shared is darker: {seen}"
    );
    // The legend hides no figure, nor one another.
    assert!(
        seen["texts"].as_u64() > Some(16) && seen["meeting"] == 0,
        "{seen}"
    );
    // At least a bar for each kind of page that there is, and the legend.
    assert!(seen["bars"].as_u64() >= Some(12), "{seen}");
}

#[test]
fn plots_of_bench_and_top_are_images_to_a_browser() {
    let host = Host::new();
    let (bench, history) = (host.path("bench"), host.path("history"));
    let images = host.images();
    let mut measure = host.command(&["bench", "estimate", "--repetitions", "1", "--plot"]);
    let output = measure.arg(&bench).args(&images).output().expect("a run");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let mut top = host.command(&["top", "--interval", "0.2", "--plot"]);
    top.arg(&history);
    let mut top = Terminal::open(top, 80, 24);
    top.shows("vfio");
    std::thread::sleep(Duration::from_secs(1));
    top.types("q");
    assert!(top.end().success());

    let plots = [
        "bench/estimate",
        "history/top-memory",
        "history/top-pages",
        "history/top-cpu",
    ];
    let page = host.path("plots.html");
    let image = |plot: &&str| {
        let path = host.path(&format!("{plot}.svg"));
        let svg = fs::read_to_string(&path).expect("a plot");
        assert!(
            svg.starts_with("<svg ") && !svg.contains("no figures"),
            "{plot}: {svg}"
        );
        format!("<img src=\"{plot}.svg\">")
    };
    fs::write(&page, plots.iter().map(image).collect::<String>()).expect("a page");

    let seen = looked_at(
        &page,
        "() => [...document.images].map(image => [image.naturalWidth, image.naturalHeight])",
    );

    let Some(seen) = seen else { return };
    let size = Value::from(vec![900, 420]);
    assert_eq!(seen, Value::from(vec![size; plots.len()]));
}

#[test]
fn an_estimates_page_overwrites_no_memory() {
    let host = Host::new();
    let images = host.images();
    let before = fs::read(&images[0]).expect("an image");
    let link = host.path("link.html");
    std::os::unix::fs::symlink(&images[0], &link).expect("a link");
    let link = link.to_str().expect("UTF-8");
    for args in [
        ["estimate", &images[0], &images[1], "--html", &images[0]],
        ["estimate", "--html", &images[0], &images[1], &images[2]],
        ["estimate", &images[0], &images[1], "--html", link],
    ] {
        let error = host.error(&args, 2);

        assert!(error.contains("is not overwritten: name "), "{error}");
        assert!(fs::read(&images[0]).expect("an image") == before, "{args:?}");
    }
    let page = host.path("page.html");
    for _ in 0..2 {
        host.must(&["estimate", &images[0], "--html", page.to_str().expect("UTF-8")]);
    }
    assert!(fs::read_to_string(page).expect("a page").contains("</html>"));
    // Before anything is read.
    let early = host.error(&["estimate", "/no/image", "--html", "/nonexistent/x.html"], 1);
    assert!(early.contains("cannot write /nonexistent/x.html"), "{early}");
}

#[test]
fn a_folder_for_plots_that_cannot_be_is_refused_before_anything_is_measured() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let images = host.images();
    let bench = host.error(&["bench", "estimate", &images[0], "--plot", "/proc/no"], 1);
    assert!(bench.contains("cannot write plots to /proc/no"), "{bench}");
    let page = host.error(&["estimate", &images[0], "--html", "/proc/no/page.html"], 1);
    assert!(page.contains("cannot write /proc/no/page.html"), "{page}");
}
