use super::*;

fn bars(figures: Vec<f64>) -> Bars {
    Bars {
        title: "freed <&>".into(),
        unit: "MiB".into(),
        groups: vec!["a".into(), "b".into()],
        series: vec![("ksm".into(), figures), ("ours".into(), vec![200.0, 400.0])],
    }
}

/// Heights of the rectangles of a series, by its colour.
fn heights(svg: &str, series: usize) -> Vec<f64> {
    let RGBColor(r, g, b) = colour(series);
    let fill = format!("fill=\"#{r:02X}{g:02X}{b:02X}\"");
    let bars = svg
        .lines()
        .filter(|line| line.starts_with("<rect") && line.contains(&fill));
    let height = |line: &str| line.split("height=\"").nth(1)?.split('"').next()?.parse().ok();
    bars.map(|line| height(line).expect("a height")).collect()
}

#[test]
fn bars_are_as_high_as_their_figures() {
    let svg = bars(vec![100.0, 400.0]).svg();
    let (first, second) = (heights(&svg, 0), heights(&svg, 1));
    // The last of each is that of the legend.
    assert_eq!((first.len(), second.len()), (3, 3), "{svg}");
    assert!((first[1] / first[0] - 4.0).abs() < 0.1, "{first:?}");
    assert!((second[0] / first[0] - 2.0).abs() < 0.05, "{first:?} {second:?}");
    assert!((second[1] - first[1]).abs() <= 1.0, "{first:?} {second:?}");
}

#[test]
fn what_is_missing_has_no_bar_and_texts_are_escaped() {
    let svg = bars(vec![f64::NAN, 400.0]).svg();
    assert_eq!(heights(&svg, 0).len(), 2, "{svg}");
    assert!(
        svg.contains("freed &lt;&amp;&gt;") && !svg.contains("NaN"),
        "{svg}"
    );
    assert!(svg.contains(">ksm") || svg.contains("\nksm"), "{svg}");
}

#[test]
fn a_plot_without_figures_says_so() {
    let none = Bars {
        series: Vec::new(),
        ..bars(Vec::new())
    };
    assert!(none.svg().contains("no figures"));
    let lines = Lines {
        title: "saved".into(),
        along: "s".into(),
        unit: "MiB".into(),
        series: vec![("host".into(), vec![(0.0, f64::NAN)])],
    };
    assert!(lines.svg().contains("no figures"));
}

#[test]
fn a_line_has_a_gap_where_a_figure_is_missing() {
    let points = |missing: f64| vec![(0.0, 1.0), (1.0, 2.0), (2.0, missing), (3.0, 4.0), (4.0, -1.0)];
    let lines = |missing| Lines {
        title: "saved".into(),
        along: "s".into(),
        unit: "MiB".into(),
        series: vec![("host".into(), points(missing))],
    };
    let RGBColor(r, g, b) = colour(0);
    let stroke = format!("stroke=\"#{r:02X}{g:02X}{b:02X}\"");
    let drawn = |svg: String| svg.matches(&stroke).count();
    let (whole, broken) = (lines(3.0).svg(), lines(f64::INFINITY).svg());
    assert_eq!(drawn(broken), drawn(whole) + 1);
}

#[test]
fn numbers_at_axes_are_short() {
    let shown = [0.0, 0.25, 1.5, 12.0, 1000.0, 2_500_000.0, -3e9].map(scale::short);
    assert_eq!(shown, ["0", "0.25", "1.5", "12", "1k", "2.5M", "-3G"]);
}
